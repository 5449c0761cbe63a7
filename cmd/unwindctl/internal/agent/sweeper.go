package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/cmd/unwindctl/internal/pools"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/sweep"
)

// sweeper runs the agent's sweeps. It logs a state only when it changes.
type sweeper struct {
	*agent
	sockets []string // the sockets that --cri auto tries
	binPath string   // CNI_PATH for attachments that are not in the journal

	would map[string]bool // what the previous sweep would have released
}

// list returns the runtime's list of pods. It returns nil if it cannot get one; the sweep then
// judges attachments by other evidence. An empty list means that the runtime has no pods.
func (s *sweeper) list(ctx context.Context) *facts.List {
	list, err := inspect.Scope{CRI: s.CRI, Sockets: s.sockets}.List(ctx, nil)
	none := ""
	if s.CRI == "auto" && errors.Is(err, node.ErrNoRuntime) {
		none, err = "none", nil
	}
	if ctx.Err() == nil {
		s.log.warnOnce("cri", "cannot list the runtime's pods", err)
		if s.log.changed("no runtime", none) && none != "" {
			s.log.Info(node.WithoutRuntime)
		}
	}
	return list
}

// sweep releases the dead attachments, or, with --observe, logs what it would release. When ctx
// ends, it lets running DELs finish.
func (s *sweeper) sweep(ctx context.Context, confDir, stateDir string) {
	list := s.list(ctx)
	if ctx.Err() != nil {
		return
	}
	pools, err := pools.Read(stateDir, confDir)
	// the agent sweeps only the pools of chains that unwind runs
	pools = slices.DeleteFunc(pools, func(p sweep.Pool) bool { return p.Plain })
	s.log.warnOnce("pools", "cannot read the pools", err)
	s.sweeps.nextRound()
	p := inspect.Plugin(s.sweeps)
	findings, err := p.Sweep(ctx, stateDir, sweep.Job{
		List: list, Pools: pools, Path: s.binPath, DryRun: s.Observe, Periodic: true,
		Progress: func(int, int) { s.sweeping.beat() },
	})
	if ctx.Err() == nil || !errors.Is(err, context.Canceled) {
		s.log.warnOnce("sweep", "sweep failed", err)
	}
	s.report(findings)
}

// report logs each released attachment. With --observe, it logs each attachment that it would
// release, unless the previous sweep logged it. It then logs the counts.
func (s *sweeper) report(findings []sweep.Finding) {
	slices.SortStableFunc(findings, func(a, b sweep.Finding) int {
		return cmp.Compare(a.Key.String(), b.Key.String())
	})
	would, words, elsewhere := map[string]bool{}, map[string]int{}, 0
	for i := range findings {
		f := &findings[i]
		word, why := inspect.Result(f, s.Observe)
		words[word]++
		if f.Elsewhere() {
			elsewhere++
		}
		thing := fmt.Sprint(f.Key.String(), f.Addresses)
		if word == "to be released" {
			would[thing] = true
		}
		if word == "released" || would[thing] && !s.would[thing] {
			s.log.Info(word, "attachment", f.Key.String(), "why", why)
		}
	}
	s.would = would
	s.reportCounts(words, elsewhere > 0 && elsewhere == len(findings))
}

// reportCounts logs how many attachments there are in each state. It does not log if only the
// number of live attachments has changed, or if a pending DEL only waits for its next try.
func (s *sweeper) reportCounts(words map[string]int, allElsewhere bool) {
	nothing := ""
	if allElsewhere {
		nothing = "this agent cannot judge any attachment from its namespaces; run it on the host, or " +
			"as unwindctl --host run"
	}
	if s.log.changed("unknown", nothing) && nothing != "" {
		s.log.Warn(nothing, "attachments", words["unknown"])
	}
	state, counts := fmt.Sprint("pending or waits ", words["pending"]+words["waits"]), []any{}
	for _, word := range []string{"released", "to be released", "pending", "waits", "kept",
		"unknown"} {
		if words[word] == 0 {
			continue
		}
		if counts = append(counts, word, words[word]); word != "pending" && word != "waits" {
			state += fmt.Sprintf(", %s %d", word, words[word])
		}
	}
	if (s.log.changed("counts", state) || words["released"] > 0) && len(counts) > 0 {
		s.log.Info("swept", append(counts, "live", words["live"]+words["recent"])...)
	}
}
