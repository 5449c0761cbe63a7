package undo

import (
	"testing"
	"time"
)

// TestSlowDELs: each DEL of a chain takes 4 seconds, as portmap's DEL does on a node with 20,000
// rules. In every verb, a DEL either gets enough time or does not start. So unwind kills no DEL
// that is merely slow.
func TestSlowDELs(t *testing.T) {
	b := DefaultBudgets
	const slow = 4 * time.Second
	for verb, whole := range map[string]time.Duration{"DEL": b.Undo, "GC": b.GC * 2 / 3, "ADD": b.Release} {
		for chain := 1; chain <= 30; chain++ {
			left, done := whole, 0
			for steps := chain; steps > 0 && left >= b.Step; steps-- {
				if share := timeFor(left, steps-1, b.Step); min(share, left) < slow {
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

// TestHangingDELs: the first DEL of a chain hangs until it is killed, which takes 500 ms more. All
// other DELs still start.
func TestHangingDELs(t *testing.T) {
	b := DefaultBudgets
	for chain := 1; chain <= 20; chain++ {
		left := b.Undo
		left -= timeFor(left, chain-1, b.Step) + 500*time.Millisecond
		for later := chain - 2; later >= 0; later-- {
			if left < b.Step {
				t.Errorf("chain of %d: %d DELs do not start, because only %s is left", chain, later+1, left)
				break
			}
			left -= time.Second
		}
	}
}
