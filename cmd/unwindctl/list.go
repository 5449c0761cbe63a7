package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// attachment is one entry as list --json prints it. It leaves out the delegates' configurations, which may hold secrets.
type attachment struct {
	Network     string        `json:"network"`
	ContainerID string        `json:"containerID"`
	IfName      string        `json:"ifname"`
	State       journal.State `json:"state"`
	Reason      string        `json:"reason,omitempty"`
	Pod         *journal.Pod  `json:"pod,omitempty"`
	NetNS       string        `json:"netns,omitempty"`
	Addresses   []netip.Addr  `json:"addresses"`
	Created     time.Time     `json:"created"`
	Updated     time.Time     `json:"updated"`
	Steps       []step        `json:"steps"`
}

// step is a delegate that is owed a DEL. Of a live attachment that is every delegate of its chain.
type step struct {
	Generation uint64 `json:"generation"`
	Plugin     string `json:"plugin"`
	Attempts   int    `json:"attempts"`
	LastError  string `json:"lastError,omitempty"`
	LastCode   uint   `json:"lastCode,omitempty"`
	Parked     bool   `json:"parked,omitempty"`
	Again      bool   `json:"again,omitempty"` // gets one more DEL since it was killed
}

func listCommand() *cobra.Command {
	var asJSON bool
	var stateDir string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the attachments in the journal",
		Long: "List the attachments in the journal: those that live, and those that are owed a DEL.\n" +
			"Nothing is changed and nothing is locked while it prints.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			store := &journal.Store{Dir: stateDir}
			attachments, err := readJournal(cmd.Context(), store)
			if err != nil && len(attachments) == 0 {
				return err
			}
			out := cmd.OutOrStdout()
			switch {
			case asJSON:
				enc := json.NewEncoder(out)
				enc.SetIndent("", "  ")
				err = errors.Join(enc.Encode(attachments), err)
			case len(attachments) == 0:
				err = printNone(out, store)
			default:
				err = errors.Join(printTable(out, attachments), err)
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	cmd.Flags().StringVar(&stateDir, "state-dir", plugin.DefaultStateDir, "the folder of the journal")
	return cmd
}

// readJournal copies the entries out of the journal. Entries that are damaged are left out and told by the error.
func readJournal(ctx context.Context, store *journal.Store) ([]attachment, error) {
	attachments, damaged := []attachment{}, []error{}
	err := store.View(ctx, func(tx *journal.Tx) error {
		return tx.All(func(e *journal.Entry, err error) error {
			if err != nil {
				damaged = append(damaged, err)
				return nil
			}
			attachments = append(attachments, describe(e))
			return nil
		})
	})
	return attachments, errors.Join(append(damaged, err)...)
}

func describe(e *journal.Entry) attachment {
	newest := e.Newest()
	a := attachment{
		Network: e.Network, ContainerID: e.ContainerID, IfName: e.IfName, State: e.State, Reason: e.Reason,
		NetNS: newest.NetNS.Path, Addresses: e.Addresses(), Created: newest.Created.Wall, Updated: e.Updated.Wall,
		Steps: []step{},
	}
	if a.Addresses == nil {
		a.Addresses = []netip.Addr{}
	}
	if e.Pod != (journal.Pod{}) {
		a.Pod = &e.Pod
	}
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			a.Steps = append(a.Steps, step{
				Generation: g.Number, Plugin: s.Type, Attempts: s.Attempts, LastError: s.LastError, LastCode: s.LastCode,
				Parked: s.Parked, Again: s.RepeatAt != 0,
			})
		}
	}
	return a
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
			a.Network, short(a.ContainerID), a.IfName, string(a.State), podName(a.Pod), addresses(a), pending(a),
		}, "\t"))
	}
	return w.Flush()
}

func podName(p *journal.Pod) string {
	if p == nil {
		return "-"
	}
	return p.Namespace + "/" + p.Name
}

// short cuts container IDs as the runtimes' own programs do.
func short(id string) string {
	if len(id) > 20 {
		return id[:20]
	}
	return id
}

func addresses(a attachment) string {
	texts := []string{}
	for _, address := range a.Addresses {
		texts = append(texts, address.String())
	}
	return orDash(texts)
}

// pending names the delegates that are owed a DEL although the attachment is not live any more, each with why.
func pending(a attachment) string {
	texts := []string{}
	if a.State == journal.Unwinding || a.State == journal.Removing {
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

func orDash(texts []string) string {
	if len(texts) == 0 {
		return "-"
	}
	return strings.Join(texts, ", ")
}
