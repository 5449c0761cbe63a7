package alive

import (
	"context"
	"errors"
	"strings"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// Judge returns the verdict on an attachment whose lock the caller does not hold.
func (n *Node) Judge(ctx context.Context, e *journal.Entry) Verdict {
	return Decide(n.Gather(ctx, e, nil))
}

// Gather gathers the evidence on an attachment. ours is its lock, if the caller holds it.
func (n *Node) Gather(ctx context.Context, e *journal.Entry, ours *journal.Lock) Evidence {
	ev := Evidence{State: e.State, Reason: Recorded(e.Cause, e.Reason)}
	if ours != nil {
		ev.Locked, ev.LockFile = tristate.No, tristate.Of(!ours.Made(), nil)
	} else {
		locked, exists, err := n.Journal.Store.Locked(e.Key)
		ev.Locked, ev.LockFile = tristate.Of(locked, err), tristate.Of(exists, err)
	}
	g := e.Newest()
	ev.SameNamespaces = n.SameNamespaces(g)
	ev.SameBoot, ev.OtherHost = n.SameBoot(g), n.otherHost(g)
	ev.Listed = n.List.has(e)
	if ev.SameBoot == tristate.Yes {
		if e.Updated.Boot != 0 {
			ev.PastGracePeriod = tristate.Of(journal.BootNanos()-e.Updated.Boot > int64(n.GraceOf(e)), nil)
		}
		ev.Doubt = Doubt(n.lookAt(g, &ev))
	}
	if DecideRecorded(ev).Releasable() { // otherwise nobody uses it
		n.LookForLater(ctx, e, &ev)
	}
	return ev
}

// LookForLater looks for a later ADD of the attachment.
func (n *Node) LookForLater(ctx context.Context, e *journal.Entry, ev *Evidence) {
	var err error
	if ev.AddedUnseen, err = n.Later(ctx, e); err != nil {
		ev.Doubt = Doubt(err)
	}
}

// Doubt returns the first of several joined errors, as part of a verdict's reason.
func Doubt(err error) string {
	if err == nil {
		return ""
	}
	first, _, _ := strings.Cut(err.Error(), "\n")
	return netconf.Shorten(first, 300)
}

// GraceOf returns the grace period of the attachment's network: the configured one, or the one
// of the ADD.
func (n *Node) GraceOf(e *journal.Entry) time.Duration {
	if recorded := e.Newest().GracePeriod; e.Network != n.Network && recorded != 0 {
		return recorded
	}
	return n.GracePeriod
}

// lookAt searches for the namespace and the interface of one ADD. It returns all errors.
func (n *Node) lookAt(g *journal.Generation, ev *Evidence) error {
	if !g.NetNS.Known() {
		return nil
	}
	place, err := host.Find(g.NetNS)
	if err != nil { // a mount may go during the look
		place, err = host.Find(g.NetNS)
	}
	place.Close()
	ev.NetNS = tristate.Of(place.Path != "", err)
	if ev.NetNS == tristate.Yes && ev.Listed != tristate.No {
		return nil
	}
	pid, processErr := n.View.ProcessIn(g.NetNS, len(g.HostLinks) == 0)
	ev.HasProcess = tristate.Of(pid != 0, processErr)
	err = errors.Join(err, processErr)
	if ev.NetNS != tristate.Yes {
		there, linkErr := host.LinkThere(g.HostLinks)
		ev.HostLink = tristate.Of(there, linkErr)
		err = errors.Join(err, linkErr)
	}
	return err
}

// List is a runtime's list of attachments.
type List struct {
	Network string // the network that it covers; "" for all
	Pods    bool   // it covers pods only
	// Valid has the attachments, by container ID and interface; an interface "" stands for all of a
	// container.
	Valid map[netconf.Attachment]bool
	// Runtimes are the processes of the runtimes that returned the list; 0 stands for one that this
	// process cannot see. It is empty for a list from another source.
	Runtimes []int
}

// NewList makes a list of the attachments of a network.
func NewList(network string, valid []netconf.Attachment) *List {
	l := &List{Network: network, Valid: map[netconf.Attachment]bool{}}
	for _, a := range valid {
		l.Valid[a] = true
	}
	return l
}

// has reports whether an attachment is on the list. The result is unknown without a list, or if the
// list does not cover the attachment.
func (l *List) has(e *journal.Entry) tristate.Value {
	if l == nil || l.Network != "" && l.Network != e.Network || l.Pods && !isPod(e.Pod) {
		return tristate.Unknown
	}
	return tristate.Of(l.Names(e.Key), nil)
}

// isPod reports whether an attachment is of a pod. A podman container has a pod's name in its
// arguments, but no pod namespace (podman#12083).
func isPod(pod journal.Pod) bool { return pod.Namespace != "" && pod.Name != "" }

// shortID is the least that crictl, nerdctl and podman print of a container ID.
const shortID = 12

// Names reports whether the list has the attachment, or all interfaces of its container. A list
// that people made may have the beginnings of container IDs.
func (l *List) Names(k journal.Key) bool {
	names := func(id string) bool {
		return l.Valid[netconf.Attachment{ContainerID: id, IfName: k.IfName}] ||
			l.Valid[netconf.Attachment{ContainerID: id, IfName: ""}]
	}
	for n := shortID; n < len(k.ContainerID); n++ {
		if names(k.ContainerID[:n]) {
			return true
		}
	}
	return names(k.ContainerID)
}

// HasContainer reports whether a list has a container, with any interface. A list of pods does not
// cover a container that is not a pod; libcni's cache shows which ones are.
func (l *List) HasContainer(network, id string, cache []Cached) tristate.Value {
	if l == nil || l.Network != "" && l.Network != network {
		return tristate.Unknown
	}
	for a := range l.Valid {
		if a.ContainerID == id ||
			len(a.ContainerID) >= shortID && strings.HasPrefix(id, a.ContainerID) {
			return tristate.Yes
		}
	}
	for _, c := range cache {
		if l.Pods && !isPod(netconf.PodOf(c.CNIArgs())) {
			return tristate.Unknown
		}
	}
	return tristate.No
}
