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
		"Undo":     "the limit of a DEL, of an ADD's rollback, and of the wait for the attachment's lock",
		"GC":       "the limit of a GC",
		"Status":   "the limit of a STATUS",
		"Release":  "the limit of other attachments' DELs during an ADD; the ADD then continues without them",
		"Step":     "the minimum time for one delegate's DEL",
		"Reserve":  "the time that a DEL reserves for each later delegate, unless one has hung",
		"LateDel":  "the limit of a DEL whose address is free again, unless host-local assigned it",
		"HostLink": "the wait for an interface's host end to disappear after its namespace",
		"Orphans":  "the wait for the delegates of a killed unwind",
		"Stop":     "the wait of a DEL for an ADD of the same attachment, after a delegate of that ADD has ended",
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
