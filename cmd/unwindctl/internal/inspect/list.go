package inspect

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
)

// PrintNoAttachments prints that a journal is empty, or that the directory has no journal.
func PrintNoAttachments(out io.Writer, store *journal.Store) error {
	text := "No attachments."
	if _, err := os.Lstat(store.Path()); errors.Is(err, fs.ErrNotExist) {
		text = fmt.Sprintf("No attachments: there is no journal in %s.", store.Dir)
	}
	_, err := fmt.Fprintln(out, text)
	return err
}

func PrintAttachments(out io.Writer, attachments []Attachment, o *term.Output) error {
	if o.Format == term.Name {
		return term.PrintNames(out, names(attachments))
	}
	t := term.NewTable(
		term.Column{Name: "NETWORK", Optional: true}, term.Column{Name: "CONTAINER", Least: 11},
		term.Column{Name: "IFNAME", Optional: true}, term.Column{Name: "STATE"},
		term.Column{Name: "AGE"}, term.Column{Name: "POD", Least: 36},
		term.Column{Name: "ADDRESSES", Least: 10, Optional: true},
		term.Column{Name: "PENDING DELS", Least: 12},
		term.Column{Name: "CREATED", Wide: true}, term.Column{Name: "NETNS", Wide: true},
		term.Column{Name: "WHY", Wide: true})
	for _, a := range attachments {
		t.Add(a.Network, term.Short(a.ContainerID, o.Format), a.IfName, string(a.State),
			term.Ago(a.Created), podName(a.Pod), term.Join(term.Addresses(a.Addresses)),
			pending(a), term.Time(a.Created), term.OrDash(a.NetNS),
			term.OrDash(term.OneLine(a.Reason)))
	}
	return t.Print(out, o)
}

// names returns arguments that name attachments; without one, the addresses.
func names(attachments []Attachment) (names []string) {
	for _, a := range attachments {
		if a.ContainerID == "" {
			names = append(names, term.Addresses(a.Addresses)...)
			continue
		}
		names = append(names, a.Key().String())
	}
	return names
}

// pending returns the delegates with pending DELs of an attachment that is not live any more, each
// with the reason.
func pending(a Attachment) string {
	texts := []string{}
	if a.PendingDEL() {
		for _, s := range a.Steps {
			why := fmt.Sprintf("tried %d×", s.Attempts)
			switch s.State {
			case journal.StepFailed, journal.StepUnproven:
				why += ", " + s.words()
			case journal.StepParked, journal.StepRepeat:
				why = s.words()
			}
			texts = append(texts, fmt.Sprintf("%s (%s)", s.Plugin, why))
		}
	}
	return term.Join(texts)
}
