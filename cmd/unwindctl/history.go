package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/journal"
)

// eventKinds are those that --kind takes.
var eventKinds = []string{string(journal.RolledBack), string(journal.Swept), string(journal.Released), string(journal.Parked),
	string(journal.Superseded), string(journal.Forgotten)}

// historyFlags are those of the command, as given.
type historyFlags struct {
	where
	network string
	kinds   []string
	since   time.Duration
	last    int
	asJSON  bool
}

func historyCommand() *cobra.Command {
	var flags historyFlags
	cmd := &cobra.Command{
		Use:   "history [ATTACHMENT|POD|ADDRESS]",
		Short: "Show what happened out of the ordinary",
		Long: "Show what happened out of the ordinary, the last at the end. The journal keeps the last 1,000 events:\n" +
			"  rolled-back  an ADD failed and was undone, as far as it could be; WHY has the delegate's words\n" +
			"  swept        released without the runtime's DEL\n" +
			"  released     an address of host-local's that no attachment in the journal had\n" +
			"  parked       a DEL waits for an address that another attachment has by now\n" +
			"  superseded   another ADD of the same container ID came before the DEL\n" +
			"  forgotten    given up by unwindctl forget, with DELs owed\n\n" +
			"Nothing is changed, and nothing is locked while it prints.",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usageError{fmt.Errorf("one attachment, pod or address at most, not %d", len(args))}
			}
			if len(args) == 1 {
				if _, err := find(nil, args[0]); err != nil {
					return err
				}
			}
			if flags.last < 0 || flags.since < 0 {
				return usageError{errors.New("--last and --since take no negative value")}
			}
			if flags.last < 0 || flags.since < 0 {
				return usageError{errors.New("--last and --since are not negative")}
			}
			for _, k := range flags.kinds {
				if !slices.Contains(eventKinds, k) {
					return usageError{fmt.Errorf("--kind %s is none of %s", k, strings.Join(eventKinds, ", "))}
				}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := flags.resolve(); err != nil {
				return err
			}
			events, err := readHistory(cmd.Context(), flags.stateDir)
			if err != nil {
				return err
			}
			events = slices.DeleteFunc(events, func(e journal.Event) bool { return !flags.match(e, args) })
			if flags.last > 0 && len(events) > flags.last {
				events = events[len(events)-flags.last:]
			}
			if flags.asJSON {
				return printJSON(cmd.OutOrStdout(), "events", append([]journal.Event{}, events...))
			}
			return printHistory(cmd.OutOrStdout(), events)
		},
	}
	cmd.Flags().BoolVar(&flags.asJSON, "json", false, "print JSON: version, events")
	cmd.Flags().StringVar(&flags.network, "network", "", "only of this `NETWORK`")
	cmd.Flags().StringSliceVar(&flags.kinds, "kind", nil, "only of these `KINDS`: "+strings.Join(eventKinds, ", "))
	cmd.Flags().DurationVar(&flags.since, "since", 0, "only of the last `DURATION`, such as 2h")
	cmd.Flags().IntVar(&flags.last, "last", 0, "only the last `N`; 0 for all")
	flags.addStateFlag(cmd)
	_ = cmd.RegisterFlagCompletionFunc("kind", cobra.FixedCompletions(eventKinds, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (flags *historyFlags) match(e journal.Event, args []string) bool {
	return (flags.network == "" || e.Network == flags.network) &&
		(len(flags.kinds) == 0 || slices.Contains(flags.kinds, string(e.Kind))) &&
		(flags.since == 0 || time.Since(e.At.Wall) <= flags.since) &&
		(len(args) == 0 || about(e, args[0]))
}

// about says whether an event is about what an argument names, see find.
func about(e journal.Event, arg string) bool {
	a := attachment{Network: e.Network, ContainerID: e.ContainerID, IfName: e.IfName, Pod: &e.Pod, Addresses: e.Addresses}
	found, err := find([]attachment{a}, arg)
	return err == nil && len(found) == 1
}

// lastOf returns the last events about what an argument names.
func lastOf(events []journal.Event, arg string, n int) []journal.Event {
	events = slices.DeleteFunc(events, func(e journal.Event) bool { return !about(e, arg) })
	return events[max(0, len(events)-n):]
}

func readHistory(ctx context.Context, stateDir string) (events []journal.Event, err error) {
	err = (&journal.Store{Dir: stateDir}).View(ctx, func(tx *journal.Tx) error {
		events = nil
		return tx.History(func(e journal.Event) error {
			events = append(events, e)
			return nil
		})
	})
	return events, err
}

func printHistory(out io.Writer, events []journal.Event) error {
	if len(events) == 0 {
		_, err := fmt.Fprintln(out, "No events.")
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	_, err := fmt.Fprintln(w, "TIME\tWHAT\tNETWORK\tCONTAINER\tIFNAME\tPOD\tADDRESSES\tPLUGINS\tWHY")
	for _, e := range events {
		fmt.Fprintln(w, strings.Join([]string{
			e.At.Wall.Local().Format(time.DateTime), string(e.Kind), e.Network, orNone(short(e.ContainerID)), orNone(e.IfName),
			podName(&e.Pod), orDash(addressTexts(e.Addresses)), orDash(e.Plugins), oneLine(e.Reason),
		}, "\t"))
	}
	return errors.Join(err, w.Flush())
}
