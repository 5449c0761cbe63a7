package main

import (
	"cmp"
	"os"

	"github.com/spf13/cobra"
)

// changes is the output of unwindctl off, on or uninstall on a node.
type changes []struct{ Change, What string }

func switchCommand(o *options, verb string) *cobra.Command {
	help := map[string][2]string{
		"off": {"Switch unwind off on each node until it is switched on again",
			"Switch unwind off on each node: new pods get the provider's own chain. unwind stays\n" +
				"off across restarts, until kubectl unwind on."},
		"on": {"Switch unwind on again on each node",
			"Switch unwind on again on each node: the agents install it within seconds."},
		"uninstall": {"Remove unwind from each node once nothing needs it",
			"Switch unwind off on each node, and remove the plugin once nothing needs it. Rows\n" +
				"with \"kept\" show what remains: run uninstall again later. The agents stay until you\n" +
				"delete the DaemonSet."},
	}
	v := &view{
		unwindctl: []string{verb}, key: "changes",
		report:  func() report { return &changes{} },
		words:   []string{"removed", "returned", "kept", "off", "on"},
		none:    "nothing to do",
		columns: []string{"CHANGE", "WHAT"},
	}
	if verb != "on" {
		v.unwindctl = append(v.unwindctl, "--by", "kubectl unwind "+verb+" as "+operator())
	}
	return v.command(o, &cobra.Command{
		Use: verb, Short: help[verb][0],
		Long:    help[verb][1] + "\n\nThe default is all nodes; --nodes selects some.",
		Example: "  kubectl unwind " + verb + " --nodes worker-2\n  kubectl unwind " + verb,
	})
}

// operator returns the user who runs this program, for the record.
func operator() string {
	host, _ := os.Hostname()
	return cmp.Or(os.Getenv("USER"), os.Getenv("USERNAME"), "somebody") + "@" + cmp.Or(host, "?")
}

func (all *changes) count() map[string]int {
	count := map[string]int{}
	for _, c := range *all {
		count[c.Change]++
	}
	return count
}

func (all *changes) rows(bool) (rows []row) {
	for _, c := range *all {
		rows = append(rows, row{0, []string{c.Change, c.What}})
	}
	return rows
}
