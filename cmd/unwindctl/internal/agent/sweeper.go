package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/metrics"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
)

// sweeper runs the agent's sweeps. It logs a state only when the state changes.
type sweeper struct {
	*agent
	sockets []string // see inspect.Scope
	binPath string   // CNI_PATH for attachments that are not in the journal

	would    map[string]bool // what the previous sweep would have released
	history  journal.Tail
	counters inspect.Counters
}

func (s *sweeper) scope(confDir, stateDir string) inspect.Scope {
	return inspect.Scope{CRI: s.CRI, Sockets: s.sockets,
		Directories: node.Directories{ConfDir: confDir, StateDir: stateDir}}
}

// sweep releases the dead attachments, or, with --observe, logs what it would release. The agent
// sweeps only the pools of chains that unwind runs. When ctx ends, sweep lets running DELs finish.
func (s *sweeper) sweep(ctx context.Context, of inspect.Scope) {
	s.sweeps.nextRound()
	p := inspect.Plugin(s.sweeps)
	p.Log = slog.New(s.sweeps)
	ours := of
	ours.Ours = true
	r, err := inspect.Sweep(ctx, p, nil, ours, sweep.Options{
		Path: s.binPath, DryRun: s.Observe, Periodic: true,
		Progress: func(int, int) { s.sweeping.beat() },
	})
	if err != nil || ctx.Err() != nil && r.ListErr != nil {
		return
	}
	none := ""
	if r.NoRuntime {
		none = node.WithoutRuntime
	}
	s.log.warnOnce("cri", "cannot list the runtime's pods", r.ListErr)
	if s.log.changed("no runtime", none) && none != "" {
		s.log.Info(none)
	}
	if err := r.JournalErr; ctx.Err() == nil || !errors.Is(err, context.Canceled) {
		if r.Guard != nil {
			err = r.Guard
		}
		s.log.warnOnce("sweep", "sweep failed", errors.Join(err, r.SweepErr))
	}
	s.report(r.Findings)
	of.Earlier = r
	s.collect(ctx, of)
}

// collect stores a report of the node for the metrics.
func (s *sweeper) collect(ctx context.Context, of inspect.Scope) {
	r, err := inspect.NewReport(ctx, term.Streams{}, of)
	if err != nil || ctx.Err() != nil {
		return
	}
	s.log.warnOnce("metrics", "cannot collect some metrics",
		errors.Join(r.Err(), r.HistoryErr, r.SweepErr, r.PoolErr))
	s.log.warnOnce("journal", "cannot write the journal, so ADDs and DELs are not recorded",
		r.Unwritable)
	s.seen.Store(&metrics.Source{Version: s.Version, Report: r, Counters: s.count(of.StateDir)})
}

// countFrom is the age of the oldest event that a new agent counts. An agent that starts does not
// count all events of the history again: to Prometheus, they would look new.
const countFrom = 15 * time.Minute

// count counts the events in the history of a state directory. The first call for a directory
// counts only events that are at most countFrom old; for older events, it returns counters with the
// value 0. It keeps the counters between calls, because the history drops old events.
func (s *sweeper) count(stateDir string) inspect.Counters {
	first := s.history.Store == nil || s.history.Store.Dir != stateDir
	if first {
		s.history, s.counters = journal.Tail{Store: &journal.Store{Dir: stateDir}}, inspect.Counters{}
	}
	events, _ := s.history.Next() // the report contains the error
	s.counters.Add(events)
	if first {
		isOld := func(e journal.Event) bool { return time.Since(e.At.Wall) > countFrom }
		for i := range s.counters {
			s.counters[i].Value = 0
		}
		s.counters.Add(slices.DeleteFunc(events, isOld))
	}
	return slices.Clone(s.counters)
}

// report logs each released attachment. With --observe, it logs each attachment that the sweep
// would release, unless the previous sweep would have released it, too. Then it logs the counts.
func (s *sweeper) report(findings []sweep.Finding) {
	would, counts, elsewhere := map[string]bool{}, map[string]int{}, 0
	for i := range findings {
		f := &findings[i]
		counts[inspect.Counted(f, s.Observe)]++
		if f.Elsewhere() {
			elsewhere++
		}
		result, why := inspect.Result(f, s.Observe)
		thing := fmt.Sprint(f.Key.String(), f.Addresses)
		if result == inspect.WouldBeReleased {
			would[thing] = true
		}
		if result == inspect.Released || would[thing] && !s.would[thing] {
			s.log.Info(result, "attachment", f.Key.String(), "why", why)
		}
	}
	s.would = would
	nothing := ""
	if elsewhere > 0 && elsewhere == len(findings) {
		nothing = "this agent cannot tell from its namespaces whether attachments are live; run the " +
			"agent on the host, or as unwindctl --host run"
	}
	if s.log.changed("unknown", nothing) && nothing != "" {
		s.log.Warn(nothing, "attachments", elsewhere)
	}
	s.reportCounts(counts)
}

// reportCounts logs how many attachments have each result, and how many are in state unknown. It
// logs nothing if only the number of live attachments has changed.
func (s *sweeper) reportCounts(counts map[string]int) {
	var words []any
	for _, word := range append(inspect.Results, "unknown") {
		if counts[word] > 0 {
			words = append(words, word, counts[word])
		}
	}
	if (s.log.changed("counts", fmt.Sprint(words)) || counts[inspect.Released] > 0) && words != nil {
		done := "swept"
		if s.Observe {
			done = "observed"
		}
		s.log.Info(done, append(words, "live", counts["live"]+counts["recent"]+counts["busy"])...)
	}
}

// dedupLogger logs a state when it begins, but not again while it lasts.
type dedupLogger struct {
	*slog.Logger
	mu     sync.Mutex
	states map[string]string
}

func newDedupLogger(log *slog.Logger) *dedupLogger {
	return &dedupLogger{Logger: log, states: map[string]string{}}
}

// changed stores a thing's state, and reports whether it has changed. "" is the normal state.
func (d *dedupLogger) changed(thing, state string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.states[thing]
	d.states[thing] = state
	return before != state
}

var digits = regexp.MustCompile(`\d+`)

// warnOnce logs an error about a thing when the error begins, and "recovered" when the error ends.
// Errors that differ only in numbers, such as a port or a time, count as the same.
func (d *dedupLogger) warnOnce(thing, msg string, err error) {
	switch {
	case err == nil && d.changed(thing, ""):
		d.Info("recovered", "was", msg)
	case err != nil && d.changed(thing, digits.ReplaceAllString(err.Error(), "")):
		d.Warn(msg, "err", err)
	}
}

// dedupHandler passes on a sweep's warnings and errors, except for those that this or the previous
// sweep has already logged.
type dedupHandler struct {
	slog.Handler
	*rounds
	attrs string // the attributes of WithAttrs
}

type rounds struct {
	mu          sync.Mutex
	before, now map[string]bool
}

func (r *rounds) nextRound() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before, r.now = r.now, map[string]bool{}
}

func (h *dedupHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelWarn && h.Handler.Enabled(ctx, level)
}

func (h *dedupHandler) Handle(ctx context.Context, record slog.Record) error {
	text := record.Message + h.attrs
	record.Attrs(func(a slog.Attr) bool {
		text += " " + a.String()
		return true
	})
	h.mu.Lock()
	known := h.before[text] || h.now[text]
	h.now[text] = true
	h.mu.Unlock()
	if known {
		return nil
	}
	return h.Handler.Handle(ctx, record)
}

func (h *dedupHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &dedupHandler{h.Handler.WithAttrs(attrs), h.rounds, h.attrs + fmt.Sprint(attrs)}
}

// Write logs what a plugin writes to its stderr.
func (h *dedupHandler) Write(p []byte) (int, error) {
	if text := strings.TrimSpace(string(p)); text != "" {
		slog.New(h).Warn(text)
	}
	return len(p), nil
}
