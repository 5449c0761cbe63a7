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
