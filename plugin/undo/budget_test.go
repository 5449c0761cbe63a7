package undo

import (
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
)

// TestSlowDELs: the DELs of a chain each take seconds, as portmap's where there are 20,000 rules. In
// any verb, each has the time that it takes, or does not start: none is killed as one that hangs.
func TestSlowDELs(t *testing.T) {
	b := DefaultBudgets
	const slow = 4 * time.Second
	for verb, whole := range map[string]time.Duration{"DEL": b.Undo, "GC": b.GC * 2 / 3, "ADD": b.Release} {
		for chain := 1; chain <= 30; chain++ {
			left, done := whole, 0
			for steps := chain; steps > 0 && left >= b.Step; steps-- {
				if share := decide.Share(&journal.Step{}, left, steps, b.Step); min(share, left) < slow {
					t.Errorf("%s of %d: %s for DEL %d", verb, chain, min(share, left), done+1)
				}
				left, done = left-slow, done+1
			}
			if done == 0 || verb == "DEL" && chain < 20 && done < chain {
				t.Errorf("%s of %d: only %d DELs start", verb, chain, done)
			}
		}
	}
}

// TestLateDELEndsInTime: a late DEL is over, and its processes are killed, before an ADD that got its address stops
// waiting.
func TestLateDELEndsInTime(t *testing.T) {
	if b := DefaultBudgets; b.LateDel+delegate.GroupDelay >= b.Release {
		t.Errorf("a late DEL ends after %s and %s, an ADD waits %s", b.LateDel, delegate.GroupDelay, b.Release)
	}
}
