package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
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
			"The states, of which live, dead, unknown and other-machine are also verdicts:\n" +
			describe("state") + "\n" +
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

func ipamCommand() *cobra.Command {
	var o term.Output
	var flags inspect.Scope
	cmd := &cobra.Command{
		Use:        "ipam",
		SuggestFor: []string{"pools", "addresses"},
		Short:      "Show the host-local pools and the owners of their addresses",
		Long: "Show the host-local pools on this node, with or without unwind: how many\n" +
			"addresses are allocated, how many are leaked, and how to free the leaked ones. A\n" +
			"bar shows how full each range set is; with --watch, it is a live view.\n" +
			"-o wide shows each address with its container, as in crictl pods, and why it is\n" +
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
	r, err := look(cmd, of)
	if err != nil {
		return err
	}
	unread := errors.Join(r.PoolErr, r.SweepErr, r.JournalErr)
	err = errors.Join(unread, errors.Join(r.Damaged...))
	unknown := errors.Is(r.JournalErr, fs.ErrPermission) // that is, all owners
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

// eventKinds are the values of --kind.
var eventKinds = []string{string(journal.RolledBack), string(journal.Swept),
	string(journal.Released), string(journal.Waiting),
	string(journal.Superseded), string(journal.Forgotten), string(journal.Dropped),
	string(journal.NoOp), string(journal.Install), string(journal.On), string(journal.Off),
	string(journal.Uninstall)}

type historyFlags struct {
	node.Directories
	network string
	kinds   []string
	since   time.Duration
	output  term.Output
}

func historyCommand() *cobra.Command {
	var flags historyFlags
	cmd := &cobra.Command{
		Use:        "history [ATTACHMENT|POD|ADDRESS]",
		SuggestFor: []string{"events", "log"},
		Short:      "Show unusual events and changes to the installation",
		Long: "Show unusual events and changes to the installation, newest last. unwind keeps the\n" +
			"last 500 to 2,000 events. These are the kinds of events:\n" +
			describe("event") + "\n" +
			"history is read-only and takes no locks.",
		Example: "  unwindctl history --since 2h\n" +
			"  unwindctl history default/web-0\n" +
			"  unwindctl history --kind rolled-back",
		Args: func(cmd *cobra.Command, args []string) error {
			return cmp.Or(term.OneArg(cmd, args), flags.check(args))
		},
		ValidArgsFunction: completeNames(&flags.Directories, true),
		RunE: func(cmd *cobra.Command, args []string) error {
			err := inspect.CheckNetwork(cmd.Context(), flags.Directories, flags.network)
			if err != nil {
				return err
			}
			store := &journal.Store{Dir: flags.StateDir}
			events, err := store.History()
			if err != nil {
				return err
			}
			if why := inspect.Unwritable(flags.StateDir); why != nil {
				_ = term.Print(cmd.ErrOrStderr(),
					fmt.Sprintf("warning: %v, so unwind cannot record events\n", why))
			}
			events = inspect.Told(events)
			if len(args) == 1 && !flags.output.IsObject() {
				err := inspect.CheckName(cmd.Context(), flags.StateDir, args[0], events)
				if err != nil {
					return err
				}
			}
			events = slices.DeleteFunc(events, func(e journal.Event) bool {
				return !flags.match(e, args)
			})
			if flags.output.IsObject() {
				return flags.output.PrintObject(cmd.OutOrStdout(), "events",
					append([]journal.Event{}, events...))
			}
			return inspect.PrintHistory(cmd.OutOrStdout(), events, &flags.output)
		},
	}
	flags.output.AddFlags(cmd, cmd.Flags(), "events", lookFormats...)
	addNetworkFlag(cmd, &flags.Directories, &flags.network, "only events of this `NETWORK`")
	cmd.Flags().StringSliceVar(&flags.kinds, "kind", nil,
		"only events of these `KINDS`: "+strings.Join(eventKinds, ", "))
	cmd.Flags().DurationVar(&flags.since, "since", 0, "only events of the last `DURATION`, such as 2h")
	addStateFlag(cmd, &flags.Directories)
	checkDirs(cmd, "state-dir")
	_ = cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions(eventKinds,
		cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (flags *historyFlags) check(args []string) error {
	if len(args) == 1 {
		if _, err := inspect.Find(nil, args[0]); err != nil {
			return err
		}
	}
	if flags.since < 0 {
		return term.Usage("--since must not be negative")
	}
	for _, k := range flags.kinds {
		if !slices.Contains(eventKinds, k) {
			return term.Usage("--kind %s: must be one of %s", k, strings.Join(eventKinds, ", "))
		}
	}
	return nil
}

func (flags *historyFlags) match(e journal.Event, args []string) bool {
	return (flags.network == "" || e.Network == flags.network) &&
		(len(flags.kinds) == 0 || slices.Contains(flags.kinds, string(e.Kind))) &&
		(flags.since == 0 || time.Since(e.At.Wall) <= flags.since) &&
		(len(args) == 0 || inspect.About(e, args[0]))
}
