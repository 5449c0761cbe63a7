package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// attachment is one entry as --json prints it. It leaves out the delegates' configurations, which may hold secrets.
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
	Since       time.Time     `json:"since"` // it has been in this state
	Updated     time.Time     `json:"updated"`
	Steps       []step        `json:"steps"`

	freed []netip.Addr // those that may have another owner by now
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

	retry, repeat time.Duration // until a DEL that failed is tried again, and until that of one that was killed is; see wait
}

func (a *attachment) key() journal.Key {
	return journal.Key{Network: a.Network, ContainerID: a.ContainerID, IfName: a.IfName}
}

// owed says whether DELs are owed that the runtime does not have to ask for any more.
func (a *attachment) owed() bool { return a.State == journal.Unwinding || a.State == journal.Removing }

// readJournal copies the entries out of the journal. Entries that are damaged are left out and told by the error.
func readJournal(ctx context.Context, store *journal.Store) ([]attachment, error) {
	attachments, damaged := []attachment{}, []error{}
	err := store.View(ctx, func(tx *journal.Tx) error {
		attachments, damaged = attachments[:0], damaged[:0]
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
		NetNS: newest.NetNS.Path, Addresses: e.Addresses(), Created: newest.Created.Wall, Since: e.Since.Wall,
		Updated: e.Updated.Wall, Steps: []step{},
	}
	if a.Addresses == nil {
		a.Addresses = []netip.Addr{}
	}
	if e.Since == (journal.Time{}) {
		a.Since = a.Updated
	}
	if e.Pod != (journal.Pod{}) {
		a.Pod = &e.Pod
	}
	for _, g := range e.Generations {
		for _, c := range g.Claims {
			if g.Freed(c) && a.owed() {
				a.freed = append(a.freed, c.Address)
			}
		}
		for _, s := range g.Steps {
			a.Steps = append(a.Steps, step{
				Generation: g.Number, Plugin: s.Type, Attempts: s.Attempts, LastError: s.LastError, LastCode: s.LastCode,
				Parked: s.Parked, Again: s.RepeatAt != 0,
				retry: time.Duration(s.RetryAt - journal.BootNanos()), repeat: time.Duration(s.RepeatAt - journal.BootNanos()),
			})
		}
	}
	return a
}

// find returns the attachments that an argument names: NETWORK/CONTAINER/IFNAME, a container ID, a pod (NAMESPACE/NAME or its
// name), or an address. Of a container ID the beginning is enough if it is one container's.
func find(attachments []attachment, arg string) ([]attachment, error) {
	if address, err := netip.ParseAddr(arg); err == nil {
		return filter(attachments, func(a *attachment) bool { return slices.Contains(a.Addresses, address.Unmap()) }), nil
	}
	parts := strings.Split(arg, "/")
	if slices.Contains(parts, "") || len(parts) > 3 {
		return nil, usageError{fmt.Errorf("%q is neither NETWORK/CONTAINER/IFNAME nor a container ID, a pod (NAMESPACE/NAME) or an address", arg)}
	}
	switch len(parts) {
	case 3:
		return ofOneContainer(arg, parts[1], filter(attachments, func(a *attachment) bool {
			return a.Network == parts[0] && a.IfName == parts[2] && strings.HasPrefix(a.ContainerID, parts[1])
		}))
	case 2:
		return filter(attachments, func(a *attachment) bool {
			return a.Pod != nil && a.Pod.Namespace == parts[0] && a.Pod.Name == parts[1]
		}), nil
	}
	if pods := filter(attachments, func(a *attachment) bool { return a.Pod != nil && a.Pod.Name == arg }); len(pods) > 0 {
		return pods, nil
	}
	return ofOneContainer(arg, arg, filter(attachments, func(a *attachment) bool { return strings.HasPrefix(a.ContainerID, arg) }))
}

func filter(attachments []attachment, keep func(*attachment) bool) (kept []attachment) {
	for i := range attachments {
		if keep(&attachments[i]) {
			kept = append(kept, attachments[i])
		}
	}
	return kept
}

// ofOneContainer returns the attachments of the container with that ID, else all if they are of one container.
func ofOneContainer(arg, id string, found []attachment) ([]attachment, error) {
	if whole := filter(found, func(a *attachment) bool { return a.ContainerID == id }); len(whole) > 0 {
		return whole, nil // though others may begin so
	}
	ids := map[string]bool{}
	for _, a := range found {
		ids[a.ContainerID] = true
	}
	if len(ids) > 1 {
		return nil, usageError{fmt.Errorf("%s are %d attachments; write more of the container ID", arg, len(found))}
	}
	return found, nil
}

// findOne returns the one attachment that an argument names. One that is damaged is found by its full name.
func findOne(ctx context.Context, stateDir, arg string) (key journal.Key, err error) {
	attachments, err := readJournal(ctx, &journal.Store{Dir: stateDir})
	found, findErr := find(attachments, arg)
	switch {
	case findErr != nil:
		return key, findErr
	case len(found) == 1:
		return found[0].key(), nil
	case len(found) > 1:
		var names []string
		for _, a := range found[:min(4, len(found))] {
			names = append(names, a.key().String())
		}
		return key, usageError{fmt.Errorf("%s are %d attachments: %s; name one of them", arg, len(found), strings.Join(names, ", "))}
	case err != nil:
		return key, err
	}
	return key, usageError{fmt.Errorf("no attachment %s in the journal of %s; unwindctl list shows them", arg, stateDir)}
}

// judge returns what a sweep would say of attachments. It changes nothing.
func judgeAll(ctx context.Context, p *plugin.Plugin, stateDir string, list *plugin.List) (map[journal.Key]*plugin.Finding, error) {
	findings, err := p.Sweep(ctx, stateDir, plugin.Sweep{DryRun: true, Force: true, List: list})
	byKey := map[journal.Key]*plugin.Finding{}
	for i := range findings {
		byKey[findings[i].Key] = &findings[i]
	}
	return byKey, err
}
