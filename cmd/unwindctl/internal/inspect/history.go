package inspect

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
)

// About reports whether an event is about an attachment that an argument names. See Find.
func About(e journal.Event, arg string) bool {
	found, err := Find(attachmentsOf([]journal.Event{e}), arg)
	return err == nil && len(found) == 1
}

// attachmentsOf returns the attachments of events, with those fields that an event records.
func attachmentsOf(events []journal.Event) (attachments []Attachment) {
	for i := range events {
		e := &events[i]
		if e.Key == (journal.Key{}) { // a change to the installation
			continue
		}
		attachments = append(attachments, Attachment{Key: e.Key, Pod: &e.Pod, Addresses: e.Addresses})
	}
	return attachments
}

func PrintHistory(out io.Writer, events []journal.Event, o *term.Output) error {
	if o.Format == term.Name {
		return term.PrintNames(out, names(attachmentsOf(events)))
	}
	if len(events) == 0 {
		return term.Print(out, "No events.\n")
	}
	t := term.NewTable(
		term.Column{Name: "AGE"}, term.Column{Name: "TIME", Wide: true}, term.Column{Name: "EVENT"},
		term.Column{Name: "NETWORK", Optional: true},
		term.Column{Name: "CONTAINER", Least: 11, Optional: true},
		term.Column{Name: "IFNAME", Optional: true}, term.Column{Name: "POD", Least: 16},
		term.Column{Name: "ADDRESSES", Least: 10, Optional: true},
		term.Column{Name: "PLUGINS", Least: 8}, term.Column{Name: "REASON", Least: 30})
	oneLine := term.OneLine
	if o.Format == term.Wide {
		oneLine = term.Printable
	}
	for _, e := range events {
		t.Add(term.Ago(e.At.Wall), term.Time(e.At.Wall), string(e.Kind), term.OrDash(e.Network),
			term.OrDash(term.Short(e.ContainerID, o.Format)), term.OrDash(e.IfName),
			podName(&e.Pod), term.Join(term.Addresses(e.Addresses)), term.Join(e.Plugins),
			oneLine(e.Reason))
	}
	return t.Print(out, o)
}

// explainNothing explains an argument that names no attachment in the journal that can be read. It
// uses the damaged entries, the pools and past events.
func (r *Report) explainNothing(out io.Writer, arg string, o *term.Output) error {
	var text strings.Builder
	none := nothing(arg, r.StateDir)
	for _, err := range r.Damaged {
		var damaged *journal.DamagedError
		if errors.As(err, &damaged) && damaged.Key.String() == arg {
			fmt.Fprintf(&text, "The journal entry of %s cannot be read. Sweeps keep it.\n", arg)
			none = nil
		}
	}
	if o.IsObject() {
		return errors.Join(o.PrintObject(out, "attachments", []any{}), none)
	}
	for _, p := range r.Pools {
		p.explainOwners(&text, arg)
	}
	if _, err := netip.ParseAddr(arg); err == nil && text.Len() == 0 {
		none = errors.Join(fmt.Errorf("%w; it is not allocated in a host-local pool on this node", none),
			r.PoolErr, r.SweepErr)
	}
	events := slices.DeleteFunc(slices.Clone(r.Events),
		func(e journal.Event) bool { return !About(e, arg) })
	if len(events) > 0 {
		fmt.Fprintf(&text, "The journal contains no attachment %s. Its last events, as in unwindctl "+
			"history:\n", arg)
	}
	if text.Len() == 0 && r.Err() != nil {
		return nil //nolint:nilerr // it may be in the journal; the caller returns why that is unread
	}
	if text.Len() == 0 {
		return none
	}
	err := term.Print(out, text.String())
	if len(events) > 0 {
		err = errors.Join(err, PrintHistory(out, events[max(0, len(events)-3):], o))
	}
	return err
}

// explainOwners writes which addresses of a pool are reserved for an argument of Find that is not
// in the journal.
func (p *Pool) explainOwners(text *strings.Builder, arg string) {
	for _, r := range p.Reservations {
		found, _ := Find([]Attachment{{Key: journal.Key{Network: p.Network, ContainerID: r.ContainerID,
			IfName: r.IfName}, Pod: r.Pod, Addresses: []netip.Addr{r.Address}}}, arg)
		if len(found) == 0 {
			continue
		}
		owner := ""
		for _, of := range [][2]string{{" for container ", term.OneLine(r.ContainerID)},
			{", interface ", term.OneLine(r.IfName)}, {", pod ", strings.Trim(podName(r.Pod), "-")}} {
			if of[1] != "" {
				owner += of[0] + of[1]
			}
		}
		fmt.Fprintf(text, "%s is reserved in %s%s: %s.\n", r.Address, p.Dir, owner, term.OneLine(r.Why))
		if r.Remedy != "" {
			fmt.Fprintf(text, "%s.\n", r.Remedy)
		}
	}
}

func nothing(arg, stateDir string) error {
	path := (&journal.Store{Dir: stateDir}).Path()
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return term.WithHint("without a journal, unwindctl ipam shows addresses, and unwindctl sweep "+
			"releases leaked ones",
			"no attachment %s: there is no journal in %s", arg, stateDir)
	}
	return fmt.Errorf("no attachment %s in the journal in %s; unwindctl list shows all attachments",
		arg, stateDir)
}
