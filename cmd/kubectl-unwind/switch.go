package main

import (
	"cmp"
	"os"

	"github.com/spf13/cobra"
)

// changes is what unwindctl off, on or uninstall has done on a node.
type changes []struct{ Change, What string }

func switchCommand(o *options, verb string) *cobra.Command {
	help := map[string][2]string{
		"off": {"Switch unwind off on each node, until it is switched on",
			"Switch unwind off on each node: pods that start from then on get the provider's own\n" +
				"chain. It stays off whatever is started anew, until kubectl unwind on."},
		"on": {"Switch unwind on again on each node",
			"Switch unwind on again on each node: the agents install it within seconds."},
		"uninstall": {"Take unwind off each node, as far as nothing needs it",
			"Switch unwind off on each node, and remove the plugin once nothing needs it. kept says\n" +
				"what stays: run it again then. The agents stay, until the DaemonSet is deleted."},
	}
	v := &view{
		unwindctl: []string{verb}, key: "changes",
		report:  func() report { return &changes{} },
		words:   []string{"removed", "returned", "kept", "off", "on"},
		none:    "nothing had to be done",
		columns: []string{"CHANGE", "WHAT"},
	}
	if verb != "on" {
		v.unwindctl = append(v.unwindctl, "--by", "kubectl unwind "+verb+" of "+operator())
	}
	return v.command(o, &cobra.Command{
		Use: verb, Short: help[verb][0], Long: help[verb][1] + " Without --nodes all nodes are meant.",
		Example: "  kubectl unwind " + verb + " --nodes worker-2\n  kubectl unwind " + verb,
	})
}

// operator is who runs this program, for the record.
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
