package main

import (
	"errors"
	"io/fs"
	"slices"

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
		Long: "List the attachments in the journal: first those whose DELs fail, then other\n" +
			"dead ones, then the rest. list is read-only and takes no locks.\n\n" +
			"The states:\n" +
			describe("state"),
		Example: "  unwindctl list\n" +
			"  unwindctl list --network podnet -o wide\n" +
			"  unwindctl list -o name",
		RunE: func(cmd *cobra.Command, _ []string) error {
			r, err := inspectNode(cmd, of)
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

// inspectNode returns a report of the node, and prints the report's warnings on stderr.
func inspectNode(cmd *cobra.Command, of inspect.Scope) (*inspect.Report, error) {
	if err := inspect.CheckNetwork(cmd.Context(), of.Directories, of.Network); err != nil {
		return nil, err
	}
	r, err := inspect.NewReport(cmd.Context(), streams(cmd), of)
	if err == nil {
		r.Warn(cmd.ErrOrStderr())
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
			"The states, of which live, dead, unknown and other-machine are also verdicts:\n" +
			describe("state") + "\n" +
			"Name the attachment by NETWORK/CONTAINER/IFNAME, container ID, pod\n" +
			"(NAMESPACE/NAME, or NAME), or address. A prefix of a container ID is enough.",
		Example: "  unwindctl show 10.22.0.5\n  unwindctl show default/web-0\n  unwindctl show " +
			"4ac0",
		Args:              term.OneArg,
		ValidArgsFunction: completeNames(&flags.Directories, true),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := inspectNode(cmd, flags)
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

func ipamCommand() *cobra.Command {
	var o term.Output
	var flags inspect.Scope
	cmd := &cobra.Command{
		Use:        "ipam",
		SuggestFor: []string{"pools", "addresses"},
		Short:      "Show the host-local pools and the owners of their addresses",
		Long: "Show the host-local pools on this node, with or without unwind: how many\n" +
			"addresses are allocated, how many are leaked, and how to free the leaked ones. A\n" +
			"bar shows how full each range set is; --watch repeats the output.\n" +
			"-o wide shows each address with its container ID, as in crictl pods, and why it is\n" +
			"live or leaked. ipam is read-only.\n\n" +
			"An ADD takes an address from each range set of a pool, such as one IPv4 and one\n" +
			"IPv6 set, so the pool is full once one set is full.\n\n" +
			"The states of addresses:\n" +
			describe("address"),
		Example: "  unwindctl ipam\n" +
			"  unwindctl ipam --network podnet -o wide",
		RunE: func(cmd *cobra.Command, _ []string) error {
			return showPools(cmd, flags, &o)
		},
	}
	o.AddFlags(cmd, cmd.Flags(), "pools", slices.Concat(lookFormats, []term.Format{term.Line})...)
	term.AddWatch(cmd)
	addNetworkFlag(cmd, &flags.Directories, &flags.Network, "only the pools of this `NETWORK`")
	addScopeFlags(cmd, &flags)
	return cmd
}

func showPools(cmd *cobra.Command, of inspect.Scope, o *term.Output) error {
	r, err := inspectNode(cmd, of)
	if err != nil {
		return err
	}
	unread := errors.Join(r.PoolErr, r.SweepErr, r.JournalErr)
	err = errors.Join(unread, errors.Join(r.Damaged...))
	unknown := errors.Is(r.JournalErr, fs.ErrPermission) // without the journal, all owners are unknown
	if unknown || len(r.Pools) == 0 && errors.Is(err, fs.ErrPermission) {
		return term.WithHint("only root can read the conflists, the journal and the pools; "+
			"run this as root", "cannot read the pools: %w", err)
	}
	out := cmd.OutOrStdout()
	switch {
	case o.IsObject():
		return errors.Join(o.PrintObject(out, "pools", r.Pools), err)
	case len(r.Pools) == 0 && unread != nil:
		return err
	}
	return errors.Join(r.PrintPools(out, o), err)
}
