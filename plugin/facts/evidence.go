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
)

// Judge returns the verdict on an attachment. The caller must not hold the attachment's lock.
func (n *Node) Judge(ctx context.Context, e *journal.Record) decide.Judgment {
	return decide.Decide(n.Gather(ctx, e, nil))
}

// Gather returns the evidence on an attachment. If the caller holds its lock, ours is that lock.
func (n *Node) Gather(ctx context.Context, e *journal.Record, ours *journal.Lock) decide.Evidence {
	ev := decide.Evidence{
		State: e.State, Reason: decide.Recorded(e.Cause, e.Reason),
		Locked: decide.False, SameNamespaces: n.SameNamespaces(e),
		SameBoot: n.SameBoot(e), OtherHost: n.otherHost(e), Listed: n.List.has(e),
		AddedUnseen: &fact{look: func() (bool, error) { return n.Later(ctx, e) }},
	}
	if ours == nil {
		state, err := n.Journal.Store.LookAtLock(e.Key)
		ev.Locked = decide.TruthOf(state.Owned, err)
	}
	if e.Updated.Boot != 0 && e.Added.Host.TimeNS == n.Host.TimeNS {
		ev.PastGracePeriod = decide.TruthOf(n.GraceLeft(e) < 0, nil)
	}
	if e.Added.NetNS.Known() && n.SameBoot(e) == decide.True {
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

// fact is a decide.Fact that look determines once, when it is first needed. If look returns an
// error, the fact is unknown. Only one goroutine may use it.
type fact struct {
	look   func() (bool, error)
	value  decide.Truth
	why    string
	looked bool
}

// Ask returns the fact. why is the first line of look's error, shortened so that it fits into a
// reason, or "".
func (f *fact) Ask() (v decide.Truth, why string) {
	if !f.looked {
		is, err := f.look()
		f.value, f.looked = decide.TruthOf(is, err), true
		if err != nil {
			first, _, _ := strings.Cut(err.Error(), "\n")
			f.why = netconf.Shorten(first, 300)
		}
	}
	return f.value, f.why
}

// Known returns a fact without inspecting the node. looked is false if the fact has not been
// determined yet.
func Known(f decide.Fact) (v decide.Truth, looked bool) {
	switch f := f.(type) {
	case *fact:
		return f.value, f.looked
	case decide.Truth:
		return f, true
	}
	return decide.Unclear, false
}

// GraceOf returns n.GracePeriod for an attachment in n.Network. For any other attachment, it
// returns the grace period in the attachment's record or, if there is none, n.GracePeriod.
func (n *Node) GraceOf(e *journal.Record) time.Duration {
	if recorded := e.Added.GracePeriod; e.Network != n.Network && recorded != 0 {
		return recorded
	}
	return n.GracePeriod
}

// GraceLeft returns how much of an attachment's grace period remains. Once the result is negative,
// the attachment's absence from a list can prove that it is dead.
func (n *Node) GraceLeft(e *journal.Record) time.Duration {
	return cmp.Or(n.ListGrace, n.GraceOf(e)) - time.Duration(journal.BootNanos()-e.Updated.Boot)
}

// Owner is a container that is not in the journal.
type Owner struct {
	Network, ContainerID string
	Addresses            []netip.Addr
	Written              []time.Time // the modification times of its files
	Grace                time.Duration
}

// JudgeOwner returns the verdict on a container that is not in the journal, and its grace period.
func (n *Node) JudgeOwner(o Owner) (v decide.Judgment, grace decide.Grace) {
	cache, err := n.readCache(o.Network + "-" + o.ContainerID + "-")
	cached := slices.ContainsFunc(cache, Cached.netNSThere)
	grace = n.GraceOfOwner(o.Written, o.Grace)
	return decide.DecideStray(decide.Stray{
		SameNamespaces:  &fact{look: n.seesAsRuntime},
		Listed:          n.List.hasContainer(o, cache),
		PastGracePeriod: decide.TruthIf(n.Host.TimeNS == namespacesOf("/proc/1").TimeNS, grace.Over),
		Undated:         grace.SameBoot == decide.Unclear,
		Cached:          decide.TruthIf(cached || err == nil, cached),
		Runs:            &fact{look: func() (bool, error) { return n.View.containerRuns(o.ContainerID) }},
		InUse:           &fact{look: func() (bool, error) { return n.View.Uses(o.Addresses) }},
	}), grace
}

// GraceOfOwner returns the grace period of an owner whose files were written at these times.
func (n *Node) GraceOfOwner(written []time.Time, grace time.Duration) decide.Grace {
	var ages []time.Duration
	for _, at := range written {
		ages = append(ages, time.Since(at))
	}
	return decide.DecideGrace(ages, wallClock(), grace, n.ListGrace)
}

type List struct {
	Network string                      // the network that it covers; "" for all
	Pods    bool                        // it covers pods only
	Valid   map[netconf.Attachment]bool // the interface "" stands for all interfaces
	Named   map[string]journal.Pod      // the pods by container ID, if the list names them
	// Runtimes are the process IDs of the runtimes that returned the list, if it came from runtimes. 0
	// stands for a runtime that this process cannot see.
	Runtimes []int
}

func NewList(network string, valid []netconf.Attachment) *List {
	l := &List{Network: network, Valid: map[netconf.Attachment]bool{}, Named: map[string]journal.Pod{}}
	for _, a := range valid {
		l.Valid[a] = true
	}
	return l
}

// has reports whether an attachment is on the list. The fact is unknown if the list does not cover
// the attachment, and nil if there is no list.
func (l *List) has(e *journal.Record) decide.Fact {
	if l == nil {
		return nil
	}
	named := l.Names(e.Key)
	covered := (l.Network == "" || l.Network == e.Network) &&
		(named || !l.Pods || isPod(e.Added.Pod))
	return decide.TruthIf(covered, named)
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
// does not cover a container that belongs to no pod according to libcni's cache.
func (l *List) hasContainer(o Owner, cache []Cached) decide.Truth {
	if l == nil || l.Network != "" && l.Network != o.Network {
		return decide.Unclear
	}
	for a := range l.Valid {
		if a.ContainerID == o.ContainerID {
			return decide.True
		}
	}
	noPods := slices.ContainsFunc(cache, func(c Cached) bool { return !isPod(c.Pod()) })
	return decide.TruthIf(!l.Pods || !noPods, false)
}
