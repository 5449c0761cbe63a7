package facts

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"strings"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// Judge returns the verdict on an attachment whose lock the caller does not hold.
func (n *Node) Judge(ctx context.Context, e *journal.Entry) decide.Verdict {
	return decide.Decide(n.Gather(ctx, e, nil))
}

// Gather returns the evidence on an attachment. ours is the attachment's lock if the caller holds
// it, and nil otherwise.
func (n *Node) Gather(ctx context.Context, e *journal.Entry, ours *journal.Lock) decide.Evidence {
	ev := decide.Evidence{
		State: e.Undo.State, Reason: decide.Recorded(e.Undo.Cause, e.Undo.Reason),
		Locked: tristate.No, SameNamespaces: n.SameNamespaces(e),
		SameBoot: n.SameBoot(e), OtherHost: n.otherHost(e), Listed: n.List.has(e),
		AddedUnseen: &fact{look: func() (bool, error) { return n.Later(ctx, e) }},
	}
	if ours == nil {
		state, err := n.Journal.Store.LookAtLock(e.Key)
		ev.Locked = tristate.Of(state.Held, err)
	}
	if e.Updated.Boot != 0 && e.Added.Host.TimeNS == n.Host.TimeNS {
		ev.PastGracePeriod = tristate.Of(n.GraceLeft(e) < 0, nil)
	}
	if e.Added.NetNS.Known() && n.SameBoot(e) == tristate.Yes {
		ev.NetNS = &fact{look: func() (bool, error) {
			place, err := Find(e.Added.NetNS, "")
			place.Close()
			return place.There(), err
		}}
		ev.HasProcess = &fact{look: func() (bool, error) {
			return n.View.ProcessIn(e.Added.NetNS, len(e.Got.HostLinks) == 0)
		}}
		ev.HostLink = &fact{look: func() (bool, error) { return LinkThere(e.Got.HostLinks) }}
	}
	return ev
}

// fact is a decide.Fact that costs a look at the node. It looks when it is first needed, and only
// once. It is unknown if look returns an error. Only one goroutine may use it.
type fact struct {
	look   func() (bool, error)
	value  tristate.Value
	why    string
	looked bool
}

// Ask returns the fact. why is the first of several joined errors, short enough for a verdict's
// reason.
func (f *fact) Ask() (v tristate.Value, why string) {
	if !f.looked {
		is, err := f.look()
		if f.value, f.looked = tristate.Of(is, err), true; err != nil {
			first, _, _ := strings.Cut(err.Error(), "\n")
			f.why = netconf.Shorten(first, 300)
		}
	}
	return f.value, f.why
}

// Known returns a fact without a look. looked is false if the fact is not determined yet.
func Known(f decide.Fact) (v tristate.Value, looked bool) {
	switch f := f.(type) {
	case *fact:
		return f.value, f.looked
	case tristate.Value:
		return f, true
	}
	return tristate.Unknown, false
}

// GraceOf returns an attachment's grace period. For the network whose configuration this process
// has read, it is the configured one. For any other network, it is the one that the ADD recorded.
func (n *Node) GraceOf(e *journal.Entry) time.Duration {
	if recorded := e.Added.GracePeriod; e.Network != n.Network && recorded != 0 {
		return recorded
	}
	return n.GracePeriod
}

// GraceLeft returns how much of an attachment's grace period is left. It is negative once a list
// can prove the attachment dead.
func (n *Node) GraceLeft(e *journal.Entry) time.Duration {
	return cmp.Or(n.ListGrace, n.GraceOf(e)) - time.Duration(journal.BootNanos()-e.Updated.Boot)
}

// Owner is a container that is not in the journal. Its fields help to prove it live or dead.
type Owner struct {
	Network, ContainerID string
	Addresses            []netip.Addr
	Made                 time.Time // wall-clock time of its youngest file; zero if unknown
	Grace                time.Duration
}

// JudgeOwner returns the verdict on a container that is not in the journal, and how much of its
// grace period is left (see GraceLeft).
func (n *Node) JudgeOwner(o Owner) (v decide.Verdict, left time.Duration) {
	cache, cacheErr := n.readCache(o.Network + "-" + o.ContainerID + "-")
	seen := decide.Orphan{
		SameNamespaces: &fact{look: n.seesAsRuntime},
		Listed:         n.List.hasContainer(o, cache),
		Cached: &fact{look: func() (bool, error) {
			if slices.ContainsFunc(cache, Cached.netNSThere) {
				return true, nil
			}
			return false, cacheErr
		}},
		Runs:  &fact{look: func() (bool, error) { return n.View.ContainerRuns(o.ContainerID) }},
		InUse: &fact{look: func() (bool, error) { return n.View.Uses(o.Addresses) }},
	}
	// The wall clock may have been set since Made, so the age is capped at the time since boot.
	left = cmp.Or(n.ListGrace, o.Grace) - min(time.Since(o.Made), time.Duration(journal.BootNanos()))
	if !o.Made.IsZero() && n.Host.TimeNS == namespacesOf("/proc/1").TimeNS {
		seen.PastGracePeriod = tristate.Of(left < 0, nil)
	}
	return decide.DecideOrphan(seen), left
}

// List is a runtime's list of attachments.
type List struct {
	Network string // the network that it covers; "" for all
	Pods    bool   // it covers pods only
	// Valid contains the attachments, by container ID and interface. The interface "" stands for
	// all interfaces of a container.
	Valid map[netconf.Attachment]bool
	Named map[string]journal.Pod // the pods by container ID, if the list names them
	// Runtimes are the process IDs of the runtimes that returned the list. 0 stands for a runtime
	// that this process cannot see. It is empty for a list from another source.
	Runtimes []int
}

// NewList returns a list of a network's attachments.
func NewList(network string, valid []netconf.Attachment) *List {
	l := &List{Network: network, Valid: map[netconf.Attachment]bool{}, Named: map[string]journal.Pod{}}
	for _, a := range valid {
		l.Valid[a] = true
	}
	return l
}

// has reports whether an attachment is on the list. It returns nil if there is no list, and unknown
// if the list does not cover the attachment.
func (l *List) has(e *journal.Entry) decide.Fact {
	if l == nil {
		return nil
	}
	if l.Network != "" && l.Network != e.Network || l.Pods && !isPod(e.Added.Pod) {
		return tristate.Unknown
	}
	return tristate.Of(l.Names(e.Key), nil)
}

// isPod reports whether an attachment belongs to a Kubernetes pod. A podman container has a pod's
// name in its arguments, but no pod namespace (podman#12083).
func isPod(pod journal.Pod) bool { return pod.Namespace != "" && pod.Name != "" }

// Names reports whether the list contains the attachment, or all interfaces of its container.
func (l *List) Names(k journal.Key) bool {
	return l.Valid[netconf.Attachment{ContainerID: k.ContainerID, IfName: k.IfName}] ||
		l.Valid[netconf.Attachment{ContainerID: k.ContainerID, IfName: ""}]
}

// hasContainer reports whether the list contains a container, with any interface. A list of pods
// does not cover a container outside Kubernetes. libcni's cache shows whether the container belongs
// to a pod.
func (l *List) hasContainer(o Owner, cache []Cached) tristate.Value {
	if l == nil || l.Network != "" && l.Network != o.Network {
		return tristate.Unknown
	}
	for a := range l.Valid {
		if a.ContainerID == o.ContainerID {
			return tristate.Yes
		}
	}
	if l.Pods && slices.ContainsFunc(cache, func(c Cached) bool { return !isPod(c.Pod()) }) {
		return tristate.Unknown
	}
	return tristate.No
}
