// Package agent keeps unwind installed on a node, sweeps, and serves metrics: unwindctl run.
package agent

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/metrics"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
)

type Options struct {
	install.Options
	CRI       string        // the runtime's socket, auto or none
	Listen    string        // the address of /metrics and /healthz; "" for none
	Interval  time.Duration // between sweeps
	NoInstall bool          // only sweep
	Off       bool          // keep unwind switched off while it runs with this flag
	Version   string        // this program's version
	LogFormat string        // text, json
	LogLevel  slog.Level
}

// agent is one run of unwindctl run. It has two independent loops: one keeps unwind installed, and
// one sweeps.
type agent struct {
	Options
	log    *dedupLogger
	sweeps *dedupHandler // receives the log of sweeps, and the plugins' stderr
	find   func() (node.Runtime, error)

	reconciling, sweeping heartbeat

	mu       sync.Mutex
	stateDir string // the last state directory that our conflist named

	seen atomic.Pointer[metrics.Source] // the report of the last sweep; nil before the first
}

// Run keeps unwind installed and sweeps until ctx ends, which is not an error. It then waits for
// running DELs. It logs to stderr.
func Run(ctx context.Context, stderr io.Writer, o Options) error {
	if os.Geteuid() != 0 {
		return term.WithHint("run it as root; in a container, set runAsUser: 0",
			"the agent needs root, and runs as user %d", os.Geteuid())
	}
	options := &slog.HandlerOptions{Level: o.LogLevel}
	var handler slog.Handler = slog.NewTextHandler(stderr, options)
	if o.LogFormat == "json" {
		handler = slog.NewJSONHandler(stderr, options)
	}
	a := &agent{Options: o, log: newDedupLogger(slog.New(handler)),
		sweeps: &dedupHandler{Handler: handler, rounds: &rounds{}},
		find:   func() (node.Runtime, error) { return o.Find(ctx, "/") }}
	return a.run(ctx)
}

func (a *agent) run(ctx context.Context) error {
	paths, err := a.find()
	var usage term.UsageError
	if errors.As(err, &usage) || err != nil && !a.NoInstall {
		return err
	}
	if err != nil {
		a.log.Warn("cannot find the runtime's directories; using the default ones", "err", err)
		paths = node.Runtime{ConfDir: node.DefaultConfDir, BinDirs: []string{node.DefaultBinDir}}
	}
	setup, err := a.Setup(ctx, paths)
	if err != nil {
		return err
	}
	a.reconciling.beat()
	a.sweeping.beat()
	keeper := &reconciler{agent: a, Setup: setup, paths: paths}
	found := func() status { return status{} }
	if !a.NoInstall {
		found = keeper.status
		if err := a.switchOff(setup); err != nil {
			return err
		}
	}
	if a.Listen != "" {
		stop, err := (&server{agent: a, setup: setup, found: found}).serve(ctx)
		if err != nil {
			return err
		}
		defer stop()
	}
	a.log.Info("running", "version", a.Version, "confDir", setup.ConfDir, "interval", a.Interval,
		"observe", a.Observe)
	var loops sync.WaitGroup
	if !a.NoInstall {
		loops.Go(func() { keeper.run(ctx) })
	}
	a.sweepEach(ctx, setup, paths)
	loops.Wait()
	a.log.Info("stopped; installed files stay in place")
	return nil
}

// switchOff switches unwind off if this agent runs with --off, and on again if an earlier agent
// did. If somebody else has switched unwind off, it stays off.
func (a *agent) switchOff(setup install.Setup) error {
	const byFlag = "run --off"
	dir := a.journalDir(setup)
	was := install.ReadOff(dir)
	switch {
	case a.Off:
		return install.WriteOff(dir, byFlag)
	case was != nil && was.By == byFlag:
		return setup.SwitchOn(dir)
	}
	return nil
}

func (a *agent) sweepEach(ctx context.Context, setup install.Setup, paths node.Runtime) {
	s := &sweeper{agent: a, sockets: []string{paths.Socket},
		binPath: strings.Join(paths.BinDirs, string(filepath.ListSeparator))}
	s.look(ctx, s.scope(setup.ConfDir, a.journalDir(setup)))
	for ctx.Err() == nil {
		a.sweeping.beat()
		s.sweep(ctx, s.scope(setup.ConfDir, a.journalDir(setup)))
		select {
		case <-ctx.Done():
		case <-time.After(a.Interval):
		}
	}
}

// journalDir returns the state directory: --state-dir, or else the directory that our conflist
// names, or the last one that it named, or the default.
func (a *agent) journalDir(setup install.Setup) string {
	if setup.StateDir != "" {
		return setup.StateDir
	}
	named := setup.Entry().StateDir
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stateDir = cmp.Or(named, a.stateDir, netconf.DefaultStateDir)
	return a.stateDir
}
