package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
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
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			attachments, err := readJournal(cmd, stateDir)
			if err != nil && len(attachments) == 0 {
				return err
			}
			if asJSON {
				enc := json.NewEncoder(cmd.OutOrStdout())
				enc.SetIndent("", "  ")
				return errors.Join(enc.Encode(attachments), err)
			}
			return errors.Join(printTable(cmd.OutOrStdout(), attachments), err)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON array")
	cmd.Flags().StringVar(&stateDir, "state-dir", plugin.DefaultStateDir, "the folder of the journal")
	return cmd
}

// readJournal copies the entries out of the journal. Entries that are damaged are left out and told by the error.
func readJournal(cmd *cobra.Command, stateDir string) ([]attachment, error) {
	store := &journal.Store{Dir: stateDir}
	attachments, damaged := []attachment{}, []error{}
	err := store.View(cmd.Context(), func(tx *journal.Tx) error {
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

func printTable(out io.Writer, attachments []attachment) error {
	if len(attachments) == 0 {
		_, err := fmt.Fprintln(out, "No attachments.")
		return err
	}
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

// pending names the delegates that are owed a DEL although the attachment is not live any more, with the attempts made.
func pending(a attachment) string {
	texts := []string{}
	if a.State == journal.Unwinding || a.State == journal.Removing {
		for _, s := range a.Steps {
			text := fmt.Sprintf("%s (%d tries)", s.Plugin, s.Attempts)
			if s.Parked {
				text = s.Plugin + " (parked)"
			}
			texts = append(texts, text)
		}
	}
	return orDash(texts)
}

func orDash(texts []string) string {
	if len(texts) == 0 {
		return "-"
	}
	return strings.Join(texts, ",")
}
