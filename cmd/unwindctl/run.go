package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"
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
			"It removes its own conflist when the provider's file is gone, and writes it again for the next one. It removes nothing when\n" +
			"it ends: pods go on to be attached through unwind. To switch it off, end it, then unwindctl uninstall.\n\n" +
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

// agent is unwindctl run under way.
type agent struct {
	flags  runFlags
	log    *slog.Logger
	stderr io.Writer
	find   func() (runtimePaths, error)

	said     string    // the last error about the install: each is said once
	verified bool      // the binary to install is the plugin, for this machine
	gone     time.Time // since when the provider's file is not there
	turned   atomic.Int64
}

// goneAfter is how long a provider's file may be away before ours is removed: some write it anew by removing it first.
const goneAfter = 5 * time.Second

// settle is how long the folder must be quiet before it is looked at: a file is written in several steps.
const settle = 200 * time.Millisecond

func newAgent(cmd *cobra.Command, flags runFlags) (*agent, error) {
	if flags.interval < time.Second {
		return nil, usageError{fmt.Errorf("--interval %s is less than a second", flags.interval)}
	}
	return &agent{
		flags: flags, stderr: cmd.ErrOrStderr(), log: slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)),
		find: func() (runtimePaths, error) { return flags.find("/") },
	}, nil
}

// run is the agent's loop. It ends when ctx does, which is no error.
func (a *agent) run(ctx context.Context) error {
	paths, err := a.find()
	if err != nil && !a.flags.noInstall {
		return err
	}
	inst, err := a.flags.installation(paths)
	if err != nil {
		return err
	}
	stop, err := a.serve(inst)
	if err != nil {
		return err
	}
	defer stop()
	changes, stopWatching := a.watch(inst.ConfDir)
	defer stopWatching()
	a.log.Info("running", "version", version, "confDir", inst.ConfDir, "interval", a.flags.interval, "observe", a.flags.observe)
	sweep, look := time.NewTimer(0), time.NewTimer(0)
	for {
		a.turned.Store(time.Now().UnixNano())
		select {
		case <-ctx.Done():
			a.log.Info("ending; unwind stays installed")
			return nil
		case <-changes:
			look.Reset(settle)
		case <-look.C:
			look.Reset(a.keepInstalled(ctx, inst, paths))
		case <-sweep.C:
			a.sweep(ctx, inst)
			sweep.Reset(a.flags.interval)
		}
	}
}

// watch reports changes in a folder. Without it, they are found by looking once in a while.
func (a *agent) watch(dir string) (changes <-chan fsnotify.Event, stop func()) {
	w, err := fsnotify.NewWatcher()
	if err == nil {
		if err = w.Add(dir); err == nil {
			go func() {
				for err := range w.Errors {
					a.log.Warn("watching a folder", "dir", dir, "err", err)
				}
			}()
			return w.Events, func() { _ = w.Close() }
		}
		_ = w.Close()
	}
	a.log.Warn("the folder cannot be watched; it is looked at once in a while", "dir", dir, "err", err)
	return nil, func() {}
}

// keepInstalled has the binary and our conflist be as they should, and returns after what time to look again.
//
//  1. The provider's file is the one that ours names, else that of --conf, else the first of the folder.
//  2. If it is gone, and stays so, ours is removed: a runtime without a network says so, one with ours could attach no pod.
//  3. The binary is put in place, then our conflist. A provider's file that cannot be read leaves ours as it is.
func (a *agent) keepInstalled(ctx context.Context, inst installation, paths runtimePaths) (again time.Duration) {
	if a.flags.noInstall {
		return a.flags.interval
	}
	inst.Source = cmp.Or(a.flags.conf, namedSource(inst.path()))
	if inst.Source != "" {
		if _, err := os.Stat(inst.Source); errors.Is(err, fs.ErrNotExist) {
			if a.gone.IsZero() {
				a.gone = time.Now()
			}
			if left := goneAfter - time.Since(a.gone); left > 0 {
				return left
			}
			a.removeConflist(inst)
			inst.Source = a.flags.conf
		}
	}
	if inst.Source == "" || exists(inst.Source) {
		a.gone = time.Time{}
		a.tell(a.install(ctx, inst, paths))
	}
	return a.flags.interval
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// namedSource returns the provider's file that our conflist names, or "".
func namedSource(path string) string {
	c, err := plugin.ReadConflist(path)
	if c == nil || err != nil && c.Unwind == nil || c.Unwind == nil {
		return ""
	}
	return c.Unwind.ChainFile
}

func (a *agent) removeConflist(inst installation) {
	if !exists(inst.path()) {
		return
	}
	if err := inst.remove(); err != nil {
		a.tell(err)
		return
	}
	a.log.Info("the provider's file is gone: our conflist is removed", "source", inst.Source, "removed", inst.path())
}

func (a *agent) install(ctx context.Context, inst installation, paths runtimePaths) error {
	w, err := inst.wrap()
	if err == nil {
		err = paths.accepts(w)
	}
	if err == nil && !a.verified {
		_, err = inst.verifyBinary(ctx)
		a.verified = err == nil
	}
	if err != nil {
		return err
	}
	binary, err := inst.installBinary()
	if err != nil {
		return err
	}
	conflist, err := inst.writeConflist()
	if err == nil && (binary || conflist) {
		a.log.Info("installed", "binary", binary, "conflist", conflist, "path", inst.path(), "source", w.source.Path)
	}
	return err
}

// tell logs an error once, until it is another one.
func (a *agent) tell(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != a.said && text != "" {
		a.log.Warn("unwind is not installed as it should be; trying again", "err", text)
	}
	a.said = text
}

// sweep releases what is dead, or says what it would release.
func (a *agent) sweep(ctx context.Context, inst installation) {
	list, err := listFor(ctx, sweepFlags{cri: a.flags.cri}, nil)
	if err != nil {
		a.log.Warn("asking the runtime for its pods", "err", err)
	}
	stateDir := inst.stateDir()
	pools, err := plugin.ReadPools(inst.ConfDir, stateDir)
	if err != nil {
		a.log.Warn("reading the pools", "err", err)
	}
	p := &plugin.Plugin{Stdout: io.Discard, Stderr: a.stderr, Budgets: plugin.DefaultBudgets}
	findings, err := p.Sweep(ctx, stateDir, plugin.Sweep{List: list, Pools: pools, DryRun: a.flags.observe})
	if err != nil {
		a.log.Warn("sweep", "err", err)
	}
	words := map[string]int{}
	for i := range findings {
		word, why := result(&findings[i], a.flags.observe)
		words[word]++
		if word == "released" || word == "to be released" {
			a.log.Info(word, "attachment", findings[i].Key.String(), "why", why)
		}
	}
	if n := words["unknown"]; n > 0 && n == len(findings) {
		a.log.Warn("nothing can be told of any attachment; run this on the host, or with --host", "attachments", n)
	}
	if words["released"]+words["to be released"]+words["pending"] > 0 {
		a.log.Info("swept", "released", words["released"], "to be released", words["to be released"], "pending", words["pending"],
			"live", words["live"], "unknown", words["unknown"])
	}
}

// serve serves the metrics, and whether the loop turns.
func (a *agent) serve(inst installation) (stop func(), err error) {
	if a.flags.listen == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", a.flags.listen)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	c := &collector{
		ctx: context.Background(), stderr: a.stderr, flags: sweepFlags{confDir: inst.ConfDir, stateDir: inst.stateDir()},
		failed: func(err error) { a.log.Warn("metrics", "err", err) },
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(c.registry(), promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", a.healthz)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			a.log.Error("serving", "err", err)
		}
	}()
	return func() { _ = server.Close() }, nil
}

// healthz says whether the loop turns: a sweep takes as long as its DELs do, but not for ever.
func (a *agent) healthz(w http.ResponseWriter, _ *http.Request) {
	if since := time.Since(time.Unix(0, a.turned.Load())); since > a.flags.interval+10*time.Minute {
		http.Error(w, fmt.Sprintf("a sweep has taken %s", roughly(since)), http.StatusServiceUnavailable)
		return
	}
	_, _ = io.WriteString(w, "ok\n")
}
