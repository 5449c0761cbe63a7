package main

import (
	"errors"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/journal"
)

func listCommand() *cobra.Command {
	var o term.Output
	var of inspect.Scope
	cmd := &cobra.Command{
		Use:        "list",
		SuggestFor: []string{"ls", "ps"},
		Short:      "List the attachments in the journal",
		Long: "List the attachments in the journal: first those with DELs that fail, then other\n" +
			"dead ones, then the rest. list is read-only and takes no locks.\n\n" +
			"The states:\n" +
			describe("state"),
		Example: "  unwindctl list\n" +
			"  unwindctl list --network podnet -o wide\n" +
			"  unwindctl list -o name",
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := look(cmd, of)
			if err != nil {
				return err
			}
			err = r.Err()
			if err != nil && len(r.Attachments) == 0 {
				return err
			}
			inspect.Sort(r.Attachments)
			out := cmd.OutOrStdout()
			switch {
			case o.IsObject():
				return errors.Join(o.PrintObject(out, "attachments", r.Attachments), err)
			case len(r.Attachments) == 0 && o.Format != term.Name:
				return inspect.PrintNoAttachments(out, &journal.Store{Dir: of.StateDir}, of.Network)
			}
			return errors.Join(inspect.PrintAttachments(out, r.Attachments, &o), err)
		},
	}
	o.AddFlags(cmd, cmd.Flags(), "attachments", lookFormats...)
	term.AddWatch(cmd)
	addNetworkFlag(cmd, &of.Directories, &of.Network, "only attachments of this `NETWORK`")
	addScopeFlags(cmd, &of)
	checkDirs(cmd, "state-dir")
	return cmd
}

// look returns a report of the node. It warns on stderr if the runtime returns no list.
func look(cmd *cobra.Command, of inspect.Scope) (*inspect.Report, error) {
	if err := inspect.CheckNetwork(cmd.Context(), of.Directories, of.Network); err != nil {
		return nil, err
	}
	r, err := inspect.Look(cmd.Context(), streams(cmd), of)
	if err == nil {
		r.WarnOfRuntime(cmd.ErrOrStderr())
	}
	return r, err
}

func showCommand() *cobra.Command {
	var o term.Output
	var flags inspect.Scope
	cmd := &cobra.Command{
		Use:        "show ATTACHMENT|POD|ADDRESS",
		SuggestFor: []string{"get", "describe", "inspect"},
		Short:      "Show an attachment: its resources, why it is kept, and how to release it",
		Long: "Show an attachment: its resources, its pending DELs and why they fail, the evidence\n" +
			"for its verdict, and how to release it. show is read-only and takes no locks.\n\n" +
			"The verdicts:\n" +
			describe("verdict") + "\n" +
			"Name the attachment by NETWORK/CONTAINER/IFNAME, container ID, pod\n" +
			"(NAMESPACE/NAME, or NAME), or address. A prefix of a container ID is enough.",
		Example: "  unwindctl show 10.22.0.5\n  unwindctl show default/web-0\n  unwindctl show " +
			"4ac0",
		Args:              term.OneArg,
		ValidArgsFunction: completeNames(&flags.Directories, true),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := look(cmd, flags)
			if err != nil {
				return err
			}
			return r.Show(cmd.OutOrStdout(), args[0], &o)
		},
	}
	o.AddFlags(cmd, cmd.Flags(), "attachments", lookFormats...)
	term.AddWatch(cmd)
	addScopeFlags(cmd, &flags)
	return cmd
}
