// Command kubectl-unwind is a kubectl plugin: kubectl unwind runs unwindctl on all nodes in
// parallel and shows the results in one table.
//
// It runs on the operator's machine, on any operating system, so it shares only package term with
// unwindctl. It runs the user's kubectl with the user's kubeconfig and permissions: kubectl get for
// the pods, and one kubectl proxy to run unwindctl in the agent's pod on each node. 500 runs of
// kubectl exec would take 500 logins and 28 s of CPU time.
//
//	kubectl.go  runs kubectl with limits
//	agents.go   finds the nodes, and the agent's pod on each
//	exec.go     runs a command in an agent's pod through kubectl proxy
//	ask.go      runs a command on all nodes, and shows the progress on a terminal
//	view.go     prints a table of the results, the worst first
//	item.go     converts a list that unwindctl prints to rows
//
// doctor.go and ipam.go contain the commands with their own kinds of rows, commands.go all others.
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

type options struct {
	kubectl
	agents   string   // the labels of the agents' pods
	selector string   // only nodes with these labels
	nodes    []string // only these nodes; empty for all
	output   term.Output
}

func rootCommand() *cobra.Command {
	o := &options{kubectl: kubectl{turns: make(chan struct{}, mostKubectls)}}
	root := term.Program(&cobra.Command{
		Use:   "kubectl-unwind",
		Short: "Inspect the CNI plugin unwind on all nodes, and switch it on or off",
		Long: "Inspect the CNI plugin unwind on all nodes, and switch it on or off. kubectl unwind\n" +
			"runs unwindctl in the agent's pod on each node, and prints a table of the results, the\n" +
			"worst first. off, on, uninstall and sweep --yes change nodes; all other commands are\n" +
			"read-only.\n\n" +
			"Unreachable nodes come first in the table, with the reason. They include nodes\n" +
			"without an agent, if you have permission to list nodes.\n\n" +
			"You need these permissions:\n" +
			"  in the agents' namespace: list and get pods, get and create pods/exec\n" +
			"  in the cluster: list nodes, to see the nodes without an agent\n" +
			"Permission to exec into an agent's pod amounts to root on its node.\n\n" +
			"kubectl unwind queries up to 512 nodes at a time through one kubectl proxy. Without\n" +
			"permission to get pods/exec, or if an HTTP proxy is set, it runs one kubectl exec per\n" +
			"node instead, 16 at a time.\n\n" +
			"The exit codes:\n" +
			"  0    success\n" +
			"  1    a node is unreachable or its results are incomplete; show: no such attachment;\n" +
			"       sweep: unwindctl sweep exited 1 on a node\n" +
			"  2    usage error; nothing was done\n" +
			"  3    doctor: all nodes answered, and the worst problem is a warning\n" +
			"  4    doctor: the worst problem is an error, even if some nodes are unreachable\n" +
			"  130  interrupted",
		Example: "  kubectl unwind doctor\n" +
			"  kubectl unwind ipam --nodes worker-1,worker-2\n" +
			"  kubectl unwind sweep --yes -l pool=batch\n" +
			"  kubectl unwind list -o wide --context production",
		Annotations:       map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl unwind"},
		Version:           version,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		PersistentPreRunE: func(*cobra.Command, []string) error {
			if o.timeout <= 0 {
				return term.Usage("--timeout %s: must be positive", o.timeout)
			}
			if o.selector != "" && len(o.nodes) > 0 {
				return term.Usage("--selector and --nodes are mutually exclusive")
			}
			return nil
		},
	})
	flags := root.PersistentFlags()
	o.flags = flags
	kubectlFlags.addTo(flags)
	flags.StringVarP(&o.namespace, "namespace", "n", "kube-system", "find the agents in `NAMESPACE`")
	flags.StringVar(&o.agents, "agent-selector", "app.kubernetes.io/name=unwind",
		"find the agents' pods by these `LABELS`")
	flags.StringVarP(&o.selector, "selector", "l", "", "only nodes with these `LABELS`")
	flags.StringSliceVar(&o.nodes, "nodes", nil,
		"only these `NODES`, comma-separated; may be repeated")
	flags.DurationVar(&o.timeout, "timeout", 20*time.Second,
		"wait at most this `DURATION` for each node, and for the list of pods")
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
