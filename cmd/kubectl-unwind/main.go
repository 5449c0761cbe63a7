// Command kubectl-unwind is a kubectl plugin: "kubectl unwind exec" runs unwindctl on all nodes.
//
// It runs on the operator's machine, on any operating system, so it shares only package term with
// unwindctl. It runs the user's kubectl, with the user's kubeconfig and permissions.
//
//	nodes.go  finds the nodes, and the agent's pod on each
//	exec.go   runs unwindctl in these pods, and prints the outputs
package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"cni-unwind/cmd/internal/term"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(term.Main(rootCommand(), term.HintOf)) }

type options struct {
	flags     *pflag.FlagSet // including kubectlFlags
	namespace string
	agents    string   // the labels of the agents' pods
	selector  string   // only nodes with these labels
	nodes     []string // only these nodes; empty for all
	timeout   time.Duration
	yes       bool // do not ask
	keepGoing bool // do not stop at a failure
}

// kubectlFlags are the names and help texts of the flags that are passed to kubectl.
var kubectlFlags = [][2]string{
	{"context", "use the kubeconfig context `NAME`"},
	{"kubeconfig", "use the kubeconfig `FILE`"},
	{"as", "impersonate `USER`"},
	{"as-group", "impersonate `GROUP`; may be repeated"},
}

func rootCommand() *cobra.Command {
	o := &options{}
	root := term.Program(&cobra.Command{
		Use:   "kubectl-unwind",
		Short: "Run unwindctl on all nodes",
		Long: "Run unwindctl on all nodes, with kubectl exec in the agent's pod on each node, 20\n" +
			"nodes at a time. The outputs are printed in the order of the nodes' names. At the end,\n" +
			"error lines name the nodes that failed, the nodes without an agent (if you may list\n" +
			"nodes), and the nodes on which nothing was run.\n\n" +
			"You need these permissions:\n" +
			"  in the agents' namespace: list and get pods, get and create pods/exec\n" +
			"  in the cluster: list nodes, for --selector and to see nodes without an agent\n" +
			"Permission to exec into an agent's pod amounts to root on its node.\n\n" +
			"The exit code is the highest exit code of unwindctl on any node. It is 1 if all other\n" +
			"nodes succeeded and a node has no agent or did not respond, 2 after a usage error, and\n" +
			"130 after an interrupt.",
		Example: "  kubectl unwind doctor\n" +
			"  kubectl unwind ipam\n" +
			"  kubectl unwind exec -- history --since 2h",
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
	o.flags = root.PersistentFlags()
	for _, f := range kubectlFlags {
		o.flags.StringArray(f[0], nil, f[1])
	}
	o.flags.StringVarP(&o.namespace, "namespace", "n", "kube-system",
		"find the agents in `NAMESPACE`")
	o.flags.StringVar(&o.agents, "agent-selector", "app.kubernetes.io/name=unwind",
		"find the agents' pods by these `LABELS`")
	o.flags.StringVarP(&o.selector, "selector", "l", "", "only nodes with these `LABELS`")
	o.flags.StringSliceVar(&o.nodes, "nodes", nil,
		"only these `NODES`, comma-separated; may be repeated")
	o.flags.DurationVar(&o.timeout, "timeout", time.Minute,
		"wait at most this `DURATION` for each node, and for each request that lists pods or nodes")
	sweep := lineCommand(o, "sweep", "Release the dead attachments of each node, and print the counts")
	sweep.Flags().Bool("dry-run", false, "count what would be released, and release nothing")
	root.AddCommand(execCommand(o), sweep,
		lineCommand(o, "doctor", "Print the worst problem of each node"),
		lineCommand(o, "ipam", "Print how full the host-local pools of each node are"))
	return root
}

// lineCommand returns a command that runs the unwindctl command of the same name with -o line.
func lineCommand(o *options, name, short string) *cobra.Command {
	return &cobra.Command{
		Use:     name,
		Short:   short + ", in one line",
		Long:    short + ", in one line: the same as kubectl unwind exec -- " + name + " -o line.",
		Example: "  kubectl unwind " + name + "\n  kubectl unwind " + name + " -l pool=batch",
		Args:    term.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			args := []string{name, "-o", "line"}
			if dryRun, _ := cmd.Flags().GetBool("dry-run"); dryRun { // only sweep has the flag
				args = append(args, "--dry-run")
			}
			return o.exec(cmd, args)
		},
	}
}

func execCommand(o *options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "exec [flags] -- COMMAND",
		Short: "Run an unwindctl command on all nodes",

		DisableFlagsInUseLine: true,
		Long: "Run an unwindctl command, with its arguments, on all nodes, or on those that --nodes\n" +
			"or -l selects. unwindctl --help lists the commands.\n\n" +
			"off and uninstall take unwind out of use. On more than one node, kubectl unwind asks\n" +
			"before it runs them, runs them on 10 nodes at a time, and stops at the first failure.\n\n" +
			"If a node does not respond in time, the command may still finish on it.",
		Example: "  kubectl unwind exec -- list -o wide\n" +
			"  kubectl unwind exec --timeout 10m -l pool=batch -- sweep\n" +
			"  kubectl unwind exec --nodes worker-1,worker-2 -- off\n" +
			"  kubectl unwind exec --yes --keep-going -- off",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return term.Usage("kubectl unwind exec requires an unwindctl command after --")
			}
			return nil
		},
		RunE: o.exec,
	}
	cmd.Flags().SetInterspersed(false) // flags after the first argument are unwindctl's
	cmd.Flags().BoolVarP(&o.yes, "yes", "y", false, "do not ask before off and uninstall")
	cmd.Flags().BoolVar(&o.keepGoing, "keep-going", false,
		"if off or uninstall fails on a node, continue with the other nodes")
	return cmd
}
