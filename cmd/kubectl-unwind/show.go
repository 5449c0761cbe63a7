package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

// shown is the output of unwindctl show on a node.
type shown []struct {
	Network, ContainerID, IfName, State, Verdict, Why string
	Pod                                               podName
	Addresses, Summary                                []string
}

func showCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"show", "--cri", "auto"}, key: "attachments",
		fine:   func(code int, r report) bool { return code == term.ExitError && len(r.count()) == 0 },
		report: func() report { return &shown{} },
		words:  []string{"live", "dead", "unknown", "foreign"},
		none:   "no such attachment", quiet: true, needed: true,
		columns: []string{"ATTACHMENT", "POD", "ADDRESSES", "STATE", "VERDICT", "WHY"},
		wide:    []string{"ATTACHMENT", "STATE", "VERDICT", "SUMMARY"},
	}
	return v.command(o, &cobra.Command{
		Use:   "show ATTACHMENT|POD|ADDRESS",
		Short: "Show which node has an attachment and why it is kept",
		Long: "Find the attachments of a pod (NAMESPACE/NAME, or NAME), address, container ID or\n" +
			"NETWORK/CONTAINER/IFNAME on all nodes, and show why they are kept. -o wide shows all\n" +
			"details of unwindctl show.",
		Example: "  kubectl unwind show default/web-0\n  kubectl unwind show 10.22.0.5 -o wide",
		Args:    term.OneArg,
	})
}

func (all *shown) count() map[string]int {
	count := map[string]int{}
	for _, a := range *all {
		count[a.Verdict]++
	}
	return count
}

func (all *shown) rows(wide bool) (rows []row) {
	for _, a := range *all {
		name := a.Network + "/" + a.ContainerID + "/" + a.IfName
		cells := []string{name, a.Pod.String(), term.Join(a.Addresses), a.State, a.Verdict, a.Why}
		if !wide {
			rows = append(rows, row{0, cells})
			continue
		}
		cells = []string{name, a.State, a.Verdict, ""}
		for _, sentence := range append(a.Summary, "")[:max(1, len(a.Summary))] {
			cells[3] = sentence
			rows = append(rows, row{0, cells})
			cells = make([]string, 4)
		}
	}
	return rows
}
