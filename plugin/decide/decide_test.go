package decide

import (
	"slices"
	"strings"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/tristate"
)

// TestDecide has each row of the table of evidence, and its neighbours: the same with one thing
// unknown or the other way.
func TestDecide(t *testing.T) {
	t.Parallel()
	gone := Evidence{State: journal.Live, Locked: tristate.No, SameNamespaces: tristate.Yes, SameBoot: tristate.Yes, OtherHost: tristate.No,
		NetNS: tristate.No, HasProcess: tristate.No, HostLink: tristate.No, AddedUnseen: tristate.No}
	there := gone
	there.NetNS, there.HostLink = tristate.Yes, tristate.Yes
	unlisted := there
	unlisted.Listed, unlisted.PastGracePeriod = tristate.No, tristate.Yes
	keptOpen := gone
	keptOpen.HostLink, keptOpen.Listed, keptOpen.PastGracePeriod = tristate.Yes, tristate.No, tristate.Yes
	earlier := Evidence{State: journal.Live, Locked: tristate.No, SameNamespaces: tristate.Yes, SameBoot: tristate.No, OtherHost: tristate.No,
		AddedUnseen: tristate.No}
	foreign := earlier
	foreign.OtherHost = tristate.Yes
	// but returns ev with a change.
	but := func(ev Evidence, change func(*Evidence)) Evidence {
		change(&ev)
		return ev
	}
	for _, c := range []struct {
		name string
		ev   Evidence
		want Fate
	}{
		{"nothing is known", Evidence{}, Unknown},
		{"nothing is known but that it is free", Evidence{Locked: tristate.No}, Unknown},

		{"gone", gone, Dead},
		{"gone, locked", but(gone, func(ev *Evidence) { ev.Locked = tristate.Yes }), Live},
		{"gone, lock unknown", but(gone, func(ev *Evidence) { ev.Locked = tristate.Unknown }), Unknown},
		{"gone, seen from elsewhere", but(gone, func(ev *Evidence) { ev.SameNamespaces = tristate.No }), Unknown},
		{"gone, seen from who knows where", but(gone, func(ev *Evidence) { ev.SameNamespaces = tristate.Unknown }), Unknown},
		{"gone, a process inside", but(gone, func(ev *Evidence) { ev.HasProcess = tristate.Yes }), Live},
		{"gone, inside unknown", but(gone, func(ev *Evidence) { ev.HasProcess = tristate.Unknown }), Unknown},
		{"gone, host link there", but(gone, func(ev *Evidence) { ev.HostLink = tristate.Yes }), Live},
		{"gone, host link unknown", but(gone, func(ev *Evidence) { ev.HostLink = tristate.Unknown }), Unknown},
		{"gone, namespace unknown", but(gone, func(ev *Evidence) { ev.NetNS = tristate.Unknown }), Unknown},
		{"gone, listed", but(gone, func(ev *Evidence) { ev.Listed = tristate.Yes }), Live},
		{"gone, not listed, young", but(gone, func(ev *Evidence) { ev.Listed, ev.PastGracePeriod = tristate.No, tristate.No }), Dead},
		{"gone, not listed, a process inside", but(gone, func(ev *Evidence) {
			ev.Listed, ev.PastGracePeriod, ev.HasProcess = tristate.No, tristate.Yes, tristate.Yes
		}), Live},
		{"kept open, no list", but(keptOpen, func(ev *Evidence) { ev.Listed = tristate.Unknown }), Live},
		{"kept open, listed", but(keptOpen, func(ev *Evidence) { ev.Listed = tristate.Yes }), Live},
		{"kept open, not listed, old, empty", keptOpen, Dead},
		{"… a process inside", but(keptOpen, func(ev *Evidence) { ev.HasProcess = tristate.Yes }), Live},
		{"… inside unknown", but(keptOpen, func(ev *Evidence) { ev.HasProcess = tristate.Unknown }), Unknown},
		{"… young", but(keptOpen, func(ev *Evidence) { ev.PastGracePeriod = tristate.No }), Live},
		{"… age unknown", but(keptOpen, func(ev *Evidence) { ev.PastGracePeriod = tristate.Unknown }), Unknown},
		{"… host link unknown", but(keptOpen, func(ev *Evidence) { ev.HostLink = tristate.Unknown }), Dead},
		{"… namespace unknown", but(keptOpen, func(ev *Evidence) { ev.NetNS = tristate.Unknown }), Live},

		{"there", there, Live},
		{"there, listed", but(there, func(ev *Evidence) { ev.Listed = tristate.Yes }), Live},
		{"there, old, no list", but(there, func(ev *Evidence) { ev.PastGracePeriod = tristate.Yes }), Live},
		{"there, not listed, old, empty", unlisted, Dead},
		{"… locked", but(unlisted, func(ev *Evidence) { ev.Locked = tristate.Yes }), Live},
		{"… seen from elsewhere", but(unlisted, func(ev *Evidence) { ev.SameNamespaces = tristate.No }), Unknown},
		{"… a process inside", but(unlisted, func(ev *Evidence) { ev.HasProcess = tristate.Yes }), Live},
		{"… inside unknown", but(unlisted, func(ev *Evidence) { ev.HasProcess = tristate.Unknown }), Unknown},
		{"… young", but(unlisted, func(ev *Evidence) { ev.PastGracePeriod = tristate.No }), Live},
		{"… age unknown", but(unlisted, func(ev *Evidence) { ev.PastGracePeriod = tristate.Unknown }), Unknown},
		{"… boot unknown", but(unlisted, func(ev *Evidence) { ev.SameBoot = tristate.Unknown }), Unknown},

		{"adding, lock free", but(there, func(ev *Evidence) { ev.State, ev.HasProcess = journal.Adding, tristate.Yes }), Dead},
		{"adding, listed", but(there, func(ev *Evidence) { ev.State, ev.Listed = journal.Adding, tristate.Yes }), Dead},
		{"adding, locked", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.Adding, tristate.Yes }), Live},
		{"adding, seen from elsewhere", but(gone, func(ev *Evidence) { ev.State, ev.SameNamespaces = journal.Adding, tristate.No }), Unknown},
		{"adding, boot unknown", but(there, func(ev *Evidence) { ev.State, ev.SameBoot = journal.Adding, tristate.Unknown }), Unknown},

		{"rolling-back", but(there, func(ev *Evidence) { ev.State, ev.HasProcess = journal.RollingBack, tristate.Yes }), Dead},
		{"rolling-back, listed", but(there, func(ev *Evidence) { ev.State, ev.Listed = journal.RollingBack, tristate.Yes }), Dead},
		{"rolling-back, locked", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.RollingBack, tristate.Yes }), Live},
		{"rolling-back, lock unknown", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.RollingBack, tristate.Unknown }), Unknown},
		{"rolling-back, seen from elsewhere", but(gone, func(ev *Evidence) { ev.State, ev.SameNamespaces = journal.RollingBack, tristate.No }), Unknown},
		{"rolling-back, earlier boot", but(earlier, func(ev *Evidence) { ev.State = journal.RollingBack }), Dead},
		{"rolling-back, foreign", but(foreign, func(ev *Evidence) { ev.State = journal.RollingBack }), Foreign},
		{"deleting", but(there, func(ev *Evidence) { ev.State, ev.HasProcess = journal.Deleting, tristate.Yes }), Dead},
		{"deleting, locked", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.Deleting, tristate.Yes }), Live},
		{"deleting, boot unknown", but(there, func(ev *Evidence) { ev.State, ev.SameBoot = journal.Deleting, tristate.Unknown }), Dead},
		{"deleting, foreign", but(foreign, func(ev *Evidence) { ev.State = journal.Deleting }), Foreign},

		{"earlier boot", earlier, Dead},
		{"earlier boot, listed", but(earlier, func(ev *Evidence) { ev.Listed = tristate.Yes }), Dead},
		{"earlier boot, adding", but(earlier, func(ev *Evidence) { ev.State = journal.Adding }), Dead},
		{"earlier boot, locked", but(earlier, func(ev *Evidence) { ev.Locked = tristate.Yes }), Live},
		{"earlier boot, seen from elsewhere", but(earlier, func(ev *Evidence) { ev.SameNamespaces = tristate.No }), Unknown},
		{"earlier boot, machine unknown", but(earlier, func(ev *Evidence) { ev.OtherHost = tristate.Unknown }), Foreign},
		{"boot unknown", but(earlier, func(ev *Evidence) { ev.SameBoot = tristate.Unknown }), Unknown},
		{"boot unknown, another machine", but(foreign, func(ev *Evidence) { ev.SameBoot = tristate.Unknown }), Unknown},
		{"this boot, another machine's name", but(there, func(ev *Evidence) { ev.OtherHost = tristate.Yes }), Live},
		{"gone, added again", but(gone, func(ev *Evidence) { ev.AddedUnseen = tristate.Yes }), Live},
		{"gone, perhaps added again", but(gone, func(ev *Evidence) { ev.AddedUnseen = tristate.Unknown }), Unknown},
		{"not listed, added again", but(unlisted, func(ev *Evidence) { ev.AddedUnseen = tristate.Yes }), Live},
		{"adding, lock free, added again", but(gone, func(ev *Evidence) { ev.State, ev.AddedUnseen = journal.Adding, tristate.Yes }), Live},
		{"rolling-back, added again", but(there, func(ev *Evidence) { ev.State, ev.AddedUnseen = journal.RollingBack, tristate.Yes }), Live},
		{"deleting, added again", but(there, func(ev *Evidence) { ev.State, ev.AddedUnseen = journal.Deleting, tristate.Yes }), Live},
		{"deleting, perhaps added again", but(there, func(ev *Evidence) { ev.State, ev.AddedUnseen = journal.Deleting, tristate.Unknown }), Unknown},
		{"earlier boot, added again", but(earlier, func(ev *Evidence) { ev.AddedUnseen = tristate.Yes }), Live},
		{"foreign, added again", but(foreign, func(ev *Evidence) { ev.AddedUnseen = tristate.Yes }), Live},
		{"there, added again", but(there, func(ev *Evidence) { ev.AddedUnseen = tristate.Yes }), Live},

		{"foreign", foreign, Foreign},
		{"foreign, adding", but(foreign, func(ev *Evidence) { ev.State = journal.Adding }), Foreign},
		{"foreign, locked", but(foreign, func(ev *Evidence) { ev.Locked = tristate.Yes }), Live},
		{"foreign, seen from elsewhere", but(foreign, func(ev *Evidence) { ev.SameNamespaces = tristate.No }), Unknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := Decide(c.ev)
			if v.Fate != c.want || v.Reason.Text == "" {
				t.Errorf("%+v, want %s and a reason", v, c.want)
			}
			unlisted := c.ev.Listed == tristate.No && c.ev.HasProcess == tristate.Yes && v.Fate == Live && c.ev.Locked == tristate.No
			if warn := unlisted || strings.HasPrefix(v.Reason.Text, "it was added again"); v.Warn != warn {
				t.Errorf("warns: %t", v.Warn)
			}
		})
	}
}

// TestDecideAll has every combination of evidence: what proves a death is what README.md,
// "Who is dead", names, nothing else, and to know less never turns a life into a death.
func TestDecideAll(t *testing.T) {
	t.Parallel()
	answers := []tristate.Value{tristate.Unknown, tristate.No, tristate.Yes}
	n := 0
	var each func(ev Evidence, fields []func(*Evidence) *Fact)
	each = func(ev Evidence, fields []func(*Evidence) *Fact) {
		if len(fields) > 0 {
			for _, a := range answers {
				next := ev
				*fields[0](&next) = a
				each(next, fields[1:])
			}
			return
		}
		n++
		v := Decide(ev)
		if v.Reason.Text == "" || (v.Fate == Dead || v.Fate == Foreign) != proven(ev) {
			t.Errorf("%+v: %+v", ev, v)
		}
		if known := slices.ContainsFunc(recordable, v.Reason.Is); v.Releasable() != known {
			t.Errorf("%+v: %+v is a reason that can be on record: %t", ev, v, known)
		}
		for _, field := range everyField {
			less := ev
			*field(&less) = tristate.Unknown
			was, is := Decide(ev), Decide(less)
			if is.Releasable() && !was.Releasable() && is.Fate != was.Fate && !keptByMore(ev, less) {
				t.Errorf("%+v: %s, but %s with less known", ev, was.Fate, is.Fate)
			}
		}
	}
	for _, state := range []journal.State{journal.Adding, journal.Live, journal.RollingBack, journal.Deleting} {
		each(Evidence{State: state}, everyField)
	}
	if want := 4 * 59049; n != want {
		t.Errorf("%d combinations, want %d", n, want)
	}
}

var everyField = []func(*Evidence) *Fact{
	func(ev *Evidence) *Fact { return &ev.Locked },
	func(ev *Evidence) *Fact { return &ev.SameNamespaces },
	func(ev *Evidence) *Fact { return &ev.SameBoot },
	func(ev *Evidence) *Fact { return &ev.OtherHost },
	func(ev *Evidence) *Fact { return &ev.NetNS },
	func(ev *Evidence) *Fact { return &ev.HasProcess },
	func(ev *Evidence) *Fact { return &ev.HostLink },
	func(ev *Evidence) *Fact { return &ev.Listed },
	func(ev *Evidence) *Fact { return &ev.PastGracePeriod },
	func(ev *Evidence) *Fact { return &ev.AddedUnseen },
}

// proven says, as one formula, what README.md, "Who is dead", says in a table.
func proven(ev Evidence) bool {
	owed := ev.State == journal.RollingBack || ev.State == journal.Deleting
	rebooted := ev.SameBoot == tristate.No && ev.OtherHost == tristate.No
	cutOff := ev.SameBoot == tristate.Yes && ev.State == journal.Adding
	gone := ev.SameBoot == tristate.Yes && ev.Listed != tristate.Yes && ev.NetNS == tristate.No && ev.HasProcess == tristate.No && ev.HostLink == tristate.No
	forgotten := ev.SameBoot == tristate.Yes && ev.Listed == tristate.No && ev.NetNS != tristate.Unknown && ev.HasProcess == tristate.No && ev.PastGracePeriod == tristate.Yes
	here := owed && ev.SameBoot != tristate.No || rebooted || cutOff || gone || forgotten
	foreign := ev.SameBoot == tristate.No && ev.OtherHost != tristate.No
	return ev.Locked == tristate.No && ev.SameNamespaces == tristate.Yes && ev.AddedUnseen == tristate.No && (here || foreign)
}

// keptByMore says whether what was known more is a runtime's word: a list that has the attachment
// keeps it, and without that list the rest of the evidence decides.
func keptByMore(more, less Evidence) bool {
	return more.Listed == tristate.Yes && less.Listed == tristate.Unknown
}

// TestDecideOrphan: a reservation whose owner the journal does not know is dead only by all of the
// evidence.
func TestDecideOrphan(t *testing.T) {
	t.Parallel()
	dead := Orphan{SameNamespaces: tristate.Yes, Listed: tristate.No, PastGracePeriod: tristate.Yes, Cached: tristate.No, Runs: tristate.No, InUse: tristate.No}
	if v := DecideOrphan(dead); v.Fate != Dead {
		t.Errorf("%+v", v)
	}
	answers := []tristate.Value{tristate.Unknown, tristate.No, tristate.Yes}
	for i := range 3 * 3 * 3 * 3 * 3 * 3 {
		o := Orphan{SameNamespaces: answers[i%3], Listed: answers[i/3%3], PastGracePeriod: answers[i/9%3],
			Cached: answers[i/27%3], InUse: answers[i/81%3], Runs: answers[i/243]}
		v := DecideOrphan(o)
		if (v.Fate == Dead) != (o == dead) || v.Reason.Text == "" {
			t.Errorf("%+v: %+v", o, v)
		}
		if uncovered := o.SameNamespaces == tristate.Yes && o.Listed == tristate.Unknown; uncovered &&
			(v.Fate == Live) != (o.InUse == tristate.Yes || o.Runs == tristate.Yes) {
			t.Errorf("no list covers it: %+v: %+v", o, v)
		}
	}
}

// doubtful is an unknown fact.
type doubtful string

func (d doubtful) Ask() (tristate.Value, string) { return tristate.Unknown, string(d) }

// TestDoubt: a verdict for which a look failed says why.
func TestDoubt(t *testing.T) {
	t.Parallel()
	const why = doubtful("cannot inspect process 7")
	free := Evidence{State: journal.Live, Locked: tristate.No, SameNamespaces: tristate.Yes, SameBoot: tristate.Yes}
	netns, process, link, unlisted, again := free, free, free, free, free
	netns.NetNS = why
	process.NetNS, process.HasProcess = tristate.No, why
	link.NetNS, link.HasProcess, link.HostLink = tristate.No, tristate.No, why
	unlisted.Listed, unlisted.NetNS, unlisted.HasProcess = tristate.No, tristate.No, why
	again.State, again.AddedUnseen = journal.Deleting, why
	runs := Orphan{SameNamespaces: tristate.Yes, Listed: tristate.No, PastGracePeriod: tristate.Yes, Cached: tristate.No, Runs: why, InUse: tristate.No}
	used, uncovered := runs, runs
	used.Runs, used.InUse = tristate.No, why
	uncovered.Listed = nil
	for i, v := range []Verdict{Decide(netns), Decide(process), Decide(link), Decide(unlisted), Decide(again),
		DecideOrphan(runs), DecideOrphan(used), DecideOrphan(uncovered), DecideOrphan(Orphan{SameNamespaces: why})} {
		if v.Fate != Unknown || !strings.HasSuffix(v.Reason.Text, string(why)) {
			t.Errorf("%d: %+v", i, v)
		}
	}
}

// unasked fails the test if a row asks for it.
type unasked struct{ *testing.T }

func (u unasked) Ask() (tristate.Value, string) {
	u.Errorf("a row above asks for it")
	return tristate.Unknown, ""
}

// TestAskedLate: what a row above decides asks for no fact that takes a look of its own.
func TestAskedLate(t *testing.T) {
	t.Parallel()
	later := unasked{t}
	none := Evidence{State: journal.Live, Locked: tristate.No, SameNamespaces: tristate.Yes, SameBoot: tristate.Yes, OtherHost: later,
		NetNS: later, HasProcess: later, HostLink: later, PastGracePeriod: later, AddedUnseen: later}
	locked, earlier, there, deleting := none, none, none, none
	locked.Locked = tristate.Yes
	earlier.SameBoot, earlier.OtherHost, earlier.AddedUnseen = tristate.No, tristate.No, tristate.No
	there.NetNS = tristate.Yes
	deleting.State, deleting.AddedUnseen = journal.Deleting, tristate.No
	for _, ev := range []Evidence{locked, earlier, there, deleting} {
		if v := Decide(ev); v.Fate == Unknown {
			t.Errorf("%+v", v)
		}
	}
	orphan := Orphan{SameNamespaces: tristate.Yes, Listed: tristate.No, PastGracePeriod: tristate.No, Cached: later, Runs: later, InUse: later}
	if v := DecideOrphan(orphan); v.Fate != Live {
		t.Errorf("%+v", v)
	}
}
