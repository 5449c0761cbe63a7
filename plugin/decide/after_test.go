package decide

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/journal"
)

// TestEnd: a DEL is dropped once it has failed 300 times and the namespace is gone. Failures before
// the end of a pause don't count. If an address may depend on the DEL, the chain must also have
// lacked the plugin at 300 failures, and never contained it in between.
func TestEnd(t *testing.T) {
	t.Parallel()
	type try struct {
		step journal.Step
		o    Outcome
	}
	for _, tt := range []struct {
		name             string
		change           func(*try)
		done             bool
		failures, absent int
	}{
		{"all conditions hold", func(*try) {}, true, 300, 0},
		{"it failed 401 times", func(one *try) { one.step.Failures = 400 }, true, 401, 0},
		{"it failed 299 times", func(one *try) { one.step.Failures = 298 }, false, 299, 0},
		{"before its pause was over", func(one *try) { one.o.Early = true }, false, 299, 0},
		{"the namespace may exist", func(one *try) { one.o.NetNSGone = false }, false, 300, 0},
		{"its ADD failed", func(one *try) { one.step.ADD = journal.AddFailed }, true, 300, 0},
		{"an address may depend on it", func(one *try) { one.o.MayHold = true }, false, 300, 0},
		{"an address, the plugin left the chain", func(one *try) { one.o.MayHold, one.o.Left, one.step.Absent = true, True, 299 }, true, 300, 300},
		{"an address, the plugin left the chain 299 tries ago", func(one *try) { one.o.MayHold, one.o.Left, one.step.Absent = true, True, 298 }, false, 300, 299},
		{"an address, the plugin is in the chain again", func(one *try) { one.o.MayHold, one.o.Left, one.step.Absent = true, False, 299 }, false, 300, 0},
		{"an address, the chain is unknown", func(one *try) { one.o.MayHold, one.step.Absent = true, 298 }, false, 300, 298},
		{"an address, the plugin is in the chain again, before its pause was over", func(one *try) { one.o.MayHold, one.o.Early, one.o.Left, one.step.Absent = true, true, False, 299 }, false, 299, 0},
		{"the plugin left the chain, before its pause was over", func(one *try) { one.o.Left, one.o.Early, one.step.Absent = True, true, 7 }, false, 299, 7},
		{"it succeeded", func(one *try) { one.o.Failed = false }, true, 299, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			one := try{journal.Step{Type: "own", Failures: 299}, Outcome{Failed: true, Code: 7, Words: "no", NetNSGone: true}}
			tt.change(&one)
			after, done := After(one.step, one.o, now)
			if done != tt.done || after.Failures != tt.failures || after.Absent != tt.absent {
				t.Errorf("done %t, %d failures, %d absent", done, after.Failures, after.Absent)
			}
		})
	}
}

// TestMayHold covers each reason why an address may depend on a DEL.
func TestMayHold(t *testing.T) {
	t.Parallel()
	const ports = `{"runtimeConfig": {"portMappings": [{"hostPort": 80}]}}`
	for _, tt := range []struct {
		name string
		step journal.Step
		held []journal.Claim
		want bool
	}{
		{"its address is held", journal.Step{Index: 1}, []journal.Claim{{Step: 0}, {Step: 1}}, true},
		{"its address is free", journal.Step{Index: 1}, nil, false},
		{"only another step's address is held", journal.Step{Index: 2}, []journal.Claim{{Step: 1}}, false},
		{"it may have allocated an address", journal.Step{MayAllocate: true}, nil, true},
		{"a host port", journal.Step{Config: []byte(ports)}, nil, true},
	} {
		if got := MayHold(&tt.step, tt.held); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}

// TestAfter covers each outcome of a try, and its effect on the step.
func TestAfter(t *testing.T) {
	failed := Outcome{Failed: true, Code: 11, Words: "no", Jitter: 1}
	with := func(o Outcome, change func(*Outcome)) Outcome { change(&o); return o }
	wait := func(why journal.Why, until int64) journal.Next { return journal.Next{Why: why, At: until} }
	for _, tt := range []struct {
		name    string
		step    journal.Step
		outcome Outcome
		want    journal.Step
		done    bool
	}{
		{"it failed", journal.Step{}, failed, journal.Step{Tries: 1, Failures: 1, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now)}, false},
		{"it failed again", journal.Step{Tries: 2}, failed, journal.Step{Tries: 3, Failures: 1, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now+int64(4*time.Second))}, false},
		{"it failed without a code", journal.Step{}, with(failed, func(o *Outcome) { o.Code = 0 }), journal.Step{Tries: 1, Failures: 1, Last: "no", Code: 1, Next: wait(journal.ForBackoff, now)}, false},
		{"it passed", journal.Step{Next: wait(journal.ForRules, 0)}, Outcome{}, journal.Step{Tries: 1}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, done := After(tt.step, tt.outcome, now)
			if done && !tt.outcome.Failed { // once a step is done, its Next is never read
				got.Next, tt.want.Next = journal.Next{}, journal.Next{}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" || done != tt.done {
				t.Errorf("done %t, want %t (-want +got):\n%s", done, tt.done, diff)
			}
		})
	}
}

// TestNeedless: a sweep skips a DEL only if the namespace is proven gone, and the provider itself
// removes everything that the DEL would have removed.
func TestNeedless(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		plugin          string
		netNSGone, want bool
	}{
		{"ovn-k8s-cni-overlay", true, true}, {"ovn-k8s-cni-overlay", false, false}, {"bridge", true, false}, {"own", true, false},
	} {
		if got := Needless(&journal.Step{Type: tt.plugin}, tt.netNSGone); got != tt.want {
			t.Errorf("%+v: %t", tt, got)
		}
	}
}

// TestRetries covers the configurations with which unwind retries a DEL that failed with its
// recorded configuration.
func TestRetries(t *testing.T) {
	t.Parallel()
	const ports = `{"runtimeConfig": {"portMappings": [{"hostPort": 80}]}}`
	whole, version := []Retry{Present}, []Retry{RecordedInNew, Present}
	for _, tt := range []struct {
		name string
		step journal.Step
		code uint
		want []Retry
	}{
		{"any error", journal.Step{Config: []byte(`{}`)}, 999, whole},
		{"no code", journal.Step{Config: []byte(`{}`)}, 0, whole},
		{"a rejected configuration", journal.Step{Config: []byte(`{}`)}, 7, whole},
		{"the ADD failed", journal.Step{ADD: journal.AddFailed, Config: []byte(ports)}, 5, whole},
		{"a host port", journal.Step{Config: []byte(ports)}, 999, whole},
		{"a host port, an unknown container", journal.Step{Config: []byte(ports)}, 3, whole},
		{"a host port, the version", journal.Step{Config: []byte(ports)}, 1, version},
		{"a host port, a field", journal.Step{Config: []byte(ports)}, 2, version},
		{"a host port, it cannot be decoded", journal.Step{Config: []byte(ports)}, 6, version},
		{"a host port, the configuration", journal.Step{Config: []byte(ports)}, 7, version},
	} {
		if diff := cmp.Diff(tt.want, Retries(&tt.step, tt.code)); diff != "" {
			t.Errorf("%s:\n%s", tt.name, diff)
		}
	}
}
