package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
)

type forgetFlags struct {
	node.Directories
	network   string
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
			case len(args) == 1 && (flags.network != "" || flags.dead):
				return term.Usage("use either an attachment or --network NETWORK --dead, not both")
			case len(args) == 0 && (flags.network == "" || !flags.dead):
				return term.Usage("name an attachment, or use --network NETWORK --dead for all dead ones")
			}
			return nil
		},
		ValidArgsFunction: completeNames(&flags.Directories, false),
		RunE: func(cmd *cobra.Command, args []string) error {
			keys, err := forgettable(cmd, args, flags)
			if err != nil {
				return err
			}
			return runForget(cmd, keys, flags)
		},
	}
	addNetworkFlag(cmd, &flags.Directories, &flags.network,
		"with --dead: forget all dead attachments of this `NETWORK`")
	cmd.Flags().BoolVar(&flags.dead, "dead", false,
		"with --network: forget all dead attachments of that network")
	cmd.Flags().BoolVar(&flags.yes, "yes", false,
		"forget the attachments; without --yes, only list them")
	addStateFlag(cmd, &flags.Directories)
	return cmd
}

// forgettable returns the attachments that the command names.
func forgettable(cmd *cobra.Command, args []string, flags forgetFlags) ([]journal.Key, error) {
	if err := inspect.CheckNetwork(cmd.Context(), flags.Directories, flags.network); err != nil {
		return nil, err
	}
	p := inspect.Plugin(cmd.ErrOrStderr())
	findings, err := inspect.Judge(cmd.Context(), p, flags.StateDir, nil)
	if len(args) == 1 {
		key, findErr := inspect.FindOne(cmd.Context(), flags.StateDir, args[0])
		for k, f := range findings { // a damaged entry is found only by its full name
			if k.String() == args[0] && f.Err != nil {
				key, findErr = k, nil
			}
		}
		if f := findings[key]; findErr == nil && f != nil && f.Err == nil && !f.Releasable() {
			findErr = fmt.Errorf("%s is %s (%s); only dead attachments can be forgotten",
				key, f.Fate, f.Reason.Text)
		}
		return []journal.Key{key}, findErr
	}
	var keys []journal.Key
	for k, f := range findings {
		if k.Network == flags.network && f.Releasable() {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b journal.Key) int { return cmp.Compare(a.String(), b.String()) })
	return keys, err
}

func runForget(cmd *cobra.Command, keys []journal.Key, flags forgetFlags) error {
	out := cmd.OutOrStdout()
	if len(keys) == 0 {
		_, err := fmt.Fprintf(out, "No dead attachments in network %s.\n", flags.network)
		return err
	}
	store := &journal.Store{Dir: flags.StateDir}
	p := inspect.Plugin(cmd.ErrOrStderr())
	var errs []error
	for _, key := range keys {
		leaks, err := inspect.Leaks(cmd.Context(), store, key)
		if flags.yes && err == nil {
			err = p.Forget(cmd.Context(), flags.StateDir, key)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		word := map[bool]string{true: "forgotten", false: "to be forgotten"}[flags.yes]
		if len(leaks) == 0 {
			leaks = []string{"none known"}
		}
		fmt.Fprintf(out, "%s: %s; resources that may remain:\n", key, word)
		for _, leak := range leaks {
			fmt.Fprintf(out, "  %s\n", leak)
		}
	}
	if !flags.yes {
		errs = append(errs, errors.New("nothing was forgotten; run this again with --yes"))
	}
	return errors.Join(errs...)
}
