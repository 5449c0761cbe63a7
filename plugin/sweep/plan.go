package sweep

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/record"
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
	if err := s.w.Journal.Renew(ctx); err != nil {
		return nil, err
	}
	return s.plan(ctx, func(*Finding) bool { return false })
}

// plan does the work of Plan by the snapshot. It ends at a finding for which enough returns true.
func (s *Sweep) plan(ctx context.Context, enough func(*Finding) bool) ([]Finding, error) {
	records := s.w.Journal.Snapshot(ctx)
	findings, keys, err := s.skipLive(records)
	if err != nil {
		return nil, err
	}
	entries := make([]*journal.Entry, 0, len(keys))
	for _, k := range keys {
		e, err := records.Get(k)
		switch {
		case err != nil:
			findings = append(findings, Finding{Key: k, Err: err, Verdict: decide.Verdict{
				Fate: decide.Unknown, Reason: decide.Reason{Text: "its journal entry cannot be read"}}})
		case e != nil:
			entries = append(entries, e)
		}
	}
	sortByAge(entries, journal.BootNanos())
	for _, e := range entries {
		f := s.finding(ctx, e)
		if findings = append(findings, f); enough(&f) {
			return findings, nil
		}
	}
	return findings, s.guardMassRelease(findings)
}

// sortByAge sorts records by the time since their last change, the longest first. It uses the boot
// clock, because somebody may set the wall clock. A time after now is from an earlier boot.
func sortByAge(entries []*journal.Entry, now int64) {
	changed := func(e *journal.Entry) int64 {
		if e.Updated.Boot > now {
			return 0
		}
		return e.Updated.Boot
	}
	slices.SortStableFunc(entries,
		func(a, b *journal.Entry) int { return cmp.Compare(changed(a), changed(b)) })
}

// skipLive returns findings for the attachments that are plainly live: added in this boot, with the
// network namespace at its path, and not missing from the runtime's list. It returns the keys of
// the others. skipLive identifies a namespace by its inode. A new namespace may have the path and
// inode of a deleted one. Only unwindctl sweep detects that, because it skips no attachment.
func (s *Sweep) skipLive(
	records *record.Snapshot,
) (findings []Finding, look []journal.Key, err error) {
	var outlines []journal.Outline
	// a damaged outline has neither a state nor a boot ID
	err = records.Outlines(func(o journal.Outline, _ error) error {
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
			Finding{Key: o.Key, State: o.State, Verdict: decide.NetNSThere, thisBoot: true})
	}
	return findings, look, err
}

// finding judges an attachment.
func (s *Sweep) finding(ctx context.Context, e *journal.Entry) Finding {
	f := Finding{
		Key: e.Key, Pod: e.Added.Pod, State: e.Undo.State,
		thisBoot: s.w.Node.SameBoot(e) == tristate.Yes,
	}
	ev := s.w.Node.Gather(ctx, e, nil)
	f.Evidence = ev
	if f.orphaned = decide.Yes(ev.Locked) && s.orphaned(e); f.orphaned {
		ev.Locked = tristate.No
	}
	f.Verdict, f.Left = decide.Decide(ev), s.w.Node.GraceLeft(e)
	f.Busy = f.Verdict == decide.Locked
	if f.Warn && !s.Quick {
		s.w.Log.Warn(f.Reason.Text, "attachment", e.Key.String())
	}
	if f.Releasable() {
		f.Pending, f.failing = undo.PendingSteps(e), undo.FailingPlugins(e)
		f.Deferred = !s.w.Ready(ctx, e, !s.Periodic)
	}
	return f
}

// ready reports whether a sweep would release the attachment now.
func (f *Finding) ready() bool { return f.Releasable() && !f.Deferred && f.Err == nil }

func (s *Sweep) covers(k journal.Key) bool {
	return (s.Network == "" || k.Network == s.Network) && (s.Attachment == nil || k == *s.Attachment)
}

// orphaned reports whether only the delegates of a dead unwind hold an attachment's lock.
func (s *Sweep) orphaned(e *journal.Entry) bool {
	if s.w.Node.SameBoot(e) != tristate.Yes || s.w.Node.SameNamespaces(e) != tristate.Yes {
		return false
	}
	lock, err := s.w.Journal.Store.LookAtLock(e.Key)
	return lock.Owner == 0 && err == nil
}
