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
		"Release":  "DELs of other attachments during an ADD; the ADD continues without them",
		"Step":     "one delegate's DEL, at least",
		"Reserve":  "what a DEL leaves to each delegate after it, while none has hung",
		"LateDel":  "a DEL with an address that is free again, from the last look that found no new owner",
		"HostLink": "the wait until the host end of an interface follows its namespace",
		"Orphans":  "the wait for delegates of an unwind that was killed",
	}
	table := "| what | time |\n|---|---|\n"
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
