package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"

	"cni-unwind/plugin"
)

// runFlags are those of the command, as given.
type runFlags struct {
	installFlags
	cri, listen string
	interval    time.Duration
	noInstall   bool
}

func runCommand() *cobra.Command {
	var flags runFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Keep unwind installed on this node, and sweep",
		Long: "Be the node's agent: install unwind as unwindctl install does, keep its conflist right when the provider's file changes,\n" +
			"sweep every minute with the runtime's list of pods, and serve /metrics and /healthz.\n\n" +
			"The provider's file is the first of the folder, or that of --conf. If it is gone for longer than some seconds, unwind's\n" +
			"conflist is removed, and written again for the next one. When the agent ends it removes nothing: pods go on to be\n" +
			"attached through unwind.\n\n" +
			"unwindctl uninstall, or removing unwind's conflist by hand, switches unwind off although the agent runs: what somebody\n" +
			"else removed is not written again until unwindctl install is run or the agent is started anew. It goes on to sweep.\n\n" +
			"In a container, use unwindctl --host run: what is gone can be told from the host's namespaces alone.\n" +
			"With --observe nothing is swept, and what a sweep would release is logged: for the first week.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, err := newAgent(cmd, flags)
			if err != nil {
				return err
			}
			return a.run(cmd.Context())
		},
	}
	addInstallFlags(cmd, &flags.installFlags)
	cmd.Flags().StringVar(&flags.cri, "cri", "auto", "the runtime's `SOCKET`; auto finds it, none asks no runtime")
	cmd.Flags().StringVar(&flags.listen, "listen", "127.0.0.1:9469", "serve /metrics and /healthz at `ADDRESS`; an empty one for not at all")
	cmd.Flags().DurationVar(&flags.interval, "interval", time.Minute, "sweep each `DURATION`")
	cmd.Flags().BoolVar(&flags.noInstall, "no-install", false, "install nothing and write no conflist: only sweep")
	return cmd
}

// agent is unwindctl run under way: one loop keeps unwind installed, and one sweeps, so that neither waits for the other.
type agent struct {
	flags  runFlags
	log    *slog.Logger
	once   *once
	stderr io.Writer
	find   func() (runtimePaths, error)

	keeping, sweeping pulse

	mu       sync.Mutex
	stateDir string // the last that our conflist named
}

func newAgent(cmd *cobra.Command, flags runFlags) (*agent, error) {
	if flags.interval < time.Second {
		return nil, usageError{fmt.Errorf("--interval %s is less than a second", flags.interval)}
	}
	log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
	return &agent{
		flags: flags, stderr: cmd.ErrOrStderr(), log: log, once: newOnce(log),
		find: func() (runtimePaths, error) { return flags.find("/") },
	}, nil
}

// run is the agent's life. It ends when ctx does, which is no error, once the DELs that have begun have come to their end.
func (a *agent) run(ctx context.Context) error {
	paths, err := a.find()
	var usage usageError
	switch {
	case err == nil:
	case errors.As(err, &usage) || !a.flags.noInstall:
		return err
	default:
		a.log.Warn("the runtime's folders are guessed", "err", err)
		paths = runtimePaths{ConfDir: defaultConfDir, BinDirs: []string{defaultBinDir}}
	}
	inst, err := a.flags.installation(paths)
	if err != nil {
		return err
	}
	a.keeping.beat()
	a.sweeping.beat()
	stop, err := a.serve(ctx, inst)
	if err != nil {
		return err
	}
	defer stop()
	a.log.Info("running", "version", version, "confDir", inst.ConfDir, "interval", a.flags.interval, "observe", a.flags.observe)
	var loops sync.WaitGroup
	if !a.flags.noInstall {
		loops.Go(func() { a.keeper(inst, paths).run(ctx) })
	}
	a.sweepEach(ctx, inst, paths)
	loops.Wait()
	a.log.Info("ended; what was installed stays so")
	return nil
}

func (a *agent) keeper(inst installation, paths runtimePaths) *keeper {
	return &keeper{
		installation: inst, paths: paths, conf: a.flags.conf, interval: a.flags.interval, log: a.log, once: a.once,
		find: a.find, beat: a.keeping.beat,
	}
}

func (a *agent) sweepEach(ctx context.Context, inst installation, paths runtimePaths) {
	s := &sweeper{log: a.log, once: a.once, stderr: &unrepeated{to: a.stderr}, observe: a.flags.observe, beat: a.sweeping.beat,
		cri: a.flags.cri, sockets: append(criSockets[:len(criSockets):len(criSockets)], paths.sockets()...)}
	for ctx.Err() == nil {
		s.beat()
		s.sweep(ctx, inst.ConfDir, a.journalDir(inst))
		select {
		case <-ctx.Done():
		case <-time.After(a.flags.interval):
		}
	}
}

// journalDir is where the journal is: as given, else as our conflist has it, or had it while it was there.
func (a *agent) journalDir(inst installation) string {
	if inst.StateDir != "" {
		return inst.StateDir
	}
	c, _ := plugin.ReadConflist(inst.path())
	a.mu.Lock()
	defer a.mu.Unlock()
	if c != nil && c.Unwind != nil {
		a.stateDir = c.Unwind.StateDir
	}
	return cmp.Or(a.stateDir, plugin.DefaultStateDir)
}

// serve serves the metrics, and whether the loops turn.
func (a *agent) serve(ctx context.Context, inst installation) (stop func(), err error) {
	if a.flags.listen == "" {
		return func() {}, nil
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", a.flags.listen)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	a.log.Info("serving", "address", l.Addr().String())
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		var failed error
		c := &collector{
			ctx: r.Context(), stderr: io.Discard, flags: sweepFlags{where: where{inst.ConfDir, a.journalDir(inst)}},
			failed: func(err error) { failed = err },
		}
		promhttp.HandlerFor(c.registry(), promhttp.HandlerOpts{}).ServeHTTP(w, r)
		if r.Context().Err() == nil {
			a.once.warn("metrics", "metrics", failed)
		}
	})
	mux.HandleFunc("GET /healthz", a.healthz)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute}
	go func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			a.log.Error("serving", "err", err)
		}
	}()
	return func() { _ = server.Close() }, nil
}

// patience is for how long a loop may be at one thing: the DELs of one attachment have 45 s, and may wait for others.
const patience = 10 * time.Minute

// healthz says whether the loops turn.
func (a *agent) healthz(w http.ResponseWriter, _ *http.Request) {
	for what, p := range map[string]*pulse{"looking after the install": &a.keeping, "sweeping": &a.sweeping} {
		since := p.since()
		if what != "sweeping" && a.flags.noInstall || since <= a.flags.interval+patience {
			continue
		}
		http.Error(w, fmt.Sprintf("%s has come no further for %s", what, roughly(since)), http.StatusServiceUnavailable)
		return
	}
	_, _ = io.WriteString(w, "ok\n")
}

// pulse is a time of which goroutines tell each other.
type pulse struct{ last atomic.Int64 }

func (p *pulse) beat()                { p.last.Store(time.Now().UnixNano()) }
func (p *pulse) since() time.Duration { return time.Since(time.Unix(0, p.last.Load())) }
