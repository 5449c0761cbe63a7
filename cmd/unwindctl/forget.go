package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/plugin/sweep"
)

type forgetFlags struct {
	inspect.Scope
	dead, yes bool
}

func forgetCommand() *cobra.Command {
	var flags forgetFlags
	cmd := &cobra.Command{
		Use:        "forget ATTACHMENT | --network NETWORK --dead",
		SuggestFor: []string{"rm", "delete"},
		Short:      "Forget dead attachments whose DELs can never succeed",
		Long: "Forget dead attachments whose DELs can never succeed, because their plugin is\n" +
			"gone for good. forget runs no DEL: it leaves the plugins' resources in place, and\n" +
			"lists those that may remain. A later DEL from the runtime succeeds. unwindctl\n" +
			"history keeps a record.\n\n" +
			"forget refuses an attachment that is not dead. Try unwindctl sweep first;\n" +
			"unwindctl show explains why an attachment is kept. Without --yes, forget changes\n" +
			"nothing and exits 1.",
		Example: "  unwindctl forget podnet/4ac0/eth0\n" +
			"  unwindctl forget podnet/4ac0/eth0 --yes\n" +
			"  unwindctl forget --network podnet --dead",
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) > 1:
				return term.Usage("forget takes one attachment, not %d", len(args))
			case len(args) == 1 && (flags.Network != "" || flags.dead):
				return term.Usage("use either an attachment or --network NETWORK --dead, not both")
			case len(args) == 0 && (flags.Network == "" || !flags.dead):
				return term.Usage("name an attachment, or use --network NETWORK --dead for all dead ones")
			}
			return nil
		},
		ValidArgsFunction: completeNames(&flags.Directories, false),
		RunE: func(cmd *cobra.Command, args []string) error {
			found, err := forgettable(cmd, args, flags)
			if err != nil {
				return err
			}
			return runForget(cmd, found, flags)
		},
	}
	addNetworkFlag(cmd, &flags.Directories, &flags.Network,
		"with --dead: forget all dead attachments of this `NETWORK`")
	cmd.Flags().BoolVar(&flags.dead, "dead", false,
		"with --network: forget all dead attachments of that network")
	cmd.Flags().BoolVar(&flags.yes, "yes", false,
		"forget the attachments; without --yes, only list them")
	addScopeFlags(cmd, &flags.Scope)
	checkDirs(cmd, "state-dir")
	return cmd
}

// forgettable returns the findings on the attachments that the command line names.
func forgettable(cmd *cobra.Command, args []string, flags forgetFlags) (
	found []*sweep.Finding, err error,
) {
	r, err := look(cmd, flags.Scope)
	if err != nil {
		return nil, err
	}
	if len(args) == 1 {
		f, err := r.FindOne(args[0])
		if err == nil && f.Err == nil && !f.Releasable() {
			err = fmt.Errorf("%s is %s (%s); only dead attachments can be forgotten", f.Key, f.Fate,
				f.Reason.Text)
		}
		return []*sweep.Finding{f}, err
	}
	for i := range r.Findings {
		if f := &r.Findings[i]; f.Releasable() && f.Err == nil && len(f.Records) > 0 {
			found = append(found, f)
		}
	}
	if r.Guard != nil { // these may only seem dead, and their DELs can still run
		return found, r.Guard
	}
	return found, r.JournalErr
}

func runForget(cmd *cobra.Command, found []*sweep.Finding, flags forgetFlags) error {
	out := cmd.OutOrStdout()
	if len(found) == 0 {
		return term.Print(out, "No dead attachments in network "+flags.Network+".\n")
	}
	p := inspect.Plugin(cmd.ErrOrStderr())
	var errs []error
	for _, f := range found {
		word := "to be forgotten"
		if flags.yes {
			if err := p.Forget(cmd.Context(), flags.StateDir, f.Key, install.User()); err != nil {
				errs = append(errs, err)
				continue
			}
			word = "forgotten"
		}
		leaks := inspect.Leaks(f)
		if len(leaks) == 0 {
			leaks = []string{"none known"}
		}
		errs = append(errs, term.Print(out, fmt.Sprintf("%s: %s; resources that may remain:\n  %s\n",
			f.Key, word, strings.Join(leaks, "\n  "))))
	}
	if !flags.yes {
		errs = append(errs, errors.New("nothing was forgotten; run this again with --yes"))
	}
	return errors.Join(errs...)
}
