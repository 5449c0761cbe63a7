package main

import (
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

// events is the output of unwindctl history on a node.
type events []struct {
	Network, ContainerID, IfName, Kind, Reason string
	Pod                                        podName
	Addresses, Plugins                         []string
	At                                         struct{ Wall time.Time }
}

func historyCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"history"}, key: "events",
		report: func() report { return &events{} },
		words: []string{"rolled-back", "swept", "released", "parked", "unproven", "superseded",
			"forgotten", "untaken", "no-op"},
		none: "no events", quiet: true,
		columns: []string{"TIME", "WHAT", "NETWORK", "POD", "PLUGINS", "WHY"},
		wide: []string{"TIME", "WHAT", "NETWORK", "CONTAINER", "IFNAME", "POD", "ADDRESSES", "PLUGINS",
			"WHY"},
		flags: handedOn{{"since", "only events of the last `DURATION`, such as 2h"},
			{"last", "only the last `N` events of each node"},
			{"network", "only events of this `NETWORK`"},
			{"kind", "only events of these `KINDS`; unwindctl history --help lists them"}},
	}
	return v.command(o, &cobra.Command{
		Use:   "history [ATTACHMENT|POD|ADDRESS]",
		Short: "Show unusual events on all nodes",
		Long: "Show unusual events on all nodes, the newest last. Nodes without events are left\n" +
			"out. unwindctl history --help explains the events.",
		Example: "  kubectl unwind history --since 2h\n  kubectl unwind history default/web-0",
		Args:    term.OneArg,
	})
}

func (all *events) count() map[string]int {
	count := map[string]int{}
	for _, e := range *all {
		count[e.Kind]++
	}
	return count
}

func (all *events) rows(wide bool) (rows []row) {
	for _, e := range *all {
		cells := []string{term.Time(e.At.Wall), e.Kind, e.Network}
		if wide {
			cells = append(cells, term.OrDash(e.ContainerID), term.OrDash(e.IfName))
		}
		if cells = append(cells, e.Pod.String()); wide {
			cells = append(cells, term.Join(e.Addresses))
		}
		cells = append(cells, term.Join(e.Plugins), e.Reason)
		rows = append(rows, row{-float64(e.At.Wall.UnixMilli()), cells})
	}
	return rows
}
