package sweep

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/undo"
)

// Finding is the verdict on an attachment, or on host-local addresses without an owner. It also
// contains the outcome of the release.
type Finding struct {
	journal.Key
	decide.Judgment
	Addresses []netip.Addr // set if the attachment is not in the journal
	Cached    bool         // the attachment is in libcni's cache
	Pod       journal.Pod
	State     journal.State // before the release
	Busy      bool          // another unwind process holds its lock, so it counts as live
	Deferred  bool          // it is dead, but the sweep does not run its DELs yet
	Released  bool          // nothing remains of it that a sweep would find
	Pending   []string      // the delegates with a pending DEL, each with the reason
	Err       error         // why it was not released, or not completely
	Left      time.Duration // the remaining grace period, if the verdict is Recent
	// Removed names the plugins that have a pending DEL but have left the network's chain. The runtime
	// gets no error for their DELs.
	Removed []string

	Evidence decide.Evidence // evidence for the verdict; zero if the verdict needed none
	// Records contains the attachment's records before the release, newest first. If the attachment is
	// dead, but this sweep does not release it, the steps say what their DELs wait for now.
	Records []*journal.Record
	// Older contains the verdict on each older record, from the evidence for that record. The sweep
	// does not use these verdicts: it releases all records of an attachment, or none.
	Older []Finding

	counts bool // the mass-release guard counts it (see holdsNothing)
	failed int  // the tries of its least-tried DEL, if all its DELs have failed (see undo.FailedTries)

	owner *owner // set if the attachment is not in the journal
}

// Elsewhere reports whether this process cannot judge the attachment, because its ADD may have run
// in other namespaces.
func (f *Finding) Elsewhere() bool {
	return f.Verdict == decide.Unknown && f.Err == nil && !f.Cached &&
		!decide.Yes(f.Evidence.SameNamespaces)
}

// Plan returns the verdict on each attachment in the journal that the sweep covers, and applies the
// mass-release guard. It changes nothing.
func (s *Sweep) Plan(ctx context.Context) ([]Finding, error) {
	if err := s.w.Node.Journal.Renew(ctx); err != nil {
		return nil, err
	}
	return s.plan(ctx, func(*Finding) bool { return false })
}

// plan is like Plan, but uses the current snapshot. If enough returns true for a finding, plan
// stops there and does not apply the guard.
func (s *Sweep) plan(ctx context.Context, enough func(*Finding) bool) ([]Finding, error) {
	snapshot := s.w.Node.Journal.Snapshot(ctx)
	findings, keys := s.skipLive(snapshot)
	attachments := make([][]*journal.Record, 0, len(keys))
	for _, k := range keys {
		all, err := snapshot.Pending(k)
		switch {
		case err != nil:
			findings = append(findings, Finding{Key: k, Err: err, Judgment: decide.Judgment{
				Verdict: decide.Unknown, Reason: decide.Reason{Text: "its journal record cannot be read"}}})
		case len(all) > 0 && !s.w.Spares(all[0]):
			attachments = append(attachments, all)
		}
	}
	sortByAge(attachments, journal.BootNanos())
	for _, all := range attachments {
		f := s.finding(ctx, all)
		findings = append(findings, f)
		if enough(&f) {
			return findings, nil
		}
	}
	return findings, s.guardMassRelease(findings)
}

// sortByAge sorts attachments by the last change of their newest record, the oldest change first.
// It uses the boot clock, because the wall clock can be changed. A time after now is from an
// earlier boot, and comes first.
func sortByAge(attachments [][]*journal.Record, now int64) {
	changed := func(records []*journal.Record) int64 {
		if records[0].Updated.Boot > now {
			return 0
		}
		return records[0].Updated.Boot
	}
	slices.SortStableFunc(attachments,
		func(a, b []*journal.Record) int { return cmp.Compare(changed(a), changed(b)) })
}

// skipLive returns findings for the attachments that are plainly live: added in this boot, with the
// network namespace at its path, and not missing from the runtime's list. look contains the keys of
// all other attachments. skipLive identifies a namespace by its device and inode, so it does not
// detect a new namespace with the path and inode of a deleted one. If no runtime started the sweep,
// as with unwindctl sweep, skipLive skips nothing, so the sweep does detect such a namespace.
func (s *Sweep) skipLive(
	records *record.Snapshot,
) (findings []Finding, look []journal.Key) {
	var outlines []journal.Outline
	// a damaged outline has no state, so its attachment is not skipped; the function never fails
	_ = records.Outlines(func(o journal.Outline, _ error) error {
		if n := len(outlines); n > 0 && outlines[n-1].Key == o.Key {
			outlines[n-1] = o // only the newest ADD of an attachment counts
		} else if s.covers(o.Key) {
			outlines = append(outlines, o)
		}
		return nil
	})
	findings = make([]Finding, 0, len(outlines))
	for _, o := range outlines {
		var st unix.Stat_t
		if o.State != journal.Live || o.BootID != s.w.Node.Host.BootID || s.Attachment != nil ||
			s.List != nil && !s.List.Names(o.Key) ||
			!s.w.Node.Invoked || unix.Stat(o.NetNS.Path, &st) != nil || st.Ino != o.NetNS.Ino ||
			st.Dev != o.NetNS.Dev {
			look = append(look, o.Key)
			continue
		}
		findings = append(findings,
			Finding{Key: o.Key, State: o.State, Judgment: decide.NetNSThere, counts: true})
	}
	return findings, look
}

// finding judges an attachment by its newest record.
func (s *Sweep) finding(ctx context.Context, records []*journal.Record) Finding {
	e := records[0]
	f := Finding{Key: e.Key, Pod: e.Added.Pod, State: e.State}
	ev := s.w.Node.Gather(ctx, e, nil)
	f.Evidence = ev
	f.Judgment, f.Left = decide.Decide(ev), s.w.Node.GraceLeft(e)
	f.Busy = f.Judgment == decide.Locked
	f.counts = e.State == journal.Live && decide.Yes(ev.SameBoot) &&
		!(f.Verdict == decide.Dead && holdsNothing(records, ev))
	if f.Warn && !s.Quick {
		s.w.Node.Log.Warn(f.Reason.Text, "attachment", e.Key.String())
	}
	if f.Releasable() {
		f.failed, f.Deferred = undo.FailedTries(e), !s.w.Ready(ctx, e, !s.Periodic)
		for i := range e.Steps {
			if s.w.HasLeft(e, &e.Steps[i]) == decide.True {
				f.Removed = append(f.Removed, e.Steps[i].Type)
			}
		}
	}
	for _, e := range records {
		if s.DryRun && f.Releasable() || f.Deferred && !s.Quick {
			e = s.waiting(ctx, e)
		}
		f.Records = append(f.Records, e)
		if len(f.Records) > 1 {
			ev := s.w.Node.Gather(ctx, e, nil)
			f.Older = append(f.Older, Finding{Key: e.Key, Pod: e.Added.Pod, State: e.State,
				Evidence: ev, Judgment: decide.Decide(ev), Left: s.w.Node.GraceLeft(e)})
		}
	}
	if f.Releasable() {
		f.Pending = undo.PendingSteps(f.Records[0])
	}
	return f
}

// waiting returns a copy of a record. The steps of the copy say what their DELs wait for now.
func (s *Sweep) waiting(ctx context.Context, e *journal.Record) *journal.Record {
	now := e.Clone()
	for i, next := range s.w.Due(ctx, e, false) {
		now.Steps[i].Next = next
	}
	return now
}

// ready reports whether a sweep would release the attachment now.
func (f *Finding) ready() bool { return f.Releasable() && !f.Deferred && f.Err == nil }

func (s *Sweep) covers(k journal.Key) bool {
	return (s.Network == "" || k.Network == s.Network) && (s.Attachment == nil || k == *s.Attachment)
}

// MassReleaseError means that the mass-release guard kept attachments that seem dead, because there
// are too many of them: more than 10, and more than 30 % of this boot's records in state live. It
// is more likely that the verdicts are wrong than that so many pods of a node died at the same
// time.
type MassReleaseError struct {
	Dead, Live int
	// Fresh is set if too many attachments seem dead for the first time. The runtime's list may be
	// wrong, so this sweep judges no attachment that is not in the journal. Later sweeps also keep the
	// attachments that this sweep keeps, but release attachments that die later.
	Fresh bool
}

func (e *MassReleaseError) Error() string {
	return fmt.Sprintf("%d of the %d attachments of this boot seem dead, which is implausibly "+
		"many; they are kept. If their pods really were deleted, for example while unwind was off, "+
		"run unwindctl sweep --force", e.Dead, e.Live)
}

// tooMany reports whether the guard keeps the dead attachments. live is the number of all
// attachments that the guard counts, including the dead ones.
func tooMany(dead, live int) bool { return dead > 10 && dead*10 > live*3 }

// holdsNothing reports whether a dead attachment provably has no resources: host-local assigned all
// its addresses and has released them, and the host end of its interface is gone. So its DEL has
// run, for example while unwind was off.
func holdsNothing(records []*journal.Record, ev decide.Evidence) bool {
	return decide.No(ev.HostLink) && !slices.ContainsFunc(records, func(e *journal.Record) bool {
		return len(e.Got.Claims) == 0 ||
			slices.ContainsFunc(e.Steps, func(s journal.Step) bool { return s.MayAllocate }) ||
			slices.ContainsFunc(e.Got.Claims, func(c journal.Claim) bool {
				owner := ipam.Owner{ContainerID: e.ContainerID, IfName: e.IfName}
				there, err := ipam.HasFileOf(c.Pool, owner, c.Address)
				return c.Pool == "" || there || err != nil
			})
	})
}

// guardMassRelease keeps the dead attachments that it counts, if they are too many. If an earlier
// sweep kept some of them, the others alone decide: if the others are too many, guardMassRelease
// keeps all; otherwise, it keeps only those that the earlier sweep kept.
func (s *Sweep) guardMassRelease(findings []Finding) error {
	live := 0
	var dead, kept []*Finding
	for i := range findings {
		f := &findings[i]
		if !f.counts {
			continue
		}
		live++
		if f.Verdict == decide.Dead {
			dead = append(dead, f)
			if f.Records[0].Guarded {
				kept = append(kept, f)
			}
		}
	}
	if s.Force || !tooMany(len(dead), live) {
		return nil
	}
	err := &MassReleaseError{Fresh: tooMany(len(dead)-len(kept), live-len(kept))}
	if err.Fresh {
		kept = dead
	}
	err.Dead, err.Live = len(kept), live
	for _, f := range kept {
		f.Err = err
	}
	return err
}

// noteGuarded records which attachments the guard has kept for the first time.
func (s *Sweep) noteGuarded(ctx context.Context, findings []Finding) error {
	return s.w.Node.Journal.Update(ctx, func(tx *journal.Tx) error {
		for i := range findings {
			f := &findings[i]
			var guarded *MassReleaseError
			if !errors.As(f.Err, &guarded) {
				continue
			}
			e, err := tx.Get(f.Key)
			if err != nil {
				return err
			}
			if e == nil || e.Number != f.Records[0].Number || e.State != journal.Live {
				continue // another verb has changed the record meanwhile
			}
			e.Guarded = true
			if err := tx.Amend(e); err != nil {
				return err
			}
		}
		return nil
	})
}

// Network is a network with its present chain.
type Network struct {
	Chain *netconf.Chain
	Conf  *netconf.Conf
}

// Pool is a directory in which host-local keeps the addresses of a network.
type Pool struct {
	Network string
	Dir     string
	Config  json.RawMessage // the configuration of the delegate that calls host-local
	// Plain is set if a runtime runs the chain itself, without unwind.
	Plain bool

	chain *netconf.Chain
	conf  *netconf.Conf
}

// PoolsOf returns the pools of a chain.
func PoolsOf(ch *netconf.Chain, c *netconf.Conf) (pools []Pool) {
	for i := range ch.Delegates {
		config := ch.Config(i, c)
		p := Pool{Network: c.Name, Dir: ipam.Pool(ch.Delegates[i].IPAM, config, c.Name),
			Config: config, chain: ch, conf: c}
		if p.Dir != "" && !slices.ContainsFunc(pools, func(o Pool) bool { return o.Dir == p.Dir }) {
			pools = append(pools, p)
		}
	}
	return pools
}

// freeEmpty releases those addresses of a pool whose files contain no owner (see ipam.WhyEmpty).
func (s *Sweep) freeEmpty(ctx context.Context, pool Pool) (findings []Finding, err error) {
	plan, err := s.findEmpty(ctx, pool)
	var released []ipam.Reservation
	if !s.DryRun {
		var applyErr error
		released, applyErr = ipam.Apply(ctx, pool.Dir, plan)
		err = errors.Join(err, applyErr)
	}
	for _, r := range plan {
		f := Finding{Key: journal.Key{Network: pool.Network}, Addresses: []netip.Addr{r.Address},
			Judgment: decide.Judgment{Verdict: decide.Dead, Reason: decide.Reason{Text: ipam.WhyEmpty}}}
		if f.Released = slices.Contains(released, r); f.Released {
			s.w.Node.Journal.Event(journal.Event{Kind: journal.Released, Key: f.Key,
				Addresses: f.Addresses, Reason: ipam.WhyEmpty})
			s.w.Node.Log.Info("address released", "network", pool.Network, "address", r.Address, "reason",
				ipam.WhyEmpty)
		}
		findings = append(findings, f)
	}
	return findings, err
}

// findEmpty returns the reservations of a pool that have no owner. It omits an address that a
// record in the journal claims: the address's file had an owner once, for example before a power
// loss. Such an address stays reserved until the record is deleted.
func (s *Sweep) findEmpty(ctx context.Context, pool Pool) ([]ipam.Reservation, error) {
	found, err := ipam.Scan(pool.Dir)
	return slices.DeleteFunc(found, func(r ipam.Reservation) bool {
		return !r.Empty() || s.w.Node.Journal.Snapshot(ctx).Claims(r.Pool, r.Address)
	}), err
}
