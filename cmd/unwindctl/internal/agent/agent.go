// Package agent implements unwindctl run: it keeps unwind installed, sweeps, and serves metrics.
package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	Listen    string        // the address of /metrics, /healthz and /readyz; "" for none
	Interval  time.Duration // between sweeps
	NoInstall bool          // only sweep
	Off       bool          // keep unwind switched off while an agent runs with this flag
	Version   string        // this program's version
	LogFormat string        // text, json
	LogLevel  slog.Level
}

// agent is one execution of unwindctl run. It has two independent loops: one keeps unwind
// installed, and one sweeps.
type agent struct {
	Options
	log    *dedupLogger
	sweeps *dedupHandler // receives the log of sweeps, and the plugins' stderr
	find   func() (node.Runtime, error)

	reconciling, sweeping heartbeat

	mu       sync.Mutex
	stateDir string // the last state directory that unwind's conflist named

	seen atomic.Pointer[metrics.Source] // the report of the last sweep; nil before the first
}

// Run keeps unwind installed and sweeps until ctx ends. Then it waits for running DELs, and returns
// nil. If the runtime's directories change, Run also ends, and returns an error. It logs to stderr.
func Run(ctx context.Context, stderr io.Writer, o Options) error {
	if os.Geteuid() != 0 {
		return term.WithHint("run it as root; in a container, set runAsUser: 0",
			"the agent needs root, but runs as user %d", os.Geteuid())
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
	ctx, stopSweeps := context.WithCancel(ctx)
	defer stopSweeps()
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
		loops.Go(func() {
			defer stopSweeps()
			err = keeper.run(ctx)
		})
	}
	a.sweepEach(ctx, setup, paths)
	loops.Wait()
	a.log.Info("stopped; installed files stay in place")
	return err
}

// switchOff switches unwind off if this agent runs with --off. Without --off, it switches unwind on
// again if an earlier agent with --off switched it off, but not if anybody else switched it off.
func (a *agent) switchOff(setup install.Setup) error {
	dir := a.journalDir(setup)
	was := install.ReadOff(dir)
	switch {
	case a.Off:
		if err := install.WriteOff(dir, install.ByFlag); err != nil {
			a.log.Warn("unwind is off only while this agent runs", "err", err)
		}
	case was != nil && was.By == install.ByFlag:
		return setup.SwitchOn(dir)
	}
	return nil
}

func (a *agent) sweepEach(ctx context.Context, setup install.Setup, paths node.Runtime) {
	s := &sweeper{agent: a, sockets: []string{paths.Socket},
		binPath: strings.Join(paths.BinDirs, string(filepath.ListSeparator))}
	s.collect(node.Waiting(ctx, io.Discard, node.LookTimeout, ""),
		s.scope(setup.ConfDir, a.journalDir(setup)))
	for ctx.Err() == nil {
		a.sweeping.beat()
		s.sweep(ctx, s.scope(setup.ConfDir, a.journalDir(setup)))
		select {
		case <-ctx.Done():
		case <-time.After(a.Interval):
		}
	}
}

// journalDir returns --state-dir, or else the state directory that unwind's conflist names, or else
// the last one that the conflist named, or else the default.
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

// lockEach is the time between two attempts to take the lock.
const lockEach = 500 * time.Millisecond

// alone takes the agent's lock, and returns false if another agent holds it. Two agents would
// overwrite each other's changes forever. If the lock cannot be taken for another reason, alone
// logs the error and returns true.
//
// If the lock file was removed or the state directory has changed, alone locks a new file, so that
// other agents still wait.
func (r *reconciler) alone() bool {
	dir := r.journalDir(r.Setup)
	if r.lock != nil && r.lockDir == dir {
		if r.lock.InPlace(dir) {
			return true
		}
		r.log.Warn("the agent's lock file or its whole directory was removed; recreating it",
			"path", install.AgentLockPath(dir))
	}
	lock, err := install.TakeAgentLock(dir)
	r.unlock()
	r.lock, r.lockDir = lock, dir
	const waiting = "waiting to install"
	if !errors.Is(err, install.ErrAgentBusy) {
		r.log.warnOnce("another agent", waiting, nil)
		r.log.warnOnce("lock", "cannot take the agent's lock, so a second agent on this node would "+
			"not wait for this one", err)
		return true
	}
	r.source = nil // if the other agent removes unwind's conflist, nobody has removed it by hand
	process := ""
	if pid := install.AgentProcess(dir); pid != "" {
		process = " (process " + pid + ")"
	}
	r.log.warnOnce("another agent", waiting,
		fmt.Errorf("another agent on this node%s manages %s: only one may run; waiting for it to exit",
			process, r.ConfDir))
	return false
}

func (r *reconciler) unlock() {
	if r.lock != nil {
		r.lock.Release()
		r.lock = nil
	}
}

// warnOfStateDir warns if unwind's conflist names a state directory other than this agent's. Agents
// with different state directories take different locks, so they don't wait for each other.
func (r *reconciler) warnOfStateDir() {
	was := r.Entry().StateDir
	if was == "" || r.StateDir == "" || filepath.Clean(was) == filepath.Clean(r.StateDir) {
		return
	}
	if r.log.changed("state directory", was) {
		r.log.Warn("unwind's conflist names a state directory other than --state-dir; this agent "+
			"sweeps only --state-dir, so restart it with the state directory of the conflist",
			"conflist", was, "agent", r.StateDir)
	}
}
