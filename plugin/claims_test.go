package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/plugin/plugintest/sandbox"
)

// turn is a verb of a race.
type turn struct {
	*story
	call   []string                     // VERB POD
	verb   string                       // in capitals
	plugin string                       // which holds it, or fails
	plan   map[string]map[string]string // of both turns
	ended  bool
}

// set sets the mode that the plugin has for the verb.
func (t *turn) set(mode string) {
	if t.plan[t.plugin] == nil {
		t.plan[t.plugin] = map[string]string{}
	}
	t.plan[t.plugin][t.verb] = mode
	t.node.setModes(t.plan)
}

// await waits until the verb has ended or, unless it is to go on, until the plugin holds it. It may
// wait for the other one instead.
func (t *turn) await(most time.Duration, goOn bool) {
	name := t.verb + "." + t.who(t.call[1]).ContainerID + "." + t.plugin
	held, end := filepath.Join(t.faultyDir(), "held", name), time.Now().Add(most)
	for ; !t.ended && time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if _, err := os.Lstat(held); err == nil && !goOn {
			return
		}
		_ = os.Remove(held)
		select {
		case <-t.begun[strings.Join(t.call, " ")]:
			t.ended = true
		default:
		}
	}
}

// races are statements about two verbs at once.
var races = acts{
	// race 'VERB POD PLUGIN MODE' 'VERB POD PLUGIN MODE': one verb runs until the plugin holds it,
	// then the other; then the first one goes on, and then the other one ends
	"race": func(s *story, w []string) {
		plan, turns := map[string]map[string]string{}, []*turn{}
		for _, text := range w {
			f := strings.Fields(text)
			t := &turn{story: s, call: f[:2], verb: strings.ToUpper(f[0]), plugin: f[2], plan: plan}
			t.set(f[3])
			s.start(t.call)
			t.await(time.Second, false)
			turns = append(turns, t)
		}
		turns[0].set("ok")
		turns[0].await(time.Second, true)
		turns[1].set("ok")
		for _, t := range []*turn{turns[1], turns[0]} {
			t.await(sandbox.Patience, true)
			s.want(t.ended, "%q does not end", t.call)
		}
	},
	// has POD: all that its ADD took from p0, p1 and p2
	"has": func(s *story, w []string) {
		p := s.who(w[0])
		r, err := p.cni.GetNetworkListCachedResult(s.list(p, false), &p.RuntimeConf)
		s.must(err)
		taken, rules, a := s.taken(), s.addressRules(), address(s, r)
		for _, instance := range []string{"p0", "p1", "p2"} {
			s.want(slices.Contains(taken, p.ContainerID+".eth0."+instance), "taken: %q", taken)
		}
		s.want(slices.Contains(rules, a+".p1"), "rules: %q, not of %s", rules, a)
	},
}

// TestLateDELAgainstClaim: B gets A's address. A's DEL begins at each phase of B's ADD, and B's ADD
// begins at each phase of A's DEL. If one waits for the other, the other goes on. B has its rule
// when both are over. After B's DEL nothing of A is left. A's DEL of its whole chain, or of p1
// alone, is about to be asked for, and its address is free for B. (A's DEL has been tried twice.)
func TestLateDELAgainstClaim(t *testing.T) {
	stories(t, `
	either no entry: let p0 single
	or swept: let p0 single
	or a DEL pending: let p0 single
	or same container ID: let p0 single
	# The address is given, not claimed; it is claimed; the rule is made; B is live; A comes first.
	each ADD 'p0 hold-effect' 'p1 hold' 'p1 hold-effect' 'p2 ok' later
	# The rule is there; the rule is removed; p1 fails; the address is free.
	each DEL 'p1 hold' 'p1 hold-effect' 'p1 fail' 'p0 hold-effect'
	chain $p0 | p1, "rules": true | p2; add a
	plan p1 DEL fail; fails del a; fails del a; plan; reserved 0
	if no entry: lose $state
	if swept: gc; clean; forgets
	if same container ID: again a b
	unless later: race 'add b $ADD' 'del a $DEL'
	if later: race 'del a $DEL' 'add b p2 ok'
	plan; logged 'msg=deferred attachment=$network/b/eth0' 0
	# That DEL is B's. The rule of A stays until the address's next pod goes.
	if same container ID, ADD p: del b; clean
	unless same container ID, ADD p: has b; entry b live
	unless same container ID: del a; has b; entry b live
	del b; sweep; clean
	unless same container ID: rules`, races)
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
		parent := s.number(strings.Fields(status[strings.LastIndex(status, ")"):])[2])
		s.must(syscall.Kill(parent, syscall.SIGKILL))
	},
}

// TestRuleBeforeAddress: the DEL of a plugin that removes a rule by the address fails, and the address is freed
// after its second try. Until then the address, and so the rule, is nobody else's.
func TestRuleBeforeAddress(t *testing.T) {
	stories(t, `
	chain single | p1, "rules": true; add a; let first $a
	plan p1 DEL fail; fails del a; reserved 1; rules $a.p1
	either it works again: plan; del a; reserved 0; rules
	or it works again for a sweep: plan; drop a; sweep; gone a; reserved 0; rules
	or it keeps failing until the runtime's DEL: fails del a; reserved 0; rules $a.p1
		add b; given b $first; forgets; plan; del a; gone a; previous; rules $first.p1; del b; rules
	or it keeps failing until a sweep: fails del a; reserved 0; rules $a.p1
		add b; given b $first; forgets; plan; drop a; sweep; gone a; previous; rules $first.p1; del b; rules`)
}

// TestAddressOfAnotherStore: an IPAM plugin of which no file shows an owner frees an address and fails, and another
// pod gets the address. No DEL that removes rules by the address is given it, also one made from the runtime's
// input after a sweep.
func TestAddressOfAnotherStore(t *testing.T) {
	stories(t, `
	chain p0, "address": "$ip7/24" | p1, "rules": true; add a
	either it frees, then fails: plan p0 DEL fail-effect, p1 DEL fail; fails del a; fails del a; add b; plan
	or its DEL is killed after it freed: kill undone 2 del a; was-killed; add b
	or the runtime's DEL comes after a sweep: drop a; sweep; add b
	or it comes after the journal was lost: drop a; sweep; lose $state; add b
	rules $ip7.p1; forgets
	del a; rules $ip7.p1; entry b live; del b; rules`)
}

// TestCacheReadOnly: a sweep cannot remove a released attachment from libcni's cache. Its record goes, and its DELs
// don't run again; the runtime's late DEL takes nothing from the next owner of its address.
func TestCacheReadOnly(t *testing.T) {
	stories(t, `
	chain single | p1, "rules": true; add a; let first $a; drop a; forgets
	shell 'mount --bind $dir/cache $dir/cache && mount -o remount,ro,bind $dir/cache'
	sweep; gone a; calls DEL p1, DEL p0; sweep; calls
	shell 'umount $dir/cache'
	add b; given b $first; del a; rules $first.p1; del b; rules`)
}

// TestHangingDELFreesAddress: p1's DEL hangs, and the runtime kills each DEL that waits for it. The third DEL frees
// the address, and it stays free, also for another pod, while p1 still hangs.
func TestHangingDELFreesAddress(t *testing.T) {
	stories(t, `
	budget Orphans 500ms; chain single | p1, "rules": true
	add a; let first $a; plan p1 DEL hang
	start del a; marks a 1; cut DEL p1; fails wait del a; reserved 1
	forgets; start del a; marks a 2; cut DEL p1; fails wait del a; reserved 1
	forgets; start del a; cut DEL p1; fails wait del a; reserved 0
	either p1 works again: plan; del a; gone a; reserved 0; rules $first.p1
	or another pod gets the address: hasty; add b; given b $first; rules $b.p1; plan; del b; sweep; gone a`, lateDELs)
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
