// Command kubectl-unwind is a plugin of kubectl: kubectl unwind shows all nodes at once, as
// unwindctl sees each of them.
//
// It runs on an operator's machine, whatever the system there, and so uses no other package of
// this module. It runs the user's own kubectl, which brings the kubeconfig and the rights: kubectl
// get for the pods, and one kubectl proxy through which unwindctl is run in the agent's pod of each
// node. 500 times kubectl exec would take 500 logins and 28 s of a processor.
//
//	kubectl.go  runs kubectl, in bounds
//	agents.go   the nodes, and the pod to ask on each
//	exec.go     runs a command in an agent's pod, by kubectl proxy
//	ask.go      asks all nodes; progress.go counts them on a terminal
//	view.go     a table of the answers, the worst first
//	doctor.go, list.go, ipam.go, sweep.go  a command each: what is asked, and shown
//	switch.go  off, on and uninstall
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// version is set by the linker.
var version = "dev"

// The exit codes are those of unwindctl.
const (
	exitError       = 1 // a node was not reached, or answered in part
	exitUsage       = 2 // the command line is wrong: nothing was done
	exitWarning     = 3 // doctor: the worst is a warning
	exitFailure     = 4 // doctor: the worst is an error
	exitInterrupted = 130
)

// failure is an error with its exit code, and with what to do about it if that is known. Its text
// is empty if the output has said everything.
type failure struct {
	text string
	code int
	hint string
}

func (f *failure) Error() string { return f.text }

func usage(hint, format string, args ...any) error {
	return &failure{fmt.Sprintf(format, args...), exitUsage, hint}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	os.Exit(exitCode(ctx, rootCommand().ExecuteContext(ctx)))
}

// exitCode prints an error and returns the exit code.
func exitCode(ctx context.Context, err error) int {
	if err == nil {
		return 0
	}
	f := &failure{code: exitError}
	errors.As(err, &f)
	if ctx.Err() != nil {
		f = &failure{"interrupted", exitInterrupted, ""}
		err = f
	}
	if text := printable(err.Error()); text != "" {
		fmt.Fprintf(os.Stderr, "error: %s\n", text)
	}
	if f.hint != "" {
		fmt.Fprintf(os.Stderr, "hint: %s\n", f.hint)
	}
	return f.code
}

// options are the flags of all commands.
type options struct {
	kubectl
	selector string
	nodes    []string // only these; all if empty
	format   string
}

func rootCommand() *cobra.Command {
	o := &options{kubectl: kubectl{turns: make(chan struct{}, mostKubectls)}}
	root := &cobra.Command{
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
			"  1    a node was not reached, or answered in part\n" +
			"  2    the command line is wrong; nothing was done\n" +
			"  3    doctor: all nodes answered, and the worst is a warning\n" +
			"  4    doctor: the worst is an error, whether or not all nodes answered\n" +
			"  130  interrupted",
		Example: "  kubectl unwind doctor\n" +
			"  kubectl unwind ipam --nodes worker-1,worker-2\n" +
			"  kubectl unwind list -o wide --context production",
		Annotations:       map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl unwind"},
		Version:           version,
		Args:              noArgs,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		SilenceUsage:      true,
		SilenceErrors:     true,
		PersistentPreRunE: func(*cobra.Command, []string) error { return o.check() },
	}
	root.SetVersionTemplate("kubectl-unwind {{.Version}}\n")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usage(cmd.CommandPath()+" --help lists the flags", "%v", err)
	})
	flags := root.PersistentFlags()
	flags.StringVar(&o.context, "context", "", "the kubeconfig's context `NAME`")
	flags.StringVar(&o.kubeconfig, "kubeconfig", "", "the kubeconfig is `FILE`")
	flags.StringVarP(&o.namespace, "namespace", "n", "kube-system", "the agents are in `NAMESPACE`")
	flags.StringVarP(&o.selector, "selector", "l", "app.kubernetes.io/name=unwind",
		"the agents' pods have these `LABELS`")
	flags.StringSliceVar(&o.nodes, "nodes", nil,
		"only these `NODES`, with commas between them; may be repeated")
	flags.DurationVar(&o.timeout, "timeout", 20*time.Second,
		"a node that has not answered after this `DURATION` is not reached; the list of pods has as long")
	flags.StringVarP(&o.format, "output", "o", "table",
		"print in this `FORMAT`: table; wide, which has every finding; json")
	root.AddCommand(doctorCommand(o), listCommand(o), ipamCommand(o), sweepCommand(o),
		switchCommand(o, "off"), switchCommand(o, "on"), switchCommand(o, "uninstall"))
	return root
}

func (o *options) check() error {
	switch {
	case o.format != "table" && o.format != "wide" && o.format != "json":
		return usage("", "--output %q: none of table, wide, json", o.format)
	case o.timeout <= 0:
		return usage("", "--timeout %s: not more than 0", o.timeout)
	}
	return nil
}

// noArgs is the rule of all commands.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usage(cmd.CommandPath()+" --help lists the commands and flags",
			"%s: no such command or argument: %s", cmd.CommandPath(), strings.Join(args, " "))
	}
	return nil
}
