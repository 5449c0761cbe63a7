package main

import (
	"errors"
	"slices"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/doctor"
)

func doctorCommand() *cobra.Command {
	var o term.Output
	var failOn string
	var verbose bool
	options := doctor.Options{Version: version}
	cmd := &cobra.Command{
		Use:        "doctor",
		SuggestFor: []string{"status"},
		Short:      "Report problems with unwind on this node and how to fix them",
		Long: "Report problems with unwind on this node and how to fix them. doctor checks:\n" +
			"  the runtime, and whether it triggers sweeps\n" +
			"  the conflist, its chain, the plugins and the CNI versions they support\n" +
			"  the state directory, the journal, and DELs that stay pending\n" +
			"  the address pools\n" +
			"doctor is read-only. It runs each plugin of the chain with CNI_COMMAND=VERSION, and\n" +
			"prints the worst problem first. " + describeExits("doctor"),
		Example: "  unwindctl doctor\n" +
			"  unwindctl doctor -o json\n" +
			"  unwindctl doctor --fail-on error -o line\n" +
			"  kubectl -n kube-system exec POD -- /unwindctl --host doctor",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !slices.Contains([]string{"", doctor.Warning.String(), doctor.Failure.String()}, failOn) {
				return term.Usage("--fail-on %s: must be %s or %s", failOn, doctor.Warning, doctor.Failure)
			}
			options.Stderr = cmd.ErrOrStderr()
			report, err := doctor.Examine(cmd.Context(), options)
			if err == nil && cmd.Context().Err() != nil {
				err = errors.New("interrupted before all checks were done")
			}
			if err == nil {
				err = report.Print(cmd.OutOrStdout(), &o, verbose)
			}
			switch {
			case err != nil, report.Worst() == doctor.OK,
				failOn == doctor.Failure.String() && report.Worst() < doctor.Failure:
				return err
			case failOn == "":
				return term.Coded{Code: 2 + int(report.Worst())}
			}
			return term.Coded{Code: term.ExitError}
		},
	}
	addPlaceFlags(cmd, &options.Target)
	cmd.Flags().StringVar(&options.StateDir, "state-dir", "",
		"use the journal in `DIR` (default: the one that unwind's conflist names)")
	cmd.Flags().BoolVarP(&verbose, "verbose", "v", false, "also print the checks that passed")
	cmd.Flags().StringVar(&failOn, "fail-on", "",
		"exit 1 if the worst problem has at least this `SEVERITY`, warning or error; else exit 0")
	_ = cmd.RegisterFlagCompletionFunc("fail-on", cobra.FixedCompletions(
		[]string{doctor.Warning.String(), doctor.Failure.String()}, cobra.ShellCompDirectiveNoFileComp))
	o.AddFlags(cmd, cmd.Flags(), "checks", term.Plain, term.JSON, term.Line)
	term.AddWatch(cmd)
	return cmd
}
