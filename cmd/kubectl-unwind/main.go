// Command kubectl-unwind is a plugin of kubectl: kubectl unwind shows all nodes at once, as
// unwindctl sees each of them.
//
// It runs on an operator's machine, whatever the system there, and so shares only package term with
// unwindctl. It runs the user's own kubectl, which brings the kubeconfig and the rights: kubectl
// get for the pods, and one kubectl proxy through which unwindctl is run in the agent's pod of each
// node. 500 times kubectl exec would take 500 logins and 28 s of a processor.
//
//	kubectl.go  runs kubectl, in bounds
//	agents.go   the nodes, and the pod to ask on each
//	exec.go     runs a command in an agent's pod, by kubectl proxy
//	ask.go      asks all nodes; progress.go counts them on a terminal
//	view.go     a table of the answers, the worst first
//	switch.go   off, on and uninstall
//	about.go    version and completion
//
// The other files are a command each: what is asked, and shown.
package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(term.Main(rootCommand(), term.HintOf)) }

// options are the flags of all commands.
type options struct {
	kubectl
	selector string
	nodes    []string // only these; all if empty
	output   term.Output
}

func rootCommand() *cobra.Command {
	o := &options{kubectl: kubectl{turns: make(chan struct{}, mostKubectls)}}
	root := term.Program(&cobra.Command{
		Use:   "kubectl-unwind",
		Short: "See what the CNI plugin unwind does, on all nodes at once",
		Long: "See what the CNI plugin unwind does, on all nodes at once: in the agent's pod of\n" +
			"each node, kubectl unwind runs unwindctl by one kubectl proxy, at most 512 at once,\n" +
			"and prints a table of the answers, the worst first. off, on and uninstall change a node;\n" +
			"the others change nothing.\n\n" +
			"A node whose agent cannot be asked comes first in the table, with the reason. So\n" +
			"does a node without an agent, if you may list nodes.\n\n" +
			"You need these rights: list and get pods, and get and create pods/exec, in the\n" +
			"agents' namespace; and list nodes, to see those without an agent. Without get on\n" +
			"pods/exec, or behind a proxy, there is a kubectl exec for each node, 16 at once.\n" +
			"Whoever may exec into an agent is root on its node.\n\n" +
			"The exit codes:\n" +
			"  0    done\n" +
			"  1    a node was not reached, or answered in part; show: there is no such attachment\n" +
			"  2    the command line is wrong; nothing was done\n" +
			"  3    doctor: all nodes answered, and the worst is a warning\n" +
			"  4    doctor: the worst is an error, whether or not all nodes answered\n" +
			"  130  interrupted",
		Example: "  kubectl unwind doctor\n" +
			"  kubectl unwind ipam --nodes worker-1,worker-2\n" +
			"  kubectl unwind list -o wide --context production",
		Annotations:       map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl unwind"},
		Version:           version,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if o.timeout <= 0 {
				return term.Usage("--timeout %s: not more than 0", o.timeout)
			}
			return nil
		},
	})
	flags := root.PersistentFlags()
	o.flags = flags
	kubectlFlags.addTo(flags)
	flags.StringVarP(&o.namespace, "namespace", "n", "kube-system", "the agents are in `NAMESPACE`")
	flags.StringVarP(&o.selector, "selector", "l", "app.kubernetes.io/name=unwind",
		"the agents' pods have these `LABELS`")
	flags.StringSliceVar(&o.nodes, "nodes", nil,
		"only these `NODES`, with commas between them; may be repeated")
	flags.DurationVar(&o.timeout, "timeout", 20*time.Second,
		"a node that has not answered after this `DURATION` is not reached; the list of pods has as long")
	o.output.AddFlags(root, flags, "build, nodes", term.Plain, term.Wide, term.JSON)
	root.AddCommand(doctorCommand(o), listCommand(o), showCommand(o), historyCommand(o),
		ipamCommand(o), sweepCommand(o), switchCommand(o, "off"), switchCommand(o, "on"),
		switchCommand(o, "uninstall"), versionCommand(o), completionCommand())
	for _, cmd := range root.Commands() {
		if cmd.Args == nil {
			cmd.Args = term.NoArgs
		}
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
	return root
}
