package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
)

func forgetCommand() *cobra.Command {
	var of inspect.Scope
	var yes bool
	cmd := &cobra.Command{
		Use:        "forget ATTACHMENT",
		SuggestFor: []string{"rm", "delete"},
		Short:      "Forget a dead attachment whose DELs can never succeed",
		Long: "Forget a dead attachment whose DELs can never succeed, because their plugin is\n" +
			"gone for good. forget runs no DEL: it leaves the plugins' resources in place, and\n" +
			"lists those that may remain. A later DEL from the runtime succeeds. unwindctl\n" +
			"history shows what was forgotten.\n\n" +
			"forget refuses an attachment that is not dead, unless its record is damaged. Try\n" +
			"unwindctl sweep first; unwindctl show explains why an attachment is kept. Without\n" +
			"--yes, forget changes nothing and exits 1.",
		Example: "  unwindctl forget podnet/4ac0/eth0\n" +
			"  unwindctl forget podnet/4ac0/eth0 --yes",
		Args:              term.OneArg,
		ValidArgsFunction: completeNames(&of.Directories, false),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := inspectNode(cmd, of)
			if err != nil {
				return err
			}
			f, err := r.FindOne(args[0])
			if err != nil {
				return err
			}
			if f.Err == nil && !f.Releasable() {
				return fmt.Errorf("%s is %s (%s); only dead attachments can be forgotten", f.Key, f.Verdict,
					f.Reason.Text)
			}
			word, err := "to be forgotten", errors.New("nothing was forgotten; run this again with --yes")
			if yes {
				word, err = "forgotten", nil
				p := inspect.Plugin(cmd.ErrOrStderr())
				if err := p.Forget(cmd.Context(), of.StateDir, f.Key, install.User()); err != nil {
					return err
				}
			}
			leaks := inspect.Leaks(f)
			if len(leaks) == 0 {
				leaks = []string{"none known"}
			}
			return errors.Join(term.Print(cmd.OutOrStdout(), fmt.Sprintf("%s: %s; resources that may "+
				"remain:\n  %s\n", f.Key, word, strings.Join(leaks, "\n  "))), err)
		},
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "forget the attachment; without --yes, only describe it")
	addScopeFlags(cmd, &of)
	checkDirs(cmd, "state-dir")
	return cmd
}
