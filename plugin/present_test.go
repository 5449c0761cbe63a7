package plugin

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/journal"
)

// In the tests of this file a delegate rejects, at DEL, the configuration of its ADD, as after an
// upgrade. The chain has another configuration for it now.

// rejecting returns the configuration that is rejected.
func (n *node) rejecting(code int, extra string) string {
	return n.faulty("p0", fmt.Sprintf(`, "modes": {"DEL": "fail"}, "code": %d%s`, code, extra))
}

// TestRejectedConfiguration: a delegate that rejects its configuration as bad gets the chain's
// present one. After any other error it does not, and it never gets another delegate's.
func TestRejectedConfiguration(t *testing.T) {
	t.Parallel()
	present := func(n *node) []string { return []string{n.faulty("p0", "")} }
	for _, c := range []struct {
		name  string
		was   func(n *node) string
		is    func(n *node) []string
		calls int // number of DELs
		fails bool
	}{
		{"incompatible version", rejected(1), present, 2, false},
		{"unsupported field", rejected(2), present, 2, false},
		{"cannot be decoded", rejected(6), present, 2, false},
		{"invalid configuration", rejected(7), present, 2, false},

		{"unknown container", rejected(3), present, 1, true},
		{"invalid environment", rejected(4), present, 1, true},
		{"I/O", rejected(5), present, 1, true},
		{"try again later", rejected(11), present, 1, true},
		{"no code", rejected(0), present, 1, true},
		{"a code of its own", rejected(107), present, 1, true},
		{"stderr only", mode("stderr"), present, 1, true},
		{"crash", mode("crash"), present, 1, true},

		{"of two nobody can tell which", rejected(7), func(n *node) []string {
			return []string{n.faulty("p0", ""), n.faulty("p1", "")}
		}, 1, true},
		{"not in the chain any more", rejected(7), func(*node) []string { return []string{`{"type": "loopback"}`} }, 1, true},
		{"no chain", rejected(7), func(*node) []string { return []string{`{"type": "unwind"}`} }, 1, true},
		{"the same configuration", rejected(7), func(n *node) []string { return []string{n.rejecting(7, "")} }, 1, true},
		{"another one that is rejected", rejected(7), func(n *node) []string { return []string{n.rejecting(2, "")} }, 2, true},
	} {
		for _, verb := range []string{"DEL", "GC"} {
			t.Run(c.name+", "+verb, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				p := n.pod("a")
				p.mustAdd(n.unwind(c.was(n)))
				if verb == "GC" {
					p.dropNetNS()
				}
				var err error
				if verb == "DEL" {
					err = p.del(n.unwind(c.is(n)...))
				}
				calls := c.calls
				if c.name == "no chain" && verb == "GC" { // GC does not come so far
					calls = 0
				}
				// Another unwind may be looking into the namespace.
				for try := 0; verb == "GC" && try < 3; try++ {
					if out := n.ask("GC", "1.0.0", nil, c.is(n)...); out.code != 0 {
						err = &out.said
					}
					if calls == 0 || len(p.dels()) > 0 {
						break
					}
				}
				if got := p.dels(); len(got) != calls || (err != nil) != c.fails {
					t.Errorf("%d DELs, want %d; %v", len(got), calls, err)
				}
				if c.fails {
					wantRejected(p, c.was(n), calls > 0)
					n.forgetCalls()
					p.del(n.unwind(c.was(n)))
					if len(p.dels()) != 1 {
						t.Errorf("the DEL is not owed any more: %q", n.calls())
					}
					return
				}
				n.nothingLeft()
				if said := strings.Count(n.log(), "DEL passed with the chain's present configuration"); verb == "DEL" && said != 1 {
					t.Errorf("said %d times", said)
				}
			})
		}
	}
}

func rejected(code int) func(*node) string {
	return func(n *node) string { return n.rejecting(code, "") }
}

func mode(name string) func(*node) string {
	return func(n *node) string { return n.faulty("p0", fmt.Sprintf(`, "modes": {"DEL": %q}`, name)) }
}

// wantRejected checks that a step is pending with its earlier configuration and the first error.
func wantRejected(p *pod, was string, tried bool) {
	p.Helper()
	e := p.entry()
	if e == nil || e.Pending() != 1 {
		p.Fatalf("the journal has %+v", e)
	}
	s := e.Newest().Steps[0]
	var conf struct{ Code uint }
	if err := json.Unmarshal([]byte(was), &conf); err != nil {
		p.Fatal(err)
	}
	if conf.Code == 0 {
		conf.Code = 999
	}
	if s.Replaced || tried && s.LastCode != conf.Code || !strings.Contains(string(s.Config), `"modes":`) {
		p.Errorf("owed: %+v", s)
	}
	if len(p.taken()) != 1 {
		p.Errorf("taken: %q", p.taken())
	}
}

// TestRejectedAndKilled: what a delegate prints before it is killed does not reject its
// configuration.
func TestRejectedAndKilled(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	asked := filepath.Join(n.dir, "asked")
	n.script("odd", fmt.Sprintf(`[ $CNI_COMMAND = ADD ] && echo '{"cniVersion": "1.0.0"}' && exit
		echo DEL >>%s; echo '{"code": 7, "msg": "bad"}'; kill -9 $$`, asked))
	p := n.pod("a")
	p.mustAdd(n.unwind(`{"type": "odd", "old": true}`))
	if err := p.del(n.unwind(`{"type": "odd"}`)); err == nil || n.file(asked) != "DEL\n" {
		t.Errorf("DEL: %v, asked: %q", err, n.file(asked))
	}
}

// TestRejectedByTwo: if two delegates of a type were in the chain, nobody can tell which one is
// left.
func TestRejectedByTwo(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("a")
	p.mustAdd(n.unwind(n.rejecting(7, ""), n.faulty("p1", `, "modes": {"DEL": "fail"}, "code": 7`)))
	if err := p.del(n.unwind(n.faulty("p0", ""))); err == nil || len(n.taken()) != 2 {
		t.Errorf("DEL: %v, taken: %q", err, n.taken())
	}
	n.wantCalls("DEL", "ADD p0", "ADD p1", "DEL p1", "DEL p0")
}

// TestPresentConfigurationOfAnotherNetwork: a GC sweeps all networks, but its chain belongs to one.
func TestPresentConfigurationOfAnotherNetwork(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("a")
	p.mustAdd(n.unwind(n.rejecting(7, "")))
	p.dropNetNS()
	other := *n
	other.network += "-other"
	for range 2 {
		other.ask("GC", "1.0.0", nil, n.faulty("p0", ""))
	}
	if got := p.dels(); len(got) != 2 || p.entry() == nil {
		t.Errorf("DELs: %q, in the journal: %+v", got, p.entry())
	}
	n.ask("GC", "1.0.0", nil, n.faulty("p0", ""))
	n.nothingLeft()
}

// TestPresentConfigurationHasWhatTheADDHad: the present configuration gets what the runtime and
// multus gave to the ADD, not what they give to the DEL.
func TestPresentConfigurationHasWhatTheADDHad(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.inner = "0.4.0"
	n.conf["args"], n.conf["deviceID"] = json.RawMessage(`{"cni":{"ips":["192.0.2.9"]}}`), "0000:03:00.1"
	p := n.pod("a")
	p.CapabilityArgs = map[string]any{"ips": []string{"192.0.2.9/24"}, "mac": "02:00:00:00:00:07"}
	p.mustAdd(n.unwind(n.rejecting(1, `, "address": "192.0.2.7/24", "capabilities": {"ips": true}`)))

	n.inner = "1.0.0"
	n.conf["args"], n.conf["deviceID"] = json.RawMessage(`{"cni":{"ips":["192.0.2.10"]}}`), "0000:04:00.1"
	p.CapabilityArgs = map[string]any{"ips": []string{"192.0.2.10/24"}}
	p.mustDel(n.unwind(n.faulty("p0", `, "new": "key", "capabilities": {"ips": true, "mac": true}`)))
	calls := n.callLog()
	last := calls[len(calls)-1]
	if last.Command != "DEL" || len(calls) != 3 {
		t.Fatalf("calls: %q", n.calls())
	}
	for key, want := range map[string]string{
		"cniVersion": `"1.0.0"`, "new": `"key"`, "modes": ``, "deviceID": `"0000:03:00.1"`, "args": `{"cni":{"ips":["192.0.2.9"]}}`,
		"runtimeConfig": `{"ips":["192.0.2.9/24"],"mac":"02:00:00:00:00:07"}`,
		"prevResult":    `{"cniVersion":"1.0.0","ips":[{"address":"192.0.2.7/24"}]}`,
	} {
		if got := string(last.Stdin[key]); got != want {
			t.Errorf("%s: %s, want %s", key, got, want)
		}
	}
	if last.Args != calls[0].Args {
		t.Errorf("CNI_ARGS %q, want %q", last.Args, calls[0].Args)
	}
	n.nothingLeft()
}

// TestReplaced: a configuration that worked replaces the rejected one if the step still has a
// pending DEL, because its delegate was killed once or its address has another owner.
func TestReplaced(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		owe  func(n *node, p *pod, old, now *libcni.NetworkConfigList) (due func())
	}{
		{"killed", func(n *node, p *pod, old, _ *libcni.NetworkConfigList) func() {
			n.plan(map[string]map[string]string{"p0": {"ADD": "crash-effect"}})
			if _, err := p.add(old); err == nil {
				n.Fatal("the ADD succeeded")
			}
			n.plan(nil)
			return func() { p.edit(func(g *journal.Generation) { g.Steps[0].RepeatAt = 1 }) }
		}},
		{"parked", func(n *node, p *pod, old, now *libcni.NetworkConfigList) func() {
			p.mustAdd(old)
			if err := p.del(old); err == nil {
				n.Fatal("the DEL succeeded")
			}
			n.plan(map[string]map[string]string{"p0": {"DEL": "fail"}})
			b := n.pod("b")
			b.mustAdd(now)
			n.plan(nil)
			return func() { b.mustDel(now) }
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["gracePeriod"] = "1h"
			n.script("giver", `case $(cat) in *'"cniVersion":"0.4.0"'*) v=0.4.0 ip=',"version":"4"';; esac
				[ $CNI_COMMAND = DEL ] || echo '{"cniVersion":"'${v:-1.0.0}'","ips":[{"address":"192.0.2.7/24"'$ip'}]}'`)
			n.inner = "0.4.0"
			old := n.unwind(`{"type": "giver"}`, n.rejecting(7, ""))
			n.inner = "1.0.0"
			now := n.unwind(`{"type": "giver"}`, n.faulty("p0", ""))
			p := n.pod("a")
			due := c.owe(n, p, old, now)
			p.mustDel(now)
			e := p.entry()
			if e == nil || e.Pending() != 1 {
				t.Fatalf("the journal has %+v, want a step", e)
			}
			if s := e.Newest().Steps[0]; !s.Replaced || strings.Contains(string(s.Config), "modes") {
				t.Fatalf("the journal has %+v, want a step with the present configuration", e)
			}
			n.forgetCalls()
			due()
			p.mustDel(n.anotherChain())
			if got := p.dels(); !slices.Equal(got, []string{"p0"}) {
				t.Errorf("DELs: %q, want one", got)
			}
			for _, l := range n.callLog() {
				var prev struct{ CNIVersion string }
				_ = json.Unmarshal(l.Stdin["prevResult"], &prev)
				if string(l.Stdin["cniVersion"]) != `"1.0.0"` || prev.CNIVersion != "1.0.0" && l.Stdin["prevResult"] != nil {
					t.Errorf("%s: cniVersion %s, prevResult of %s", l.Command, l.Stdin["cniVersion"], l.Stdin["prevResult"])
				}
			}
			n.nothingLeft()
		})
	}
}

// file returns the content of a file.
func (n *node) file(path string) string {
	n.Helper()
	return run(n, "cat", path)
}
