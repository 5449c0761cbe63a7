package main

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
)

// item is an element of a list that unwindctl prints: an attachment, an event, a finding of sweep,
// an allocated address, a change or a version. It has the keys of all these kinds.
type item struct {
	Network, ContainerID, IfName, Address, Created string
	State, Verdict, Result, Kind, Change           string
	Reason, Why, What, Build                       string
	Addresses, Plugins, Summary                    []string
	Pod                                            struct{ Namespace, Name string }
	At                                             struct{ Wall time.Time }
	Steps                                          []step
}

type step struct{ Plugin, LastError, WaitsFor string }

// blocked reports whether the DEL waits for more than the end of a pause (see journal.Why).
func (s step) blocked() bool { return s.WaitsFor != "" && s.WaitsFor != "backoff" }

// cells returns the text of an item in each column.
var cells = map[string]func(*item) string{
	"ATTACHMENT":   func(i *item) string { return i.Network + "/" + i.ContainerID + "/" + i.IfName },
	"NETWORK":      func(i *item) string { return i.Network },
	"CONTAINER":    func(i *item) string { return i.ContainerID },
	"IFNAME":       func(i *item) string { return i.IfName },
	"POD":          func(i *item) string { return strings.Trim(i.Pod.Namespace+"/"+i.Pod.Name, "/") },
	"ADDRESS":      func(i *item) string { return i.Address },
	"ADDRESSES":    func(i *item) string { return term.Join(i.Addresses) },
	"CREATED":      func(i *item) string { return i.Created },
	"AGE":          func(i *item) string { return term.Ago(i.At.Wall) },
	"TIME":         func(i *item) string { return term.Time(i.At.Wall) },
	"STATE":        func(i *item) string { return i.State },
	"VERDICT":      func(i *item) string { return i.Verdict },
	"RESULT":       func(i *item) string { return i.Result },
	"AGENT":        func(i *item) string { return i.Build },
	"CHANGE":       func(i *item) string { return i.Change },
	"PLUGINS":      func(i *item) string { return term.Join(i.Plugins) },
	"PENDING DELS": func(i *item) string { return term.Join(i.pending()) },
	"EVENT":        func(i *item) string { return i.Kind },
	"ITEM":         func(i *item) string { return i.What },
	"REASON":       func(i *item) string { return cmp.Or(i.Why, i.Reason) },
}

func (i *item) pending() (plugins []string) {
	for _, s := range i.Steps {
		if !s.blocked() && (i.State == "rolling-back" || i.State == "deleting") {
			plugins = append(plugins, s.Plugin)
		}
	}
	return plugins
}

// problems returns the number of an attachment's pending DELs and their first error. A finding of
// sweep counts as one problem, with its reason, unless it is live, recent or released.
func (i *item) problems() (n int, first string) {
	if !slices.Contains([]string{"", "live", "recent", "released"}, i.Result) {
		return 1, i.Result + ": " + i.Why
	}
	for _, s := range i.Steps {
		if s.LastError != "" && !s.blocked() && i.pending() != nil {
			first = cmp.Or(first, s.Plugin+": "+s.LastError)
		}
	}
	return len(i.pending()), first
}

// items is a list that unwindctl prints.
type items []item

func (all *items) count() map[string]int {
	count := map[string]int{}
	for _, i := range *all {
		count[cmp.Or(i.Kind, i.Change, i.Result, i.Verdict, i.State, "answered")]++
		for _, s := range i.Steps {
			if s.blocked() {
				count["waiting"]++
			}
		}
		if n := len(i.pending()); n > 0 {
			count["pending DELs"] += n
		}
	}
	return count
}

// rows returns a row for each item that is not a live finding. If v.first is set and wide is not,
// it returns one row with the counts and the first problem. The latest event comes last.
func (all *items) rows(v *view, wide bool) (rows []row) {
	weight, first := 0.0, ""
	for _, i := range *all {
		if n, text := i.problems(); v.first != "" {
			weight, first = weight+float64(n), cmp.Or(first, text)
		}
	}
	if v.first != "" && !wide && (len(*all) > 0 || v.exits) {
		count, cells := all.count(), []string{}
		for _, word := range v.words {
			cells = append(cells, strconv.Itoa(count[word]))
		}
		return []row{{weight, append(cells, term.OrDash(first))}}
	}
	for _, i := range *all {
		if i.Result == "live" {
			continue
		}
		if i.Kind != "" {
			weight = -float64(i.At.Wall.UnixMilli())
		}
		rows = append(rows, i.rows(v.names(wide), weight)...)
	}
	return rows
}

// rows returns the row of an item, followed by a row for each further sentence of its summary.
func (i *item) rows(columns []string, weight float64) []row {
	var first []string
	for _, column := range columns {
		if text := cells[column]; text != nil {
			first = append(first, term.OrDash(text(i)))
		}
	}
	rows := []row{{weight, first}}
	if columns[len(columns)-1] != "SUMMARY" {
		return rows
	}
	rows[0].cells = append(first, strings.Join(i.Summary[:min(1, len(i.Summary))], ""))
	for _, sentence := range i.Summary[min(1, len(i.Summary)):] {
		rows = append(rows, row{weight, append(slices.Repeat([]string{""}, len(first)), sentence)})
	}
	return rows
}
