package decide

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/journal"
	"cni-unwind/plugin/tristate"
)

// TestTookNothing: a DEL that fails as its ADD failed is dropped if nothing can be left, and never if one
// condition does not hold.
func TestTookNothing(t *testing.T) {
	t.Parallel()
	now := int64(3 * time.Hour)
	type try struct {
		step journal.Step
		o    Outcome
		p    Pass
	}
	config := func(text string) func(*try) {
		return func(one *try) { one.step.Config = []byte(text) }
	}
	for _, tt := range []struct {
		name   string
		change func(*try)
		done   bool
		alike  int
		since  int64
	}{
		{"all hold", func(*try) {}, true, 20, int64(2 * time.Hour)},
		{"for longer", func(one *try) { one.step.AlikeSince = 1 }, true, 20, 1},
		{"19 times", func(one *try) { one.step.Alike = 18 }, false, 19, int64(2 * time.Hour)},
		{"the first time", func(one *try) { one.step.Alike, one.step.AlikeSince = 0, 0 }, false, 1, now},
		{"not an hour yet", func(one *try) { one.step.AlikeSince++ }, false, 20, int64(2*time.Hour) + 1},
		{"an hour of an earlier boot", func(one *try) { one.step.AlikeSince = now + 1 }, false, 20, now},
		{"another code", func(one *try) { one.o.Code = 8 }, false, 0, 0},
		{"other words", func(one *try) { one.o.Words = "not" }, false, 0, 0},
		{"it passed", func(one *try) { one.o.Failed, one.p.GracePeriod = false, 0 }, true, 0, 0},
		{"it was killed", func(one *try) { one.o.Killed = true }, false, 0, 0},
		{"its ADD passed", func(one *try) { one.step.ADD = journal.AddPassed }, false, 20, int64(2 * time.Hour)},
		{"its ADD was killed", func(one *try) { one.step.ADD = journal.AddKilled }, false, 20, int64(2 * time.Hour)},
		{"the namespace may be there", func(one *try) { one.o.NetNSGone = false }, false, 20, int64(2 * time.Hour)},
		{"an address is there", func(one *try) { one.o.Reserved = tristate.Yes }, false, 20, int64(2 * time.Hour)},
		{"nobody knows of an address", func(one *try) { one.o.Reserved = tristate.Unknown }, false, 20, int64(2 * time.Hour)},
		{"port mappings", config(`{"ipam": {"type": "host-local"}, "runtimeConfig": {"portMappings": [{}]}}`), false, 20, int64(2 * time.Hour)},
		{"no port mappings", config(`{"ipam": {"type": "host-local"}, "runtimeConfig": {"portMappings": []}}`), true, 20, int64(2 * time.Hour)},
		{"no configuration", config(`[`), false, 20, int64(2 * time.Hour)},
		{"no IPAM plugin", config(`{}`), true, 20, int64(2 * time.Hour)},
		{"no IPAM plugin, unknown", func(one *try) { one.step.Type = "own"; config(`{}`)(one) }, false, 20, int64(2 * time.Hour)},
		{"an IPAM plugin, unknown", func(one *try) { one.step.Type = "own" }, false, 20, int64(2 * time.Hour)},
		{"its IPAM plugin is its default", func(one *try) { one.step.Type = "flannel"; config(`{"type": "flannel"}`)(one) }, true, 20, int64(2 * time.Hour)},
		{"it does not execute its IPAM plugin", func(one *try) { one.step.Type = "egress-cni" }, false, 20, int64(2 * time.Hour)},
		{"it does", func(one *try) {
			one.step.Type = "egress-cni"
			config(`{"ipam": {"type": "host-local"}, "enabled": "true"}`)(one)
		}, true, 20, int64(2 * time.Hour)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			one := try{
				step: journal.Step{Type: "bridge", Config: withIPAM("host-local"), ADD: journal.AddFailed,
					Refusal: journal.Refusal{Code: 7, Words: "no"}, Tries: 30, Alike: 19, AlikeSince: now - int64(time.Hour)},
				o: Outcome{Failed: true, Code: 7, Words: "no", NetNSGone: true, Reserved: tristate.No},
				p: Pass{Now: now},
			}
			tt.change(&one)
			after, done := After(one.step, one.o, one.p)
			if done != tt.done || after.Alike != tt.alike || after.AlikeSince != tt.since {
				t.Errorf("done %t, %d since %s", done, after.Alike, time.Duration(after.AlikeSince))
			}
		})
	}
}

// TestAfter has each row of After, and what is next to it.
func TestAfter(t *testing.T) {
	again := now + int64(grace)
	failed := Outcome{Failed: true, Code: 11, Words: "no", Jitter: 1}
	with := func(o Outcome, change func(*Outcome)) Outcome { change(&o); return o }
	wait := func(why journal.Why, until int64) journal.Next { return journal.Next{Why: why, At: until} }
	for _, tt := range []struct {
		name    string
		step    journal.Step
		outcome Outcome
		pass    func(*Pass)
		want    journal.Step
		done    bool
	}{
		{"it failed", journal.Step{}, failed, nil, journal.Step{Tries: 1, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now)}, false},
		{"it failed again", journal.Step{Tries: 2}, failed, nil, journal.Step{Tries: 3, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now+int64(4*time.Second))}, false},
		{"it failed without a code", journal.Step{}, with(failed, func(o *Outcome) { o.Code = 0 }), nil, journal.Step{Tries: 1, Last: "no", Code: 1, Next: wait(journal.ForBackoff, now)}, false},
		{"it was killed", journal.Step{}, with(failed, func(o *Outcome) { o.Killed = true }), nil,
			journal.Step{ADD: journal.AddKilled, Again: again, Tries: 1, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now)}, false},
		{"it was late, and killed", journal.Step{LateKills: 1}, with(failed, func(o *Outcome) { o.Killed, o.LateKilled = true, true }), nil,
			journal.Step{ADD: journal.AddKilled, LateKills: 2, Again: again, Tries: 1, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now)}, false},
		{"a failed ADD's, 20 times", journal.Step{ADD: journal.AddFailed, Tries: 19}, with(failed, func(o *Outcome) { o.NotInChain, o.Jitter = true, 0 }), nil,
			journal.Step{ADD: journal.AddFailed, Tries: 20, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now+int64(15*time.Second))}, true},
		{"19 times", journal.Step{ADD: journal.AddFailed, Tries: 18}, with(failed, func(o *Outcome) { o.NotInChain, o.Jitter = true, 0 }), nil,
			journal.Step{ADD: journal.AddFailed, Tries: 19, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now+int64(15*time.Second))}, false},
		{"20 times, in the chain", journal.Step{ADD: journal.AddFailed, Tries: 19}, with(failed, func(o *Outcome) { o.Jitter = 0 }), nil,
			journal.Step{ADD: journal.AddFailed, Tries: 20, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now+int64(15*time.Second))}, false},
		{"20 times, its ADD passed", journal.Step{Tries: 19}, with(failed, func(o *Outcome) { o.NotInChain, o.Jitter = true, 0 }), nil,
			journal.Step{Tries: 20, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now+int64(15*time.Second))}, false},
		{"20 times, its ADD passed, now it was killed", journal.Step{Tries: 19},
			with(failed, func(o *Outcome) { o.Killed, o.NotInChain, o.Jitter = true, true, 0 }), nil,
			journal.Step{ADD: journal.AddKilled, Again: again, Tries: 20, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now+int64(15*time.Second))}, false},
		{"20 times, it was killed before", journal.Step{ADD: journal.AddKilled, Again: soon, Tries: 19},
			with(failed, func(o *Outcome) { o.NotInChain, o.Jitter = true, 0 }), nil,
			journal.Step{ADD: journal.AddKilled, Again: soon, Tries: 20, Last: "no", Code: 11, Next: wait(journal.ForBackoff, now+int64(15*time.Second))}, false},

		{"an address was withheld", journal.Step{Last: "no", Code: 5, MayHaveRun: true}, Outcome{Withheld: true}, nil,
			journal.Step{Tries: 1, Next: wait(journal.ForOwner, now)}, false},
		{"an address was withheld, by container", journal.Step{Type: "portmap"}, Outcome{Withheld: true}, nil, journal.Step{Type: "portmap", Tries: 1}, true},

		{"it passed", journal.Step{Next: wait(journal.ForOwner, soon)}, Outcome{}, nil, journal.Step{Tries: 1}, true},
		{"it passed, by pod", journal.Step{Config: withIPAM("spiderpool")}, Outcome{}, nil, journal.Step{Config: withIPAM("spiderpool"), Tries: 1}, true},
		{"it passed after a kill, by pod", journal.Step{Config: withIPAM("spiderpool"), ADD: journal.AddKilled, Again: again}, Outcome{}, nil,
			journal.Step{Config: withIPAM("spiderpool"), ADD: journal.AddKilled, Tries: 1}, true},
		{"it passed, which proves nothing", journal.Step{Type: "aws-cni"}, Outcome{}, nil,
			journal.Step{Type: "aws-cni", Tries: 1, Again: again, Next: wait(journal.ForRepeat, again)}, false},
		{"its IPAM plugin's proves nothing", journal.Step{Config: withIPAM("whereabouts")}, Outcome{}, nil,
			journal.Step{Config: withIPAM("whereabouts"), Tries: 1, Again: again, Next: wait(journal.ForRepeat, again)}, false},
		{"it passed again", journal.Step{Type: "aws-cni", Tries: 1, Again: now}, Outcome{}, nil,
			journal.Step{Type: "aws-cni", Tries: 2, Again: now, Next: wait(journal.ForRepeat, now)}, true},
		{"it passed after a kill", journal.Step{ADD: journal.AddKilled, Again: soon}, Outcome{}, nil,
			journal.Step{ADD: journal.AddKilled, Tries: 1, Again: soon, Next: wait(journal.ForRepeat, soon)}, false},
		{"it passed long after a kill", journal.Step{ADD: journal.AddKilled, Again: now}, Outcome{}, nil,
			journal.Step{ADD: journal.AddKilled, Tries: 1, Again: now, Next: wait(journal.ForRepeat, now)}, true},
		{"it passed in the boot after a kill", journal.Step{ADD: journal.AddKilled, Again: soon}, Outcome{}, func(p *Pass) { p.SameBoot = false },
			journal.Step{ADD: journal.AddKilled, Tries: 1, Next: wait(journal.ForRepeat, 0)}, true},
		{"it proves nothing, in another boot", journal.Step{Type: "aws-cni"}, Outcome{}, func(p *Pass) { p.SameBoot = false },
			journal.Step{Type: "aws-cni", Tries: 1, Again: again, Next: wait(journal.ForRepeat, again)}, false},
		{"it proved nothing, in another boot", journal.Step{Type: "aws-cni", Again: soon}, Outcome{}, func(p *Pass) { p.SameBoot = false },
			journal.Step{Type: "aws-cni", Tries: 1, Again: soon, Next: wait(journal.ForRepeat, soon)}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := pass()
			if tt.pass != nil {
				tt.pass(&p)
			}
			got, done := After(tt.step, tt.outcome, p)
			if done && !tt.outcome.Failed { // of a step that goes nobody reads the wait
				got.Next, tt.want.Next = journal.Next{}, journal.Next{}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" || done != tt.done {
				t.Errorf("done %t, want %t (-want +got):\n%s", done, tt.done, diff)
			}
		})
	}
}

// TestTryPresent: when a DEL that failed runs with the present configuration.
func TestTryPresent(t *testing.T) {
	t.Parallel()
	const ports = `{"ipam": {"type": "host-local"}, "runtimeConfig": {"portMappings": [{"hostPort": 80}]}}`
	for _, tt := range []struct {
		name string
		step journal.Step
		code uint
		want string
	}{
		{"the ADD failed", journal.Step{ADD: journal.AddFailed}, 5, "yes"},
		{"the ADD failed, port mappings", journal.Step{ADD: journal.AddFailed, Config: []byte(ports)}, 5, "yes"},
		{"the ADD was killed", journal.Step{ADD: journal.AddKilled}, 5, "yes"},
		{"the version", journal.Step{Config: []byte(`{}`)}, 1, "yes"},
		{"a field", journal.Step{Config: []byte(`{}`)}, 2, "yes"},
		{"an unknown container", journal.Step{Config: []byte(`{}`)}, 3, "no"},
		{"it cannot be decoded", journal.Step{Config: []byte(`{}`)}, 6, "yes"},
		{"the configuration", journal.Step{Config: []byte(`{}`)}, 7, "yes"},
		{"the configuration, port mappings", journal.Step{Config: []byte(ports)}, 7, "no"},
		{"any error", journal.Step{Config: []byte(`{}`)}, 999, "no"},
		{"any error, another IPAM plugin", journal.Step{Config: withIPAM("static")}, 999, "no"},
		{"any error, host-local", journal.Step{Config: withIPAM("host-local")}, 999, "with proof"},
		{"any error, host-local, port mappings", journal.Step{Config: []byte(ports)}, 999, "no"},
		{"no code, host-local", journal.Step{Config: withIPAM("host-local")}, 0, "no"},
	} {
		try, proof := TryPresent(&tt.step, tt.code)
		if try != (tt.want != "no") || proof != (tt.want == "with proof") {
			t.Errorf("%s: %t, with proof %t", tt.name, try, proof)
		}
	}
}

func TestShare(t *testing.T) {
	const least = 2 * time.Second
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
		if got := Share(s, tt.left, tt.steps, least); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}
