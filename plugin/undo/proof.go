package undo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/tristate"
)

// maxUnproven limits the DELs of an unproven step while its store cannot be queried: its file
// cannot be read, or the process that queried a store on another machine is gone. At one DEL per
// 2.5 to 5 minutes the limit is about 20 hours, after which whereabouts' own reconciler has run.
// There is no limit while the store has the address.
const maxUnproven = 300

// probeTime is the timeout of one query to a store.
const probeTime = 2 * time.Second

// ask queries the probe of a plugin, if there is one, for what its store has for a step's
// attachment.
func (a *attempt) ask(
	ctx context.Context, plugin string,
) (held []netip.Addr, asked bool, err error) {
	probe := a.Probes[plugin]
	if probe == nil {
		return nil, false, nil
	}
	return probe.Held(ctx, ipam.Query{
		Network: a.Entry.Network, ContainerID: a.Entry.ContainerID, IfName: a.Entry.IfName,
		Config: a.Config, IPAM: known.IPAMOf(a.Config).Name, Store: a.gen.Stores[plugin],
	})
}

// proven reports whether the address of a step is released; why is the reason for no and unknown.
// Without a store that a probe can query, the result is unknown and why is "".
func (a *attempt) proven(ctx context.Context) (is tristate.Value, why string) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	for _, plugin := range []string{a.Type, known.IPAMOf(a.Config).Name} {
		held, asked, err := a.ask(ctx, plugin)
		switch {
		case errors.Is(err, ipam.ErrQueued):
			return tristate.No, err.Error()
		case err != nil:
			return tristate.Unknown, fmt.Sprintf("cannot check whether its address is free: %v", err)
		case len(held) > 0:
			return tristate.No, fmt.Sprintf("%s is still allocated", strings.Trim(fmt.Sprint(held), "[]"))
		case asked:
			return tristate.Yes, ""
		}
	}
	return tristate.Unknown, ""
}

// settle checks a step before its DEL. undone reports that it needs no further DEL, since the store
// has released its address meanwhile; waits, that even this pass has to wait with it: see NextTry.
func (a *attempt) settle(ctx context.Context) (undone, waits bool) {
	by := a.asker(ctx, true)
	askable := by.AsksStores && storeElsewhere(a.Step)
	is, why := tristate.Unknown, ""
	if a.Unproven != "" || askable {
		if is, why = a.proven(ctx); is == tristate.Yes {
			return true, false
		}
	}
	by.NoNetNS, by.AsksStores = a.place.Path == "" && !a.asked(), false
	switch NextTry(a.Step, by).Awaits {
	case Queue, Container, Runtime:
		return false, true
	case GracePeriod:
		if waits = askable && is == tristate.Unknown; waits && why != "" {
			a.noteUnproven(why, "")
		}
	}
	return false, waits
}

// queued reports whether the DEL of a step is in its plugin's own queue. Another DEL would not
// help, and may take most of a minute while the plugin's agent is down.
func (a *attempt) queued(ctx context.Context) bool {
	if a.Unproven == "" || !known.Of(a.Type).Queues {
		return false
	}
	_, _, err := a.ask(ctx, a.Type)
	return errors.Is(err, ipam.ErrQueued)
}

// noteOutcome stores the outcome of a DEL in its step and reports whether the step is undone.
func (a *attempt) noteOutcome(ctx context.Context, f *delegate.Failure) (undone bool) {
	was := a.State
	a.Attempts++
	a.RetryAt = journal.BootNanos() + int64(backoff(a.Attempts))
	if f != nil {
		a.noteFailure(f)
		return false
	}
	before := a.Unproven
	a.Unproven = ""
	if address, is := a.withheldFrom(); is {
		if a.Ended(journal.StepParked, "", 0); was != journal.StepParked {
			a.Log.Info("DEL parked: its address has another owner", "plugin", a.Type,
				"address", address)
			a.record(journal.Parked, fmt.Sprintf("%s has another owner", address))
		}
		return false
	}
	a.Ended(journal.StepRepeat, "", 0)
	return a.noteProof(ctx, before) && onceMoreIn(a.Step, a.asker(ctx, false)) == 0
}

// noteFailure stores why the DEL of a step is pending. A killed delegate gets a second DEL.
func (a *attempt) noteFailure(f *delegate.Failure) {
	if a.State != journal.StepFailed || a.LastCode != f.Code {
		a.Log.Warn("DEL failed and is pending", "plugin", a.Type, "code", f.Code,
			"err", netconf.Shorten(f.Said(), 500))
	}
	a.Ended(journal.StepFailed, netconf.Shorten(f.Said(), 500), f.Code)
	if f.Killed {
		a.RepeatAt = journal.BootNanos() + int64(a.Node.GraceOf(a.Entry))
	}
}

// record records an event of the DEL of a step.
func (a *attempt) record(kind journal.EventKind, reason string) {
	event := record.EventOf(kind, a.Entry)
	event.Reason, event.Plugins = reason, []string{a.Type}
	a.Journal.Event(event)
}

// noteProof stores in a step whose DEL succeeded why that is unproven, and reports whether the step
// is undone according to its store. If the store cannot be queried here and the delegate is known
// to exit 0 without freeing anything, it gets one more DEL after the grace period, even if its ADD
// failed: the ADD may have failed after it stored the address.
func (a *attempt) noteProof(ctx context.Context, before string) (undone bool) {
	is, why := a.proven(ctx)
	if is == tristate.Yes {
		a.ConfirmAt = 0
		if a.ADD == "" {
			a.RepeatAt = 0 // its address is free: there is nothing to repeat
		}
		return true
	}
	if why == "" && known.IPAMOf(a.Config).Elsewhere {
		why = before // the agent has asked, and this process cannot
	}
	if why != "" && (is == tristate.No || a.Attempts < maxUnproven) {
		a.noteUnproven(why, before)
		return false
	}
	if a.ConfirmAt == 0 && (known.Of(a.Type).MayLie || known.IPAMOf(a.Config).MayLie) {
		a.ConfirmAt = journal.BootNanos() + int64(a.Node.GraceOf(a.Entry))
	}
	return true
}

// noteUnproven stores why, and logs and records it once.
func (a *attempt) noteUnproven(why, before string) {
	a.Ended(journal.StepUnproven, "", 0)
	a.Unproven = why
	if before != "" {
		return
	}
	a.Log.Warn("DEL passed, but its address is not known to be free", "plugin", a.Type,
		"why", why)
	a.record(journal.Unproven, why)
}
