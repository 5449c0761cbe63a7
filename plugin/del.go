package plugin

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/ipam"
	"cni-unwind/journal"
)

// deleting is one DEL under way.
//
//  1. Take the attachment's lock.
//  2. Find what there is to undo: the entry; or nothing, if a tombstone says that all was undone before the runtime
//     asked; or what the configuration on stdin says, for attachments that the journal does not know. In the same
//     transaction: write that the DEL has begun.
//  3. Undo.
//  4. Write what is left, if anything.
//  5. Replay the DELs of others that were parked because the address was ours.
//
// No error of the journal or of the configuration stands between a pod and its DEL.
type deleting struct {
	*op
	lock    *journal.Lock
	entry   *journal.Entry
	noWrite bool // the journal failed: what it holds of the attachment stays as it is
}

func (o *op) del() error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(o.ctx), o.Budgets.Undo)
	defer cancel()
	if o.bad != nil {
		o.log.Warn("the configuration is wrong; what is wrong in it has its default", "err", o.bad)
	}
	d := &deleting{op: o}
	lock, killed, err := o.lockOurs(ctx)
	var busy *types.Error
	switch {
	case errors.As(err, &busy):
		return busy
	case err != nil:
		d.journalFailed(err)
	default:
		d.lock = lock
		defer lock.Release()
	}
	if err := d.find(ctx, killed); err != nil || d.entry == nil {
		return err
	}
	return d.carryOut(ctx)
}

// askedFor is why an entry is removed.
const askedFor = "the runtime asked for its DEL"

func (d *deleting) journalFailed(err error) {
	d.degraded("DEL", err)
	d.log.Error("the journal failed; the DEL goes on without it", "attachment", d.key.String(), "err", err)
	d.noWrite = true
}

// find leaves in d.entry what there is to undo, nil if nothing is, and writes that the DEL has begun.
func (d *deleting) find(ctx context.Context, killed bool) error {
	var tomb *journal.Tombstone
	errUnknown := errors.New("the journal does not know it")
	look := func(tx *journal.Tx) (err error) {
		if d.entry, err = readable(tx.Get(d.key)); err != nil {
			return err
		}
		if d.entry == nil {
			tomb, err = tx.Tombstone(d.key)
			return errors.Join(err, errUnknown)
		}
		if killed {
			markKilled(d.entry, d.conf.GracePeriod)
		}
		if gen := d.entry.Newest(); d.entry.State == journal.Adding && (d.lock != nil && d.lock.Made() || d.fits(gen)) {
			d.complete(gen)
		}
		return nil
	}
	err := d.update(ctx, func(tx *journal.Tx) error {
		if err := look(tx); err != nil {
			return err
		}
		return d.mark(tx, d.entry, askedFor)
	})
	if err != nil && !errors.Is(err, errUnknown) {
		d.journalFailed(err)
		d.read(ctx, look) // a journal that cannot be written may still say what to undo
	}
	switch {
	case d.entry != nil:
		return nil
	case tomb != nil && !d.another(tomb):
		d.log.Debug("nothing to undo", "attachment", d.key.String(), "reason", tomb.Reason)
		d.forgetLock()
		return nil
	}
	if err := d.fromStdin(); err != nil || d.entry == nil || d.noWrite {
		return err
	}
	if err := d.begin(ctx, d.entry, askedFor); err != nil {
		d.log.Error("the journal cannot be told that a DEL begins", "attachment", d.key.String(), "err", err)
	}
	return nil
}

// another says whether the DEL is for another container than the tombstone's: one with the same ID, added without us.
func (d *deleting) another(tomb *journal.Tombstone) bool {
	id, err := identify(d.args.Netns)
	return err == nil && tomb.NetNS.Known() && (tomb.BootID != d.host.BootID || !id.Same(tomb.NetNS))
}

// forgetLock removes the lock file of an attachment of which the journal has nothing.
func (d *deleting) forgetLock() {
	if d.lock != nil {
		_ = d.lock.Forget()
	}
}

// fromStdin makes an entry out of the configuration and the prevResult that the runtime gave: the attachment was added
// before unwind was installed, or its entry was lost.
func (d *deleting) fromStdin() error {
	chain, err := d.conf.LoadChain()
	if err != nil {
		d.forgetLock()
		if d.neverAdded() {
			d.log.Warn("nothing to undo: the journal has nothing, and the runtime has no result of an ADD",
				"attachment", d.key.String(), "err", err)
			return nil
		}
		return badConfig(fmt.Errorf("the journal does not know %s, and the chain cannot be read: %w", d.key, err))
	}
	netns, _ := identify(d.args.Netns)
	// Which namespace the ADD was given is not on record. That of the runtime's path is taken on its word.
	gen := journal.Generation{
		NetNS: journal.NetNS{Path: netns.Path}, Args: d.args.Args, Path: d.args.Path, CNIVersion: chain.CNIVersion,
		Host: d.host, Created: journal.Now(), GracePeriod: max(1, d.conf.GracePeriod), Steps: chain.steps(d.conf),
	}
	if d.neverAdded() { // a binary that is missing made the ADD take nothing
		gen.Steps = slices.DeleteFunc(gen.Steps, func(s journal.Step) bool {
			_, err := findPlugin(s.Type, gen.Path)
			return err != nil
		})
	}
	if len(gen.Steps) == 0 {
		d.forgetLock()
		return nil
	}
	d.takePrevResult(&gen, chain)
	d.entry = &journal.Entry{
		Key: d.key, State: journal.Removing, Pod: podOf(d.args.Args), Generations: []journal.Generation{gen},
	}
	if err := checkText(d.args); err != nil {
		d.journalFailed(err)
	}
	return nil
}

// complete adds to an ADD that succeeded, though the journal could not be told, what the runtime and the chain on stdin
// say of it.
func (d *deleting) complete(gen *journal.Generation) {
	chain, err := d.conf.LoadChain()
	if err != nil {
		d.log.Warn("the journal has a part of the ADD, and the chain cannot be read", "attachment", d.key.String(), "err", err)
		return
	}
	steps := chain.steps(d.conf)
	for i, s := range gen.Steps {
		if i >= len(steps) || s.Index != i || s.Type != steps[i].Type {
			d.log.Warn("the journal has a part of the ADD, and the chain is another one now", "attachment", d.key.String())
			return
		}
	}
	gen.Steps = append(gen.Steps, steps[len(gen.Steps):]...)
	d.takePrevResult(gen, chain)
}

// fits says whether the runtime's prevResult can be the result of an ADD: it has all addresses that the ADD got. If the ADD was
// cut off, the runtime may still have that of an earlier one of the container ID.
func (d *deleting) fits(gen *journal.Generation) bool {
	r, err := parseResult(d.conf.PrevResult)
	return d.conf.PrevResult != nil && err == nil && !slices.ContainsFunc(gen.Claims, func(c journal.Claim) bool {
		return !slices.Contains(r.addresses(), c.Address)
	})
}

// takePrevResult takes the runtime's prevResult as the result of the ADD.
func (d *deleting) takePrevResult(gen *journal.Generation, chain *Chain) {
	if d.conf.PrevResult == nil {
		return
	}
	raw, err := convertResult(d.conf.PrevResult, chain.CNIVersion)
	if err != nil {
		d.log.Warn("the runtime's prevResult cannot be used", "attachment", d.key.String(), "err", err)
		return
	}
	r, err := parseResult(raw)
	if err != nil {
		d.log.Warn("the runtime's prevResult cannot be used", "attachment", d.key.String(), "err", err)
		return
	}
	gen.Result, gen.HostLinks = raw, hostLinks(r)
	for _, c := range claimsOf(r, chain, d.key.Network, d.conf) {
		if !slices.ContainsFunc(gen.Claims, func(o journal.Claim) bool { return o.Address == c.Address }) {
			gen.Claims = append(gen.Claims, c)
		}
	}
}

// neverAdded says whether the runtime has no result of an ADD, though it would give one if it had.
func (d *deleting) neverAdded() bool {
	gives, err := version.GreaterThanOrEqualTo(d.conf.CNIVersion, "0.4.0")
	return err == nil && gives && d.conf.PrevResult == nil
}

// claimsOf gives the addresses of a final result to the first delegate of the chain that calls an IPAM plugin.
func claimsOf(r *result, chain *Chain, network string, conf *Conf) []journal.Claim {
	first := max(0, slices.IndexFunc(chain.Delegates, func(d Delegate) bool { return d.IPAM != "" }))
	pool := ipam.Pool(chain.Config(first, conf), network)
	var claims []journal.Claim
	for _, address := range r.addresses() {
		claims = append(claims, journal.Claim{Address: address, Step: first, Pool: pool})
	}
	return claims
}

// carryOut undoes the entry and says how that ended.
func (d *deleting) carryOut(ctx context.Context) error {
	e := d.entry
	freed := e.Addresses()
	failures := d.undo(ctx, d.lock, e, d.args.Netns)
	durable := false
	if !d.noWrite {
		err := d.finish(ctx, d.lock, e, nil)
		if durable = err == nil; !durable {
			d.log.Error("the journal cannot be told how a DEL ended", "attachment", d.key.String(), "err", err)
		}
	}
	d.replayParked(ctx, freed)
	if len(failures) == 0 || d.conf.OnDelFailure == "defer" && durable {
		return nil
	}
	return delError(failures, durable)
}
