package plugin

import (
	"context"
	"errors"
	"strings"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/internal/tristate"
	"cni-unwind/plugin/internal/verdict"
	"cni-unwind/plugin/netconf"
)

// judge returns the verdict on an attachment whose lock this op does not hold.
func (o *op) judge(ctx context.Context, e *journal.Entry) verdict.Verdict {
	return verdict.Decide(o.gather(ctx, e, nil))
}

// gather gathers the evidence on an attachment. ours is its lock, if this op holds it.
func (o *op) gather(ctx context.Context, e *journal.Entry, ours *journal.Lock) verdict.Evidence {
	ev := verdict.Evidence{State: e.State, Reason: verdict.Recorded(e.Cause, e.Reason)}
	if ours != nil {
		ev.Locked, ev.LockFile = tristate.No, tristate.Of(!ours.Made(), nil)
	} else {
		locked, exists, err := o.store.Locked(e.Key)
		ev.Locked, ev.LockFile = tristate.Of(locked, err), tristate.Of(exists, err)
	}
	g := e.Newest()
	ev.SameNamespaces = o.sameNamespaces(g)
	ev.SameBoot, ev.OtherHost = o.sameBoot(g), o.otherHost(g)
	ev.Listed = o.list.has(e)
	if ev.SameBoot == tristate.Yes {
		if e.Updated.Boot != 0 {
			ev.PastGracePeriod = tristate.Of(journal.BootNanos()-e.Updated.Boot > int64(o.gracePeriod(e)), nil)
		}
		ev.Doubt = doubt(o.lookAt(g, &ev))
	}
	if verdict.DecideRecorded(ev).Releasable() { // else nobody asks for it
		o.lookForLater(ctx, e, &ev)
	}
	return ev
}

// lookForLater looks for a later ADD of the attachment.
func (o *op) lookForLater(ctx context.Context, e *journal.Entry, ev *verdict.Evidence) {
	var err error
	if ev.AddedUnseen, err = o.later(ctx, e); err != nil {
		ev.Doubt = doubt(err)
	}
}

// doubt returns the first of some errors, as a part of a verdict's reason.
func doubt(err error) string {
	if err == nil {
		return ""
	}
	first, _, _ := strings.Cut(err.Error(), "\n")
	return netconf.Shorten(first, 300)
}

// gracePeriod returns the grace period of the attachment's network: the configured one, or the one
// of the ADD.
func (o *op) gracePeriod(e *journal.Entry) time.Duration {
	if recorded := e.Newest().GracePeriod; e.Network != o.conf.Name && recorded != 0 {
		return recorded
	}
	return o.conf.GracePeriod
}

// lookAt looks for the namespace and the interface of one ADD. It returns the errors of the looks.
func (o *op) lookAt(g *journal.Generation, ev *verdict.Evidence) error {
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
	pid, processErr := o.view.ProcessIn(g.NetNS, len(g.HostLinks) == 0)
	ev.HasProcess = tristate.Of(pid != 0, processErr)
	err = errors.Join(err, processErr)
	if ev.NetNS != tristate.Yes {
		there, linkErr := host.LinkThere(g.HostLinks)
		ev.HostLink = tristate.Of(there, linkErr)
		err = errors.Join(err, linkErr)
	}
	return err
}
