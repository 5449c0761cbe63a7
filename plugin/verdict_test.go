package plugin

import (
	"testing"

	"cni-unwind/journal"
)

// TestDecide has each row of the table of evidence, and its neighbours: the same with one thing unknown or the other way.
func TestDecide(t *testing.T) {
	t.Parallel()
	gone := evidence{state: journal.Live, locked: no, lockFile: yes, observer: yes, sameBoot: yes, otherHost: no,
		netns: no, inside: no, hostLink: no}
	there := gone
	there.netns, there.hostLink = yes, yes
	unlisted := there
	unlisted.listed, unlisted.aged = no, yes
	earlier := evidence{state: journal.Live, locked: no, lockFile: yes, observer: yes, sameBoot: no, otherHost: no}
	foreign := earlier
	foreign.otherHost = yes
	// but returns ev with a change.
	but := func(ev evidence, change func(*evidence)) evidence {
		change(&ev)
		return ev
	}
	for _, c := range []struct {
		name string
		ev   evidence
		want Fate
	}{
		{"nothing is known", evidence{}, Unknown},
		{"nothing is known but that it is free", evidence{locked: no}, Unknown},

		{"gone", gone, Dead},
		{"gone, locked", but(gone, func(ev *evidence) { ev.locked = yes }), Live},
		{"gone, lock unknown", but(gone, func(ev *evidence) { ev.locked = unknown }), Unknown},
		{"gone, seen from elsewhere", but(gone, func(ev *evidence) { ev.observer = no }), Unknown},
		{"gone, seen from who knows where", but(gone, func(ev *evidence) { ev.observer = unknown }), Unknown},
		{"gone, a process inside", but(gone, func(ev *evidence) { ev.inside = yes }), Live},
		{"gone, inside unknown", but(gone, func(ev *evidence) { ev.inside = unknown }), Unknown},
		{"gone, host link there", but(gone, func(ev *evidence) { ev.hostLink = yes }), Live},
		{"gone, host link unknown", but(gone, func(ev *evidence) { ev.hostLink = unknown }), Unknown},
		{"gone, namespace unknown", but(gone, func(ev *evidence) { ev.netns = unknown }), Unknown},
		{"gone, listed", but(gone, func(ev *evidence) { ev.listed = yes }), Live},
		{"gone, not listed, young", but(gone, func(ev *evidence) { ev.listed, ev.aged = no, no }), Dead},
		{"gone, not listed, a process inside", but(gone, func(ev *evidence) { ev.listed, ev.aged, ev.inside = no, yes, yes }), Live},
		{"gone, not listed, host link there", but(gone, func(ev *evidence) { ev.listed, ev.aged, ev.hostLink = no, yes, yes }), Live},

		{"there", there, Live},
		{"there, listed", but(there, func(ev *evidence) { ev.listed = yes }), Live},
		{"there, old, no list", but(there, func(ev *evidence) { ev.aged = yes }), Live},
		{"there, not listed, old, empty", unlisted, Dead},
		{"… locked", but(unlisted, func(ev *evidence) { ev.locked = yes }), Live},
		{"… seen from elsewhere", but(unlisted, func(ev *evidence) { ev.observer = no }), Unknown},
		{"… a process inside", but(unlisted, func(ev *evidence) { ev.inside = yes }), Live},
		{"… inside unknown", but(unlisted, func(ev *evidence) { ev.inside = unknown }), Unknown},
		{"… young", but(unlisted, func(ev *evidence) { ev.aged = no }), Live},
		{"… age unknown", but(unlisted, func(ev *evidence) { ev.aged = unknown }), Unknown},
		{"… boot unknown", but(unlisted, func(ev *evidence) { ev.sameBoot = unknown }), Unknown},

		{"adding, lock free", but(there, func(ev *evidence) { ev.state, ev.inside = journal.Adding, yes }), Dead},
		{"adding, listed", but(there, func(ev *evidence) { ev.state, ev.listed = journal.Adding, yes }), Dead},
		{"adding, locked", but(gone, func(ev *evidence) { ev.state, ev.locked = journal.Adding, yes }), Live},
		{"adding, seen from elsewhere", but(gone, func(ev *evidence) { ev.state, ev.observer = journal.Adding, no }), Unknown},
		{"adding, no lock file", but(there, func(ev *evidence) { ev.state, ev.lockFile = journal.Adding, no }), Live},
		{"adding, lock file unknown", but(there, func(ev *evidence) { ev.state, ev.lockFile = journal.Adding, unknown }), Live},
		{"adding, no lock file, gone", but(gone, func(ev *evidence) { ev.state, ev.lockFile = journal.Adding, no }), Dead},
		{"adding, boot unknown", but(there, func(ev *evidence) { ev.state, ev.sameBoot = journal.Adding, unknown }), Unknown},

		{"unwinding", but(there, func(ev *evidence) { ev.state, ev.inside = journal.Unwinding, yes }), Dead},
		{"unwinding, listed", but(there, func(ev *evidence) { ev.state, ev.listed = journal.Unwinding, yes }), Dead},
		{"unwinding, locked", but(gone, func(ev *evidence) { ev.state, ev.locked = journal.Unwinding, yes }), Live},
		{"unwinding, lock unknown", but(gone, func(ev *evidence) { ev.state, ev.locked = journal.Unwinding, unknown }), Unknown},
		{"unwinding, seen from elsewhere", but(gone, func(ev *evidence) { ev.state, ev.observer = journal.Unwinding, no }), Unknown},
		{"unwinding, earlier boot", but(earlier, func(ev *evidence) { ev.state = journal.Unwinding }), Dead},
		{"unwinding, foreign", but(foreign, func(ev *evidence) { ev.state = journal.Unwinding }), Foreign},
		{"removing", but(there, func(ev *evidence) { ev.state, ev.inside = journal.Removing, yes }), Dead},
		{"removing, locked", but(gone, func(ev *evidence) { ev.state, ev.locked = journal.Removing, yes }), Live},
		{"removing, boot unknown", but(there, func(ev *evidence) { ev.state, ev.sameBoot = journal.Removing, unknown }), Dead},
		{"removing, foreign", but(foreign, func(ev *evidence) { ev.state = journal.Removing }), Foreign},

		{"earlier boot", earlier, Dead},
		{"earlier boot, listed", but(earlier, func(ev *evidence) { ev.listed = yes }), Dead},
		{"earlier boot, adding", but(earlier, func(ev *evidence) { ev.state = journal.Adding }), Dead},
		{"earlier boot, locked", but(earlier, func(ev *evidence) { ev.locked = yes }), Live},
		{"earlier boot, seen from elsewhere", but(earlier, func(ev *evidence) { ev.observer = no }), Unknown},
		{"earlier boot, machine unknown", but(earlier, func(ev *evidence) { ev.otherHost = unknown }), Unknown},
		{"boot unknown", but(earlier, func(ev *evidence) { ev.sameBoot = unknown }), Unknown},
		{"boot unknown, another machine", but(foreign, func(ev *evidence) { ev.sameBoot = unknown }), Unknown},
		{"this boot, another machine's name", but(there, func(ev *evidence) { ev.otherHost = yes }), Live},
		{"foreign", foreign, Foreign},
		{"foreign, adding", but(foreign, func(ev *evidence) { ev.state = journal.Adding }), Foreign},
		{"foreign, locked", but(foreign, func(ev *evidence) { ev.locked = yes }), Live},
		{"foreign, seen from elsewhere", but(foreign, func(ev *evidence) { ev.observer = no }), Unknown},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := decide(c.ev)
			if v.fate != c.want || v.reason == "" {
				t.Errorf("%+v, want %s and a reason", v, c.want)
			}
			if warn := c.ev.listed == no && c.ev.netns == yes && c.ev.inside == yes && v.fate == Live && c.ev.locked == no; v.warn != warn {
				t.Errorf("warns: %t", v.warn)
			}
		})
	}
}

// TestDecideAll has every combination of evidence: what proves a death is what DESIGN §4 names, nothing else, and to know
// less never turns a life into a death.
func TestDecideAll(t *testing.T) {
	t.Parallel()
	answers := []answer{unknown, no, yes}
	n := 0
	var each func(ev evidence, fields []func(*evidence) *answer)
	each = func(ev evidence, fields []func(*evidence) *answer) {
		if len(fields) > 0 {
			for _, a := range answers {
				next := ev
				*fields[0](&next) = a
				each(next, fields[1:])
			}
			return
		}
		n++
		v := decide(ev)
		if v.reason == "" || (v.fate == Dead || v.fate == Foreign) != proven(ev) {
			t.Errorf("%+v: %+v", ev, v)
		}
		for _, field := range everyField {
			less := ev
			*field(&less) = unknown
			was, is := decide(ev), decide(less)
			if is.ends() && !was.ends() && is.fate != was.fate && !keptByMore(ev, less) {
				t.Errorf("%+v: %s, but %s with less known", ev, was.fate, is.fate)
			}
		}
	}
	for _, state := range []journal.State{journal.Adding, journal.Live, journal.Unwinding, journal.Removing} {
		each(evidence{state: state}, everyField)
	}
	if want := 4 * 59049; n != want {
		t.Errorf("%d combinations, want %d", n, want)
	}
}

var everyField = []func(*evidence) *answer{
	func(ev *evidence) *answer { return &ev.locked },
	func(ev *evidence) *answer { return &ev.lockFile },
	func(ev *evidence) *answer { return &ev.observer },
	func(ev *evidence) *answer { return &ev.sameBoot },
	func(ev *evidence) *answer { return &ev.otherHost },
	func(ev *evidence) *answer { return &ev.netns },
	func(ev *evidence) *answer { return &ev.inside },
	func(ev *evidence) *answer { return &ev.hostLink },
	func(ev *evidence) *answer { return &ev.listed },
	func(ev *evidence) *answer { return &ev.aged },
}

// proven says, as one formula, what DESIGN §4 says in a table.
func proven(ev evidence) bool {
	owed := ev.state == journal.Unwinding || ev.state == journal.Removing
	rebooted := ev.sameBoot == no && ev.otherHost != unknown
	cutOff := ev.sameBoot == yes && ev.state == journal.Adding && ev.lockFile == yes
	gone := ev.sameBoot == yes && ev.listed != yes && ev.netns == no && ev.inside == no && ev.hostLink == no
	forgotten := ev.sameBoot == yes && ev.listed == no && ev.netns == yes && ev.inside == no && ev.aged == yes
	return ev.locked == no && ev.observer == yes && (owed || rebooted || cutOff || gone || forgotten)
}

// keptByMore says whether what was known more is a runtime's word: a list that has the attachment keeps it, and without
// that list the rest of the evidence decides.
func keptByMore(more, less evidence) bool { return more.listed == yes && less.listed == unknown }
