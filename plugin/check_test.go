package plugin

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/plugin/netconf"
)

// The log messages of a CHECK when the journal and the runtime disagree.
const (
	warnedUnknown = "CHECK of an attachment without a journal entry"
	warnedResult  = "prevResult differs from the result of the ADD"
)

// TestCheck: CHECK asks every delegate in the order of the chain, with the configuration of its ADD
// and the final result, even if the conflist has changed.
func TestCheck(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		change func(n *node) *libcni.NetworkConfigList
	}{
		{"same conflist", nil},
		{"another conflist", func(n *node) *libcni.NetworkConfigList {
			return n.unwind(n.faulty("p9", ""), n.faulty("p1", `, "key": "changed"`))
		}},
		{"a chain that cannot be read", func(n *node) *libcni.NetworkConfigList {
			return n.unwindChain(`{"plugins": [{}]}`)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(n.faulty("p0", ""), n.faulty("p1", `, "key": "as added"`), n.faulty("p2", `, "address": "192.0.2.7/24"`))
			p := n.pod("a")
			p.mustAdd(list)
			n.forgetCalls()
			changed := list
			if c.change != nil {
				changed = c.change(n)
			}
			if err := p.check(changed); err != nil {
				t.Fatal(err)
			}
			for _, l := range n.callLog() {
				r, err := netconf.ParseResult(l.Stdin["prevResult"])
				if err != nil || len(r.Addresses()) != 1 || l.NetNS != p.NetNS || l.Args == "" {
					t.Errorf("%s: prevResult %s, netns %s, args %s", l.Instance, l.Stdin["prevResult"], l.NetNS, l.Args)
				}
				if key := string(l.Stdin["key"]); l.Instance == "p1" && key != `"as added"` {
					t.Errorf("p1 got key %s", key)
				}
			}
			n.wantCalls("CHECK", "CHECK p0", "CHECK p1", "CHECK p2")
			n.wantNoWarning(warnedUnknown, warnedResult)
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

func (n *node) wantNoWarning(warnings ...string) {
	n.Helper()
	for _, w := range warnings {
		if strings.Contains(n.log(), w) {
			n.Errorf("the log warns: %s", w)
		}
	}
}

// TestCheckIsNotSwitchedOn: CHECK asks no delegate that the plain chain would not ask.
func TestCheckIsNotSwitchedOn(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, chain string }{
		{"disableCheck", `{"cniVersion": "1.0.0", "disableCheck": true, "plugins": [%s]}`},
		{"disableCheck, as a string", `{"cniVersion": "1.0.0", "disableCheck": "true", "plugins": [%s]}`},
		{"before CHECK was specified", `{"cniVersion": "0.3.1", "plugins": [%s]}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwindChain(fmt.Sprintf(c.chain, n.faulty("p0", "")))
			p := n.pod("a")
			p.mustAdd(list)
			if err := p.check(list); err != nil {
				t.Error(err)
			}
			n.wantCalls("ADD and CHECK", "ADD p0")
			if err := os.RemoveAll(n.stateDir); err != nil {
				t.Fatal(err)
			}
			if err := p.check(list); err != nil {
				t.Error(err)
			}
			n.wantCalls("CHECK without an entry")
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestCheckOfResults: CHECK compares the runtime's result with that of the ADD by meaning, over
// every pair of versions and any order of the keys. If the runtime's version can say less,
// delegates get the result as they printed it.
func TestCheckOfResults(t *testing.T) {
	t.Parallel()
	const printed = `{"cniVersion": "1.1.0", "dns": {}, "interfaces": [{"sandbox": "/s", "name": "eth0", "mtu": 1400, "mac": "02:00:00:00:00:07"}],
		"routes": [{"dst": "0.0.0.0/0", "mtu": 1300}], "ips": [{"interface": 0, "address": "192.0.2.7/24", "gateway": "192.0.2.1"}]}`
	for _, outer := range versions[2:] {
		t.Run(outer, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.outer, n.inner = outer, "1.1.0"
			n.script("printer", `cat >`+n.dir+`/$CNI_COMMAND; [ $CNI_COMMAND != ADD ] || echo '`+printed+`'`)
			list := n.unwind(`{"type": "printer"}`)
			p := n.pod("a")
			p.mustAdd(list)
			if err := p.check(list); err != nil {
				t.Fatal(err)
			}
			n.wantNoWarning(warnedResult)
			data, err := os.ReadFile(n.dir + "/CHECK")
			if err != nil {
				t.Fatal(err)
			}
			for _, want := range []string{`"mtu":1400`, `"mtu":1300`} {
				if !strings.Contains(strings.ReplaceAll(string(data), ": ", ":"), want) {
					t.Errorf("CHECK got no %s: %s", want, data)
				}
			}
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestCheckOfAnotherResult: if the runtime's result means something else than that of the ADD,
// CHECK warns, and gives the delegates the runtime's.
func TestCheckOfAnotherResult(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.faulty("p0", `, "address": "192.0.2.7/24"`))
	p := n.pod("a")
	p.mustAdd(list)
	n.forgetCalls()
	cached := filepath.Join(n.dir, "cache", "results", n.network+"-a-eth0")
	data, err := os.ReadFile(cached)
	if err != nil {
		t.Fatal(err)
	}
	n.write(cached, strings.Replace(string(data), "192.0.2.7", "192.0.2.8", 1))
	if err := p.check(list); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(n.log(), warnedResult) {
		t.Error("no warning")
	}
	var prev json.RawMessage
	for _, l := range n.callLog() {
		prev = l.Stdin["prevResult"]
	}
	if r, err := netconf.ParseResult(prev); err != nil || !slices.Contains(r.Addresses(), netip.MustParseAddr("192.0.2.8")) {
		t.Errorf("the delegate got %s", prev)
	}
	p.mustDel(list)
	n.nothingLeft()
}

// TestCheckBesideOthers: a CHECK blocks nobody. A DEL kills it after a while. An ADD of another
// sandbox of the pod, and another CHECK, neither wait for it nor kill it.
func TestCheckBesideOthers(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(n.faulty("p0", ""))
	p := n.pod("a")
	p.mustAdd(list)
	held := filepath.Join(n.faultyDir(), "held", "CHECK.a.p0")
	n.plan(map[string]map[string]string{"p0": {"CHECK": "hold"}})
	checked := make(chan error)
	go func() { checked <- p.check(list) }()
	n.running("CHECK p0")
	eventually(t, "the CHECK is held", func() bool { _, err := os.Stat(held); return err == nil })

	n.plan(nil)
	if err := p.check(list); err != nil {
		t.Errorf("another CHECK: %v", err)
	}
	b := n.pod("b")
	b.Args = p.Args
	b.mustAdd(list)
	b.mustDel(list)
	if err := os.Remove(held); err != nil {
		t.Fatal(err)
	}
	if err := <-checked; err != nil {
		t.Errorf("the CHECK: %v", err)
	}

	n.plan(map[string]map[string]string{"p0": {"CHECK": "hang"}})
	go func() { checked <- p.check(list) }()
	eventually(t, "the CHECK hangs", func() bool {
		return strings.Count(fmt.Sprint(n.calls()), "CHECK p0") == 3
	})
	p.mustDel(list)
	if err := <-checked; err == nil {
		t.Error("the CHECK of what is deleted passed")
	}
	n.nothingLeft()
}

// TestCheckFails: the runtime gets the error of the delegate that fails, with its code and words,
// and the delegates after it are not asked.
func TestCheckFails(t *testing.T) {
	stories(t, `
	chain p0 | p1, "code": 117 | p2
	add a; forgets; plan p1 CHECK fail
	fails check a code=117 'plugin type="faulty" failed (check): faulty: p1 CHECK refused'
	calls CHECK p0, CHECK p1
	plan; check a
	del a`)
}

// TestCheckWithoutEntry: without an entry the delegates decide; the missing entry is a warning.
func TestCheckWithoutEntry(t *testing.T) {
	stories(t, `
	chain p0 | p1, "address": "192.0.2.7/24"
	past add a; forgets
	either they agree: check a; logged '`+warnedUnknown+`'
	or one refuses: plan p1 CHECK fail; fails check a
	previous; calls CHECK p0, CHECK p1
	del a`, acts{"previous": func(s *story, _ []string) {
		for _, l := range s.callLog() {
			r, err := netconf.ParseResult(l.Stdin["prevResult"])
			s.want(err == nil && len(r.Addresses()) == 1, "%s: prevResult %s", l.Instance, l.Stdin["prevResult"])
		}
	}})
}

// TestCheckThatOutlivesUnwind: when unwind is killed in a CHECK, its delegate goes on. The next
// verb that undoes the attachment kills it, and no DEL becomes pending for that: the second DEL of a
// delegate that was killed would come after gracePeriod.
func TestCheckThatOutlivesUnwind(t *testing.T) {
	stories(t, `
	hasty; chain p0 | p1
	add a; plan p1 CHECK kill-parent; killed check a
	conf gracePeriod 10m
	either DEL: del a
	or sweep: drop a; statuses 0
	or next sandbox: drop a; sandbox a b; add b; del b
	ends CHECK p1`)
}

// TestCheckWithoutLock: a CHECK goes on if the lock is held for long, and creates no lock file for
// an attachment that the journal does not know.
func TestCheckWithoutLock(t *testing.T) {
	stories(t, `
	hasty; chain p0
	add a; lock a; check a; unlock; del a
	past add a; check a; locks 0
	del a`)
}
