package main

import (
	"cmp"
	"fmt"
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
		if err := term.OneOf(k, eventKinds); err != nil {
			return term.Usage("--kind %s: %w", k, err)
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
