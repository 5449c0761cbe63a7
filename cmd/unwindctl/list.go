package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"cni-unwind/journal"
)

func listCommand() *cobra.Command {
	var asJSON bool
	var network string
	var at where
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the attachments in the journal",
		Long: "List the attachments in the journal: those that live, and those that are owed a DEL.\n" +
			"Nothing is changed and nothing is locked while it prints.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := at.resolve(); err != nil {
				return err
			}
			store := &journal.Store{Dir: at.stateDir}
			attachments, err := readJournal(cmd.Context(), store)
			if network != "" {
				attachments = append([]attachment{}, filter(attachments, func(a *attachment) bool { return a.Network == network })...)
			}
			if err != nil && len(attachments) == 0 {
				return err
			}
			out := cmd.OutOrStdout()
			switch {
			case asJSON:
				err = errors.Join(printJSON(out, "attachments", attachments), err)
			case len(attachments) == 0:
				err = printNone(out, store)
			default:
				err = errors.Join(printTable(out, attachments), err)
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: version, attachments")
	cmd.Flags().StringVar(&network, "network", "", "only those of this network")
	at.addStateFlag(cmd)
	return cmd
}

// printNone tells a journal that is empty from one that is not where it was looked for.
func printNone(out io.Writer, store *journal.Store) error {
	text := "No attachments."
	if _, err := os.Lstat(store.Path()); errors.Is(err, fs.ErrNotExist) {
		text = fmt.Sprintf("No attachments: there is no journal in %s.", store.Dir)
	}
	_, err := fmt.Fprintln(out, text)
	return err
}

func printTable(out io.Writer, attachments []attachment) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "NETWORK\tCONTAINER\tIFNAME\tSTATE\tPOD\tADDRESSES\tDEL PENDING")
	for _, a := range attachments {
		fmt.Fprintln(w, strings.Join([]string{
			a.Network, short(a.ContainerID), a.IfName, string(a.State), podName(a.Pod), orDash(addressTexts(a.Addresses)), pending(a),
		}, "\t"))
	}
	return w.Flush()
}

// pending names the delegates that are owed a DEL although the attachment is not live any more, each with why.
func pending(a attachment) string {
	texts := []string{}
	if a.owed() {
		for _, s := range a.Steps {
			why := fmt.Sprintf("tried %d×", s.Attempts)
			switch {
			case s.LastError != "":
				why += fmt.Sprintf(", code %d", s.LastCode)
			case s.Parked:
				why = "its address has another owner"
			case s.Again:
				why = "once more, since it was killed"
			}
			texts = append(texts, fmt.Sprintf("%s (%s)", s.Plugin, why))
		}
	}
	return orDash(texts)
}
