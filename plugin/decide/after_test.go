package decide

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/journal"
	"cni-unwind/plugin/tristate"
)

// TestAfter has each row of After, and what is next to it.
func TestAfter(t *testing.T) {
	again := now + int64(grace)
	failed := Outcome{Failed: true, Code: 11, Words: "no", Jitter: 1}
	with := func(o Outcome, change func(*Outcome)) Outcome { change(&o); return o }
	wait := func(cause journal.Cause, until int64) journal.Wait { return journal.Wait{For: cause, Until: until} }
	for _, tt := range []struct {
		name    string
		step    journal.Step
		outcome Outcome
		pass    func(*Pass)
		want    journal.Step
		done    bool
	}{
		{"it failed", journal.Step{}, failed, nil, journal.Step{Tries: 1, Last: "no", Code: 11, Wait: wait("", now)}, false},
		{"it failed again", journal.Step{Tries: 2}, failed, nil, journal.Step{Tries: 3, Last: "no", Code: 11, Wait: wait("", now+int64(4*time.Second))}, false},
		{"it failed without a code", journal.Step{}, with(failed, func(o *Outcome) { o.Code = 0 }), nil, journal.Step{Tries: 1, Last: "no", Code: 1, Wait: wait("", now)}, false},
		{"it was killed", journal.Step{}, with(failed, func(o *Outcome) { o.Killed = true }), nil,
			journal.Step{ADD: journal.AddKilled, Again: again, Tries: 1, Last: "no", Code: 11, Wait: wait("", now)}, false},
		{"a failed ADD's, 20 times", journal.Step{ADD: journal.AddFailed, Tries: 19}, with(failed, func(o *Outcome) { o.NotInChain, o.Jitter = true, 0 }), nil,
			journal.Step{ADD: journal.AddFailed, Tries: 20, Last: "no", Code: 11, Wait: wait("", now+int64(15*time.Second))}, true},
		{"19 times", journal.Step{ADD: journal.AddFailed, Tries: 18}, with(failed, func(o *Outcome) { o.NotInChain, o.Jitter = true, 0 }), nil,
			journal.Step{ADD: journal.AddFailed, Tries: 19, Last: "no", Code: 11, Wait: wait("", now+int64(15*time.Second))}, false},
		{"20 times, in the chain", journal.Step{ADD: journal.AddFailed, Tries: 19}, with(failed, func(o *Outcome) { o.Jitter = 0 }), nil,
			journal.Step{ADD: journal.AddFailed, Tries: 20, Last: "no", Code: 11, Wait: wait("", now+int64(15*time.Second))}, false},
		{"20 times, its ADD passed", journal.Step{Tries: 19}, with(failed, func(o *Outcome) { o.NotInChain, o.Jitter = true, 0 }), nil,
			journal.Step{Tries: 20, Last: "no", Code: 11, Wait: wait("", now+int64(15*time.Second))}, false},
		{"20 times, its ADD passed, now it was killed", journal.Step{Tries: 19},
			with(failed, func(o *Outcome) { o.Killed, o.NotInChain, o.Jitter = true, true, 0 }), nil,
			journal.Step{ADD: journal.AddKilled, Again: again, Tries: 20, Last: "no", Code: 11, Wait: wait("", now+int64(15*time.Second))}, false},
		{"20 times, it was killed before", journal.Step{ADD: journal.AddKilled, Again: soon, Tries: 19},
			with(failed, func(o *Outcome) { o.NotInChain, o.Jitter = true, 0 }), nil,
			journal.Step{ADD: journal.AddKilled, Again: soon, Tries: 20, Last: "no", Code: 11, Wait: wait("", now+int64(15*time.Second))}, false},

		{"an address was withheld", journal.Step{Last: "no", Code: 5, MayHaveRun: true}, Outcome{Withheld: true, Queued: true, Free: tristate.No}, nil,
			journal.Step{Tries: 1, Wait: wait(journal.ForOwner, now)}, false},
		{"in a queue", journal.Step{}, Outcome{Queued: true, Kept: "it is queued", Free: tristate.No}, nil,
			journal.Step{Tries: 1, Last: "exit code 0, but it is queued", Wait: wait(journal.ForQueue, 0)}, false},
		{"the store has it", journal.Step{Tries: 1}, Outcome{Free: tristate.No, Kept: "ipam.json has it", Jitter: 1}, nil,
			journal.Step{Tries: 2, Last: "exit code 0, but ipam.json has it", Wait: wait("", now+int64(2*time.Second))}, false},
		{"the store has it, by pod", journal.Step{Config: withIPAM("spiderpool")}, Outcome{Free: tristate.No, Kept: "x"}, nil,
			journal.Step{Config: withIPAM("spiderpool"), Tries: 1, Last: "exit code 0, but x", Wait: wait("", now)}, false},

		{"it passed", journal.Step{Wait: wait(journal.ForOwner, soon)}, Outcome{}, nil, journal.Step{Tries: 1}, true},
		{"it passed, the store is read", journal.Step{Type: "aws-cni"}, Outcome{Free: tristate.Yes}, nil, journal.Step{Type: "aws-cni", Tries: 1}, true},
		{"it passed, by pod", journal.Step{Config: withIPAM("spiderpool")}, Outcome{}, nil, journal.Step{Config: withIPAM("spiderpool"), Tries: 1}, true},
		{"it passed after a kill, by pod", journal.Step{Config: withIPAM("spiderpool"), ADD: journal.AddKilled, Again: again}, Outcome{}, nil,
			journal.Step{Config: withIPAM("spiderpool"), ADD: journal.AddKilled, Tries: 1}, true},
		{"it passed, which proves nothing", journal.Step{Type: "aws-cni"}, Outcome{}, nil,
			journal.Step{Type: "aws-cni", Tries: 1, Again: again, Wait: wait(journal.ForRepeat, again)}, false},
		{"its IPAM plugin's proves nothing", journal.Step{Config: withIPAM("whereabouts")}, Outcome{}, nil,
			journal.Step{Config: withIPAM("whereabouts"), Tries: 1, Again: again, Wait: wait(journal.ForRepeat, again)}, false},
		{"it passed again", journal.Step{Type: "aws-cni", Tries: 1, Again: now}, Outcome{}, nil,
			journal.Step{Type: "aws-cni", Tries: 2, Again: now, Wait: wait(journal.ForRepeat, now)}, true},
		{"it passed after a kill", journal.Step{ADD: journal.AddKilled, Again: soon}, Outcome{}, nil,
			journal.Step{ADD: journal.AddKilled, Tries: 1, Again: soon, Wait: wait(journal.ForRepeat, soon)}, false},
		{"it passed after a kill, free", journal.Step{ADD: journal.AddKilled, Again: soon}, Outcome{Free: tristate.Yes}, nil,
			journal.Step{ADD: journal.AddKilled, Tries: 1, Again: soon, Wait: wait(journal.ForRepeat, soon)}, false},
		{"it passed long after a kill", journal.Step{ADD: journal.AddKilled, Again: now}, Outcome{}, nil,
			journal.Step{ADD: journal.AddKilled, Tries: 1, Again: now, Wait: wait(journal.ForRepeat, now)}, true},
		{"it passed in the boot after a kill", journal.Step{ADD: journal.AddKilled, Again: soon}, Outcome{}, func(p *Pass) { p.SameBoot = false },
			journal.Step{ADD: journal.AddKilled, Tries: 1, Wait: wait(journal.ForRepeat, 0)}, true},
		{"it proves nothing, in another boot", journal.Step{Type: "aws-cni"}, Outcome{}, func(p *Pass) { p.SameBoot = false },
			journal.Step{Type: "aws-cni", Tries: 1, Again: again, Wait: wait(journal.ForRepeat, again)}, false},
		{"it proved nothing, in another boot", journal.Step{Type: "aws-cni", Again: soon}, Outcome{}, func(p *Pass) { p.SameBoot = false },
			journal.Step{Type: "aws-cni", Tries: 1, Again: soon, Wait: wait(journal.ForRepeat, soon)}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := pass()
			if tt.pass != nil {
				tt.pass(&p)
			}
			got, done := After(tt.step, tt.outcome, p)
			if done && !tt.outcome.Failed { // of a step that goes nobody reads the wait
				got.Wait, tt.want.Wait = journal.Wait{}, journal.Wait{}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" || done != tt.done {
				t.Errorf("done %t, want %t (-want +got):\n%s", done, tt.done, diff)
			}
		})
	}
}

func TestShare(t *testing.T) {
	const reserve, least = 2 * time.Second, time.Second
	for _, tt := range []struct {
		name  string
		left  time.Duration
		steps int
		hung  bool
		want  time.Duration
	}{
		{"the last", 20 * time.Second, 1, false, 20 * time.Second},
		{"of four", 20 * time.Second, 4, false, 14 * time.Second},
		{"of many", 20 * time.Second, 9, false, 10 * time.Second},
		{"of four, it hung before", 20 * time.Second, 4, true, 5 * time.Second},
		{"no time", 0, 4, false, least},
		{"no time, it hung before", 0, 4, true, least},
	} {
		s := &journal.Step{}
		if tt.hung {
			s.ADD = journal.AddKilled
		}
		if got := Share(s, tt.left, tt.steps, reserve, least); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}
