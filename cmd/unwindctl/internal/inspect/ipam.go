package inspect

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/node"
)

// PrintPools prints the pools or, in the formats Wide and Name, each allocated address.
func (r *Report) PrintPools(out io.Writer, o *term.Output) error {
	all, of := r.Pools, r.Scope
	if o.Format == term.Line {
		return printLine(out, all)
	}
	if len(all) > 0 && o.Format == term.Wide || o.Format == term.Name {
		return printReservations(out, all, o)
	}
	var text strings.Builder
	if len(all) == 0 {
		network := ""
		if of.Network != "" {
			network = " of network " + of.Network
		}
		fmt.Fprintf(&text, "No pools: no conflist%s in %s uses host-local, or unwind's conflist there "+
			"names a state directory other than %s.\n", network, strings.Join(of.All(), ", "),
			of.StateDir)
	}
	for i, p := range all {
		if i > 0 {
			text.WriteByte('\n')
		}
		recent := ""
		if p.Recent > 0 {
			recent = fmt.Sprintf(", %d recent", p.Recent)
		}
		fmt.Fprintf(&text, "%s (%s): %d used (%d live%s, %d leaked, %d empty, %d unknown)\n",
			p.Network, p.Dir, p.Used, p.Live, recent, p.Leaked, p.Empty, p.Unknown)
		for _, s := range p.Sets {
			fmt.Fprintf(&text, "  %s\n%s", s, s.bar(out))
		}
		if !slices.ContainsFunc(p.Sets, func(s *Set) bool { return s.Number != nil }) {
			text.WriteString("  the pool's ranges and size are unknown" + term.Because(p.NoRanges) + "\n")
		}
		p.explain(out, &text)
	}
	text.WriteString(r.next())
	return term.Print(out, text.String())
}

// printLine prints all pools in one line.
func printLine(out io.Writer, all []*Pool) error {
	var texts []string
	for _, p := range all {
		text, percent, words := p.Network+": ", int64(-1), []string{}
		for _, s := range p.Sets {
			percent = max(percent, s.percent()) // once one set is full, so is the pool
		}
		if percent >= 0 {
			text += fmt.Sprintf("%d %%, ", percent)
		}
		for _, state := range barStates {
			if n := *p.ByState()[state]; n > 0 {
				words = append(words, fmt.Sprintf("%d %s", n, state))
			}
		}
		if text += fmt.Sprintf("%d used", p.Used); len(words) > 0 {
			text += " (" + strings.Join(words, ", ") + ")"
		}
		texts = append(texts, text)
	}
	_, err := fmt.Fprintln(out, cmp.Or(strings.Join(texts, "; "), "no pools"))
	return err
}

func printReservations(out io.Writer, pools []*Pool, o *term.Output) error {
	t := term.NewTable(term.Column{Name: "NETWORK"}, term.Column{Name: "ADDRESS"},
		term.Column{Name: "STATE"}, term.Column{Name: "POD"}, term.Column{Name: "CONTAINER"},
		term.Column{Name: "IFNAME"}, term.Column{Name: "REASON"})
	var addresses []string
	for _, p := range pools {
		for _, r := range p.Reservations {
			addresses = append(addresses, r.Address.String())
			t.Add(p.Network, r.Address.String(), term.State(out, r.State), podName(r.Pod),
				term.OrDash(term.OneLine(r.ContainerID)), term.OrDash(term.OneLine(r.IfName)),
				term.OneLine(r.Why))
		}
	}
	if o.Format == term.Name {
		return term.PrintNames(out, addresses)
	}
	return t.Print(out, o)
}

// explain writes which addresses are not live, why, and what to do about them.
func (p *Pool) explain(out io.Writer, text *strings.Builder) {
	groups := map[reservation][]netip.Addr{}
	for _, r := range p.Reservations {
		if r.State != "live" {
			kind := reservation{State: r.State, Why: r.Why, Remedy: r.Remedy}
			groups[kind] = append(groups[kind], r.Address)
		}
	}
	kinds := slices.SortedFunc(maps.Keys(groups), func(a, b reservation) int {
		return cmp.Or(cmp.Compare(a.State, b.State), cmp.Compare(a.Why, b.Why),
			cmp.Compare(a.Remedy, b.Remedy))
	})
	for _, k := range kinds {
		count := term.Colour(out, k.State, fmt.Sprintf("%d %s", len(groups[k]), k.State))
		fmt.Fprintf(text, "  %s (%s): %s", count, few(groups[k]), k.Why)
		if k.Remedy != "" {
			fmt.Fprintf(text, ". %s", k.Remedy)
		}
		text.WriteString(".\n")
	}
	if lost, remedy := p.Lost(); len(p.Unreserved) > 0 {
		fmt.Fprintf(text, "  %s. %s.\n", lost, remedy)
	}
}

// next returns advice on what to run next: to free leaked addresses, to judge the owners of
// addresses, and to prevent leaks. It returns "" if there are no pools.
func (r *Report) next() string {
	if len(r.Pools) == 0 {
		return ""
	}
	leaked, undecided, unknown, plain, full, what := 0, 0, 0, false, "", "leaked"
	for _, p := range r.Pools {
		leaked, unknown, plain = leaked+p.Leaked+p.Empty, unknown+p.Unknown, plain || p.Plain
		undecided += p.Unknown + p.Recent
		if p.Empty > 0 {
			what = "leaked or empty"
		}
		if p.Full && p.Live == p.Used {
			full = p.Network
		}
	}
	var text strings.Builder
	switch {
	case leaked > 0:
		force := ""
		if r.Guard != nil {
			force = " --force"
		}
		fmt.Fprintf(&text, "\n%s %s. To see what a sweep would free, run unwindctl sweep "+
			"--dry-run%s%s\n",
			term.Plural(leaked, "address is", "addresses are"), what, r.ListFlags(), force)
	case undecided == 0:
		text.WriteString("\nNo address is leaked.\n")
	}
	if full != "" {
		fmt.Fprintf(&text, "A range set of network %s is too small: all its addresses are in "+
			"use.\n", full)
	}
	if unknown > 0 && r.List == nil {
		fmt.Fprintf(&text, "\nOnly the runtime knows whether the owners of %s are live%s\n",
			term.Plural(unknown, "address", "addresses"), r.noList())
	}
	switch {
	case plain && durable.Exists(filepath.Join(r.StateDir, node.OffName)):
		text.WriteString("unwind is off. To switch it on again, run unwindctl on\n")
	case plain:
		fmt.Fprintf(&text, "unwind can prevent leaks. To see what it would install, run unwindctl "+
			"install --dry-run\n")
	}
	return text.String()
}

// noList returns the end of a sentence: the reason why there is no list from the runtime.
func (r *Report) noList() string {
	switch {
	case r.NoRuntime:
		return ", but unwindctl found no runtime. Set the runtime's socket with --cri. If the " +
			"runtime has no socket, list its containers in a file for unwindctl sweep " +
			"--valid-attachments."
	case r.ListErr != nil:
		return ", but it returned no list."
	}
	return ". Because of --cri none, unwindctl did not query it."
}

// barStates are the states of allocated addresses, in their order in a bar.
var barStates = []string{"live", "recent", "leaked", "empty", "unknown"}

// percent returns how full a set is, or -1 if its size is unknown or Unbounded.
func (s *Set) percent() int64 {
	if s.Size == nil || *s.Size <= 0 {
		return -1
	}
	return min(100, int64(s.Used)*100 / *s.Size)
}

// maxBar is the width of a bar, in columns. A set with fewer addresses has a shorter bar.
const maxBar = 50

// bar returns a line that shows how full a set is, or "" if its size is unknown or Unbounded. The
// line fits the terminal.
func (s *Set) bar(out io.Writer) string {
	if s.percent() < 0 {
		return ""
	}
	const around = len("  ") + len("  100 %")
	width := maxBar
	if columns := term.Width(out); columns > 0 {
		width = max(1, min(width, columns-around))
	}
	var counts []int
	for _, state := range barStates {
		counts = append(counts, *s.ByState()[state])
	}
	var text strings.Builder
	cells := cellsOf(counts, *s.Size, width)
	for i, state := range barStates {
		text.WriteString(term.Colour(out, state, strings.Repeat("█", cells[i])))
	}
	text.WriteString(strings.Repeat("░", cells[len(barStates)]))
	return fmt.Sprintf("  %s  %d %%\n", &text, s.percent())
}

// cellsOf divides the cells of a bar among the counts and, last, the free addresses. Each part that
// is not 0 gets at least one cell, until no cell is left.
func cellsOf(counts []int, size int64, width int) (cells []int) {
	width = int(min(int64(width), size))
	used := int64(0)
	for _, n := range counts {
		used += int64(n)
	}
	left := width
	for _, n := range append(counts, int(max(0, size-used))) {
		share := int(int64(n) * int64(width) / max(size, used))
		if n > 0 {
			share = max(1, share)
		}
		cells = append(cells, min(share, left))
		left -= min(share, left)
	}
	most := 0 // the largest part, which gets the remaining cells
	for i := range cells {
		if cells[i] > cells[most] {
			most = i
		}
	}
	cells[most] += left
	return cells
}
