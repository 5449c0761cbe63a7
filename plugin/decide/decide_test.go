package decide

import (
	"slices"
	"strings"
	"testing"

	"cni-unwind/journal"
)

// TestDecide covers each row of the verdict table in README.md, and variants of the rows with one
// piece of evidence changed.
func TestDecide(t *testing.T) {
	t.Parallel()
	gone := Evidence{State: journal.Live, Locked: False, SameNamespaces: True, SameBoot: True, OtherHost: False,
		NetNS: False, HasProcess: False, HostLink: False, AddedUnseen: False}
	there := gone
	there.NetNS, there.HostLink = True, True
	unlisted := there
	unlisted.Listed, unlisted.PastGracePeriod = False, True
	keptOpen := gone
	keptOpen.HostLink, keptOpen.Listed, keptOpen.PastGracePeriod = True, False, True
	earlier := Evidence{State: journal.Live, Locked: False, SameNamespaces: True, SameBoot: False, OtherHost: False,
		AddedUnseen: False}
	foreign := earlier
	foreign.OtherHost = True
	// but() returns a changed copy of ev.
	but := func(ev Evidence, change func(*Evidence)) Evidence {
		change(&ev)
		return ev
	}
	for _, c := range []struct {
		name string
		ev   Evidence
		want Verdict
	}{
		{"nothing is known", Evidence{}, Unknown},
		{"nothing is known except that the lock is free", Evidence{Locked: False}, Unknown},

		{"gone", gone, Dead},
		{"gone, locked", but(gone, func(ev *Evidence) { ev.Locked = True }), Live},
		{"gone, lock unknown", but(gone, func(ev *Evidence) { ev.Locked = Unclear }), Unknown},
		{"gone, judged from other namespaces", but(gone, func(ev *Evidence) { ev.SameNamespaces = False }), Unknown},
		{"gone, judged from unknown namespaces", but(gone, func(ev *Evidence) { ev.SameNamespaces = Unclear }), Unknown},
		{"gone, a process inside", but(gone, func(ev *Evidence) { ev.HasProcess = True }), Live},
		{"gone, inside unknown", but(gone, func(ev *Evidence) { ev.HasProcess = Unclear }), Unknown},
		{"gone, host link there", but(gone, func(ev *Evidence) { ev.HostLink = True }), Live},
		{"gone, host link unknown", but(gone, func(ev *Evidence) { ev.HostLink = Unclear }), Unknown},
		{"gone, namespace unknown", but(gone, func(ev *Evidence) { ev.NetNS = Unclear }), Unknown},
		{"gone, listed", but(gone, func(ev *Evidence) { ev.Listed = True }), Live},
		{"gone, not listed, young", but(gone, func(ev *Evidence) { ev.Listed, ev.PastGracePeriod = False, False }), Dead},
		{"gone, not listed, a process inside", but(gone, func(ev *Evidence) {
			ev.Listed, ev.PastGracePeriod, ev.HasProcess = False, True, True
		}), Live},
		{"kept open, no list", but(keptOpen, func(ev *Evidence) { ev.Listed = Unclear }), Live},
		{"kept open, listed", but(keptOpen, func(ev *Evidence) { ev.Listed = True }), Live},
		{"kept open, not listed, old, empty", keptOpen, Dead},
		{"… a process inside", but(keptOpen, func(ev *Evidence) { ev.HasProcess = True }), Live},
		{"… inside unknown", but(keptOpen, func(ev *Evidence) { ev.HasProcess = Unclear }), Unknown},
		{"… young", but(keptOpen, func(ev *Evidence) { ev.PastGracePeriod = False }), Live},
		{"… age unknown", but(keptOpen, func(ev *Evidence) { ev.PastGracePeriod = Unclear }), Unknown},
		{"… host link unknown", but(keptOpen, func(ev *Evidence) { ev.HostLink = Unclear }), Dead},
		{"… namespace unknown", but(keptOpen, func(ev *Evidence) { ev.NetNS = Unclear }), Live},

		{"there", there, Live},
		{"there, listed", but(there, func(ev *Evidence) { ev.Listed = True }), Live},
		{"there, old, no list", but(there, func(ev *Evidence) { ev.PastGracePeriod = True }), Live},
		{"there, not listed, old, empty", unlisted, Dead},
		{"… locked", but(unlisted, func(ev *Evidence) { ev.Locked = True }), Live},
		{"… judged from other namespaces", but(unlisted, func(ev *Evidence) { ev.SameNamespaces = False }), Unknown},
		{"… a process inside", but(unlisted, func(ev *Evidence) { ev.HasProcess = True }), Live},
		{"… inside unknown", but(unlisted, func(ev *Evidence) { ev.HasProcess = Unclear }), Unknown},
		{"… young", but(unlisted, func(ev *Evidence) { ev.PastGracePeriod = False }), Live},
		{"… age unknown", but(unlisted, func(ev *Evidence) { ev.PastGracePeriod = Unclear }), Unknown},
		{"… boot unknown", but(unlisted, func(ev *Evidence) { ev.SameBoot = Unclear }), Unknown},

		{"adding, lock free", but(there, func(ev *Evidence) { ev.State, ev.HasProcess = journal.Adding, True }), Dead},
		{"adding, listed", but(there, func(ev *Evidence) { ev.State, ev.Listed = journal.Adding, True }), Dead},
		{"adding, locked", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.Adding, True }), Live},
		{"adding, judged from other namespaces", but(gone, func(ev *Evidence) { ev.State, ev.SameNamespaces = journal.Adding, False }), Unknown},
		{"adding, boot unknown", but(there, func(ev *Evidence) { ev.State, ev.SameBoot = journal.Adding, Unclear }), Unknown},

		{"rolling-back", but(there, func(ev *Evidence) { ev.State, ev.HasProcess = journal.RollingBack, True }), Dead},
		{"rolling-back, listed", but(there, func(ev *Evidence) { ev.State, ev.Listed = journal.RollingBack, True }), Dead},
		{"rolling-back, locked", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.RollingBack, True }), Live},
		{"rolling-back, lock unknown", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.RollingBack, Unclear }), Unknown},
		{"rolling-back, judged from other namespaces", but(gone, func(ev *Evidence) { ev.State, ev.SameNamespaces = journal.RollingBack, False }), Unknown},
		{"rolling-back, earlier boot", but(earlier, func(ev *Evidence) { ev.State = journal.RollingBack }), Dead},
		{"rolling-back, foreign", but(foreign, func(ev *Evidence) { ev.State = journal.RollingBack }), Foreign},
		{"deleting", but(there, func(ev *Evidence) { ev.State, ev.HasProcess = journal.Deleting, True }), Dead},
		{"deleting, locked", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.Deleting, True }), Live},
		{"deleting, boot unknown", but(there, func(ev *Evidence) { ev.State, ev.SameBoot = journal.Deleting, Unclear }), Dead},
		{"deleting, foreign", but(foreign, func(ev *Evidence) { ev.State = journal.Deleting }), Foreign},

		{"earlier boot", earlier, Dead},
		{"earlier boot, listed", but(earlier, func(ev *Evidence) { ev.Listed = True }), Dead},
		{"earlier boot, adding", but(earlier, func(ev *Evidence) { ev.State = journal.Adding }), Dead},
		{"earlier boot, locked", but(earlier, func(ev *Evidence) { ev.Locked = True }), Live},
		{"earlier boot, judged from other namespaces", but(earlier, func(ev *Evidence) { ev.SameNamespaces = False }), Unknown},
		{"earlier boot, machine unknown", but(earlier, func(ev *Evidence) { ev.OtherHost = Unclear }), Foreign},
		{"boot unknown", but(earlier, func(ev *Evidence) { ev.SameBoot = Unclear }), Unknown},
		{"boot unknown, another machine", but(foreign, func(ev *Evidence) { ev.SameBoot = Unclear }), Unknown},
		{"this boot, another machine's name", but(there, func(ev *Evidence) { ev.OtherHost = True }), Live},
		{"gone, added again", but(gone, func(ev *Evidence) { ev.AddedUnseen = True }), Live},
		{"gone, perhaps added again", but(gone, func(ev *Evidence) { ev.AddedUnseen = Unclear }), Unknown},
		{"not listed, added again", but(unlisted, func(ev *Evidence) { ev.AddedUnseen = True }), Live},
		{"adding, lock free, added again", but(gone, func(ev *Evidence) { ev.State, ev.AddedUnseen = journal.Adding, True }), Live},
		{"rolling-back, added again", but(there, func(ev *Evidence) { ev.State, ev.AddedUnseen = journal.RollingBack, True }), Live},
		{"deleting, added again", but(there, func(ev *Evidence) { ev.State, ev.AddedUnseen = journal.Deleting, True }), Live},
		{"deleting, perhaps added again", but(there, func(ev *Evidence) { ev.State, ev.AddedUnseen = journal.Deleting, Unclear }), Unknown},
		{"earlier boot, added again", but(earlier, func(ev *Evidence) { ev.AddedUnseen = True }), Live},
		{"foreign, added again", but(foreign, func(ev *Evidence) { ev.AddedUnseen = True }), Live},
		{"there, added again", but(there, func(ev *Evidence) { ev.AddedUnseen = True }), Live},

		{"foreign", foreign, Foreign},
		{"foreign, adding", but(foreign, func(ev *Evidence) { ev.State = journal.Adding }), Foreign},
		{"foreign, locked", but(foreign, func(ev *Evidence) { ev.Locked = True }), Live},
		{"foreign, judged from other namespaces", but(foreign, func(ev *Evidence) { ev.SameNamespaces = False }), Unknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := Decide(c.ev)
			if v.Verdict != c.want || v.Reason.Text == "" {
				t.Errorf("%+v, want %s and a reason", v, c.want)
			}
			unlisted := c.ev.Listed == False && c.ev.HasProcess == True && v.Verdict == Live && c.ev.Locked == False
			if warn := unlisted || strings.HasPrefix(v.Reason.Text, "a later ADD"); v.Warn != warn {
				t.Errorf("warns: %t", v.Warn)
			}
		})
	}
}

// TestDecideAll covers every combination of evidence. Decide allows the release of an attachment
// exactly when the table "Who is dead" in README.md does. If one piece of evidence becomes unknown,
// Decide still keeps each attachment that it kept before. For the only exception, see keptByMore.
func TestDecideAll(t *testing.T) {
	t.Parallel()
	answers := []Truth{Unclear, False, True}
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
		if v.Reason.Text == "" || (v.Verdict == Dead || v.Verdict == Foreign) != proven(ev) {
			t.Errorf("%+v: %+v", ev, v)
		}
		if known := slices.ContainsFunc(recordable, v.Reason.Is); v.Releasable() != known {
			t.Errorf("%+v: releasable %t, but the journal may contain the reason: %t (%+v)", ev, v.Releasable(), known, v)
		}
		for _, field := range everyField {
			less := ev
			*field(&less) = Unclear
			was, is := Decide(ev), Decide(less)
			if is.Releasable() && !was.Releasable() && is.Verdict != was.Verdict && !keptByMore(ev, less) {
				t.Errorf("%+v: %s, but %s without one piece of evidence", ev, was.Verdict, is.Verdict)
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

// proven is the table "Who is dead" in README.md as one formula: it reports whether the table
// releases an attachment.
func proven(ev Evidence) bool {
	owed := ev.State == journal.RollingBack || ev.State == journal.Deleting
	rebooted := ev.SameBoot == False && ev.OtherHost == False
	cutOff := ev.SameBoot == True && ev.State == journal.Adding
	gone := ev.SameBoot == True && ev.Listed != True && ev.NetNS == False && ev.HasProcess == False && ev.HostLink == False
	forgotten := ev.SameBoot == True && ev.Listed == False && ev.NetNS != Unclear && ev.HasProcess == False && ev.PastGracePeriod == True
	here := owed && ev.SameBoot != False || rebooted || cutOff || gone || forgotten
	foreign := ev.SameBoot == False && ev.OtherHost != False
	return ev.Locked == False && ev.SameNamespaces == True && ev.AddedUnseen == False && (here || foreign)
}

// keptByMore reports whether Listed is True in the first evidence and Unclear in the second. If so,
// the runtime's list may be the only reason to keep the attachment.
func keptByMore(more, less Evidence) bool {
	return more.Listed == True && less.Listed == Unclear
}

// TestDecideStray: a reservation whose owner is not in the journal is dead only if every piece of
// evidence says so.
func TestDecideStray(t *testing.T) {
	t.Parallel()
	dead := Stray{SameNamespaces: True, Listed: False, PastGracePeriod: True, Cached: False, Runs: False, InUse: False}
	if v := DecideStray(dead); v.Verdict != Dead {
		t.Errorf("%+v", v)
	}
	answers := []Truth{Unclear, False, True}
	for i := range 3 * 3 * 3 * 3 * 3 * 3 {
		o := Stray{SameNamespaces: answers[i%3], Listed: answers[i/3%3], PastGracePeriod: answers[i/9%3],
			Cached: answers[i/27%3], InUse: answers[i/81%3], Runs: answers[i/243]}
		v := DecideStray(o)
		if (v.Verdict == Dead) != (o == dead) || v.Reason.Text == "" {
			t.Errorf("%+v: %+v", o, v)
		}
		if uncovered := o.SameNamespaces == True && o.Listed == Unclear; uncovered &&
			(v.Verdict == Live) != (o.InUse == True || o.Runs == True) {
			t.Errorf("no list covers the owner: %+v: %+v", o, v)
		}
	}
}

// doubtful is a fact that could not be determined. Its text is the reason.
type doubtful string

func (d doubtful) Ask() (Truth, string) { return Unclear, string(d) }

// TestDoubt: if a fact that the verdict needs cannot be determined, the verdict is unknown and its
// reason says why.
func TestDoubt(t *testing.T) {
	t.Parallel()
	const why = doubtful("cannot inspect process 7")
	free := Evidence{State: journal.Live, Locked: False, SameNamespaces: True, SameBoot: True}
	netns, process, link, unlisted, again := free, free, free, free, free
	netns.NetNS = why
	process.NetNS, process.HasProcess = False, why
	link.NetNS, link.HasProcess, link.HostLink = False, False, why
	unlisted.Listed, unlisted.NetNS, unlisted.HasProcess = False, False, why
	again.State, again.AddedUnseen = journal.Deleting, why
	runs := Stray{SameNamespaces: True, Listed: False, PastGracePeriod: True, Cached: False, Runs: why, InUse: False}
	used, uncovered := runs, runs
	used.Runs, used.InUse = False, why
	uncovered.Listed = nil
	for i, v := range []Judgment{Decide(netns), Decide(process), Decide(link), Decide(unlisted), Decide(again),
		DecideStray(runs), DecideStray(used), DecideStray(uncovered), DecideStray(Stray{SameNamespaces: why})} {
		if v.Verdict != Unknown || !strings.HasSuffix(v.Reason.Text, string(why)) {
			t.Errorf("%d: %+v", i, v)
		}
	}
}

// unasked is a fact that fails the test if a decision asks for it.
type unasked struct{ *testing.T }

func (u unasked) Ask() (Truth, string) {
	u.Errorf("the decision asked for a fact that it does not need")
	return Unclear, ""
}

// TestAskedLate: some facts are expensive to gather. If a row of the table decides, Decide and
// DecideStray do not request the facts that only later rows need.
func TestAskedLate(t *testing.T) {
	t.Parallel()
	later := unasked{t}
	none := Evidence{State: journal.Live, Locked: False, SameNamespaces: True, SameBoot: True, OtherHost: later,
		NetNS: later, HasProcess: later, HostLink: later, PastGracePeriod: later, AddedUnseen: later}
	locked, earlier, there, deleting := none, none, none, none
	locked.Locked = True
	earlier.SameBoot, earlier.OtherHost, earlier.AddedUnseen = False, False, False
	there.NetNS = True
	deleting.State, deleting.AddedUnseen = journal.Deleting, False
	for _, ev := range []Evidence{locked, earlier, there, deleting} {
		if v := Decide(ev); v.Verdict == Unknown {
			t.Errorf("%+v", v)
		}
	}
	stray := Stray{SameNamespaces: True, Listed: False, PastGracePeriod: False, Cached: later, Runs: later, InUse: later}
	if v := DecideStray(stray); v.Verdict != Live {
		t.Errorf("%+v", v)
	}
}
