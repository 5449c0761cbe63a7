package main

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
)

// eventKinds are the values of --kind.
var eventKinds = []string{string(journal.RolledBack), string(journal.Swept),
	string(journal.Released), string(journal.Parked), string(journal.Unproven),
	string(journal.Superseded), string(journal.Forgotten), string(journal.Untaken),
	string(journal.NoOp)}

// historyFlags are the command's.
type historyFlags struct {
	node.Directories
	network string
	kinds   []string
	since   time.Duration
	last    int
	output  term.Output
}

func historyCommand() *cobra.Command {
	var flags historyFlags
	cmd := &cobra.Command{
		Use:        "history [ATTACHMENT|POD|ADDRESS]",
		SuggestFor: []string{"events", "log"},
		Short:      "Show what happened out of the ordinary",
		Long: "Show what happened out of the ordinary, the last at the end. The journal keeps\n" +
			"the last 1,000 events:\n" +
			"  rolled-back  an ADD failed and was undone, as far as it could be; WHY has the\n" +
			"               delegate's words\n" +
			"  swept        released without the runtime's DEL\n" +
			"  released     an address of host-local's that no attachment in the journal had\n" +
			"  parked       a DEL waits for an address that another attachment has by now\n" +
			"  superseded   another ADD of the same container ID came before the DEL\n" +
			"  forgotten    given up by unwindctl forget, with pending DELs\n" +
			"  unproven     a DEL passed, but its address is not known to be free: the store of its IPAM\n" +
			"               plugin still has it, or cannot be asked\n" +
			"  untaken      a DEL that fails has nothing to undo: the ADD took nothing\n" +
			"  no-op        the runtime's DEL succeeded and ran no plugin; WHY has the reason\n\n" +
			"Nothing is changed, and nothing is locked while it prints.",
		Example: "  unwindctl history --since 2h\n" +
			"  unwindctl history default/web-0\n" +
			"  unwindctl history --kind rolled-back --last 20",
		Args: func(cmd *cobra.Command, args []string) error {
			return cmp.Or(term.OneArg(cmd, args), flags.check(args))
		},
		ValidArgsFunction: completeNames(&flags.Directories, true),
		RunE: func(cmd *cobra.Command, args []string) error {
			events, err := inspect.ReadHistory(cmd.Context(), flags.StateDir)
			if err != nil {
				return err
			}
			events = slices.DeleteFunc(events, func(e journal.Event) bool {
				return !flags.match(e, args)
			})
			if flags.last > 0 && len(events) > flags.last {
				events = events[len(events)-flags.last:]
			}
			if flags.output.IsObject() {
				return flags.output.PrintObject(cmd.OutOrStdout(), "events",
					append([]journal.Event{}, events...))
			}
			return inspect.PrintHistory(cmd.OutOrStdout(), events, &flags.output)
		},
	}
	flags.output.AddFlags(cmd, cmd.Flags(), "events", lookFormats...)
	addNetworkFlag(cmd, &flags.Directories, &flags.network, "only of this `NETWORK`")
	cmd.Flags().StringSliceVar(&flags.kinds, "kind", nil,
		"only of these `KINDS`: "+strings.Join(eventKinds, ", "))
	cmd.Flags().DurationVar(&flags.since, "since", 0, "only of the last `DURATION`, such as 2h")
	cmd.Flags().IntVar(&flags.last, "last", 0, "only the last `N`; 0 for all")
	addStateFlag(cmd, &flags.Directories)
	_ = cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions(eventKinds,
		cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// check is an error if the command line is wrong.
func (flags *historyFlags) check(args []string) error {
	if len(args) == 1 {
		if _, err := inspect.Find(nil, args[0]); err != nil {
			return err
		}
	}
	if flags.last < 0 || flags.since < 0 {
		return term.Usage("--last and --since take no negative value")
	}
	for _, k := range flags.kinds {
		if !slices.Contains(eventKinds, k) {
			return term.Usage("--kind %s is none of %s", k, strings.Join(eventKinds, ", "))
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
