package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

// attachments is the output of unwindctl list on a node.
type attachments []struct {
	Network, ContainerID, IfName, State, Reason, Created string
	Pod                                                  podName
	Addresses                                            []string
	Steps                                                []struct {
		Plugin, State, LastError string
		ProvesNothing            bool
	}
}

// podName is the pod of an attachment.
type podName struct{ Namespace, Name string }

func (p podName) String() string { return term.OrDash(strings.Trim(p.Namespace+"/"+p.Name, "/")) }

func listCommand(o *options) *cobra.Command {
	v := &view{
		unwindctl: []string{"list"}, key: "attachments",
		report: func() report { return &attachments{} },
		words:  []string{"live", "adding", "unwinding", "removing", "pending DELs", "unproven"},
		none:   "no attachments",
		columns: []string{"LIVE", "ADDING", "UNWINDING", "REMOVING", "PENDING DELS", "UNPROVEN",
			"FIRST ERROR"},
		wide: []string{"NETWORK", "CONTAINER", "IFNAME", "STATE", "CREATED", "POD", "ADDRESSES",
			"PENDING DELS", "WHY"},
	}
	cmd := v.command(o, &cobra.Command{
		Use:   "list",
		Short: "Count the attachments in each node's journal by state",
		Long: "Count the attachments in each node's journal by state, and their pending DELs. The\n" +
			"nodes with the most pending DELs come first. A DEL is unproven if it succeeded but its\n" +
			"address may still be in use. -o wide shows every attachment.",
		Example: "  kubectl unwind list\n" +
			"  kubectl unwind list -o wide --nodes worker-2",
	})
	term.AddWatch(cmd)
	return cmd
}

// pending reports whether an attachment in this state has pending DELs.
func pending(state string) bool { return state == "unwinding" || state == "removing" }

func (all *attachments) count() map[string]int {
	count := map[string]int{}
	for _, a := range *all {
		count[a.State]++
		for _, s := range a.Steps {
			if pending(a.State) {
				count["pending DELs"]++
			}
			if s.State == "unproven" || s.ProvesNothing {
				count["unproven"]++
			}
		}
	}
	return count
}

func (all *attachments) rows(wide bool) (rows []row) {
	count, first := all.count(), "-"
	weight := float64(count["pending DELs"])
	for _, a := range *all {
		var plugins []string
		for _, s := range a.Steps {
			if !pending(a.State) {
				continue
			}
			plugins = append(plugins, s.Plugin)
			if first == "-" && s.State == "failed" {
				first = fmt.Sprintf("%s: %s", s.Plugin, s.LastError)
			}
		}
		rows = append(rows, row{weight, []string{a.Network, a.ContainerID, a.IfName, a.State,
			a.Created, a.Pod.String(), term.Join(a.Addresses), term.Join(plugins), term.OrDash(a.Reason)}})
	}
	if wide || len(rows) == 0 {
		return rows
	}
	cells := numbers(count, "live", "adding", "unwinding", "removing", "pending DELs", "unproven")
	return []row{{weight, append(cells, first)}}
}

// numbers returns the counts of the words as cells.
func numbers(count map[string]int, words ...string) (cells []string) {
	for _, word := range words {
		cells = append(cells, strconv.Itoa(count[word]))
	}
	return cells
}
