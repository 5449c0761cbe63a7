package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
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

// lateDELs are statements about DELs whose address is free.
var lateDELs = acts{
	// marks POD N: waits until the journal has N tries of the DEL of the pod's last step
	"marks": func(s *story, w []string) {
		eventually(s, "marked", func() bool {
			e := s.who(w[0]).entry()
			return e != nil && fmt.Sprint(e.Undo.Steps[len(e.Undo.Steps)-1].Tries) == w[1]
		})
	},
	// cut VERB PLUGIN: the runtime kills the unwind that runs this call, the last one, once it has begun
	"cut": func(s *story, w []string) {
		var last logged
		eventually(s, "begun", func() bool {
			if all := s.callLog(); len(all) > 0 {
				last = all[len(all)-1]
			}
			return last.Command == w[0] && last.Instance == w[1]
		})
		status := read(s, fmt.Sprintf("/proc/%d/stat", last.PID))
		parent, err := strconv.Atoi(strings.Fields(status[strings.LastIndex(status, ")"):])[2])
		s.must(err)
		s.must(syscall.Kill(parent, syscall.SIGKILL))
	},
}

// TestHangingDELFreesAddress: p1's DEL hangs, and the runtime kills each DEL that waits for it. The second DEL frees
// the address, and it stays free, also for another pod, while p1 still hangs.
func TestHangingDELFreesAddress(t *testing.T) {
	stories(t, `
	chain single | p1, "rules": true
	add a; let first $a; plan p1 DEL hang
	start del a; marks a 1; cut DEL p1; fails wait del a; reserved 1
	forgets; start del a; cut DEL p1; fails wait del a; reserved 0
	forgets; start del a; cut DEL p1; fails wait del a; reserved 0
	either p1 works again: plan; del a; gone a; reserved 0; rules
	or another pod gets the address: hasty; add b; given b $first; rules $b.p1; plan; del b; sweep; gone a`, lateDELs)
}

// TestTwoSlowLateDELs: b gets a's address while the first of two slow DELs of a runs. b goes on before the second
// one ends, which does not get the address.
func TestTwoSlowLateDELs(t *testing.T) {
	stories(t, `
	budget LateDel 10s; budget Release 20s
	chain single | p1, "rules": true | p2, "rules": true; let held $dir/faulty/held
	add a; plan p1 DEL fail, p2 DEL fail; fails del a; reserved 0; rules $a.p1 $a.p2
	plan p1 DEL hold, p2 DEL hold
	start del a; appears $held/DEL.a.p2; add b; rules $b.p1 $b.p2
	appears $held/DEL.a.p1; lose $held/DEL.a.p1; fails wait del a
	rules $b.p1 $b.p2; pending a p1 p2
	plan; del b; sweep; gone a; rules`)
}

// TestSlowLateDELEnds: a late DEL always needs more time than its address may be free. The third one runs without
// the address. Its rule goes with the address's next owner.
func TestSlowLateDELEnds(t *testing.T) {
	stories(t, `
	budget LateDel 1s; chain single | p1, "rules": true; let held $dir/faulty/held/DEL.a.p1
	add a; plan p1 DEL fail; fails del a; plan p1 DEL hold
	either by DELs: fails del a; fails del a
	or by sweeps: sweep; sweep
	lose $held; forgets
	if DEL: start del a
	if sweep: start sweep
	appears $held; previous; lose $held
	if DEL: wait del a
	if sweep: wait sweep
	gone a; rules $a.p1; reserved 0
	plan; add b; rules $b.p1; del b; rules`)
}

// TestADDRunsPendingDEL: an ADD gets the address of a dead attachment with a pending DEL. That DEL gets the address,
// and runs before the ADD's next delegate.
func TestADDRunsPendingDEL(t *testing.T) {
	stories(t, `
	chain single | p1, "rules": true | p2
	add a; plan p1 DEL fail; fails del a; rules $a.p1; plan; forgets
	add b; previous $a; calls ADD p0, DEL p1, ADD p1, ADD p2; rules $b.p1; gone a
	del b; rules`)
}

// TestParkedUntilTheNextSweep: A has a DEL that is parked, or will be, because B has its address. When
// the runtime calls GC, both are dead. That GC undoes B, and the next one leaves nothing of A.
func TestParkedUntilTheNextSweep(t *testing.T) {
	stories(t, `
	chain single | p1, "rules": true | p2
	add a; plan p1 DEL fail; fails del a; rules $a.p1; reserved 0
	add b; plan
	either parked before: del a
	or parked by the GC:
	drop b; gc; gc; clean; rules`)
}

// hostPorts are statements about the programs with which rules can be listed.
var hostPorts = acts{
	// flush ADDRESS: the chain of its host port is empty
	"flush": func(s *story, w []string) {
		for _, rule := range s.node.rules("-A CNI-DN-") {
			if strings.Contains(rule, " "+w[0]+":") {
				run(s, "iptables", "-w", "-t", "nat", "-F", strings.Fields(rule)[1])
			}
		}
	},
	// unlisted TEXT: the programs that list rules do this for unwind
	"unlisted": func(s *story, w []string) {
		dir := filepath.Join(s.dir, "unlisted")
		s.mkdir(dir)
		for _, program := range []string{"iptables-save", "ip6tables-save", "nft"} {
			s.must(os.WriteFile(filepath.Join(dir, program), []byte("#!/bin/sh\n"+w[0]+"\n"), 0o700))
		}
		s.env = append(s.env, "PATH="+dir+":"+os.Getenv("PATH"))
	},
}

// TestHostPortKeepsAddress: portmap's DEL fails, and its rule forwards to the pod's address. The address stays with
// the pod until portmap's DEL succeeds, and goes in the same pass, or until the machine boots.
func TestHostPortKeepsAddress(t *testing.T) {
	stories(t, `
	chain bridge | portmap
	add a; let first $a; breaks portmap
	either by a DEL: fails del a 'portmap (code 999)'
	or by a sweep: drop a; status
	port $first; reserved 1; sweep; reserved 1; pending a bridge portmap
	either portmap works again:
	or the machine was started again:
	if DEL, the machine: drop a
	if the machine: boot a; sweep; reserved 0; pending a portmap
	works portmap; sweep; gone a; reserved 0`)
}

// TestHostPortsUnlisted: nobody needs to list the rules of host ports, whether that fails or hangs.
func TestHostPortsUnlisted(t *testing.T) {
	stories(t, `
	chain bridge | portmap
	each how 'exit 1' 'exec sleep 100'
	unlisted '$how'; add a; del a; reserved 0; gone a`, hostPorts)
}

// TestRulesOfOthers: a rule that another container made keeps no pod's address.
func TestRulesOfOthers(t *testing.T) {
	stories(t, `
	chain bridge | portmap
	either a chain without a jump:
		shell 'iptables -w -t nat -N CNI-DN-$network'
		shell 'iptables -w -t nat -A CNI-DN-$network -p tcp --dport 9 -j DNAT --to-destination $ip2:80'
		add a; given a $ip2; port $ip2 2; del a; reserved 0; gone a
		shell 'iptables -w -t nat -F CNI-DN-$network; iptables -w -t nat -X CNI-DN-$network'
	or a network on the same subnet:
		network other o; add b; given b $ip2; network
		add a; given a $ip2; port $ip2 2; del a; reserved 0 a; gone a; port $ip2; del b`)
}

// TestHostPortBeforeBoot: a record with a host port is from before the boot, and the plugin's binary is gone.
func TestHostPortBeforeBoot(t *testing.T) {
	stories(t, `
	script ports 'exec $cni/portmap'
	chain bridge | {"type": "ports", "capabilities": {"portMappings": true}}
	add a; lose $dir/bin/ports; reboot a; sweep; reserved 0; pending a ports
	script ports 'exec $cni/portmap'; sweep; gone a`)
}
