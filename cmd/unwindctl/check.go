package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/doctor"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/cmd/unwindctl/internal/trial"
)

func checkCommand() *cobra.Command {
	var o term.Output
	options := trial.Options{Version: version}
	cmd := &cobra.Command{
		Use:        "check",
		SuggestFor: []string{"test", "verify"},
		Short:      "Check with a test attachment that this node's network works",
		Long: "Check with a test attachment that this node's network works. check runs the\n" +
			"chain of the conflist that the runtime uses, for a test container ID in a new\n" +
			"network namespace, and tests:\n" +
			"  ADD, the interface with its addresses and routes, a ping of the gateway, the\n" +
			"  record in the journal, CHECK, DEL, and that nothing is left\n" +
			"Then it tests that unwind rolls back. It uses a separate journal, appends to the\n" +
			"chain a plugin that fails ADD and DEL, and expects:\n" +
			"  the ADD fails and is rolled back, the DEL of that plugin stays pending, and a\n" +
			"  sweep runs that DEL once the plugin is repaired\n\n" +
			"check touches no pod. It needs a free address, requests no host port, and passes\n" +
			"no pod name to the plugins, so a plugin that looks up its pod may fail the ADD.\n" +
			"If check is interrupted, it removes what it created; if it is killed, the next\n" +
			"check does. Only one check runs at a time.\n\n" +
			"If check fails, run it with --plain: if that fails too, unwind is not the cause.\n" +
			describeExits("check"),
		Example: "  unwindctl check\n" +
			"  unwindctl check --plain\n" +
			"  kubectl -n kube-system exec POD -- /unwindctl --host check\n" +
			"  kubectl unwind exec -- check",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if options.Timeout < time.Second {
				return term.Usage("--timeout %s: must be at least 1s", options.Timeout)
			}
			out, start := cmd.OutOrStdout(), time.Now()
			options.Stderr = cmd.ErrOrStderr()
			options.Report = func(s trial.Step) {
				if !o.IsObject() {
					printStep(out, &o, s)
				}
			}
			defer context.AfterFunc(cmd.Context(), func() {
				fmt.Fprintln(options.Stderr,
					"interrupted: waiting for the running plugin; interrupt again to exit immediately")
			})()
			steps, err := trial.Run(cmd.Context(), options)
			if err != nil {
				return err
			}
			if o.IsObject() {
				err = o.PrintObject(out, "steps", steps, "plain", options.Plain)
			} else {
				err = printVerdict(out, steps, options.Plain, time.Since(start))
			}
			if worst := trial.Worst(steps).Severity; err == nil && worst > doctor.OK {
				err = term.Coded{Code: 2 + int(worst)}
			}
			return err
		},
	}
	addPlaceFlags(cmd, &options.Target)
	addNetworkFlag(cmd, &node.Directories{}, &options.Network,
		"check this `NETWORK` (default: the one that the runtime uses)")
	cmd.Flags().BoolVar(&options.Plain, "plain", false, "run the provider's chain without unwind")
	cmd.Flags().DurationVar(&options.Timeout, "timeout", time.Minute,
		"stop a step and its plugins after `DURATION`")
	o.AddFlags(cmd, cmd.Flags(), "steps, plain", term.Plain, term.JSON)
	return cmd
}

var marks = map[doctor.Severity]string{doctor.OK: "✓", doctor.Warning: "!", doctor.Failure: "✗"}

func printStep(out io.Writer, o *term.Output, s trial.Step) {
	t := term.NewTable(term.Column{}, term.Column{}, term.Column{},
		term.Column{Least: 20, Wrap: true})
	t.Add(term.State(out, marks[s.Severity]), fmt.Sprintf("%-13s", s.Name),
		fmt.Sprintf("%6.2fs", float64(s.Millis)/1000), s.Text)
	if s.Remedy != "" {
		t.Add("", "", "", "→ "+s.Remedy)
	}
	_ = t.Print(out, o) // printVerdict reports a write error
}

func printVerdict(out io.Writer, steps []trial.Step, plain bool,
	took time.Duration,
) error {
	worst, verdict := trial.Worst(steps), "the network works through unwind"
	if plain {
		verdict = "the network works without unwind"
	}
	switch {
	case worst.Severity == doctor.Warning:
		verdict += ", with a warning: " + worst.Name
	case worst.Severity == doctor.Failure && plain && len(steps) > 2:
		verdict = worst.Name + " failed, even without unwind: unwind is not the cause"
	case worst.Severity == doctor.Failure:
		verdict = worst.Name + " failed"
	}
	mark := marks[worst.Severity]
	return term.Print(out, term.Colour(out, mark, fmt.Sprintf("%s %s (%s, %.1f s)", mark, verdict,
		term.Plural(len(steps), "step", "steps"), took.Seconds()))+"\n")
}
