package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
)

// What the log says of a CHECK in which the journal and the runtime do not agree.
const (
	warnedUnknown = "CHECK of an attachment that the journal does not know"
	warnedResult  = "prevResult is not what the ADD returned"
)

// TestCheck has every delegate be asked in the order of the chain, each with the configuration of its ADD and the final
// result, also when the conflist has changed.
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
				r, err := parseResult(l.Stdin["prevResult"])
				if err != nil || len(r.addresses()) != 1 || l.NetNS != p.NetNS || l.Args == "" {
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

// TestCheckFails has the error of the delegate that fails be the runtime's, with its code and words, and those after it not
// be asked.
func TestCheckFails(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.faulty("p0", ""), n.faulty("p1", `, "code": 117`), n.faulty("p2", ""))
	p := n.pod("a")
	p.mustAdd(list)
	n.forgetCalls()
	n.plan(map[string]map[string]string{"p1": {"CHECK": "fail"}})
	err := p.check(list)
	var said *types.Error
	if want := `plugin type="faulty" failed (check): faulty: p1 CHECK refused`; !errors.As(err, &said) || said.Code != 117 || said.Msg != want {
		t.Errorf("CHECK: %#v, want code 117, %s", err, want)
	}
	n.wantCalls("CHECK", "CHECK p0", "CHECK p1")
	n.plan(nil)
	if err := p.check(list); err != nil {
		t.Errorf("CHECK of a chain that is well again: %v", err)
	}
	p.mustDel(list)
	n.nothingLeft()
}

// TestCheckWithoutEntry has delegates decide where the journal knows nothing: not knowing is a warning.
func TestCheckWithoutEntry(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, mode string
	}{{"they agree", "ok"}, {"one refuses", "fail"}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			chain := []string{n.faulty("p0", ""), n.faulty("p1", `, "address": "192.0.2.7/24"`)}
			p := n.pod("a")
			p.mustAdd(n.plain(chain...))
			n.forgetCalls()
			n.plan(map[string]map[string]string{"p1": {"CHECK": c.mode}})
			list := n.unwind(chain...)
			if err := p.check(list); (err == nil) != (c.mode == "ok") {
				t.Errorf("CHECK: %v", err)
			}
			for _, l := range n.callLog() {
				if r, err := parseResult(l.Stdin["prevResult"]); err != nil || len(r.addresses()) != 1 {
					t.Errorf("%s: prevResult %s", l.Instance, l.Stdin["prevResult"])
				}
			}
			n.wantCalls("CHECK", "CHECK p0", "CHECK p1")
			if c.mode == "ok" && !strings.Contains(n.log(), warnedUnknown) {
				t.Error("no warning")
			}
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestCheckIsNotSwitchedOn has no delegate be asked that the plain chain would not ask.
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

// TestCheckOfResults compares the runtime's result with that of the ADD by what they mean, over every pair of versions and
// whatever the order of the keys. Delegates get it as they printed it, where the runtime's version can say less.
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

// TestCheckOfAnotherResult has a result of the runtime's that says something else than the ADD did be a warning, and be what
// the delegates get.
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
	if r, err := parseResult(prev); err != nil || !slices.Contains(r.addresses(), netip.MustParseAddr("192.0.2.8")) {
		t.Errorf("the delegate got %s", prev)
	}
	p.mustDel(list)
	n.nothingLeft()
}
