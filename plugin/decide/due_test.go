package decide

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"cni-unwind/journal"
)

// withIPAM is the configuration of a plugin with an IPAM plugin.
func withIPAM(ipam string) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"type": "p", "ipam": {"type": %q}}`, ipam))
}

// withPorts is the configuration of a plugin with a port mapping.
var withPorts = json.RawMessage(`{"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]}}`)

// now and grace are of all passes of these tests.
const (
	now   = int64(1000 * time.Second)
	grace = 10 * time.Minute
	soon  = now + int64(5*time.Second)
)

// pass is one in which nothing keeps a DEL from running.
func pass() Pass {
	never := func() bool { return false }
	none := func(*journal.Step) bool { return false }
	return Pass{
		Now: now, SameBoot: true, Since: now, GracePeriod: grace, ContainerLives: never, PodLives: never, Withheld: none,
		Reassigned: none,
	}
}

func yes() bool { return true }

// TestDue has each row of Due, and what is next to it.
func TestDue(t *testing.T) {
	held := func(*journal.Step) bool { return true }
	// port is a pass over a record with an address of the first step, and with port mappings of the third
	port := func(changes ...func(*Pass)) func(*Pass) {
		return func(p *Pass) {
			p.Claims = []journal.Claim{{Step: 0}, {Step: 4}}
			p.Steps = []journal.Step{{}, {Index: 1}, {Index: 2, Config: withPorts}, {Index: 3}, {Index: 4}}
			for _, change := range changes {
				change(p)
			}
		}
	}
	portStep := func(change func(*journal.Step)) func(*Pass) {
		return port(func(p *Pass) { change(&p.Steps[2]) })
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
		{"nothing was tried", journal.Step{}, nil, journal.Next{}},
		{"a newer ADD lives", journal.Step{}, func(p *Pass) { p.NewerLives, p.Asked, p.IgnorePause = true, true, true }, wait(journal.ForContainer, 0)},

		{"by pod, another sandbox lives", journal.Step{Config: withIPAM("spiderpool")}, func(p *Pass) { p.PodLives = yes }, wait(journal.ForContainer, 0)},
		{"by pod, none lives", journal.Step{Config: withIPAM("spiderpool")}, nil, journal.Next{}},
		{"not by pod, another sandbox lives", journal.Step{Config: withIPAM("host-local")}, func(p *Pass) { p.PodLives = yes }, journal.Next{}},
		{"by container, it passed", journal.Step{Config: withIPAM("whereabouts"), Tries: 1}, func(p *Pass) { p.ContainerLives = yes }, wait(journal.ForContainer, 0)},
		{"by container, it passed, none lives", journal.Step{Config: withIPAM("whereabouts"), Tries: 1}, nil, journal.Next{}},
		{"by container, it may have passed", journal.Step{Config: withIPAM("whereabouts"), MayHaveRun: true}, func(p *Pass) { p.ContainerLives = yes }, wait(journal.ForContainer, 0)},
		{"by container, it was killed", journal.Step{Config: withIPAM("whereabouts"), Tries: 1, Code: 5, ADD: journal.AddKilled},
			func(p *Pass) { p.ContainerLives = yes }, wait(journal.ForContainer, 0)},
		{"by container, it failed", journal.Step{Config: withIPAM("whereabouts"), Tries: 1, Code: 5}, func(p *Pass) { p.ContainerLives = yes }, journal.Next{}},
		{"by container, it was not tried", journal.Step{Config: withIPAM("whereabouts")}, func(p *Pass) { p.ContainerLives = yes }, journal.Next{}},
		{"not by container", journal.Step{Config: withIPAM("host-local"), Tries: 1}, func(p *Pass) { p.ContainerLives = yes }, journal.Next{}},

		{"the runtime may bring the path", journal.Step{Type: "kube-ovn"}, func(p *Pass) { p.NoNetNS = true }, wait(journal.ForRuntime, now+int64(grace))},
		{"the runtime asks", journal.Step{Type: "kube-ovn"}, func(p *Pass) { p.NoNetNS, p.Asked = true, true }, journal.Next{}},
		{"there is a namespace", journal.Step{Type: "kube-ovn"}, nil, journal.Next{}},
		{"of an earlier boot", journal.Step{Type: "kube-ovn"}, func(p *Pass) { p.NoNetNS, p.SameBoot = true, false }, journal.Next{}},
		{"past the grace period", journal.Step{Type: "kube-ovn"}, func(p *Pass) { p.NoNetNS, p.Since = true, now-int64(grace) }, journal.Next{}},
		{"just within it", journal.Step{Type: "kube-ovn"}, func(p *Pass) { p.NoNetNS, p.Since = true, now-int64(grace)+1 }, wait(journal.ForRuntime, now+1)},
		{"a plugin that needs no path", journal.Step{Type: "bridge"}, func(p *Pass) { p.NoNetNS = true }, journal.Next{}},

		{"a host port's DEL is pending", journal.Step{}, port(), wait(journal.ForPort, 0)},
		{"it is pending, and a pause is over", journal.Step{Next: wait(journal.ForBackoff, now)}, port(), wait(journal.ForPort, 0)},
		{"it is pending, asked", journal.Step{Next: wait(journal.ForPort, 0)},
			port(func(p *Pass) { p.Asked, p.IgnorePause = true, true }), wait(journal.ForPort, 0)},
		{"it was killed", journal.Step{}, portStep(func(s *journal.Step) { s.ADD = journal.AddKilled }), wait(journal.ForPort, 0)},
		{"it is unknown how its ADD ended", journal.Step{}, portStep(func(s *journal.Step) { s.ADD = journal.AddUnknown }), wait(journal.ForPort, 0)},
		{"its ADD failed", journal.Step{}, portStep(func(s *journal.Step) { s.ADD = journal.AddFailed }), journal.Next{}},
		{"its DEL is done", journal.Step{Next: wait(journal.ForPort, 0)}, port(func(p *Pass) { p.Steps = slices.Delete(p.Steps, 2, 3) }), journal.Next{}},
		{"it got no mapping", journal.Step{}, withConfig(`{"runtimeConfig": {"portMappings": []}}`), journal.Next{}},
		{"it got another capability", journal.Step{}, withConfig(`{"runtimeConfig": {"bandwidth": {"ingressRate": 1}}}`), journal.Next{}},
		{"it got null", journal.Step{}, withConfig(`{"runtimeConfig": {"portMappings": null}}`), journal.Next{}},
		{"its configuration cannot be read", journal.Step{}, withConfig(`[`), journal.Next{}},
		{"an earlier boot's", journal.Step{Next: wait(journal.ForPort, 0)}, port(func(p *Pass) { p.SameBoot = false }), journal.Next{}},
		{"a step that frees no address", journal.Step{Index: 1}, port(), journal.Next{}},
		{"the host port's own step", journal.Step{Index: 2}, port(func(p *Pass) { p.Claims[0].Step = 2 }), journal.Next{}},
		{"a step after it", journal.Step{Index: 4}, port(), journal.Next{}},

		{"it has another owner", journal.Step{Next: wait(journal.ForOwner, 0)}, func(p *Pass) { p.Withheld = held }, wait(journal.ForOwner, 0)},
		{"it has another owner, asked", journal.Step{Next: wait(journal.ForOwner, soon)},
			func(p *Pass) { p.IgnorePause, p.Withheld = true, held }, wait(journal.ForOwner, soon)},
		{"it has another owner, and a newer ADD lives", journal.Step{Next: wait(journal.ForOwner, 0)},
			func(p *Pass) { p.NewerLives, p.Withheld = true, held }, wait(journal.ForOwner, 0)},
		{"no other owner, and a newer ADD lives", journal.Step{Next: wait(journal.ForOwner, now)},
			func(p *Pass) { p.NewerLives = true }, wait(journal.ForContainer, 0)},
		{"no other owner, not its time", journal.Step{Next: wait(journal.ForOwner, soon)}, nil, wait(journal.ForOwner, soon)},
		{"no other owner, asked", journal.Step{Next: wait(journal.ForOwner, soon)}, func(p *Pass) { p.IgnorePause = true }, journal.Next{}},
		{"no other owner", journal.Step{Next: wait(journal.ForOwner, now)}, nil, journal.Next{}},
		{"an owner that it does not wait for", journal.Step{}, func(p *Pass) { p.Withheld = held }, journal.Next{}},

		{"to be repeated", journal.Step{Next: wait(journal.ForRepeat, soon)}, func(p *Pass) { p.IgnorePause = true }, wait(journal.ForRepeat, soon)},
		{"to be repeated, and another sandbox lives", journal.Step{Config: withIPAM("whereabouts"), Tries: 1, Next: wait(journal.ForRepeat, soon)},
			func(p *Pass) { p.ContainerLives = yes }, wait(journal.ForRepeat, soon)},
		{"to be repeated now", journal.Step{Next: wait(journal.ForRepeat, now)}, nil, journal.Next{}},
		{"killed, to be repeated", journal.Step{ADD: journal.AddKilled, Next: wait(journal.ForRepeat, soon)}, nil, wait(journal.ForRepeat, soon)},
		{"killed before the boot", journal.Step{ADD: journal.AddKilled, Next: wait(journal.ForRepeat, soon)}, func(p *Pass) { p.SameBoot = false }, journal.Next{}},
		{"a success before the boot", journal.Step{Next: wait(journal.ForRepeat, soon)}, func(p *Pass) { p.SameBoot = false }, wait(journal.ForRepeat, soon)},

		{"a pause", journal.Step{Next: wait(journal.ForBackoff, soon)}, nil, wait(journal.ForBackoff, soon)},
		{"a pause, asked", journal.Step{Next: wait(journal.ForBackoff, soon)}, func(p *Pass) { p.IgnorePause = true }, journal.Next{}},
		{"a pause that is over", journal.Step{Next: wait(journal.ForBackoff, now)}, nil, journal.Next{}},
		{"a pause of another boot", journal.Step{Next: wait(journal.ForBackoff, now+int64(grace)+1)}, nil, journal.Next{}},
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
		0: 0, now - 1: 0, now: 0, now + 1: 1, now + int64(grace): grace, now + int64(grace) + 1: 0,
	} {
		if got := Left(journal.Next{At: until}, pass()); got != want {
			t.Errorf("until %d: %s, want %s", until, got, want)
		}
	}
	p := pass()
	p.GracePeriod = 0
	if got := Left(journal.Next{At: now + int64(longPause)}, p); got != longPause {
		t.Errorf("without a grace period: %s", got)
	}
}

// TestFactsOfSteps has what is said of a step, or of an address, by one fact or two.
func TestFactsOfSteps(t *testing.T) {
	repeats := func(reassigned bool, s journal.Step) bool {
		return NeedsNoRepeat(&s, Pass{Reassigned: func(*journal.Step) bool { return reassigned }})
	}
	for _, tt := range []struct {
		what      string
		got, want bool
	}{
		{"late", IsLate(&journal.Step{Type: "firewall", Index: 1}, journal.Claim{}, true), true},
		{"late, of an unknown plugin", IsLate(&journal.Step{Type: "own", Index: 2}, journal.Claim{Step: 1}, true), true},
		{"its address is its own", IsLate(&journal.Step{Type: "firewall", Index: 1}, journal.Claim{}, false), false},
		{"it gets no address", IsLate(&journal.Step{Type: "firewall", Index: 1}, journal.Claim{Step: 1}, true), false},
		{"by container", IsLate(&journal.Step{Type: "portmap", Index: 1}, journal.Claim{}, true), false},
		{"its first late DEL", DropsAddress(&journal.Step{}, true), false},
		{"it was late, and killed", DropsAddress(&journal.Step{LateKills: 1}, true), false},
		{"it was late, and killed twice", DropsAddress(&journal.Step{LateKills: 2}, true), true},
		{"its record is not in the journal", DropsAddress(&journal.Step{}, false), true},
		{"its addresses are others'", repeats(true, journal.Step{Again: soon}), true},
		{"one is not", repeats(false, journal.Step{Again: soon}), false},
		{"the second DEL failed", repeats(true, journal.Step{Again: soon, Code: 5}), true},
		{"a killed plugin's agent may have taken another", repeats(true, journal.Step{Again: soon, ADD: journal.AddKilled}), false},
		{"no DEL has passed", repeats(true, journal.Step{Tries: 1, Code: 5}), false},
		{"adding", KeepsContainer(journal.Adding), true}, {"live", KeepsContainer(journal.Live), true},
		{"rolling-back", KeepsContainer(journal.RollingBack), false}, {"deleting", KeepsContainer(journal.Deleting), false},
		{"failing", Failing(&journal.Step{Last: "x"}), true}, {"not tried", Failing(&journal.Step{}), false},
		{"waiting for an owner", Failing(&journal.Step{Last: "x", Next: journal.Next{Why: journal.ForOwner}}), false},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %t", tt.what, tt.got)
		}
	}
	words := map[string]journal.Step{
		"": {}, "code 5": {Code: 5, Last: "x"}, "x": {Last: "x", ADD: journal.AddKilled}, "was killed": {ADD: journal.AddKilled},
		"succeeded; runs once more":                          {Code: 5, Next: journal.Next{Why: journal.ForRepeat}},
		"waiting: its address has a new owner":               {Next: journal.Next{Why: journal.ForOwner}},
		"waiting: it could release resources of another ADD": {Next: journal.Next{Why: journal.ForContainer}},
		"waiting: a host port may forward to its address":    {Next: journal.Next{Why: journal.ForPort}},
		"waiting for the runtime's own DEL":                  {Next: journal.Next{Why: journal.ForRuntime}},
	}
	for want, s := range words {
		if got := Words(&s); got != want {
			t.Errorf("%+v: %q, want %q", s, got, want)
		}
	}
}

// TestPortFirst: the DEL of bridge comes after the DEL of portmap, though that was tried more often, and
// before one that was tried even more often. So it runs in the pass in which portmap's succeeds.
func TestPortFirst(t *testing.T) {
	p := pass()
	p.Claims = []journal.Claim{{}}
	p.Steps = []journal.Step{{Index: 0}, {Index: 1, Tries: 3, Config: withPorts}, {Index: 2}, {Index: 3, Tries: 4}}
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

func TestOrder(t *testing.T) {
	for _, tt := range []struct {
		name  string
		tries [4]int
		hung  int // the index of the step whose ADD was killed; -1: none
		want  []int
	}{
		{"none was tried", [4]int{}, -1, []int{3, 2, 1, 0}},
		{"the last was tried", [4]int{0, 0, 0, 1}, -1, []int{2, 1, 0, 3}},
		{"some were", [4]int{0, 2, 0, 1}, -1, []int{2, 0, 3, 1}},
		{"all were", [4]int{1, 1, 1, 1}, -1, []int{3, 2, 1, 0}},
		{"the last hung", [4]int{}, 3, []int{2, 1, 0, 3}},
		{"one hung, and was tried", [4]int{0, 0, 2, 1}, 2, []int{1, 0, 3, 2}},
	} {
		var steps []journal.Step
		for i, tries := range tt.tries {
			steps = append(steps, journal.Step{Index: i, Tries: tries})
		}
		if tt.hung >= 0 {
			steps[tt.hung].ADD = journal.AddKilled
		}
		if got := Order(Pass{Steps: steps}); !slices.Equal(got, tt.want) || steps[0].Index != 0 {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}
