package decide

import (
	"slices"
	"strings"
	"testing"

	"cni-unwind/journal"
)

// TestDecide has each row of the table of evidence, and its neighbours: the same with one thing
// unknown or the other way.
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
		{"nothing is known but that it is free", Evidence{Locked: False}, Unknown},

		{"gone", gone, Dead},
		{"gone, locked", but(gone, func(ev *Evidence) { ev.Locked = True }), Live},
		{"gone, lock unknown", but(gone, func(ev *Evidence) { ev.Locked = Unclear }), Unknown},
		{"gone, seen from elsewhere", but(gone, func(ev *Evidence) { ev.SameNamespaces = False }), Unknown},
		{"gone, seen from who knows where", but(gone, func(ev *Evidence) { ev.SameNamespaces = Unclear }), Unknown},
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
		{"… seen from elsewhere", but(unlisted, func(ev *Evidence) { ev.SameNamespaces = False }), Unknown},
		{"… a process inside", but(unlisted, func(ev *Evidence) { ev.HasProcess = True }), Live},
		{"… inside unknown", but(unlisted, func(ev *Evidence) { ev.HasProcess = Unclear }), Unknown},
		{"… young", but(unlisted, func(ev *Evidence) { ev.PastGracePeriod = False }), Live},
		{"… age unknown", but(unlisted, func(ev *Evidence) { ev.PastGracePeriod = Unclear }), Unknown},
		{"… boot unknown", but(unlisted, func(ev *Evidence) { ev.SameBoot = Unclear }), Unknown},

		{"adding, lock free", but(there, func(ev *Evidence) { ev.State, ev.HasProcess = journal.Adding, True }), Dead},
		{"adding, listed", but(there, func(ev *Evidence) { ev.State, ev.Listed = journal.Adding, True }), Dead},
		{"adding, locked", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.Adding, True }), Live},
		{"adding, seen from elsewhere", but(gone, func(ev *Evidence) { ev.State, ev.SameNamespaces = journal.Adding, False }), Unknown},
		{"adding, boot unknown", but(there, func(ev *Evidence) { ev.State, ev.SameBoot = journal.Adding, Unclear }), Unknown},

		{"rolling-back", but(there, func(ev *Evidence) { ev.State, ev.HasProcess = journal.RollingBack, True }), Dead},
		{"rolling-back, listed", but(there, func(ev *Evidence) { ev.State, ev.Listed = journal.RollingBack, True }), Dead},
		{"rolling-back, locked", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.RollingBack, True }), Live},
		{"rolling-back, lock unknown", but(gone, func(ev *Evidence) { ev.State, ev.Locked = journal.RollingBack, Unclear }), Unknown},
		{"rolling-back, seen from elsewhere", but(gone, func(ev *Evidence) { ev.State, ev.SameNamespaces = journal.RollingBack, False }), Unknown},
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
		{"earlier boot, seen from elsewhere", but(earlier, func(ev *Evidence) { ev.SameNamespaces = False }), Unknown},
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
		{"foreign, seen from elsewhere", but(foreign, func(ev *Evidence) { ev.SameNamespaces = False }), Unknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := Decide(c.ev)
			if v.Fate != c.want || v.Reason.Text == "" {
				t.Errorf("%+v, want %s and a reason", v, c.want)
			}
			unlisted := c.ev.Listed == False && c.ev.HasProcess == True && v.Fate == Live && c.ev.Locked == False
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
		if v.Reason.Text == "" || (v.Fate == Dead || v.Fate == Foreign) != proven(ev) {
			t.Errorf("%+v: %+v", ev, v)
		}
		if known := slices.ContainsFunc(recordable, v.Reason.Is); v.Releasable() != known {
			t.Errorf("%+v: %+v is a reason that can be on record: %t", ev, v, known)
		}
		for _, field := range everyField {
			less := ev
			*field(&less) = Unclear
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
	rebooted := ev.SameBoot == False && ev.OtherHost == False
	cutOff := ev.SameBoot == True && ev.State == journal.Adding
	gone := ev.SameBoot == True && ev.Listed != True && ev.NetNS == False && ev.HasProcess == False && ev.HostLink == False
	forgotten := ev.SameBoot == True && ev.Listed == False && ev.NetNS != Unclear && ev.HasProcess == False && ev.PastGracePeriod == True
	here := owed && ev.SameBoot != False || rebooted || cutOff || gone || forgotten
	foreign := ev.SameBoot == False && ev.OtherHost != False
	return ev.Locked == False && ev.SameNamespaces == True && ev.AddedUnseen == False && (here || foreign)
}

// keptByMore says whether what was known more is a runtime's word: a list that has the attachment
// keeps it, and without that list the rest of the evidence decides.
func keptByMore(more, less Evidence) bool {
	return more.Listed == True && less.Listed == Unclear
}

// TestDecideStray: a reservation whose owner the journal does not know is dead only by all of the
// evidence.
func TestDecideStray(t *testing.T) {
	t.Parallel()
	dead := Stray{SameNamespaces: True, Listed: False, PastGracePeriod: True, Cached: False, Runs: False, InUse: False}
	if v := DecideStray(dead); v.Fate != Dead {
		t.Errorf("%+v", v)
	}
	answers := []Truth{Unclear, False, True}
	for i := range 3 * 3 * 3 * 3 * 3 * 3 {
		o := Stray{SameNamespaces: answers[i%3], Listed: answers[i/3%3], PastGracePeriod: answers[i/9%3],
			Cached: answers[i/27%3], InUse: answers[i/81%3], Runs: answers[i/243]}
		v := DecideStray(o)
		if (v.Fate == Dead) != (o == dead) || v.Reason.Text == "" {
			t.Errorf("%+v: %+v", o, v)
		}
		if uncovered := o.SameNamespaces == True && o.Listed == Unclear; uncovered &&
			(v.Fate == Live) != (o.InUse == True || o.Runs == True) {
			t.Errorf("no list covers it: %+v: %+v", o, v)
		}
	}
}

// doubtful is an unknown fact.
type doubtful string

func (d doubtful) Ask() (Truth, string) { return Unclear, string(d) }

// TestDoubt: a verdict for which a look failed says why.
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
	for i, v := range []Verdict{Decide(netns), Decide(process), Decide(link), Decide(unlisted), Decide(again),
		DecideStray(runs), DecideStray(used), DecideStray(uncovered), DecideStray(Stray{SameNamespaces: why})} {
		if v.Fate != Unknown || !strings.HasSuffix(v.Reason.Text, string(why)) {
			t.Errorf("%d: %+v", i, v)
		}
	}
}

// unasked fails the test if a row asks for it.
type unasked struct{ *testing.T }

func (u unasked) Ask() (Truth, string) {
	u.Errorf("a row above asks for it")
	return Unclear, ""
}

// TestAskedLate: what a row above decides asks for no fact that takes a look of its own.
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
		if v := Decide(ev); v.Fate == Unknown {
			t.Errorf("%+v", v)
		}
	}
	stray := Stray{SameNamespaces: True, Listed: False, PastGracePeriod: False, Cached: later, Runs: later, InUse: later}
	if v := DecideStray(stray); v.Fate != Live {
		t.Errorf("%+v", v)
	}
}
