package decide

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"cni-unwind/journal"
)

// withIPAM returns the configuration of a plugin that calls an IPAM plugin.
func withIPAM(ipam string) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"type": "p", "ipam": {"type": %q}}`, ipam))
}

// withPorts is the configuration of a plugin with a port mapping.
var withPorts = json.RawMessage(`{"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}}`)

// The current time, and the end of a pause in these tests.
const (
	now  = int64(1000 * time.Second)
	soon = now + int64(5*time.Second)
)

// pass returns a pass in which every DEL may run.
func pass() Pass { return Pass{Now: now, SameBoot: true} }

// TestDue covers each case of Due, and variants of the cases with one fact changed.
func TestDue(t *testing.T) {
	// port returns a function that gives a pass five steps, and then applies the changes. The first
	// and the last step claim an address, and the third has port mappings.
	port := func(changes ...func(*Pass)) func(*Pass) {
		return func(p *Pass) {
			p.Claims = []journal.Claim{{Step: 0}, {Step: 4}}
			p.Steps = []journal.Step{{Type: "bridge"}, {Index: 1, Type: "tuning"}, {Index: 2, Type: "portmap", Config: withPorts},
				{Index: 3, Type: "tuning"}, {Index: 4, Type: "tuning"}}
			for _, change := range changes {
				change(p)
			}
		}
	}
	portStep := func(change func(*journal.Step)) func(*Pass) {
		return port(func(p *Pass) { change(&p.Steps[2]) })
	}
	// rule returns a function that gives a pass two steps, and then changes the second. The first step
	// claims an address, and the second is firewall.
	rule := func(change func(*journal.Step)) func(*Pass) {
		return func(p *Pass) {
			p.Claims, p.Steps = []journal.Claim{{}}, []journal.Step{{}, {Index: 1, Type: "firewall"}}
			change(&p.Steps[1])
		}
	}
	withConfig := func(config string) func(*Pass) {
		return portStep(func(s *journal.Step) { s.Config = json.RawMessage(config) })
	}
	wait := func(why journal.Why, until int64) journal.Next { return journal.Next{Why: why, At: until} }
	for _, tt := range []struct {
		name string
		step journal.Step
		pass func(*Pass)
		want journal.Next
	}{
		{"it was never tried", journal.Step{}, nil, journal.Next{}},
		{"a newer ADD is live", journal.Step{}, func(p *Pass) { p.NewerLives, p.IgnorePause = true, true }, wait(journal.ForContainer, 0)},

		{"it frees by pod, another sandbox is live", journal.Step{Config: withIPAM("spiderpool")}, func(p *Pass) { p.PodLives = true }, wait(journal.ForContainer, 0)},
		{"it frees by pod, no other sandbox is live", journal.Step{Config: withIPAM("spiderpool")}, nil, journal.Next{}},
		{"it frees by container, another sandbox is live", journal.Step{Config: withIPAM("host-local")}, func(p *Pass) { p.PodLives = true }, journal.Next{}},

		{"a host port's DEL is pending", journal.Step{}, port(), wait(journal.ForRules, 0)},
		{"a host port's DEL is pending, this step's pause is over", journal.Step{Next: wait(journal.ForBackoff, now)}, port(), wait(journal.ForRules, 0)},
		{"a host port's DEL is pending, the pass ignores pauses", journal.Step{Next: wait(journal.ForRules, 0)},
			port(func(p *Pass) { p.IgnorePause = true }), wait(journal.ForRules, 0)},
		{"the outcome of portmap's ADD is unknown", journal.Step{}, portStep(func(s *journal.Step) { s.ADD = journal.AddUnknown }), wait(journal.ForRules, 0)},
		{"portmap's ADD failed", journal.Step{}, portStep(func(s *journal.Step) { s.ADD = journal.AddFailed }), journal.Next{}},
		{"portmap's DEL is done", journal.Step{Next: wait(journal.ForRules, 0)}, port(func(p *Pass) { p.Steps = slices.Delete(p.Steps, 2, 3) }), journal.Next{}},
		{"portmap got no mapping", journal.Step{}, withConfig(`{"runtimeConfig": {"portMappings": []}}`), journal.Next{}},
		{"portmap got another capability", journal.Step{}, withConfig(`{"runtimeConfig": {"bandwidth": {"ingressRate": 1}}}`), journal.Next{}},
		{"portmap got null", journal.Step{}, withConfig(`{"runtimeConfig": {"portMappings": null}}`), journal.Next{}},
		{"portmap's configuration cannot be read", journal.Step{}, withConfig(`[`), journal.Next{}},
		{"a host port of an earlier boot", journal.Step{Next: wait(journal.ForRules, 0)}, port(func(p *Pass) { p.SameBoot = false }), journal.Next{}},
		{"a step that frees no address", journal.Step{Index: 1}, port(), journal.Next{}},
		{"the host port's own step", journal.Step{Index: 2}, port(func(p *Pass) { p.Claims[0].Step = 2 }), journal.Next{}},
		{"a step after the host port's", journal.Step{Index: 4}, port(), journal.Next{}},

		{"a rule's DEL is pending", journal.Step{}, rule(func(*journal.Step) {}), wait(journal.ForRules, 0)},
		{"the rule's DEL was tried once", journal.Step{}, rule(func(s *journal.Step) { s.Tries = 1 }), wait(journal.ForRules, 0)},
		{"the rule's DEL was tried twice", journal.Step{}, rule(func(s *journal.Step) { s.Tries = 2 }), journal.Next{}},
		{"the rule's plugin is missing", journal.Step{}, rule(func(s *journal.Step) { s.Tries, s.Code = 9, missing }), wait(journal.ForRules, 0)},
		{"the rule's plugin is missing, and left the chain", journal.Step{},
			rule(func(s *journal.Step) { s.Tries, s.Code, s.Absent = 9, missing, 1 }), journal.Next{}},
		{"the rule's ADD failed", journal.Step{}, rule(func(s *journal.Step) { s.ADD = journal.AddFailed }), journal.Next{}},
		{"the rule's ADD was interrupted", journal.Step{}, rule(func(s *journal.Step) { s.ADD = journal.AddUnknown }), journal.Next{}},
		{"the rule's plugin left the chain", journal.Step{}, rule(func(s *journal.Step) { s.Absent = 1 }), journal.Next{}},
		{"a plugin that removes rules by container", journal.Step{}, rule(func(s *journal.Step) { s.Type = "bandwidth" }), journal.Next{}},

		{"a pause", journal.Step{Next: wait(journal.ForBackoff, soon)}, nil, wait(journal.ForBackoff, soon)},
		{"a pause, the pass ignores pauses", journal.Step{Next: wait(journal.ForBackoff, soon)}, func(p *Pass) { p.IgnorePause = true }, journal.Next{}},
		{"a pause that is over", journal.Step{Next: wait(journal.ForBackoff, now)}, nil, journal.Next{}},
		{"a pause of another boot", journal.Step{Next: wait(journal.ForBackoff, now+int64(longPause)+1)}, nil, journal.Next{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := pass()
			if tt.pass != nil {
				tt.pass(&p)
			}
			if got := Due(&tt.step, p); got != tt.want {
				t.Errorf("%+v, want %+v", got, tt.want)
			}
		})
	}
}

func TestPause(t *testing.T) {
	for tries, want := range map[int]time.Duration{
		0: 0, 1: 0, 2: 2 * time.Second, 3: 4 * time.Second, 5: 16 * time.Second, 6: 30 * time.Second, 20: 30 * time.Second,
		21: 5 * time.Minute, 1000: 5 * time.Minute,
	} {
		if least, most := Pause(tries, 0), Pause(tries, 1); most != want || least != want/2 {
			t.Errorf("after %d tries %s to %s, want %s at most", tries, least, most, want)
		}
	}
}

func TestLeft(t *testing.T) {
	for until, want := range map[int64]time.Duration{
		0: 0, now - 1: 0, now: 0, now + 1: 1, now + int64(longPause): longPause, now + int64(longPause) + 1: 0,
	} {
		if got := Left(journal.Next{At: until}, pass()); got != want {
			t.Errorf("until %d: %s, want %s", until, got, want)
		}
	}
}

// TestFactsOfSteps covers KeepsContainer, Failing and Words.
func TestFactsOfSteps(t *testing.T) {
	for _, tt := range []struct {
		what      string
		got, want bool
	}{
		{"adding", KeepsContainer(journal.Adding), true}, {"live", KeepsContainer(journal.Live), true},
		{"rolling-back", KeepsContainer(journal.RollingBack), false}, {"deleting", KeepsContainer(journal.Deleting), false},
		{"failing", Failing(&journal.Step{Last: "x"}), true}, {"not tried", Failing(&journal.Step{}), false},
		{"waiting", Failing(&journal.Step{Last: "x", Next: journal.Next{Why: journal.ForRules}}), false},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %t", tt.what, tt.got)
		}
	}
	words := map[string]journal.Step{
		"": {}, "code 5": {Code: 5, Last: "x"}, "x": {Last: "x"},
		"waiting: it could release resources of another ADD":                              {Next: journal.Next{Why: journal.ForContainer}},
		"waiting for a later plugin: rules or host ports may still use the pod's address": {Next: journal.Next{Why: journal.ForRules}},
	}
	for want, s := range words {
		if got := Words(&s); got != want {
			t.Errorf("%+v: %q, want %q", s, got, want)
		}
	}
}

// TestPortFirst: bridge's DEL comes after portmap's, even if portmap's was tried more often. So
// bridge's DEL runs in the same pass in which portmap's succeeds. A DEL that was tried more often
// than both of them comes last.
func TestPortFirst(t *testing.T) {
	p := pass()
	p.Claims = []journal.Claim{{}}
	p.Steps = []journal.Step{{Index: 0}, {Index: 1, Type: "portmap", Tries: 3, Config: withPorts},
		{Index: 2, Type: "tuning"}, {Index: 3, Type: "tuning", Tries: 4}}
	for tries, want := range map[int][]int{0: {2, 1, 0, 3}, 3: {2, 1, 0, 3}, 5: {2, 1, 3, 0}} {
		p.Steps[0].Tries = tries
		if got := Order(p); !slices.Equal(got, want) {
			t.Errorf("after %d tries of the first: %v, want %v", tries, got, want)
		}
	}
	p.Steps[0].Tries, p.SameBoot = 0, false
	if got := Order(p); !slices.Equal(got, []int{2, 0, 1, 3}) {
		t.Errorf("in another boot: %v", got)
	}
}

// TestReserved: an address stays reserved only while the pending DEL of a later step needs it.
func TestReserved(t *testing.T) {
	p := pass()
	p.Steps = []journal.Step{{Index: 1, Type: "portmap", Config: withPorts}}
	if !Reserved(0, p) {
		t.Error("portmap's DEL is pending, and the address is not reserved")
	}
	if Reserved(1, p) {
		t.Error("no later DEL is pending, and the address is reserved")
	}
}

func TestOrder(t *testing.T) {
	for _, tt := range []struct {
		name  string
		tries [4]int
		want  []int
	}{
		{"none was tried", [4]int{}, []int{3, 2, 1, 0}},
		{"the last was tried", [4]int{0, 0, 0, 1}, []int{2, 1, 0, 3}},
		{"some were tried", [4]int{0, 2, 0, 1}, []int{2, 0, 3, 1}},
		{"all were tried", [4]int{1, 1, 1, 1}, []int{3, 2, 1, 0}},
	} {
		var steps []journal.Step
		for i, tries := range tt.tries {
			steps = append(steps, journal.Step{Index: i, Tries: tries})
		}
		if got := Order(Pass{Steps: steps}); !slices.Equal(got, tt.want) || steps[0].Index != 0 {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// TestGets covers each case of Gets, and variants of the cases with one fact changed.
func TestGets(t *testing.T) {
	file, none := journal.Claim{Pool: "pool"}, journal.Claim{}
	for _, tt := range []struct {
		name  string
		step  journal.Step
		claim journal.Claim
		owner Owner
		want  bool
	}{
		{"the step that got it", journal.Step{Type: "own"}, none, Owner{Freed: true, Others: true}, true},
		{"the step that got it from host-local", journal.Step{Type: "own"}, file, Owner{}, true},
		{"a plugin that removes rules by container", journal.Step{Index: 1, Type: "portmap"}, file, Owner{}, true},
		{"the file names the container", journal.Step{Index: 1, Type: "firewall"}, file, Owner{InFile: true}, true},
		{"the file names the container, its DEL has started", journal.Step{Index: 1, Type: "firewall"}, file, Owner{InFile: true, Freed: true}, true},
		{"the file names the container, another attachment has the address", journal.Step{Index: 1, Type: "firewall"}, file, Owner{InFile: true, Others: true}, false},
		{"the file names another container", journal.Step{Index: 1, Type: "firewall"}, file, Owner{}, false},
		{"a plugin before the one that got the address", journal.Step{Index: 0, Type: "own"}, journal.Claim{Step: 1, Pool: "pool"}, Owner{}, false},
		{"the address is not freed yet", journal.Step{Index: 1, Type: "firewall"}, none, Owner{}, true},
		{"the address may be free", journal.Step{Index: 1, Type: "firewall"}, none, Owner{Freed: true}, false},
		{"another record claims the address", journal.Step{Index: 1, Type: "firewall"}, none, Owner{Others: true}, false},
	} {
		if got := Gets(&tt.step, tt.claim, tt.owner); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}
