package main

import (
	"slices"
	"strconv"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

// The exit codes of doctor by the worst severity.
const (
	exitWarning = 3
	exitFailure = 4
)

// severities are the severities of unwindctl doctor, the least severe first.
var severities = []string{"ok", "warning", "error"}

type diagnosis struct {
	Plugin string // the plugin's version
	Checks []struct{ What, Severity, Text, Remedy string }
}

func doctorView() *view {
	return &view{
		unwindctl: []string{"doctor"}, key: "checks", whole: true,
		fine:    func(code int, _ report) bool { return code == exitWarning || code == exitFailure },
		report:  func() report { return &diagnosis{} },
		words:   []string{"error", "warning", "ok"},
		none:    "nothing checked",
		columns: []string{"WORST", "ERRORS", "WARNINGS", "VERSION", "FIRST FINDING"},
		wide:    []string{"SEVERITY", "CHECK", "FINDING"},
	}
}

func doctorCommand(o *options) *cobra.Command {
	return term.AddWatch(doctorView().command(o, &cobra.Command{
		Use:   "doctor",
		Short: "Report problems with unwind on each node",
		Long: "Report problems with unwind on each node, as unwindctl doctor does there. The last\n" +
			"line counts nodes by their worst finding. -o wide shows every finding and how to fix\n" +
			"it. VERSION is the version of the plugin.\n\n" +
			"The exit code is 4 if a node has an error; else 1 if a node is unreachable or its\n" +
			"results are incomplete; else 3 if a node has a warning; else 0.",
		Example: "  kubectl unwind doctor\n" +
			"  kubectl unwind doctor -o wide --nodes worker-2",
	}))
}

// severity returns the rank of a severity. An unknown severity ranks highest.
func severity(word string) int {
	if i := slices.Index(severities, word); i >= 0 {
		return i
	}
	return len(severities) - 1
}

func (d *diagnosis) worst() int {
	worst := 0
	for _, c := range d.Checks {
		worst = max(worst, severity(c.Severity))
	}
	return worst
}

func (d *diagnosis) count() map[string]int { return map[string]int{severities[d.worst()]: 1} }

func (d *diagnosis) rows(_ *view, wide bool) (rows []row) {
	worst, first := d.worst(), "-"
	weight, count := float64(worst), make([]int, len(severities))
	for _, c := range d.Checks {
		s := severity(c.Severity)
		if count[s]++; s == 0 {
			continue
		}
		if s == worst && count[s] == 1 {
			first = c.What + ": " + c.Text
		}
		rows = append(rows, row{weight, []string{severities[s], c.What, c.Text}})
		if c.Remedy != "" {
			rows = append(rows, row{weight, []string{"", "", "→ " + c.Remedy}})
		}
	}
	switch {
	case !wide:
		return []row{{weight, []string{severities[worst], strconv.Itoa(count[2]),
			strconv.Itoa(count[1]), term.OrDash(d.Plugin), first}}}
	case len(rows) == 0:
		return []row{{0, []string{"ok", "-", "-"}}}
	}
	return rows
}
