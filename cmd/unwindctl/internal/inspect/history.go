package inspect

import (
	"fmt"
	"io"
	"slices"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
)

// About reports whether an event is about what an argument names, see Find.
func About(e journal.Event, arg string) bool {
	found, err := Find(attachmentsOf([]journal.Event{e}), arg)
	return err == nil && len(found) == 1
}

// attachmentsOf returns what events say of their attachments.
func attachmentsOf(events []journal.Event) (attachments []Attachment) {
	for i := range events {
		e := &events[i]
		attachments = append(attachments, Attachment{Key: e.Key, Pod: &e.Pod, Addresses: e.Addresses})
	}
	return attachments
}

func lastOf(events []journal.Event, arg string, n int) []journal.Event {
	events = slices.DeleteFunc(events, func(e journal.Event) bool { return !About(e, arg) })
	return events[max(0, len(events)-n):]
}

func PrintHistory(out io.Writer, events []journal.Event, o *term.Output) error {
	if o.Format == term.Name {
		return term.PrintNames(out, names(attachmentsOf(events)))
	}
	if len(events) == 0 {
		_, err := fmt.Fprintln(out, "No events.")
		return err
	}
	t := term.NewTable(
		term.Column{Name: "TIME"}, term.Column{Name: "WHAT"},
		term.Column{Name: "NETWORK", Optional: true},
		term.Column{Name: "CONTAINER", Least: 11}, term.Column{Name: "IFNAME", Optional: true},
		term.Column{Name: "POD", Least: 12},
		term.Column{Name: "ADDRESSES", Least: 10, Optional: true},
		term.Column{Name: "PLUGINS", Least: 10, Optional: true},
		term.Column{Name: "WHY", Least: 13})
	for _, e := range events {
		t.Add(term.Time(e.At.Wall), string(e.Kind), e.Network,
			term.OrDash(term.Short(e.ContainerID, o.Format)), term.OrDash(e.IfName),
			podName(&e.Pod), term.Join(term.Addresses(e.Addresses)), term.Join(e.Plugins),
			term.OneLine(e.Reason))
	}
	return t.Print(out, o)
}
