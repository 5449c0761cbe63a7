package main

import (
	"errors"
	"slices"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
)

func listCommand() *cobra.Command {
	var o term.Output
	var network string
	var at node.Directories
	cmd := &cobra.Command{
		Use:        "list",
		SuggestFor: []string{"ls", "ps"},
		Short:      "List the attachments in the journal",
		Long: "List the attachments in the journal: first those with DELs that fail, then those\n" +
			"with DELs that wait, then the rest. list is read-only and takes no locks.\n\n" +
			"The states:\n" +
			describe("state"),
		Example: "  unwindctl list\n" +
			"  unwindctl list --network podnet -o wide\n" +
			"  unwindctl list -o name",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := inspect.CheckNetwork(cmd.Context(), at, network); err != nil {
				return err
			}
			store := &journal.Store{Dir: at.StateDir}
			attachments, err := inspect.ReadJournal(cmd.Context(), store)
			attachments = slices.DeleteFunc(attachments, func(a inspect.Attachment) bool {
				return network != "" && a.Network != network
			})
			if err != nil && len(attachments) == 0 {
				return err
			}
			inspect.Sort(attachments)
			out := cmd.OutOrStdout()
			switch {
			case o.IsObject():
				err = errors.Join(o.PrintObject(out, "attachments", attachments), err)
			case len(attachments) == 0 && o.Format != term.Name:
				err = inspect.PrintNoAttachments(out, store, network)
			default:
				err = errors.Join(inspect.PrintAttachments(out, attachments, &o), err)
			}
			return err
		},
	}
	o.AddFlags(cmd, cmd.Flags(), "attachments", lookFormats...)
	term.AddWatch(cmd)
	addNetworkFlag(cmd, &at, &network, "only attachments of this `NETWORK`")
	addStateFlag(cmd, &at)
	return cmd
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
			return inspect.Show(cmd.Context(), streams(cmd), args[0], flags, &o)
		},
	}
	o.AddFlags(cmd, cmd.Flags(), "attachments", lookFormats...)
	term.AddWatch(cmd)
	addScopeFlags(cmd, &flags)
	return cmd
}
