package undo

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/testdata/document"
)

// TestBudgetTable keeps the table in plugin/README.md, "Budgets", in step with DefaultBudgets.
func TestBudgetTable(t *testing.T) {
	words := map[string]string{
		"Undo":     "limit for a DEL, for an ADD's rollback, and for the wait for the attachment's lock",
		"GC":       "limit for a GC",
		"Status":   "limit for a STATUS",
		"Release":  "limit for the DELs of other attachments during an ADD, after which the ADD continues",
		"Step":     "minimum time for the DEL of one delegate, and time that is reserved for each later delegate, unless a delegate has hung",
		"LateDel":  "limit for a DEL whose address is already free",
		"HostLink": "how long unwind waits for an interface's host end to disappear after its namespace",
		"Orphans":  "how long unwind waits for the delegates of a killed unwind to end",
		"Stop":     "how long a DEL waits for the rollback of a running ADD of its attachment",
		"Exchange": "how long an ADD or a STATUS waits for a configuration file or a plugin that its provider replaces",
	}
	table := "| budget | time |\n|---|---|\n"
	budgets := reflect.ValueOf(DefaultBudgets)
	for i := range budgets.NumField() {
		name := budgets.Type().Field(i).Name
		if words[name] == "" {
			t.Errorf("%s has no words", name)
		}
		limit := time.Duration(budgets.Field(i).Int()).String()
		table += fmt.Sprintf("| %s | %s |\n", words[name], strings.Replace(limit, "m0s", "m", 1))
	}
	document.Table(t, "../README.md", "budgets", table)
}

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
