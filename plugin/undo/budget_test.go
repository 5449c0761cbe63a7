package undo

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"cni-unwind/testdata/document"
)

// TestBudgetTable keeps the table in plugin/README.md, "Budgets", in step with DefaultBudgets.
func TestBudgetTable(t *testing.T) {
	words := map[string]string{
		"Undo":     "a DEL, the rollback of an ADD, the wait for the attachment's lock",
		"GC":       "a GC",
		"Status":   "a STATUS",
		"Release":  "the DELs of other attachments during an ADD, which continues without them",
		"Step":     "the least time for one delegate's DEL",
		"Reserve":  "the time that a DEL reserves for each delegate that follows, unless one has hung",
		"LateDel":  "a DEL with an address that is free again, of another IPAM plugin than host-local",
		"HostLink": "the wait until the host end of an interface follows its namespace",
		"Orphans":  "the wait for delegates of an unwind that was killed",
		"Stop":     "the wait of a DEL for an ADD of its attachment to stop, since a delegate of that ADD ended",
	}
	table := "| step | time |\n|---|---|\n"
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
