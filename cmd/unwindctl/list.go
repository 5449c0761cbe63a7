package main

import (
	"errors"

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
		Long: "List the attachments in the journal: live ones, and those with pending DELs. list\n" +
			"is read-only and takes no locks.",
		Example: "  unwindctl list\n" +
			"  unwindctl list --network podnet -o wide\n" +
			"  unwindctl list -o name",
		RunE: func(cmd *cobra.Command, _ []string) error {
			store := &journal.Store{Dir: at.StateDir}
			attachments, err := inspect.ReadJournal(cmd.Context(), store)
			if network != "" {
				attachments = append([]inspect.Attachment{},
					inspect.Filter(attachments, func(a *inspect.Attachment) bool {
						return a.Network == network
					})...)
			}
			if err != nil && len(attachments) == 0 {
				return err
			}
			out := cmd.OutOrStdout()
			switch {
			case o.IsObject():
				err = errors.Join(o.PrintObject(out, "attachments", attachments), err)
			case len(attachments) == 0 && o.Format != term.Name:
				err = inspect.PrintNoAttachments(out, store)
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
