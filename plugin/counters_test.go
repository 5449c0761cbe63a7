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

// counters returns the counters in the history, by name and labels.
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

// failedADD is the reason that the history gives for an ADD in which p1 failed.
const failedADD = `faulty: p1 ADD refused`

// TestNotesOfDegradation breaks the journal, and repairs it while a plugin still runs. The verb
// that continued without the journal is counted once, with the cause, however many of its
// transactions failed.
func TestNotesOfDegradation(t *testing.T) {
	type cause struct {
		name     string // the label in the counter
		breakage breakage
	}
	causes := []cause{
		{"read-only", readOnly},
		{"newer", newerFormat},
		{"busy", strangersTurn},
		{"other", groupWritable},
	}
	each2(t, causes, []string{"ADD", "DEL"}, func(t *testing.T, cause cause, verb string) {
		n := newNode(t)
		n.makeJournal()
		n.chain(p0, p1, p2)
		a := n.newPod("a")
		var mend func()
		var request *underWay
		var holder string
		if verb == "ADD" {
			holder = "p2"
			n.plan(p2.ADD("hold"))
			mend = cause.breakage.of(n)
			request = a.beginAdd()
		} else {
			holder = "p0"
			a.add()
			n.plan(p0.DEL("hold"))
			mend = cause.breakage.of(n)
			request = a.beginDel()
		}
		n.awaitHeld(verb, "a", holder)
		mend()
		n.plan()
		n.letGo(verb, "a", holder)
		request.passes()
		n.wantEvents()
		n.wantCounters("degraded " + verb + " " + cause.name + " 1")
	})
}

// TestNotesOfReleaseUnwritten: the history contains a release only if unwind could write that
// release to the journal.
func TestNotesOfReleaseUnwritten(t *testing.T) {
	type death struct {
		name, why, label string
		of               func(p *pod)
	}
	deaths := []death{
		{"of an earlier boot", "it was added before the last boot",
			"earlier-boot", (*pod).ofEarlierBoot},
		{"of another machine", "it was added before the last boot, possibly on another machine",
			"other-machine", (*pod).ofAnotherMachine},
	}
	each1(t, deaths, func(t *testing.T, death death) {
		n := newNode(t)
		n.chain(p0)
		a := n.add("a")
		death.of(a)
		worker := n.worker()
		worker.Node.Journal.Store.Point = func(name string) {
			if name == "commit" {
				panic("this commit fails")
			}
		}
		n.want(worker.Release(n.Context(), a.key()) != nil && a.record() != nil, "the journal could be told")
		worker.Node.Journal.Store.Point = nil
		worker.Node.Journal.Flush()
		n.wantEvents()
		n.wantCounters()
		n.sweep()
		n.wantEvents("swept a [] []: " + death.why)
		n.wantCounters("swept " + death.label + " 1")
	})
}

// TestLastSweep: when a sweep over all networks ends, unwind stores the time, but at most once a
// minute. A sweep that can judge no attachment doesn't count.
func TestLastSweep(t *testing.T) {
	each1(t, []string{"status", "gc", "sweep"}, func(t *testing.T, verb string) {
		n := newNode(t)
		sweepBy := func() {
			n.Helper()
			switch verb {
			case "status":
				n.status()
			case "gc":
				n.gc()
			default:
				n.sweep()
			}
		}
		wantNow := func() {
			n.Helper()
			last := n.store.LastSweep()
			n.want(time.Since(last).Abs() < 10*time.Minute, "it was at %s", last)
		}
		// set makes the last sweep seem to have ended that long ago.
		set := func(ago time.Duration) (at time.Time) {
			n.Helper()
			at = time.Now().Add(-ago).Truncate(time.Second)
			must(n, os.Chtimes(filepath.Join(n.stateDir, "last-sweep"), time.Time{}, at))
			return at
		}
		wantMoved := func(set time.Time) {
			n.Helper()
			n.want(n.store.LastSweep().Unix() != set.Unix(), "it was at %s", set)
			wantNow()
		}
		wantUnmoved := func(set time.Time) {
			n.Helper()
			n.want(n.store.LastSweep().Unix() == set.Unix(), "it was at %s", n.store.LastSweep())
		}

		n.chain(p0)
		n.sweep()
		n.wantAbsent(n.stateDir)
		a := n.add("a")
		key := a.key()
		for _, part := range []sweep.Options{{DryRun: true}, {Network: n.network}, {Attachment: &key}} {
			_, err := n.plugin().Sweep(n.Context(), n.stateDir, part)
			must(n, err)
		}
		n.want(n.store.LastSweep().Unix() <= 0, "it was at %s", n.store.LastSweep())
		sweepBy()
		wantNow()
		at := set(20 * time.Second)
		sweepBy()
		wantUnmoved(at)
		at = set(100 * time.Second)
		sweepBy()
		wantMoved(at)
		at = set(-time.Hour)
		sweepBy()
		wantMoved(at)
		a.seenElsewhere()
		at = set(100 * time.Second)
		n.agentSweep()
		wantUnmoved(at)
	})
}

// TestNotesOfTheKilled kills unwind at each crash point of a failing ADD, or of a STATUS that finds
// a dead attachment. A sweep then releases what is left. The release is recorded and counted once,
// or not at all if unwind is killed between the release and its recording.
func TestNotesOfTheKilled(t *testing.T) {
	t.Parallel()
	for _, verb := range oneOf("failing ADD", "STATUS") {
		t.Run(verb.name, func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 5, func(t *testing.T, at int) (killed bool) {
				n := newNode(t)
				n.versions("1.1.0", "1.0.0")
				n.chain(p0, p1)
				a := n.newPod("a")
				if verb.is("failing ADD") {
					n.plan(p1.ADD("fail-effect"))
					killed, _ = n.tryKill("", at, a.tryAdd)
					a.dropNetNS()
				} else {
					a.add()
					a.dropNetNS()
					n.chain(faulty("another"))
					killed = n.kill("", at, n.tryLibcniStatus)
				}
				there, told := a.record() != nil, len(n.events()) > 0
				n.want(!told || !there, "told, and still there: %v", n.events())
				n.sweep()
				n.want((told || there) == (len(n.events()) == 1),
					"there %t, told %t, then %v", there, told, n.events())
				total := uint64(0)
				for _, count := range n.counters() {
					total += count
				}
				n.want(total == uint64(len(n.events())), "%v are counted as %v", n.events(), n.counters())
				n.wantClean()
				return killed
			})
		})
	}
}

// TestNotes: each unusual event appears once in the history and in its counter, if it has one.
func TestNotes(t *testing.T) {
	const (
		rolledBack2 = "rolled-back a [IP2] [faulty]: " + failedADD
		rolledBack3 = "rolled-back a [IP3] [faulty]: " + failedADD
		netnsGone   = "swept a [IP2] []: its network namespace is gone"
		earlierBoot = "swept a [IP2] []: it was added before the last boot"
		fromAnother = earlierBoot + ", possibly on another machine"
	)
	const waits = "waiting a [IP2] [faulty]: " +
		"rules or host ports for its address may remain until a later plugin's DEL succeeds"
	type note struct {
		name     string
		do       func(n *node, a *pod)
		events   []string // IP2 and IP3 stand for addresses of the subnet
		counters []string
	}
	notes := []note{
		{"nothing", func(n *node, a *pod) {
			a.add()
			a.del()
			n.gc()
		}, nil, nil},
		{"ADD fails, and is tried again", func(n *node, a *pod) {
			n.plan(p1.ADD("fail-effect"))
			n.wantError(a.tryAdd())
			n.wantError(a.tryAdd())
			a.del()
		}, []string{rolledBack2, rolledBack3}, []string{"rollbacks faulty complete 2"}},
		{"ADD fails, and its DEL, until a sweep", func(n *node, a *pod) {
			n.plan(p1.ADD("fail-effect"), p1.DEL("fail"))
			n.wantError(a.tryAdd())
			n.sweep()
			n.plan()
			n.sweep()
			n.sweep()
			a.del()
		}, []string{rolledBack2, "swept a [IP2] []: its ADD failed: faulty: " + failedADD},
			[]string{"rollbacks faulty pending 1", "swept failed-add 1"}},
		{"ADD fails, and its DEL, until the next DEL", func(n *node, a *pod) {
			n.plan(p1.ADD("fail-effect"), p1.DEL("fail"))
			n.wantError(a.tryAdd())
			n.plan()
			a.del()
		}, []string{rolledBack2}, []string{"rollbacks faulty pending 1"}},
		{"ADD cut off", func(n *node, a *pod) {
			n.plan(p1.ADD("kill-parent-effect"), p1.DEL("fail"))
			n.wantError(a.tryAdd())
			a.awaitLock()
			a.dropNetNS()
			n.sweep()
			n.plan()
			n.sweep()
		}, []string{waits, netnsGone}, []string{"swept netns-gone 1"}},
		{"ADD killed by the runtime, which then sends DEL", func(n *node, a *pod) {
			n.plan(pooled.ADD("kill-parent"))
			n.wantError(a.tryAdd())
			a.del()
		}, []string{"rolled-back a [] [faulty]: the ADD was probably killed"}, []string{"rollbacks faulty complete 1"}},
		{"ADD killed after the first result", func(n *node, a *pod) {
			n.conf["gracePeriod"] = "10m"
			n.plan(p1.ADD("kill-parent"), p1.DEL("fail"))
			n.wantError(a.tryAdd())
			n.wantError(a.tryDel())
			n.plan()
			a.del()
		}, []string{"rolled-back a [IP2] [faulty]: the ADD was probably killed"}, []string{"rollbacks faulty pending 1"}},
		{"libcni's cache was removed while the pod ran", func(n *node, a *pod) {
			a.add()
			n.remove(a.cacheFile())
			a.del()
		}, nil, nil},
		{"a plugin is missing", func(n *node, a *pod) {
			n.chain(pooled, p1, named("gone"))
			n.wantError(a.tryAdd())
			a.del()
		}, []string{"rolled-back a [] [gone]: "}, []string{"rollbacks gone complete 1"}},
		{"namespace gone, found by STATUS", func(n *node, a *pod) {
			a.add()
			a.dropNetNS()
			n.until(0, func() { n.status() })
			a.del()
		}, []string{netnsGone}, []string{"swept netns-gone 1"}},
		{"namespace gone, found by the next ADD of the pod", func(n *node, a *pod) {
			a.add()
			a.dropNetNS()
			a.nextSandbox("b").add()
		}, []string{netnsGone}, []string{"swept netns-gone 1"}},
		{"of an earlier boot", func(n *node, a *pod) {
			a.add()
			a.reboot()
			n.plan(p1.DEL("fail"))
			n.sweep()
			n.plan()
			n.gc()
		}, []string{earlierBoot}, []string{"swept earlier-boot 1"}},
		{"of another machine", func(n *node, a *pod) {
			a.add()
			a.ofAnotherMachine()
			n.gc()
		}, []string{fromAnother}, []string{"swept other-machine 1"}},
		{"of another machine, found by an ADD of the container ID", func(n *node, a *pod) {
			a.add()
			a.ofAnotherMachine()
			a.again().add()
		}, []string{fromAnother}, []string{"swept other-machine 1"}},
		{"not on a list", func(n *node, a *pod) {
			a.add()
			n.gc(valid())
		}, []string{"swept a [IP2] []: the runtime does not list it"}, []string{"swept unlisted 1"}},
		{"asked for, and released by a sweep", func(n *node, a *pod) {
			a.add()
			n.plan(p1.DEL("fail"))
			n.wantError(a.tryDel())
			n.plan()
			n.sweep()
		}, []string{waits, "swept a [IP2] []: " + decide.Requested.Text}, []string{"swept requested 1"}},
		{"another ADD of the container ID", func(n *node, a *pod) {
			a.add()
			n.plan(p1.DEL("fail"))
			n.wantError(a.tryDel()) // b's ADD retries this DEL, and then frees the address
			a.dropNetNS()
			b := a.again()
			b.add()
			n.plan()
			b.del()
		}, []string{waits, "superseded a [IP2] [faulty (code 999)]: superseded by another ADD of the same container ID"},
			nil},
		{"given up", func(n *node, a *pod) {
			n.plan(p1.ADD("fail-effect"), p1.DEL("fail"))
			n.wantError(a.tryAdd())
			a.giveUp()
			a.del()
		}, []string{rolledBack2, "forgotten a [IP2] [faulty (code 999)]: forgotten by an operator",
			"no-op a [] []: dropped from the journal with unwindctl forget"}, []string{"rollbacks faulty pending 1"}},
		{"a reservation without an owner", func(n *node, _ *pod) {
			n.reserve(n.ip(2))
			eventually(n, "released", func() bool {
				n.gc()
				return len(n.reserved()) == 0
			})
		}, []string{"released  [IP2] []: host-local or the node died before an owner was written"}, nil},
	}
	each1(t, notes, func(t *testing.T, note note) {
		n := newNode(t)
		n.chain(pooled, p1)
		note.do(n, n.newPod("a"))
		var events []string
		for _, event := range note.events {
			events = append(events, strings.NewReplacer("IP2", n.ip(2), "IP3", n.ip(3)).Replace(event))
		}
		n.wantEvents(events...)
		n.wantCounters(note.counters...)
	})
}
