package main

import (
	"slices"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/doctor"
)

// examinedCode returns the exit code for the worst severity of a report, by --fail-on if that is
// given.
func examinedCode(worst doctor.Severity, failOn string) int {
	switch {
	case worst == doctor.OK:
		return 0
	case failOn == "":
		return 2 + int(worst)
	case failOn == doctor.Failure.String() && worst < doctor.Failure:
		return 0
	}
	return term.ExitError
}

func doctorCommand() *cobra.Command {
	var o term.Output
	var failOn string
	options := doctor.Options{Version: version}
	cmd := &cobra.Command{
		Use:        "doctor",
		SuggestFor: []string{"check", "status"},
		Short:      "Look for what is wrong with unwind on this node, with remedies",
		Long: "Look for what is wrong: the runtime and whether it ever asks for a sweep, the\n" +
			"conflist and its chain, the plugins and the versions that they speak, the state\n" +
			"directory and the journal, pending DELs that stay, and the pools. With Multus on\n" +
			"the node, it also names the NetworkAttachmentDefinitions that are not wrapped,\n" +
			"which it reads with Multus' kubeconfig. doctor changes nothing.\n\n" +
			"The exit code is 0 if all is well, 3 if the worst is a warning, 4 if it is an\n" +
			"error. A monitor that knows 0 and 1 alone asks with --fail-on: 1 if the worst is\n" +
			"at least that, else 0. Any other code then means that nothing is known.",
		Example: "  unwindctl doctor\n" +
			"  unwindctl doctor -o json\n" +
			"  unwindctl doctor --fail-on error -o line\n" +
			"  kubectl -n kube-system exec POD -- /unwindctl --host doctor",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains([]string{"", doctor.Warning.String(), doctor.Failure.String()}, failOn) {
				return term.Usage("--fail-on %s is none of %s, %s", failOn, doctor.Warning, doctor.Failure)
			}
			options.Stderr = cmd.ErrOrStderr()
			report := doctor.Examine(cmd.Context(), options)
			err := report.Print(cmd.OutOrStdout(), &o)
			if code := examinedCode(report.Worst(), failOn); err == nil && code != 0 {
				return term.Coded{Code: code}
			}
			return err
		},
	}
	addPlaceFlags(cmd, &options.Target)
	cmd.Flags().StringVar(&options.StateDir, "state-dir", "",
		"the journal is in `DIR` (default: as unwind's conflist has it)")
	cmd.Flags().StringVar(&failOn, "fail-on", "",
		"exit with 1 if the worst is at least this `SEVERITY`, warning or error, else with 0")
	_ = cmd.RegisterFlagCompletionFunc("fail-on", cobra.FixedCompletions(
		[]string{doctor.Warning.String(), doctor.Failure.String()}, cobra.ShellCompDirectiveNoFileComp))
	o.AddFlags(cmd, cmd.Flags(), "checks", term.Plain, term.JSON, term.Line)
	term.AddWatch(cmd)
	return cmd
}
