package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"
)

// The problem: the runtime sends the DEL of an attachment whose entry is missing or incomplete.
// This file creates or completes the entry from the runtime's input.

// amend completes the entry if unwind could not write all of it to the journal. It uses the
// runtime's prevResult and the chain on stdin. It adds the ADD's result, or it creates an entry for
// a later ADD, which is undone first. It reports whether it changed anything.
func (d *deleting) amend(killed []string) (amended bool) {
	e := d.entry
	amended = d.w.MarkKilled(e, killed)
	partial := e.State == journal.Adding && d.fits(e) ||
		e.State == journal.Live && len(d.given().Addresses) > len(e.Claims) && d.fits(e)
	if !partial && !d.addedUnseen() {
		return amended
	}
	chain, err := d.w.Verb.Chain()
	if err != nil {
		d.log.Warn("the journal entry of the ADD is incomplete, and the chain cannot be read", "err", err)
		return amended
	}
	if partial {
		d.takePrevResult(e, chain)
		e.State = journal.Live
		return true
	}
	d.log.Warn("the attachment was added again by an ADD that the journal did not record; " +
		"undoing both ADDs")
	d.older = append([]*journal.Entry{e}, d.older...)
	d.entry = d.newEntry(journal.Deleting, chain)
	d.takePrevResult(d.entry, chain)
	return true
}

func (d *deleting) given() journal.Interface {
	return netconf.InterfaceOf(d.conf.PrevResult, d.key.IfName)
}

// addedUnseen reports whether the runtime's prevResult comes from an ADD that the journal does not
// contain. In that case, the attachment was added again while the journal could not be written.
// (After a failed ADD, the runtime has no result.)
func (d *deleting) addedUnseen() bool {
	given := d.given()
	if !given.Known() {
		return false
	}
	if slices.ContainsFunc(d.undone, func(e *journal.Entry) bool {
		return facts.SameADD(e.Interface, given) == tristate.Yes
	}) {
		seen, err := facts.Look(d.args.Netns, d.key.IfName)
		return err == nil && seen.Is(given) // undone, and added again with the same MAC address
	}
	ended := d.entry.State == journal.RollingBack || d.entry.State == journal.Adding
	known := ended
	for _, e := range append([]*journal.Entry{d.entry}, d.older...) {
		own := facts.InterfaceOf(e)
		known = known || own.Known()
		same := facts.SameADD(own, given)
		if same == tristate.Yes || same == tristate.Unknown && own.Known() && !ended {
			return false
		}
	}
	return known
}

// fromStdin creates an entry from the runtime's configuration and prevResult, for an attachment
// that was added before unwind was installed, or whose entry was lost. The journal does not know
// the namespace of that ADD. So the namespace at the runtime's path must be verified first: see
// undo.Worker.
func (d *deleting) fromStdin() error {
	if ours, _ := d.namesHostNetNS(); ours && d.conf.NeverAdded() { // its ADD was refused
		d.succeedIdle("its ADD was refused: CNI_NETNS is the runtime's own namespace", nil, false)
		return nil
	}
	chain, err := d.w.Verb.Chain()
	switch {
	case err == nil:
	case d.conf.NeverAdded():
		d.succeedIdle("the journal has no entry, and the runtime has no ADD result", err, false)
		return nil
	case errors.Is(err, netconf.ErrNoChain) && d.bad == nil && !d.rec.Unwritable:
		// multus up to 4.3 removes unwind's keys from a clusterNetwork, so a retry could not help
		d.succeedIdle("the journal in "+d.conf.StateDir+" does not contain the attachment, "+
			"and the runtime's configuration contains no chain", err, false)
		return nil
	default:
		_ = d.lock.Remove()
		return badConfig(fmt.Errorf("%s is not in the journal, and the chain cannot be read: %w", d.key,
			err))
	}
	e := d.newEntry(journal.Deleting, chain)
	d.takePrevResult(e, chain)
	if d.conf.NeverAdded() { // a delegate without a binary allocated nothing
		undo.Interrupted(e.Steps)
		e.Steps = slices.DeleteFunc(e.Steps, func(s journal.Step) bool {
			_, err := netconf.FindPlugin(s.Type, e.Path)
			return err != nil
		})
	}
	if len(e.Steps) == 0 {
		d.succeedIdle("no plugin of the chain is in CNI_PATH, and the runtime has no ADD result",
			nil, false)
		return nil
	}
	d.entry = e
	if err := checkText(d.args); err != nil {
		d.degrade("DEL", err)
	}
	return nil
}

// fits reports whether the runtime's prevResult can be the result of the ADD: it contains all
// addresses that the ADD got, and the runtime names no other namespace. If the ADD was interrupted,
// the runtime may still have the result of an earlier ADD of the container ID, or of a later one
// that is not in the journal.
func (d *deleting) fits(e *journal.Entry) bool {
	if seen, err := facts.Look(d.args.Netns, ""); err == nil && e.NetNS.Known() &&
		!e.NetNS.Same(seen.Netns) {
		return false
	}
	r, err := netconf.ParseResult(d.conf.PrevResult)
	return d.conf.PrevResult != nil && err == nil &&
		!slices.ContainsFunc(e.Claims, func(c journal.Claim) bool {
			return !slices.Contains(r.Addresses(), c.Address)
		})
}

// takePrevResult stores the runtime's prevResult as the result of the ADD, with claims for the
// first delegate of the chain that calls an IPAM plugin.
func (d *deleting) takePrevResult(e *journal.Entry, chain *netconf.Chain) {
	if d.conf.PrevResult == nil {
		return
	}
	raw, err := netconf.ConvertResult(d.conf.PrevResult, chain.CNIVersion)
	r, parseErr := netconf.ParseResult(raw)
	if err = cmp.Or(err, parseErr); err != nil {
		d.log.Warn("ignoring the runtime's prevResult, which is invalid", "err", err)
		return
	}
	e.Result, e.HostLinks = raw, facts.HostLinks(r)
	first := max(0, slices.IndexFunc(chain.Delegates,
		func(d netconf.Delegate) bool { return d.IPAM != "" }))
	by := chain.Steps(d.conf)[first]
	e.Claims = append(e.Claims, newClaims(e, r, by)...)
}

// succeedIdle logs that the DEL succeeds without running a delegate, and why. It also records this
// in the history. It does not record an expected DEL, which follows a failed ADD, because the
// history already contains the rollback. err, if any, is the reason why unwind knows no more about
// the attachment.
func (d *deleting) succeedIdle(why string, err error, expected bool) {
	d.noteIdle(why, err, expected)
	_ = d.lock.Remove() // the attachment has no journal entry
}

func (d *deleting) noteIdle(why string, err error, expected bool) {
	level, attrs := slog.LevelInfo, []any{"reason", why}
	if err != nil {
		level, attrs = slog.LevelWarn, append(attrs, "err", err)
	}
	d.log.Log(context.Background(), level, "DEL ran no plugin", attrs...)
	if !expected {
		d.rec.Event(journal.Event{
			Key: d.key, Kind: journal.NoOp, Pod: netconf.PodOf(d.args.Args), Reason: why,
		})
	}
}
