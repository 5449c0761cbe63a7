package undo

import (
	"context"
	"log/slog"
	"slices"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
)

// TestDue: an entry is deferred only if each of its steps waits for its second DEL.
func TestDue(t *testing.T) {
	t.Parallel()
	hour := journal.BootNanos() + int64(time.Hour)
	waiting := journal.Step{State: journal.StepRepeat, Attempts: 1, RepeatAt: hour}
	for _, c := range []struct {
		name   string
		boot   string
		steps  []journal.Step
		notDue bool
	}{
		{"never tried", "this", []journal.Step{{}}, false},
		{"killed, never tried", "this", []journal.Step{{RepeatAt: hour}}, false},
		{"waits", "this", []journal.Step{waiting}, true},
		{"waits, of another boot", "another", []journal.Step{waiting}, false},
		{"waited", "this", []journal.Step{{State: journal.StepRepeat, Attempts: 1, RepeatAt: 1}}, false},
		{"failed", "this", []journal.Step{{State: journal.StepFailed, Attempts: 1, RepeatAt: hour, LastError: "refused"}}, false},
		{"parked", "this", []journal.Step{{State: journal.StepParked, Attempts: 1, RepeatAt: hour}}, false},
		{"one of two waits", "this", []journal.Step{waiting, {}}, false},
		{"both wait", "this", []journal.Step{waiting, waiting}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := testWorker()
			e := &journal.Entry{Generations: []journal.Generation{{Host: journal.Host{BootID: c.boot}, Steps: c.steps}}}
			if w.Ready(t.Context(), e, false) == c.notDue {
				t.Errorf("due %t", !c.notDue)
			}
		})
	}
}

func TestUndoOrder(t *testing.T) {
	t.Parallel()
	steps := func(failed ...int) []journal.Step {
		all := []journal.Step{{Index: 0}, {Index: 1}, {Index: 2}, {Index: 3}}
		for _, i := range failed {
			all[i].State = journal.StepFailed
		}
		return all
	}
	killed := func(all []journal.Step, i int) []journal.Step {
		all[i].RepeatAt = 1
		return all
	}
	tried := func(all []journal.Step, i int) []journal.Step {
		all[i].State = journal.StepRepeat
		return all
	}
	for _, c := range []struct {
		name  string
		steps []journal.Step
		cut   int
		want  []int
	}{
		{"none", nil, 2, nil},
		{"reverse", steps(), 0, []int{3, 2, 1, 0}},
		{"first pass", steps(), 0, []int{3, 2, 1, 0}},
		{"rolled back by the ADD, then a pass", steps(), 0, []int{3, 2, 1, 0}},
		{"the last failed", steps(3), 0, []int{2, 1, 0, 3}},
		{"two failed, in their order", steps(1, 3), 0, []int{2, 0, 3, 1}},
		{"the first failed", steps(0), 0, []int{3, 2, 1, 0}},
		{"all failed", steps(0, 1, 2, 3), 0, []int{3, 2, 1, 0}},
		{"one cut off", steps(), 1, []int{2, 1, 0, 3}},
		{"two cut off", steps(), 2, []int{1, 0, 3, 2}},
		{"three cut off", steps(), 3, []int{0, 3, 2, 1}},
		{"four cut off", steps(), 4, []int{3, 2, 1, 0}},
		{"failed, then one cut off", steps(3), 1, []int{1, 0, 3, 2}},
		{"the ADD of the last hung", killed(steps(), 3), 0, []int{2, 1, 0, 3}},
		{"the ADD hung, first pass", killed(steps(), 3), 0, []int{2, 1, 0, 3}},
		{"the ADD hung, its DEL passed", tried(killed(steps(0), 3), 3), 0, []int{3, 2, 1, 0}},
		{"killed in a pass that was cut off", killed(steps(), 3), 1, []int{2, 1, 0, 3}},
		{"killed in a second one", killed(steps(), 3), 2, []int{1, 0, 3, 2}},
		{"a gap", []journal.Step{{Index: 1}, {Index: 3}}, 1, []int{1, 3}},
		{"one, many cut off", []journal.Step{{Index: 2}}, 6, []int{2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := undoOrder(&journal.Generation{Steps: c.steps}, c.cut); !slices.Equal(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
		})
	}
}

// testWorker returns a worker in the boot "this", without a journal.
func testWorker() *Worker {
	log := slog.New(slog.DiscardHandler)
	rec := &record.Recorder{Store: &journal.Store{Dir: "/nonexistent"}, Log: log}
	conf := netconf.DefaultConf()
	return &Worker{
		Node: &alive.Node{
			Journal: rec, Log: log, Host: journal.Host{BootID: "this"}, GracePeriod: conf.GracePeriod,
			View: &host.View{}, Pools: &alive.Pools{},
		},
		Journal: rec, Log: log, Budgets: DefaultBudgets, Verb: Verb{Conf: conf},
	}
}

// TestConfirmingStepKeepsItsTime: a step that only waits for its confirming DEL does not take from the
// time of the others, as one does that was killed.
func TestConfirmingStepKeepsItsTime(t *testing.T) {
	t.Parallel()
	limits := func(confirmAt, repeatAt int64) (all [2]time.Duration) {
		gen := &journal.Generation{Steps: []journal.Step{{ConfirmAt: confirmAt, RepeatAt: repeatAt}, {Index: 1}}}
		u := undoing{Worker: testWorker(), gen: gen, left: 2}
		for i := range all {
			ctx, cancel := context.WithTimeout(t.Context(), DefaultBudgets.Undo)
			defer cancel()
			var ok bool
			if all[i], ok = (&attempt{&u, &gen.Steps[i]}).share(ctx); !ok {
				t.Fatal("no time")
			}
		}
		return all
	}
	without, confirming, killed := limits(0, 0), limits(1, 0), limits(0, 1)
	for i := range without {
		if confirming[i] < without[i]*9/10 {
			t.Errorf("step %d has %s, and %s if none is to be confirmed", i, confirming[i], without[i])
		}
	}
	if killed[0] > without[0]*9/10 {
		t.Errorf("a step that was killed has %s, and %s if it was not", killed[0], without[0])
	}
}
