package inspect

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
)

// Find returns the attachments that an argument names: NETWORK/CONTAINER/IFNAME, a container ID, a
// pod (NAMESPACE/NAME or its name), or an address. A unique prefix of a container ID is enough.
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

// ofOneContainer returns the attachments in found whose container ID is exactly id. If there are
// none, it returns found, or a usage error if found belongs to more than one container.
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

// several returns the error that an argument names several attachments.
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

// FindOne returns the finding on the only attachment that an argument names. It finds a damaged
// entry by its full name alone.
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
// networks. They come from the journal and, if history is set, also from
// its events. It reads for at most completeTime.
func Complete(ctx context.Context, stateDir string, history bool) (args, networks []string) {
	ctx, cancel := context.WithTimeout(ctx, completeTime)
	defer cancel()
	store := &journal.Store{Dir: stateDir}
	attachments, _ := ReadJournal(ctx, store)
	if events, _ := store.History(); history {
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
