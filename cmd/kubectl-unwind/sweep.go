package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

// findings is the output of unwindctl sweep on a node.
type findings []struct {
	Network, ContainerID, IfName, Address, State, Result, Why string
	Pod                                                       podName
}

// results are the possible results of a dry run.
var results = []string{"to be released", "waits", "kept", "unknown", "busy", "live", "left"}

func sweepCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"sweep", "--dry-run", "--cri", "auto"}, key: "findings",
		report: func() report { return &findings{} },
		words:  results,
		none:   "nothing to release",
		columns: []string{"TO BE RELEASED", "WAITS", "KEPT", "UNKNOWN", "BUSY", "LIVE",
			"LEFT", "FIRST REASON"},
		wide: []string{"NETWORK", "CONTAINER", "IFNAME", "ADDRESS", "POD", "STATE", "RESULT", "WHY"},
	}
	var dryRun bool
	cmd := v.command(o, &cobra.Command{
		Use:   "sweep --dry-run",
		Short: "Show what a sweep would release on each node",
		Long: "Show what a sweep with the runtime's list of pods would release on each node, and what\n" +
			"it would keep. The nodes with the most to release or keep come first. -o wide shows\n" +
			"every attachment that is not live, and why. unwindctl sweep --help explains the\n" +
			"results.\n\n" +
			"Only a dry run is available for all nodes at once. The agents sweep every minute.",
		Example: "  kubectl unwind sweep --dry-run\n" +
			"  kubectl unwind sweep --dry-run -o wide --nodes worker-2",
	})
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "print what would be released; required")
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !dryRun {
			return term.WithHint("the agents sweep every minute; to sweep one node now: kubectl -n "+
				o.namespace+" exec POD -c "+container+" -- /unwindctl --host sweep",
				"%w", term.Usage("sweep requires --dry-run"))
		}
		return run(cmd, args)
	}
	return cmd
}

func (all *findings) count() map[string]int {
	count := map[string]int{}
	for _, f := range *all {
		count[f.Result]++
	}
	return count
}

func (all *findings) rows(wide bool) (rows []row) {
	count, first := all.count(), "-"
	weight := float64(len(*all) - count["live"])
	for _, f := range *all {
		if f.Result == "live" {
			continue
		}
		if first == "-" {
			first = f.Result + ": " + f.Why
		}
		rows = append(rows, row{weight, []string{f.Network, term.OrDash(f.ContainerID),
			term.OrDash(f.IfName), term.OrDash(f.Address), f.Pod.String(), term.OrDash(f.State),
			f.Result, f.Why}})
	}
	if wide || len(*all) == 0 {
		return rows
	}
	return []row{{weight, append(numbers(count, results...), first)}}
}
