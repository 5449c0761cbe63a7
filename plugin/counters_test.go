package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/sweep"
)

// events returns the events in the history, each as "KIND CONTAINER ADDRESSES PLUGINS: REASON".
func (n *node) events() (all []string) {
	n.Helper()
	for _, e := range n.recorded() {
		if e.Kind == "" {
			continue
		}
		if e.Network != n.network || e.At.Wall.IsZero() {
			n.Errorf("an event of network %q at %v", e.Network, e.At)
		}
		all = append(all, fmt.Sprintf("%s %s %v %v: %s", e.Kind, e.ContainerID, e.Addresses, e.Plugins, e.Reason))
	}
	return all
}

func (n *node) recorded() []journal.Event {
	n.Helper()
	events, err := n.store.History()
	must(n, err)
	return events
}

// counters returns what the history counts, by name and labels.
func (n *node) counters() map[string]uint64 {
	n.Helper()
	counters := map[string]uint64{}
	for _, e := range n.recorded() {
		if len(e.Count) > 0 {
			counters[strings.Join(e.Count, " ")]++
		}
	}
	return counters
}

// failedADD is the reason in the history for an ADD that p1 failed.
const failedADD = `faulty: p1 ADD refused`

// TestNotesOfDegradation breaks the journal, and repairs it while a delegate still runs. The verb
// that went on without it counts once, with the cause, however many transactions failed.
func TestNotesOfDegradation(t *testing.T) {
	stories(t, `
	journal; chain p0 | p1 | p2; let held $dir/faulty/held
	either read-only: let breakage read-only file system; let reason read-only
	or newer: let breakage newer format; let reason newer
	or busy: let breakage queue that a stranger holds; let reason busy
	or other: let breakage file that others can write to; let reason other
	either ADD: plan p2 ADD hold; break $breakage
		start add a; appears $held/ADD.a.p2; mend; plan; lose $held/ADD.a.p2; wait add a
	or DEL: add a; plan p0 DEL hold; break $breakage
		start del a; appears $held/DEL.a.p0; mend; plan; lose $held/DEL.a.p0; wait del a
	events
	if ADD: counters 'degraded ADD $reason 1'
	if DEL: counters 'degraded DEL $reason 1'
	leaves`)
}

// TestNotesOfReleaseUnwritten: a release that could not be written to the journal is not recorded;
// the one that is written is.
func TestNotesOfReleaseUnwritten(t *testing.T) {
	stories(t, `
	chain p0; add a
	either of an earlier boot: boot a; let why it was added before the last boot; let label earlier-boot
	or of another machine: clone a; let why it was added before the last boot, possibly on another machine; let label other-machine
	unwritten a; events; counters
	sweep; events 'swept a [] []: $why'; counters 'swept $label 1'
	leaves`, acts{"unwritten": func(s *story, w []string) {
		worker := s.worker()
		worker.Journal.Store.Point = func(name string) {
			if name == "commit" {
				panic("this commit fails")
			}
		}
		s.want(worker.Release(s.Context(), s.who(w[0]).key()) != nil && s.who(w[0]).entry() != nil, "the journal could be told")
		worker.Journal.Store.Point = nil
		worker.Journal.Flush()
	}})
}

// TestLastSweep: the time of the last sweep is that of a sweep over all networks that finished and
// could judge something. It is written once a minute.
func TestLastSweep(t *testing.T) {
	stories(t, `
	chain p0; sweep; absent $state; add a; parts a; last never
	each verb status gc sweep
	$verb; last now
	set 20s; $verb; last kept; set 100s; $verb; last now; set -1h; $verb; last now
	elsewhere a; set 100s; agent; last kept
	leaves`, acts{
		"parts": func(s *story, w []string) { // what is no sweep of all
			key := s.who(w[0]).key()
			for _, job := range []sweep.Job{{DryRun: true}, {Network: s.network}, {Attachment: &key}} {
				_, err := s.plugin().Sweep(s.Context(), s.stateDir, job)
				s.must(err)
			}
		},
		"set": func(s *story, w []string) {
			at := time.Now().Add(-s.duration(w[0])).Truncate(time.Second)
			s.must(os.Chtimes(filepath.Join(s.stateDir, "last-sweep"), time.Time{}, at))
			s.vars["set"] = fmt.Sprint(at.Unix())
		},
		"last": func(s *story, w []string) {
			last := s.store.LastSweep()
			kept := fmt.Sprint(last.Unix()) == s.vars["set"]
			is := map[string]bool{"never": last.Unix() <= 0, "kept": kept,
				"now": !kept && time.Since(last).Abs() < 10*time.Minute}
			s.want(is[w[0]], "it was at %s", last)
		},
	})
}

// TestNotesOfTheKilled kills unwind at each point of a failing ADD, or of a STATUS that finds a
// dead attachment, and lets a sweep do the rest. A release without the runtime's DEL is recorded and
// counted once, or not at all if unwind was killed between the two.
func TestNotesOfTheKilled(t *testing.T) {
	t.Parallel()
	atEveryPoint(t, 5, `
	versions 1.1.0 1.0.0; chain p0 | p1
	either failing ADD: plan p1 ADD fail-effect; kill any $at tries add a; drop a
	or STATUS: add a; drop a; chain another; kill any $at libcni-status
	told`, acts{"told": func(s *story, _ []string) {
		there, told := s.who("a").entry() != nil, len(s.node.events()) > 0
		s.want(!told || !there, "told, and still there: %v", s.node.events())
		s.sweep()
		s.want((told || there) == (len(s.node.events()) == 1), "there %t, told %t, then %v", there, told, s.node.events())
		total := uint64(0)
		for _, count := range s.node.counters() {
			total += count
		}
		s.want(total == uint64(len(s.node.events())), "%v are counted as %v", s.node.events(), s.node.counters())
	}})
}

// TestNotes makes something out of the ordinary happen. The history and the counters have it once.
func TestNotes(t *testing.T) {
	stories(t, `
	chain pooled | p1; let failed `+failedADD+`
	either nothing: add a; del a; gc
		events; counters
	or ADD fails, and is tried again: plan p1 ADD fail-effect; fails add a; fails add a; del a
		events 'rolled-back a [$ip2] [faulty]: $failed' 'rolled-back a [$ip3] [faulty]: $failed'
		counters 'rollbacks faulty complete 2'
	or ADD fails, and its DEL, until a sweep: plan p1 ADD fail-effect, p1 DEL fail; fails add a; sweep
		plan; sweep; sweep; del a
		events 'rolled-back a [$ip2] [faulty]: $failed' 'swept a [$ip2] []: its ADD failed: faulty: $failed'
		counters 'rollbacks faulty pending 1' 'swept failed-add 1'
	or ADD fails, and its DEL, until the next DEL: plan p1 ADD fail-effect, p1 DEL fail; fails add a; plan; del a
		events 'rolled-back a [$ip2] [faulty]: $failed'
		counters 'rollbacks faulty pending 1'
	or ADD cut off: plan p1 ADD kill-parent-effect, p1 DEL fail; fails add a; free a; drop a; sweep; plan; sweep
		events 'swept a [$ip2] []: its network namespace is gone'
		counters 'swept netns-gone 1'
	or namespace gone, found by STATUS: add a; drop a; until 0 status; del a
		events 'swept a [$ip2] []: its network namespace is gone' 'no-op a [] []: its network namespace is gone'
		counters 'swept netns-gone 1'
	or namespace gone, found by the next ADD of the pod: add a; drop a; sandbox a b; add b
		events 'swept a [$ip2] []: its network namespace is gone'
		counters 'swept netns-gone 1'
	or of an earlier boot: add a; reboot a; plan p1 DEL fail; sweep; plan; gc
		events 'swept a [$ip2] []: it was added before the last boot'
		counters 'swept earlier-boot 1'
	or of another machine: add a; clone a; gc
		events 'swept a [$ip2] []: it was added before the last boot, possibly on another machine'
		counters 'swept other-machine 1'
	or of another machine, found by an ADD of the container ID: add a; clone a; again a b; add b
		events 'swept a [$ip2] []: it was added before the last boot, possibly on another machine'
		counters 'swept other-machine 1'
	or not on a list: add a; gc list
		events 'swept a [$ip2] []: the runtime does not list it'
		counters 'swept unlisted 1'
	or asked for, and released by a sweep: add a; plan p1 DEL fail; fails del a; plan; sweep
		events 'swept a [$ip2] []: `+decide.Requested.Text+`'
		counters 'swept requested 1'
	or another ADD of the container ID: add a; drop a; plan p1 DEL fail; again a b; add b; plan; del b
		events 'superseded a [$ip2] [faulty (code 999)]: superseded by another ADD of the same container ID'
		counters
	or given up: plan p1 ADD fail-effect, p1 DEL fail; fails add a; giveup a; del a
		events 'rolled-back a [$ip2] [faulty]: $failed' 'forgotten a [$ip2] [faulty (code 999)]: forgotten by an operator'
		counters 'rollbacks faulty pending 1'
	or a reservation without an owner: reserve $ip2; vacated
		events 'released  [$ip2] []: host-local died before it wrote an owner'
		counters
	leaves`, acts{"vacated": func(s *story, _ []string) {
		eventually(s, "released", func() bool { s.passes([]string{"gc"}); return len(s.reserved()) == 0 })
	}})
}
