package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// The problem: the runtime sends the DEL of an ADD whose entry is missing or incomplete. This file
// creates or completes the entry from the runtime's input.

// lookAtPath looks at the namespace that the runtime's DEL names: at CNI_NETNS or, if the runtime
// sends none, at the path in its prevResult.
func (d *deleting) lookAtPath(ctx context.Context) {
	d.sandbox = netconf.SandboxOf(d.Conf.PrevResult, d.Key.IfName)
	place, _ := facts.Look(cmp.Or(d.args.Netns, d.sandbox), "")
	d.netns = place.Netns
	d.named = sync.OnceValue(func() facts.Named { return d.nameOf(ctx, d.netns.Path) })
	d.result = sync.OnceValue(func() facts.Named { return d.nameOf(ctx, d.sandbox) })
}

// nameOf returns what a path leads to. The namespace of another attachment in the journal, and the
// runtime's own one, identify no ADD of this attachment.
func (d *deleting) nameOf(ctx context.Context, path string) facts.Named {
	seen, _ := facts.Look(path, d.Key.IfName)
	hosts := d.IsHost(seen.Netns) && !d.overridesNetNS()
	if seen.Netns.Known() && (hosts || d.Anothers(ctx, d.Key, seen.Netns)) {
		seen = facts.Interface{Netns: journal.NetNS{Path: path}}
	}
	again := d.Conf.PrevResult != nil && seen.Is(netconf.AddressesOf(d.Conf.PrevResult))
	return facts.Named{Interface: seen, Again: again}
}

// isOf reports whether the runtime's DEL is that of a record's ADD. Without a path, it is that of
// the newest one.
func (d *deleting) isOf(e *journal.Entry) bool {
	if d.netns.Path == "" {
		return d.entry == nil || e == d.entry
	}
	return d.IsAt(e, d.netns) || d.Names(e, d.named())
}

// addUnrecorded adds an entry for the ADD whose namespace the runtime's DEL names, if no record is
// of that ADD. The attachment was added again while the journal could not be written, or while
// unwind was off. addUnrecorded reports whether it added one.
func (d *deleting) addUnrecorded() bool {
	records := append([]*journal.Entry{d.entry}, d.older...)
	if slices.ContainsFunc(slices.Concat(records, d.undone), d.isOf) {
		return false
	}
	chain, err := d.Chain()
	if err != nil {
		d.log.Warn("the journal does not contain the ADD of this DEL, and the chain cannot be read",
			"err", err)
		return false
	}
	e := d.reconstruct(chain, slices.Concat(records, d.undone)...)
	if len(e.Undo.Steps) == 0 {
		return false
	}
	d.log.Warn("the attachment was added again by an ADD that the journal did not record; " +
		"undoing both ADDs")
	d.entry, d.older = e, records
	return true
}

// complete gives an interrupted ADD the runtime's prevResult, if that names the ADD's namespace. It
// reports whether it did so. Any other prevResult belongs to an earlier ADD of the container ID.
func (d *deleting) complete() bool {
	e := d.entry
	if e.Undo.State != journal.Adding || e.Got.Result != nil || !d.isOf(e) || !d.hasResultOf(e) {
		return false
	}
	chain, err := d.Chain()
	if err != nil {
		d.log.Warn("the journal entry of the ADD is incomplete, and the chain cannot be read", "err", err)
		return false
	}
	d.takePrevResult(e, chain)
	e.Undo.State = journal.Live
	return true
}

// hasResultOf reports whether the runtime's prevResult names the namespace of a record's ADD.
func (d *deleting) hasResultOf(e *journal.Entry) bool {
	return d.sandbox != "" && d.Names(e, d.result())
}

// reconstruct returns an entry for an ADD that the journal does not have, from the runtime's input.
// The runtime's prevResult is not taken if it names the namespace of one of the records instead.
func (d *deleting) reconstruct(chain *netconf.Chain, records ...*journal.Entry) *journal.Entry {
	e := d.newEntry(journal.Deleting, chain)
	e.Added.NetNS.Path = d.netns.Path
	if d.args.Netns != "" { // a path in prevResult may lead elsewhere by now
		e.Added.NetNS = d.named().Netns
	}
	if facts.SamePath(d.sandbox, d.netns.Path) || !slices.ContainsFunc(records, d.hasResultOf) {
		d.takePrevResult(e, chain)
	}
	if d.Conf.NeverAdded() { // a delegate without a binary allocated nothing
		undo.Interrupted(e.Undo.Steps)
		e.Undo.Steps = slices.DeleteFunc(e.Undo.Steps, func(s journal.Step) bool {
			_, err := netconf.FindPlugin(s.Type, e.Added.Path)
			return err != nil
		})
	}
	if err := checkText(d.args); err != nil {
		d.degrade("DEL", err)
	}
	return e
}

// fromStdin creates an entry from the runtime's configuration and prevResult, for an attachment
// that was added before unwind was installed, or whose entry was lost.
func (d *deleting) fromStdin() error {
	chain, err := d.Chain()
	switch {
	case err == nil:
	case d.Conf.NeverAdded():
		d.succeedIdle("the journal has no entry, and the runtime has no ADD result", err, false)
		return nil
	case errors.Is(err, netconf.ErrNoChain) && d.bad == nil && !d.Journal.Unwritable:
		// multus up to 4.3 removes unwind's keys from a clusterNetwork, so a retry could not help
		d.succeedIdle("the journal in "+d.Conf.StateDir+" does not contain the attachment, "+
			"and the runtime's configuration contains no chain", err, false)
		return nil
	default:
		_ = d.lock.Remove()
		return badConfig(fmt.Errorf("%s is not in the journal, and the chain cannot be read: %w", d.Key,
			err))
	}
	e := d.reconstruct(chain, d.undone...)
	if len(e.Undo.Steps) == 0 {
		d.succeedIdle("no plugin of the chain is in CNI_PATH, and the runtime has no ADD result",
			nil, false)
		return nil
	}
	d.entry = e
	return nil
}

// takePrevResult stores the runtime's prevResult as the result of the ADD, with claims for the
// first delegate of the chain that calls an IPAM plugin.
func (d *deleting) takePrevResult(e *journal.Entry, chain *netconf.Chain) {
	if d.Conf.PrevResult == nil {
		return
	}
	raw, err := netconf.ConvertResult(d.Conf.PrevResult, chain.CNIVersion)
	r, parseErr := netconf.ParseResult(raw)
	if err = cmp.Or(err, parseErr); err != nil {
		d.log.Warn("ignoring the runtime's prevResult, which is invalid", "err", err)
		return
	}
	e.Got.Result, e.Got.HostLinks = raw, facts.HostLinks(r)
	first := max(0, slices.IndexFunc(chain.Delegates,
		func(d netconf.Delegate) bool { return d.IPAM != "" }))
	by := chain.Steps(d.Conf)[first]
	e.Got.Claims = append(e.Got.Claims, newClaims(e, r, by)...)
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
		d.Journal.Event(journal.Event{
			Key: d.Key, Kind: journal.NoOp, Pod: netconf.PodOf(d.args.Args), Reason: why,
		})
	}
}
