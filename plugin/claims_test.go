package plugin

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"

	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/tristate"
)

// The phases of B's ADD. In the chain, p0 gives the address, p1 has a rule of the address, and p2
// comes last.
var claimPhases = []phase{
	{"the address is given, not claimed", "p0", "hold-effect"},
	{"the address is claimed", "p1", "hold"},
	{"the rule is made", "p1", "hold-effect"},
	{"live", "", ""},
}

// The phases of A's DEL: with p1 alone left, and with the whole chain.
var (
	latePhases = []phase{
		{"the rule is there", "p1", "hold"},
		{"the rule is removed", "p1", "hold-effect"},
		{"p1 fails", "p1", "fail"},
	}
	wholePhases = []phase{
		{"the rule is there", "p1", "hold"},
		{"p1 fails", "p1", "fail"},
		{"the address is free", "p0", "hold-effect"},
	}
	overPhase = []phase{{"over", "", ""}}
)

// kinds are the ways in which A's DEL is late. Each leaves A with a DEL that the runtime is about
// to ask for, and the address free for B.
var kinds = []struct {
	name   string
	phases []phase
	make   func(t *testing.T) *contest
}{
	{"A is live", wholePhases, func(t *testing.T) *contest {
		c := newContest(t, func(n *node) string { return n.faulty("p0", fmt.Sprintf(`, "address": %q`, n.prefix(4, 7))) })
		c.a.mustAdd(c.list)
		return c
	}},
	{"no entry", wholePhases, func(t *testing.T) *contest {
		c := pendingContest(t)
		must(t, os.RemoveAll(c.stateDir))
		return c
	}},
	{"tombstone", overPhase, func(t *testing.T) *contest {
		c := pendingContest(t)
		if out := c.ask("GC", "1.0.0", nil, c.faulty("p0", "")); out.code != 0 {
			t.Errorf("GC: %v", out.said)
		}
		c.nothingLeft()
		c.forgetCalls()
		c.silent = true
		return c
	}},
	{"parked", latePhases, pendingContest},
	{"same container ID", latePhases, func(t *testing.T) *contest {
		c := pendingContest(t)
		c.b = c.a.again()
		return c
	}},
	{"same container ID, another address", latePhases, func(t *testing.T) *contest {
		c := pendingContestOf(t, 2)
		c.b = c.a.again()
		return c
	}},
}

// TestLateDELAgainstClaim: B gets A's address. A's DEL starts at each phase of B's ADD, and B's ADD
// starts at each phase of A's DEL. If one waits for the other, the other goes on. B has its rule
// when both are over. After B's DEL nothing of A is left.
func TestLateDELAgainstClaim(t *testing.T) {
	t.Parallel()
	for k, kind := range kinds {
		skipped := func(a, b int) bool { return len(kind.phases) > 1 && !sampled(2, k, a, b) }
		for i, a := range kind.phases {
			for j, b := range claimPhases {
				if skipped(i, j) {
					continue
				}
				t.Run(fmt.Sprintf("%s/B %s/A %s", kind.name, b.name, a.name), func(t *testing.T) {
					t.Parallel()
					c := kind.make(t)
					errADD, errDEL := c.race(c.turn("ADD", c.b, b), c.turn("DEL", c.a, a))
					if c.a.ContainerID == c.b.ContainerID {
						c.wantOneDEL(errDEL)
						return
					}
					c.wantOutcome(errDEL, errADD)
				})
			}
			if skipped(i, len(claimPhases)) {
				continue
			}
			t.Run(fmt.Sprintf("%s/A %s/then B", kind.name, a.name), func(t *testing.T) {
				t.Parallel()
				c := kind.make(t)
				errDEL, errADD := c.race(c.turn("DEL", c.a, a), c.turn("ADD", c.b, overPhase[0]))
				c.wantOutcome(errDEL, errADD)
			})
		}
	}
}

// TestSlowLateDELAgainstClaim: a's DEL takes longer than an ADD waits for another's. Nobody gets the address
// meanwhile.
func TestSlowLateDELAgainstClaim(t *testing.T) {
	stories(t, `
	hasty; chain single | p1, "rules": true; let held $dir/faulty/held/DEL.a.p1
	add a; plan p1 DEL fail; fails del a; plan p1 DEL hold
	start del a; appears $held; fails add b 'no IP addresses available'; rules $a.p1
	plan; lose $held; tries wait del a; add b; rules $a.p1
	del a; rules $a.p1; del b; rules`)
}

// TestOneSweepIsEnough: A has a DEL that is parked, or will be, because B has its address. When the
// runtime calls GC, both are dead. That one GC leaves nothing, though A comes first, being dead for
// longer.
func TestOneSweepIsEnough(t *testing.T) {
	stories(t, `
	chain single | p1, "rules": true | p2
	add a; plan p1 DEL fail; fails del a; rules $a.p1; reserved 0
	add b; plan
	either parked before: del a
	or parked by the GC:
	drop b; gc; left; rules`)
}

// hostPorts are statements about the rules of host ports.
var hostPorts = acts{
	// forwards ADDRESS yes|no
	"forwards": func(s *story, w []string) {
		is, err := facts.ForwardsTo(s.Context(), netip.MustParseAddr(w[0]))
		s.want(err == nil && (is == tristate.Yes) == (w[1] == "yes"), "%v, %v", is, err)
	},
	// flush ADDRESS: the chain of its host port is empty
	"flush": func(s *story, w []string) {
		for _, rule := range s.node.rules("-A CNI-DN-") {
			if strings.Contains(rule, " "+w[0]+":") {
				run(s, "iptables", "-w", "-t", "nat", "-F", strings.Fields(rule)[1])
			}
		}
	},
}

// TestHostPortKeepsAddress: portmap's DEL fails, and its rule forwards to the pod's address. The address
// stays with the pod until the rule is gone, in the runtime's DEL and in a sweep. Then nothing keeps it,
// although the DEL still fails.
func TestHostPortKeepsAddress(t *testing.T) {
	stories(t, `
	chain bridge | portmap
	add a; let first $a; breaks portmap
	either by a DEL: fails del a 'portmap (code 999)'
	or by a sweep: drop a; status
	forwards $first yes; reserved 1
	either the rule goes: flush $first; forwards $first no; sweep; reserved 0
	or portmap works again:
	works portmap; sweep; forwards $first no; gone a`, hostPorts)
}

// TestPortmapPassesWithoutEffect: portmap's DEL cannot use iptables. It exits with 0, since it can use
// ip6tables, and its rule still forwards to the pod's address. That DEL counts as one that failed: the
// next sweep runs it again, and then frees the address, which would stay for good with a DEL that is done.
func TestPortmapPassesWithoutEffect(t *testing.T) {
	stories(t, `
	shell 'mkdir $dir/six; ln -s $(command -v ip6tables) $dir/six'
	script portmap 'if [ $CNI_COMMAND = DEL ] && [ -e $dir/blind ]; then PATH=$dir/six; fi; exec $cni/portmap'
	chain bridge | portmap
	add a; let first $a; file $dir/blind
	either by a DEL: del a
	or by a sweep: drop a; status
	forwards $first yes; reserved 1; pending a bridge portmap
	if DEL: logged 'exit code 0, but a host port of this node still forwards to $first'
	lose $dir/blind; sweep; forwards $first no; reserved 0; gone a`, hostPorts)
}
