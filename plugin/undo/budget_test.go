package undo

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

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
		"Step":     "minimum time for the DEL of one delegate",
		"Reserve":  "time that is reserved for the DEL of each later delegate, unless a delegate has hung",
		"LateDel":  "limit for a DEL whose address is already free",
		"HostLink": "how long unwind waits for an interface's host end to disappear after its namespace",
		"Orphans":  "how long unwind waits for the delegates of a killed unwind to end",
		"Stop":     "how long a DEL waits for a running ADD of its attachment while none of that ADD's delegates ends",
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

// TestLateDELEndsInTime: a late DEL is over, and its processes are killed, before an ADD that got its address stops
// waiting.
func TestLateDELEndsInTime(t *testing.T) {
	if b := DefaultBudgets; b.LateDel+delegate.GroupDelay >= b.Release {
		t.Errorf("a late DEL ends after %s and %s, an ADD waits %s", b.LateDel, delegate.GroupDelay, b.Release)
	}
}
