package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
)

// Find returns the attachments that an argument names: NETWORK/CONTAINER/IFNAME, a container ID, a
// pod (NAMESPACE/NAME or NAME), or an address. A unique prefix of a container ID is enough.
func Find(attachments []Attachment, arg string) ([]Attachment, error) {
	if address, err := netip.ParseAddr(arg); err == nil {
		return Filter(attachments, func(a *Attachment) bool {
			return slices.Contains(a.Addresses, address.Unmap())
		}), nil
	}
	parts := strings.Split(arg, "/")
	if slices.Contains(parts, "") || len(parts) > 3 {
		return nil, term.Usage("%q is not NETWORK/CONTAINER/IFNAME, a container ID, a pod "+
			"(NAMESPACE/NAME) or an address", arg)
	}
	switch len(parts) {
	case 3:
		return ofOneContainer(arg, parts[1], Filter(attachments, func(a *Attachment) bool {
			return a.Network == parts[0] && a.IfName == parts[2] &&
				strings.HasPrefix(a.ContainerID, parts[1])
		}))
	case 2:
		return Filter(attachments, func(a *Attachment) bool {
			return a.Pod != nil && a.Pod.Namespace == parts[0] && a.Pod.Name == parts[1]
		}), nil
	}
	pods := Filter(attachments, func(a *Attachment) bool { return a.Pod != nil && a.Pod.Name == arg })
	if len(pods) > 0 {
		return pods, nil
	}
	return ofOneContainer(arg, arg, Filter(attachments, func(a *Attachment) bool {
		return strings.HasPrefix(a.ContainerID, arg)
	}))
}

func Filter(attachments []Attachment, keep func(*Attachment) bool) (kept []Attachment) {
	for i := range attachments {
		if keep(&attachments[i]) {
			kept = append(kept, attachments[i])
		}
	}
	return kept
}

// ofOneContainer narrows the found attachments to those whose container ID is exactly id. If there
// are none, it returns all that were found, or a usage error if they belong to several containers.
func ofOneContainer(arg, id string, found []Attachment) ([]Attachment, error) {
	whole := Filter(found, func(a *Attachment) bool { return a.ContainerID == id })
	if len(whole) > 0 {
		return whole, nil // even if id is also a prefix of other IDs
	}
	if slices.ContainsFunc(found, func(a Attachment) bool {
		return a.ContainerID != found[0].ContainerID
	}) {
		return nil, several(arg, found, "use a longer container ID")
	}
	return found, nil
}

// several returns the usage error for an argument that names several attachments.
func several(arg string, found []Attachment, remedy string) error {
	some := strings.Join(names(found[:min(4, len(found))]), ", ")
	if len(found) > 4 {
		some += ", …"
	}
	return term.Usage("%s matches %d attachments: %s; %s", arg, len(found), some, remedy)
}

// findOne returns the only attachment that an argument names, or nil. A missing attachment is not a
// usage error: it may have been released since the user listed it.
func findOne(attachments []Attachment, arg string) (*Attachment, error) {
	found, err := Find(attachments, arg)
	switch {
	case len(found) > 1:
		return nil, several(arg, found, "name one of them")
	case len(found) == 1:
		return &found[0], nil
	}
	return nil, err
}

// FindKey returns the key of the only attachment in the journal that an argument names.
func FindKey(ctx context.Context, stateDir, arg string) (key journal.Key, err error) {
	attachments, readErr := ReadJournal(ctx, &journal.Store{Dir: stateDir})
	a, err := findOne(attachments, arg)
	if a == nil {
		return key, cmp.Or(err, readErr, nothing(arg, stateDir))
	}
	return a.Key, nil
}

// FindOne returns the finding on the only attachment that an argument names. For a damaged record,
// the argument must be NETWORK/CONTAINER/IFNAME in full.
func (r *Report) FindOne(arg string) (*sweep.Finding, error) {
	for i := range r.Findings {
		if f := &r.Findings[i]; f.Key.String() == arg && len(f.Records) == 0 && f.Err != nil {
			return f, nil //nolint:nilerr // the caller shows f.Err
		}
	}
	a, err := findOne(r.Attachments, arg)
	if a == nil {
		return nil, cmp.Or(err, r.Err(), nothing(arg, r.StateDir))
	}
	return a.finding, nil
}

// CheckName returns an error if an argument names no attachment in the journal and none in events.
// It returns nil if the journal cannot be read.
func CheckName(ctx context.Context, stateDir, arg string, events []journal.Event) error {
	attachments, err := ReadJournal(ctx, &journal.Store{Dir: stateDir})
	found, several := Find(append(attachments, attachmentsOf(events)...), arg)
	if len(found) == 0 && several == nil && err == nil {
		return fmt.Errorf("no events: %w", nothing(arg, stateDir))
	}
	return nil
}

const completeTime = time.Second

// Complete returns candidates for shell completion: arguments that name attachments, and names of
// networks. They come from the journal and, if history is set, also from past events. Complete
// reads the journal for at most completeTime.
func Complete(ctx context.Context, stateDir string, history bool) (args, networks []string) {
	ctx, cancel := context.WithTimeout(ctx, completeTime)
	defer cancel()
	store := &journal.Store{Dir: stateDir}
	attachments, _ := ReadJournal(ctx, store)
	if history {
		events, _ := store.History()
		attachments = append(attachments, attachmentsOf(Told(events))...)
	}
	for _, a := range attachments {
		networks = append(networks, a.Network)
		if a.ContainerID != "" {
			args = append(args, a.Key.String())
		}
		if pod := podName(a.Pod); pod != "-" {
			args = append(args, pod)
		}
		args = append(args, term.Addresses(a.Addresses)...)
	}
	slices.Sort(args)
	slices.Sort(networks)
	return slices.Compact(args), slices.Compact(networks)
}

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

// explainNothing prints what damaged records, pools and past events contain about an argument that
// names no readable attachment in the journal.
func (r *Report) explainNothing(out io.Writer, arg string, o *term.Output) error {
	var text strings.Builder
	none := nothing(arg, r.StateDir)
	for _, err := range r.Damaged {
		var damaged *journal.DamagedError
		if errors.As(err, &damaged) && damaged.Key.String() == arg {
			fmt.Fprintf(&text, "Sweeps keep %s: its journal record cannot be read.\n", arg)
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
		none = errors.Join(fmt.Errorf("%w; no known host-local pool reserves the address", none),
			r.PoolErr, r.SweepErr)
	}
	events := slices.DeleteFunc(slices.Clone(r.Events),
		func(e journal.Event) bool { return !About(e, arg) })
	if len(events) > 0 {
		fmt.Fprintf(&text, "Found no attachment %s in the journal. Its last events (see unwindctl "+
			"history):\n", arg)
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

// explainOwners describes the pool's reservations that an argument names (see Find), and their
// owners.
func (p *Pool) explainOwners(text *strings.Builder, arg string) {
	for _, r := range p.Reservations {
		found, _ := Find([]Attachment{{Key: journal.Key{Network: p.Network, ContainerID: r.ContainerID,
			IfName: r.IfName}, Pod: r.Pod, Addresses: []netip.Addr{r.Address}}}, arg)
		if len(found) == 0 {
			continue
		}
		owner := ownerText(r.ContainerID, r.IfName, r.Pod)
		if owner != "" {
			owner = " for " + owner
		}
		fmt.Fprintf(text, "%s is reserved in %s%s: %s.\n", r.Address, p.Dir, owner, term.OneLine(r.Why))
		if r.Remedy != "" {
			fmt.Fprintf(text, "%s.\n", r.Remedy)
		}
	}
}

// ownerText names the owner of a reservation. It returns "" if the reservation is empty.
func ownerText(containerID, ifname string, pod *journal.Pod) string {
	var words []string
	for _, of := range [][2]string{{"container ", term.OneLine(containerID)},
		{"interface ", term.OneLine(ifname)}, {"pod ", strings.Trim(podName(pod), "-")}} {
		if of[1] != "" {
			words = append(words, of[0]+of[1])
		}
	}
	return strings.Join(words, ", ")
}

func nothing(arg, stateDir string) error {
	path := (&journal.Store{Dir: stateDir}).Path()
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return term.WithHint("to see the addresses, run unwindctl ipam; to release leaked ones, run "+
			"unwindctl sweep",
			"no attachment %s: there is no journal in %s", arg, stateDir)
	}
	return term.WithHint("to release leaked addresses that are not in the journal, run unwindctl "+
		"sweep without an argument",
		"no attachment %s in the journal in %s; unwindctl list shows all attachments", arg, stateDir)
}
