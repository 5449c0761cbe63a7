package sweep

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"
)

// Finding is the verdict on an attachment, or on host-local addresses without an owner. It also
// contains the outcome of the release.
type Finding struct {
	journal.Key
	decide.Verdict
	Addresses []netip.Addr // set if the attachment is not in the journal
	Cached    bool         // the attachment is in libcni's cache
	Pod       journal.Pod
	State     journal.State // before the release
	Busy      bool          // another unwind process holds its lock, so it counts as live
	Deferred  bool          // it is dead, but not ready to retry
	Released  bool          // nothing remains of it
	Pending   []string      // the delegates with a pending DEL, each with the reason
	Err       error         // why it was not released
	Left      time.Duration // the rest of its grace period, if it is Recent

	Evidence decide.Evidence // evidence for the verdict; zero if the verdict needed none

	thisBoot bool     // it was added in this boot
	orphaned bool     // orphaned delegates hold its lock
	failing  []string // the plugins whose DELs failed (see undo.FailingPlugins)

	owner *owner // set if the attachment is not in the journal
}

// Elsewhere reports whether this process cannot judge the attachment, because its ADD ran in other
// namespaces.
func (f *Finding) Elsewhere() bool {
	return f.Fate == decide.Unknown && f.Err == nil && !f.Cached &&
		!decide.Yes(f.Evidence.SameNamespaces)
}

// Plan returns the verdict on every attachment in the journal, and applies the mass-release guard.
// It changes nothing.
func (s *Sweep) Plan(ctx context.Context) ([]Finding, error) {
	findings, keys, err := s.skipLive(ctx)
	if err != nil {
		return nil, err
	}
	entries := make([]*journal.Entry, 0, len(keys))
	err = s.w.Journal.Store.View(ctx, func(tx *journal.Tx) error {
		for _, k := range keys {
			e, err := tx.Get(k)
			switch {
			case err != nil:
				findings = append(findings, Finding{Key: k, Err: err, Verdict: decide.Verdict{
					Fate: decide.Unknown, Reason: decide.Reason{Text: "its journal entry cannot be read"}}})
			case e != nil:
				entries = append(entries, e)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(entries,
		func(a, b *journal.Entry) int { return a.Updated.Wall.Compare(b.Updated.Wall) })
	for _, e := range entries {
		findings = append(findings, s.finding(ctx, e))
	}
	return findings, s.guardMassRelease(findings)
}

// skipLive returns findings for the attachments that are plainly live: added in this boot, with the
// network namespace at its path, and not missing from the runtime's list. It returns the keys of
// the others. skipLive identifies a namespace by its inode. A new namespace may have the path and
// inode of a deleted one. Only unwindctl sweep detects that, because it skips no attachment.
func (s *Sweep) skipLive(ctx context.Context) (findings []Finding, look []journal.Key, err error) {
	var outlines []journal.Outline
	s.last = s.w.Journal.Store.LastSweep()
	err = s.w.Journal.Store.View(ctx, func(tx *journal.Tx) error {
		outlines = nil
		// a damaged outline has neither a state nor a boot ID
		return tx.Outlines(func(o journal.Outline, _ error) error {
			if n := len(outlines); n > 0 && outlines[n-1].Key == o.Key {
				outlines[n-1] = o // only the newest ADD of an attachment counts
			} else if s.covers(o.Key) {
				outlines = append(outlines, o)
			}
			return nil
		})
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
			Finding{Key: o.Key, State: o.State, Verdict: decide.NetNSThere, thisBoot: true})
	}
	return findings, look, err
}

// finding judges an attachment.
func (s *Sweep) finding(ctx context.Context, e *journal.Entry) Finding {
	f := Finding{
		Key: e.Key, Pod: e.Pod, State: e.State,
		thisBoot: s.w.Node.SameBoot(e) == tristate.Yes,
	}
	ev := s.w.Node.Gather(ctx, e, nil)
	f.Evidence = ev
	if f.orphaned = decide.Yes(ev.Locked) && s.orphaned(e); f.orphaned {
		ev.Locked = tristate.No
	}
	f.Verdict, f.Left = decide.Decide(ev), s.w.Node.GraceLeft(e)
	f.Busy = f.Verdict == decide.Locked
	if f.Warn && !s.Quick { // a Quick sweep would repeat it at each STATUS
		s.w.Log.Warn(f.Reason.Text, "attachment", e.Key.String())
	}
	if f.Releasable() {
		f.Pending, f.failing = undo.PendingSteps(e), undo.FailingPlugins(e)
		f.Deferred = !s.w.Ready(ctx, e, !s.Periodic)
	}
	return f
}

func (s *Sweep) covers(k journal.Key) bool {
	return (s.Network == "" || k.Network == s.Network) && (s.Attachment == nil || k == *s.Attachment)
}

// orphaned reports whether only delegates hold an attachment's lock, and whether they have held it
// for longer than unwind waits for delegates.
func (s *Sweep) orphaned(e *journal.Entry) bool {
	if s.w.Node.SameBoot(e) != tristate.Yes || s.w.Node.SameNamespaces(e) != tristate.Yes ||
		journal.BootNanos()-e.Updated.Boot < int64(s.w.Budgets.Orphans) {
		return false
	}
	lock, err := s.w.Journal.Store.LookAtLock(e.Key)
	return lock.Owner == 0 && err == nil
}
