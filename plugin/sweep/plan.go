package sweep

import (
	"context"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"
)

// Finding is the verdict on an attachment, or on a host-local reservation without an attachment in
// the journal, and the outcome of its release.
type Finding struct {
	journal.Key
	alive.Verdict
	Address  netip.Addr // of a reservation; the Key has its owner, if any
	Pod      journal.Pod
	State    journal.State // before the release
	Busy     bool          // another unwind is working on it, so it counts as live
	Deferred bool          // it is dead, but not ready to retry
	Released bool          // nothing of it remains
	Pending  []string      // the delegates with a pending DEL, each with the reason
	Err      error         // why it was not released
	// Left are the commands that remove the leftovers of a dead container, if libcni's cache has no
	// DEL for it, see Leftovers. With LeftOnly it has nothing else to release; the key is empty if
	// the container's ID is unknown.
	Left     []string
	LeftOnly bool

	Evidence alive.Evidence // evidence for the verdict; zero if the verdict needed none

	listed     bool // the sweep had a list
	identified bool // its network namespace is on record

	thisBoot bool     // it was added in this boot
	passed   bool     // live only in the journal, because its DEL passed, see alive.Node.Passed
	orphaned bool     // orphaned delegates hold its lock
	failing  []string // see undo.FailingPlugins

	cached *alive.Cached // set if only libcni's cache has the attachment, see planCached
}

// Cached reports whether libcni's cache has the attachment and the journal does not. If so, it
// returns the cached addresses.
func (f *Finding) Cached() (addresses []netip.Addr, is bool) {
	if f.cached == nil {
		return nil, false
	}
	return netconf.InterfaceOf(f.cached.Result, f.IfName).Addresses, true
}

// Elsewhere reports whether this process cannot judge the attachment, because its ADD ran in other
// namespaces.
func (f *Finding) Elsewhere() bool {
	return f.Fate == alive.Unknown && f.Err == nil && f.cached == nil &&
		f.Evidence.SameNamespaces != tristate.Yes
}

// Fact is one piece of evidence for people: a question, and "yes", "no" or "unknown".
type Fact struct {
	Question  string `json:"question"`
	Answer    string `json:"answer"`
	NotLooked bool   `json:"notLooked,omitempty"` // unknown because it was not examined
}

// Facts returns the evidence for the verdict. It marks facts that were not examined, because other
// evidence decides or the fact means nothing, such as after a reboot.
func (f *Finding) Facts() []Fact {
	ev := f.Evidence
	here := ev.SameBoot == tristate.Yes
	looked := here && f.identified
	missing := looked && ev.NetNS != tristate.Yes
	fact := func(question string, answer tristate.Value, looked bool) Fact {
		return Fact{question, answer.String(), answer == tristate.Unknown && !looked}
	}
	return []Fact{
		fact("its lock is held", ev.Locked, true),
		fact("this process is in the namespaces of its ADD", ev.SameNamespaces, true),
		fact("added in this boot", ev.SameBoot, true),
		fact("added on another machine", ev.OtherHost, true),
		fact("its network namespace is at its path or mounted elsewhere", ev.NetNS, looked),
		fact("a process is in its network namespace", ev.HasProcess,
			missing || looked && ev.Listed == tristate.No),
		fact("the host end of its interface exists", ev.HostLink, missing),
		fact("the runtime lists it", ev.Listed, f.listed),
		fact("older than the grace period", ev.PastGracePeriod, here),
		fact("added again without a journal entry", ev.AddedUnseen,
			alive.DecideRecorded(ev).Releasable()),
	}
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
				findings = append(findings, Finding{Key: k, Err: err, Verdict: alive.Verdict{
					Fate: alive.Unknown, Reason: alive.Reason{Text: "its entry cannot be read"}}})
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
// network namespace at its path, and not missing from the list. It returns the keys of the others.
// Here the inode identifies a namespace. Only unwindctl sweep, which skips none, detects a new
// namespace with the path and inode of one that is gone.
func (s *Sweep) skipLive(ctx context.Context) (findings []Finding, look []journal.Key, err error) {
	var outlines []journal.Outline
	err = s.w.Journal.Store.View(ctx, func(tx *journal.Tx) error {
		outlines, s.last = nil, tx.Counter(record.LastSweep)
		// a damaged entry is neither live nor of this boot
		return tx.Outlines(func(o journal.Outline, _ error) error {
			if s.covers(o.Key) {
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
			Finding{Key: o.Key, State: o.State, Verdict: alive.NetNSThere, thisBoot: true})
	}
	return findings, look, err
}

// finding judges an attachment. A periodic sweep does not examine one that only waits for its next
// try, because that would inspect every process.
func (s *Sweep) finding(ctx context.Context, e *journal.Entry) Finding {
	f := Finding{
		Key: e.Key, Pod: e.Pod, State: e.State, listed: s.w.Node.List != nil,
		identified: e.Newest().NetNS.Known(),
		thisBoot:   s.w.Node.SameBoot(e.Newest()) == tristate.Yes,
	}
	if failing := undo.FailingPlugins(e); len(failing) > 0 && e.State != journal.Live && s.Periodic &&
		!s.DryRun && !s.w.Ready(ctx, e, false) {
		f.Fate, f.Reason = alive.Dead, alive.Recorded(e.Cause, e.Reason)
		f.Pending, f.failing, f.Deferred = undo.PendingSteps(e), failing, true
		return f
	}
	ev := s.w.Node.Gather(ctx, e, nil)
	f.Evidence = ev
	if f.orphaned = ev.Locked == tristate.Yes && s.orphaned(e); f.orphaned {
		ev.Locked = tristate.No
		s.w.Node.LookForLater(ctx, e, &ev)
	}
	f.Verdict = alive.Decide(ev)
	f.Busy = f.Verdict == alive.Locked
	if f.Warn && !s.Quick { // not at each STATUS
		s.w.Log.Warn(f.Reason.Text, "attachment", e.Key.String())
	}
	if f.Releasable() {
		f.passed = e.State == journal.Live && s.w.Node.Passed(e)
		f.Pending, f.failing = undo.PendingSteps(e), undo.FailingPlugins(e)
		f.Deferred = !s.w.Ready(ctx, e, !s.Periodic)
	}
	return f
}

func (s *Sweep) covers(k journal.Key) bool {
	return (s.Network == "" || k.Network == s.Network) && (s.Attachment == nil || k == *s.Attachment)
}

// orphaned reports whether only delegates hold an attachment's lock, and for longer than unwind
// waits for them.
func (s *Sweep) orphaned(e *journal.Entry) bool {
	g := e.Newest()
	if s.w.Node.SameBoot(g) != tristate.Yes || s.w.Node.SameNamespaces(g) != tristate.Yes ||
		journal.BootNanos()-e.Updated.Boot < int64(s.w.Budgets.Orphans) {
		return false
	}
	owner, err := s.w.Journal.Store.Owner(e.Key)
	return owner == 0 && err == nil
}
