package plugin

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/journal"
	"cni-unwind/plugin/undo"
)

// stripped returns the pod's DEL as multus up to 4.3 gives it to the plugin of a clusterNetwork:
// with the keys of libcni's PluginConf alone (multus 6597fa65f). The default stateDir is below
// varLib.
func (p *pod) stripped(varLib string, prevResult string) *input {
	p.Helper()
	del := p.input("DEL", p.entryOf("", map[string]any{
		"stateDir": nil, "chain": nil, "logLevel": nil, "gracePeriod": nil, "ipam": map[string]any{},
		"capabilities": map[string]bool{"portMappings": true}, "prevResult": json.RawMessage(prevResult),
	}))
	del.varLib = varLib
	return del
}

// TestStrippedDEL: a DEL without chain and stateDir undoes what the journal in the default stateDir
// has, of an ADD that succeeded and of one that failed.
func TestStrippedDEL(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	varLib := filepath.Join(n.dir, "varlib")
	n.stateDir = filepath.Join(varLib, "cni", "unwind")
	n.store = &journal.Store{Dir: n.stateDir}
	n.mkdir(varLib)
	chain := `{"cniVersion": "1.0.0", "plugins": [` + strings.Join([]string{n.bridgePlugin(`, "ipMasq": true`),
		`{"type": "portmap", "capabilities": {"portMappings": true}}`, n.faulty("p2", "")}, ", ") + `]}`
	add := func(p *pod) outcome {
		t.Helper()
		in := p.input("ADD", n.entryOf(chain, map[string]any{
			"stateDir": nil, "capabilities": map[string]bool{"portMappings": true},
			"runtimeConfig": json.RawMessage(`{"portMappings": [{"hostPort": 18090, "containerPort": 80, "protocol": "tcp"}]}`),
		}))
		in.varLib = varLib
		return n.start(in)
	}
	live, failed := n.pod("live"), n.pod("failed")
	out := add(live)
	if out.code != 0 || len(n.reserved()) != 1 || len(n.rules("18090")) == 0 || len(n.taken()) != 1 {
		t.Fatalf("ADD: %s, %v, %v, %v", out.stdout, n.reserved(), n.rules("18090"), n.taken())
	}
	if out := n.start(live.stripped(varLib, out.stdout)); out.code != 0 || strings.Contains(out.stderr, "is not known") {
		t.Errorf("DEL: %s, log:\n%s", out.stdout, out.stderr)
	}
	n.nothingLeft()

	n.plan(map[string]map[string]string{"p2": {"ADD": "fail-effect", "DEL": "fail"}})
	if out := add(failed); out.code == 0 || failed.entry() == nil || failed.entry().State != journal.Unwinding {
		t.Fatalf("ADD: %s, %+v", out.stdout, failed.entry())
	}
	n.plan(nil)
	if out := n.start(failed.stripped(varLib, "null")); out.code != 0 {
		t.Errorf("DEL after a failed ADD: %s", out.stdout)
	}
	n.nothingLeft()
	if rules := n.rules("18090"); len(rules) > 0 {
		t.Errorf("portmap's rules are left: %v", rules)
	}
}

// TestStrippedDELOfNothing: a DEL without chain and stateDir of an attachment that the journal in
// the default stateDir does not know starts nothing, passes and warns: a retry would know no more.
// An entry in another stateDir stays live, for a DEL that names it or a sweep.
func TestStrippedDELOfNothing(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"0.3.1", "1.0.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.outer, n.inner = version, version
			varLib := filepath.Join(n.dir, "varlib")
			n.mkdir(varLib)
			chain := `{"plugins": [` + n.bridgePlugin("") + `]}`
			p := n.pod("a")
			added := n.start(p.input("ADD", n.entryOf(chain, nil)))
			if added.code != 0 {
				t.Fatalf("ADD: %s", added.stdout)
			}
			out := n.start(p.stripped(varLib, added.stdout))
			if out.code != 0 || !strings.Contains(out.stderr, "level=WARN msg=\"DEL ran no delegate") {
				t.Errorf("DEL: %s, log:\n%s", out.stdout, out.stderr)
			}
			if e := p.entry(); e == nil || e.State != journal.Live || len(n.reserved()) != 1 {
				t.Errorf("in the other stateDir: %+v, %v", e, n.reserved())
			}
			if locks := n.names(filepath.Join(varLib, "cni", "unwind", "locks")); len(locks) > 0 {
				t.Errorf("lock files are left: %v", locks)
			}
			if out := n.start(p.input("DEL", n.entryOf(chain, nil))); out.code != 0 {
				t.Errorf("DEL with its stateDir: %s", out.stdout)
			}
			n.nothingLeft()
		})
	}
}

// TestNoChainIsStillAnError: a DEL of an unknown attachment fails if another key is wrong, or the
// journal cannot be read: a retry may know more then. An ADD is refused.
func TestNoChainIsStillAnError(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("a")
	result := `{"cniVersion": "1.0.0", "ips": [{"address": "10.9.8.7/24"}]}`
	for name, changes := range map[string]map[string]any{
		"a chainFile that is none": {"chainFile": 5},
		"no journal":               {"stateDir": "/proc/none"},
	} {
		changes["chain"], changes["prevResult"] = nil, json.RawMessage(result)
		if out := n.start(p.input("DEL", n.entryOf("", changes))); out.said.Code != 7 {
			t.Errorf("DEL, %s: %d, %s", name, out.code, out.stdout)
		}
	}
	if out := n.start(p.input("ADD", n.entryOf("", map[string]any{"chain": nil}))); out.said.Code != 7 {
		t.Errorf("ADD: %s", out.stdout)
	}
	n.nothingLeft()
}

// TestDELThatRunsNothing: a DEL that succeeds although no delegate runs says why, in one line at the
// default log level and in the history.
func TestDELThatRunsNothing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		seed func(p *pod, list *libcni.NetworkConfigList, del *input)
		why  string
	}{
		{"a tombstone", func(p *pod, list *libcni.NetworkConfigList, del *input) {
			r := p.mustAdd(list)
			p.dropNetNS()
			p.sweep(undo.DefaultBudgets)
			raw, err := json.Marshal(r)
			if err != nil {
				p.Fatal(err)
			}
			del.stdin = strings.TrimSuffix(del.stdin, "}") + `, "prevResult": ` + string(raw) + "}"
		}, "its network namespace is gone"},
		{"the runtime's namespace", func(_ *pod, _ *libcni.NetworkConfigList, del *input) {
			del.env["CNI_NETNS"] = "/proc/self/ns/net"
		}, "its ADD was refused: CNI_NETNS is the runtime's own namespace"},
		{"no binary", func(p *pod, _ *libcni.NetworkConfigList, del *input) {
			del.env["CNI_PATH"] = p.path[0]
		}, "no plugin of its chain is in CNI_PATH, and the runtime has no result of an ADD"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["logLevel"] = "info"
			chain := []string{n.faulty("p0", `, "address": "192.0.2.7/24"`)}
			p := n.pod("a")
			del := p.input("DEL", n.entryOf(`{"cniVersion": "1.0.0", "plugins": [`+chain[0]+`]}`, nil))
			tt.seed(p, n.unwind(chain...), del)
			n.forgetCalls()
			out := n.start(del)
			if out.code != 0 || len(n.calls()) > 0 {
				t.Fatalf("DEL: %s, calls %v", out.stdout, n.calls())
			}
			line := `level=INFO msg="DEL ran no delegate" attachment=` + p.key().String()
			if strings.Count(out.stderr, "\n") != 1 || !strings.Contains(out.stderr, line) || !strings.Contains(out.stderr, tt.why) {
				t.Errorf("log: %s", out.stderr)
			}
			events := strings.Join(n.events(), "\n")
			if last := events[strings.LastIndex(events, "\n")+1:]; !strings.HasPrefix(last, "no-op a ") || !strings.Contains(last, tt.why) {
				t.Errorf("history: %q", events)
			}
		})
	}
}
