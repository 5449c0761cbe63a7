package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"

	"cni-unwind/plugin"
)

// sweeper sweeps for the agent, and says of each thing once what is the matter with it.
type sweeper struct {
	log     *slog.Logger
	once    *once
	stderr  *unrepeated
	observe bool
	cri     string   // as --cri has it
	sockets []string // where auto looks
	beat    func()   // is told that the sweep gets on

	would map[string]bool // what would be released, as the sweep before has said
}

// sockets is where the runtime's configuration has CRI.
func (r runtimePaths) sockets() []string {
	if r.Socket == "" || slices.Contains(criSockets, r.Socket) {
		return nil
	}
	return []string{r.Socket}
}

// list asks the runtime. nil is no list, which is not an empty one: attachments are judged without.
func (s *sweeper) list(ctx context.Context) *plugin.List {
	var list *plugin.List
	var err error
	if s.cri == "auto" {
		list, err = findPodSandboxes(ctx, s.sockets)
		if errors.Is(err, errNoRuntime) {
			err = nil
		}
	} else {
		list, err = listFor(ctx, sweepFlags{cri: s.cri}, nil)
	}
	if ctx.Err() == nil {
		s.once.warn("cri", "asking the runtime for its pods", err)
		s.noRuntime(s.cri == "auto" && list == nil && err == nil)
	}
	return list
}

func (s *sweeper) noRuntime(none bool) {
	state := ""
	if none {
		state = "none"
	}
	if s.once.begins("no runtime", state) && none {
		s.log.Info("no runtime with CRI is found, so attachments are judged without a list of pods; --cri names its socket")
	}
}

// sweep releases what is dead, or says what it would release. What is under way when ctx ends is brought to its end.
func (s *sweeper) sweep(ctx context.Context, confDir, stateDir string) {
	list := s.list(ctx)
	if ctx.Err() != nil {
		return
	}
	pools, err := plugin.ReadPools(confDir, stateDir)
	s.once.warn("pools", "reading the pools", err)
	s.stderr.turn()
	p := &plugin.Plugin{Stdout: io.Discard, Stderr: s.stderr, Budgets: plugin.DefaultBudgets}
	findings, err := p.Sweep(ctx, stateDir, plugin.Sweep{
		List: list, Pools: pools, DryRun: s.observe, Progress: func(int, int) { s.beat() },
	})
	if ctx.Err() == nil || !errors.Is(err, context.Canceled) {
		s.once.warn("sweep", "sweep", err)
	}
	s.tell(findings)
}

// tell logs what was released, and of the rest what is not as the sweep before has left it.
func (s *sweeper) tell(findings []plugin.Finding) {
	slices.SortStableFunc(findings, func(a, b plugin.Finding) int { return cmp.Compare(a.Key.String(), b.Key.String()) })
	would, words := map[string]bool{}, map[string]int{}
	for i := range findings {
		f := &findings[i]
		word, why := result(f, s.observe)
		words[word]++
		thing := f.Key.String()
		if f.Address.IsValid() {
			thing += " " + f.Address.String()
		}
		if word == "to be released" {
			would[thing] = true
		}
		if word == "released" || would[thing] && !s.would[thing] {
			s.log.Info(word, "attachment", f.Key.String(), "why", why)
		}
	}
	s.would = would
	s.tellOf(words, len(findings))
}

// tellOf logs how many there are of each. Those that live come and go without a word.
func (s *sweeper) tellOf(words map[string]int, all int) {
	nothing := ""
	if n := words["unknown"]; n > 0 && n == all {
		nothing = "nothing can be told of any attachment; run this on the host, or with --host"
	}
	if s.once.begins("unknown", nothing) && nothing != "" {
		s.log.Warn(nothing, "attachments", words["unknown"])
	}
	state, counts := "", []any{}
	for _, word := range []string{"released", "to be released", "pending", "waits", "kept", "unknown"} {
		if words[word] > 0 {
			state += fmt.Sprintf("%s %d,", word, words[word])
			counts = append(counts, word, words[word])
		}
	}
	if (s.once.begins("counts", state) || words["released"] > 0) && state != "" {
		s.log.Info("swept", append(counts, "live", words["live"])...)
	}
}
