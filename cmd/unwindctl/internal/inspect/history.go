package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/ipam"
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

// explainNothing describes an argument that names no attachment in the journal.
func explainNothing(out io.Writer, arg string, of Scope, events []journal.Event,
	o *term.Output) error {
	if o.IsObject() {
		return errors.Join(o.PrintObject(out, "attachments", []any{}), nothing(arg, of.StateDir))
	}
	var text strings.Builder
	if address, err := netip.ParseAddr(arg); err == nil {
		explainAddress(&text, address.Unmap(), of)
	}
	events = slices.DeleteFunc(events, func(e journal.Event) bool { return !About(e, arg) })
	for _, e := range events[max(0, len(events)-3):] { // the last ones
		text.WriteString(eventSentence(e))
	}
	if text.Len() == 0 {
		return nothing(arg, of.StateDir)
	}
	_, err := io.WriteString(out, text.String())
	return err
}

// explainAddress says who has an address that no attachment in the journal has.
func explainAddress(text *strings.Builder, address netip.Addr, of Scope) {
	pools, _ := of.Pools()
	for _, p := range pools {
		found, _ := ipam.Scan(p.Dir)
		for _, r := range found {
			switch {
			case r.Address != address:
			case r.Ownerless():
				fmt.Fprintf(text, "%s is reserved in %s without an owner: host-local died before it wrote "+
					"one, so no DEL releases it.\n"+
					"unwindctl sweep releases it.\n", address, p.Dir)
			default:
				fmt.Fprintf(text, "%s is reserved in %s for container %s%s, which is not in the journal: "+
					"the pod is older than the installation, or the journal was lost.\n"+
					"unwindctl sweep --cri auto asks the runtime, and releases it if no pod has it.\n", address,
					p.Dir, term.OneLine(r.Owner.ContainerID),
					interfaceOf(term.OneLine(r.Owner.IfName)))
			}
		}
	}
}

// eventSentence returns a sentence about an event whose attachment is not in the journal any more.
func eventSentence(e journal.Event) string {
	what := map[journal.EventKind]string{
		journal.RolledBack: "its ADD was rolled back",
		journal.Swept:      "it was released by a sweep",
		journal.Released:   "its address was released",
		journal.Parked:     "a DEL was parked",
		journal.Unproven:   "a DEL passed, but its address is not known to be free",
		journal.Superseded: "another ADD took its place",
		journal.Forgotten:  "it was forgotten",
		journal.Untaken:    "a DEL had nothing to undo",
		journal.NoOp:       "the runtime's DEL ran no plugin",
	}[e.Kind]
	a := &Attachment{Key: journal.Key{ContainerID: cmp.Or(e.ContainerID, "unknown")}, Pod: &e.Pod}
	with := ""
	if len(e.Addresses) > 0 {
		with = " with " + strings.Join(term.Addresses(e.Addresses), " and ")
	}
	return fmt.Sprintf("%s%s in network %s%s: %s %s ago%s.\n", whose(a), interfaceOf(e.IfName),
		e.Network, with, cmp.Or(what, string(e.Kind)), term.Ago(e.At.Wall), term.Because(e.Reason))
}

func explainDamaged(out io.Writer, damaged *journal.DamagedError, o *term.Output) (err error) {
	if o.IsObject() {
		err = o.PrintObject(out, "attachments", []any{})
	} else {
		_, err = fmt.Fprintf(out, "The entry of %s cannot be read. Sweeps keep it.\n"+
			"Its next ADD or DEL replaces it; a DEL then uses what the runtime sends. To give it up: "+
			"unwindctl forget %s\n", damaged.Key, damaged.Key)
	}
	return errors.Join(damaged, err)
}

func nothing(arg, stateDir string) error {
	return fmt.Errorf("no attachment %s in the journal of %s; unwindctl list shows them", arg,
		stateDir)
}
