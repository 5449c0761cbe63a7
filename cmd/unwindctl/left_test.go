package main

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/cmd/unwindctl/internal/nodetest"
)

const (
	byIPTables = `{"type": "portmap", "capabilities": {"portMappings": true}}`
	byNFTables = `{"type": "portmap", "capabilities": {"portMappings": true}, "backend": "nftables"}`
	shaping    = `{"type": "bandwidth", "ingressRate": 8000000, "ingressBurst": 8000000, "egressRate": 8000000, "egressBurst": 8000000}`
)

// leftNodes are chains whose pods leave rules and devices, with what the commands for a dead one
// contain.
var leftNodes = []struct {
	name, bridge string
	plugins      []string
	commands     []string
}{
	{"iptables", `"ipMasq": true`, []string{byIPTables, `{"type": "firewall"}`, shaping}, []string{
		"iptables -w -t nat -D POSTROUTING ", "iptables -w -t nat -D CNI-HOSTPORT-DNAT ", "iptables -w -t nat -F CNI-DN-",
		"iptables -w -t nat -X CNI-DN-", "iptables -w -t filter -D CNI-FORWARD -s ", "iptables -w -t filter -D CNI-FORWARD -d ",
		"ip link delete bwp"}},
	{"nftables", `"ipMasq": true, "ipMasqBackend": "nftables"`, []string{byNFTables, shaping}, []string{
		"nft delete rule inet cni_plugins_masquerade masq_checks handle ", "nft delete rule ip cni_hostport hostports handle ",
		"nft delete rule ip cni_hostport masquerading handle ", "ip link delete bwp"}},
	{"firewall alone", `"ipMasq": false`, []string{`{"type": "firewall"}`}, []string{"iptables -w -t filter -D CNI-FORWARD -s "}},
	{"bandwidth alone", `"ipMasq": false`, []string{shaping}, []string{"ip link delete bwp"}},
}

// newLeftNode has the chain of one of leftNodes.
func newLeftNode(t *testing.T, bridge string, plugins []string) *plainNode {
	t.Helper()
	n := newPlainNodeOf(t, bridge, plugins...)
	t.Cleanup(func() {
		n.run(home.command(n.machine, "nft", "flush", "ruleset"))
		for _, name := range n.ifbs() {
			n.run(home.command(n.machine, "ip", "link", "delete", name))
		}
	})
	return n
}

func (n *plainNode) ifbs() []string {
	n.Helper()
	return regexp.MustCompile("bwp[0-9a-f]+").FindAllString(n.must(home.command(n.machine, "ip", "-o", "link", "show", "type", "ifb")), -1)
}

// all is everything on the node that the plugins of leftNodes make.
func (n *plainNode) all() (s seen) {
	n.Helper()
	s = n.look()
	for _, table := range []string{"inet cni_plugins_masquerade", "ip cni_hostport"} {
		out := n.run(home.command(n.machine, "nft", strings.Fields("list table "+table)...))
		s.Rules = append(s.Rules, strings.Split(out.stdout, "\n")...)
	}
	s.Rules = append(s.Rules, n.ifbs()...)
	return s
}

// forget removes what host-local and libcni's cache have of a container: nothing has a DEL for it.
func (n *plainNode) forget(id string) {
	n.Helper()
	for _, path := range append(n.reserved(id), n.cacheFile(id)) {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			n.Fatal(err)
		}
	}
}

// lose is leak, and waits until the kernel has removed the interfaces.
func (n *plainNode) lose(id string) {
	n.Helper()
	n.netns(id)
	before := n.veths()
	n.mustAdd(id)
	n.drop(id)
	n.age(id)
	eventually(n, "the interfaces of "+id+" are gone", func() bool { return n.veths() == before })
}

func (n *plainNode) veths() int {
	n.Helper()
	return strings.Count(n.must(home.command(n.machine, "ip", "-o", "link", "show", "type", "veth")), "\n")
}

// left returns the commands that a dry run names, by container.
func (n *plainNode) left() map[string][]string {
	n.Helper()
	before, commands := n.all(), map[string][]string{}
	var object struct {
		Findings []struct {
			ContainerID, Result string
			Left                []string
		}
	}
	out := n.ctl("sweep", "--dry-run", "--json")
	if err := json.Unmarshal([]byte(out.stdout), &object); err != nil || out.code != 0 {
		n.Fatalf("%v: %+v", err, out)
	}
	for _, f := range object.Findings {
		if len(f.Left) > 0 {
			commands[f.ContainerID] = append(commands[f.ContainerID], f.Left...)
		}
	}
	if diff := cmp.Diff(before, n.all()); diff != "" {
		n.Errorf("a look changed, -before +after:\n%s", diff)
	}
	return commands
}

// TestLeft: the rules and devices of a dead container, of which neither host-local nor libcni's cache
// has anything, are named. A sweep leaves them; the lines that it prints, as a script, remove exactly
// them. Those of a pod that lives are never named.
func TestLeft(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	long := strings.Repeat("0123456789abcdef", 6) // in a comment of nftables it is cut off
	for _, c := range leftNodes {
		for _, suffix := range []string{"", long} {
			t.Run(c.name+suffix[:min(1, len(suffix))], func(t *testing.T) {
				n := newLeftNode(t, c.bridge, c.plugins)
				n.live("live" + suffix)
				before := n.all()
				id := "dead" + suffix
				n.lose(id)
				if left := n.left(); len(left) > 0 {
					t.Errorf("libcni's cache has its DEL: %q", left)
				}
				n.forget(id)
				left := n.left()
				text := strings.Join(slices.Concat(slices.Collect(mapValues(left))...), "\n")
				for _, want := range c.commands {
					if !strings.Contains(text, want) {
						t.Errorf("%q is not in:\n%s", want, text)
					}
				}
				all := n.all()
				out := n.ctl("sweep")
				if diff := cmp.Diff(all, n.all()); diff != "" || out.code != 0 {
					t.Errorf("%+v, -before +after the sweep:\n%s", out, diff)
				}
				_, script, found := strings.Cut(out.stdout, "To remove it, run:\n")
				if !found {
					t.Fatalf("%+v", out)
				}
				n.must(home.command(n.machine, "sh", "-ec", script))
				if diff := cmp.Diff(before, n.all()); diff != "" {
					t.Errorf("-before the leak +after its commands:\n%s", diff)
				}
				if left := n.left(); len(left) > 0 {
					t.Errorf("still left: %q", left)
				}
				n.wantNoJournal()
			})
		}
	}
}

func mapValues(m map[string][]string) func(func([]string) bool) {
	return func(yield func([]string) bool) {
		for _, v := range m {
			if !yield(v) {
				return
			}
		}
	}
}

// TestLeftGuards: one piece of evidence that a container lives, and nothing of it is named.
func TestLeftGuards(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	for _, c := range leftNodes {
		t.Run(c.name, func(t *testing.T) {
			n := newLeftNode(t, c.bridge, c.plugins)
			n.live("live")
			none := func(why string) {
				t.Helper()
				if left := n.left(); len(left) > 0 {
					t.Errorf("%s: %q", why, left)
				}
			}
			veths := n.veths()
			n.netns("new")
			address := n.mustAdd("new")
			n.forget("new")
			none("an ADD is under way, by the interface and its address alone")
			n.forget("live")
			none("only the runtime and its namespace know it")

			n.lose("dead")
			if err := os.Remove(n.cacheFile("dead")); err != nil {
				t.Fatal(err)
			}
			if left := n.left(); len(left["dead"]) == 0 {
				t.Errorf("its reservation is old: %q", left)
			}
			touch(t, n.reserved("dead")[0])
			none("its reservation is young")
			n.forget("dead")
			n.listed = append(n.listed, nodetest.Sandbox("dead", cri.PodSandboxState_SANDBOX_NOTREADY))
			if c.name != "firewall alone" { // its rules name no container
				none("the runtime lists it")
			}
			n.listed = n.listed[:1]
			if left := n.left(); len(left) != 1 {
				t.Errorf("no guard: %q", left)
			}

			n.drop("new") // its address is free, and host-local gives it to nobody
			eventually(t, "the interfaces of new are gone", func() bool { return n.veths() == veths })
			if c.name == "firewall alone" {
				if left := strings.Join(n.left()[""], "\n"); !strings.Contains(left, address) {
					t.Errorf("rules for %s: %s", address, left)
				}
			} else if left := n.left(); len(left["new"])+len(left[""]) == 0 {
				t.Errorf("new is dead: %q", left)
			}
		})
	}
}

// TestLeftAddressReused: the rules of a dead container send packets to the pod that has its address
// now. They are named; the accept rule of the address and all of that pod's own are not.
func TestLeftAddressReused(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	for _, c := range leftNodes[:2] {
		t.Run(c.name, func(t *testing.T) {
			n := newLeftNode(t, c.bridge, c.plugins)
			n.lose("dead")
			n.forget("dead")
			if err := os.RemoveAll(poolDir); err != nil {
				t.Fatal(err)
			}
			n.live("live")
			if address := filepath.Base(n.reserved("live")[0]); address != "10.77.0.2" {
				t.Fatalf("another address: %s", address)
			}
			left := n.left()
			if len(left) != 1 || strings.Contains(strings.Join(left["dead"], "\n"), "CNI-FORWARD") {
				t.Errorf("%q", left)
			}
			for _, command := range left["dead"] {
				n.must(home.command(n.machine, "sh", "-c", command))
			}
			n.wantWhole([]string{"live"})
			if text := strings.Join(n.all().Rules, "\n"); strings.Contains(text, "dead") {
				t.Error(text)
			}
		})
	}
}

// TestLeftAddressReusedLater: the commands are run only when another pod has the address by then, as
// those of a sweep that has just freed it. Its accept rules stay.
func TestLeftAddressReusedLater(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newLeftNode(t, leftNodes[0].bridge, leftNodes[0].plugins)
	n.lose("dead")
	if err := os.Remove(n.cacheFile("dead")); err != nil {
		t.Fatal(err)
	}
	out := n.ctl("sweep")
	_, script, found := strings.Cut(out.stdout, "To remove it, run:\n")
	if !found || out.code != 0 || !strings.Contains(script, " -D CNI-FORWARD -s 10.77.0.2/32 ") {
		t.Fatalf("%+v", out)
	}
	if err := os.RemoveAll(poolDir); err != nil { // else host-local takes the next address
		t.Fatal(err)
	}
	n.live("live")
	if address := filepath.Base(n.reserved("live")[0]); address != "10.77.0.2" {
		t.Fatalf("another address: %s", address)
	}
	n.must(home.command(n.machine, "sh", "-ec", script))
	n.wantWhole([]string{"live"})
	text := strings.Join(n.all().Rules, "\n")
	if strings.Contains(text, "dead") || strings.Count(text, "CNI-FORWARD -s 10.77.0.2/32 ") != 1 {
		t.Error(text)
	}
}

// TestLeftCacheFiles: the files of libcni's cache of a dead container are named if no DEL is to be run
// by them: they are of an earlier boot, or of a chain that takes nothing. Those of a live one are not.
func TestLeftCacheFiles(t *testing.T) {
	if !onOldMachine(t) {
		return
	}
	n := newPlainNode(t)
	n.must(home.command(n.machine, "ip", "link", "set", "lo", "up")) // the host has 127.0.0.1, too
	n.live("live")
	n.lose("dead")
	loopback := func(id string) string { return filepath.Join(cacheDir, "cni-loopback-"+id+"-lo") }
	for _, id := range []string{"live", "dead"} {
		script := `sed 's/podnet/cni-loopback/g; s/eth0/lo/g; s/10\.77\.0\.[0-9]*/127.0.0.1/g' ` + n.cacheFile(id) + " >" + loopback(id)
		n.must(home.command(n.machine, "sh", "-c", script))
	}
	before := n.all()
	for _, path := range []string{n.cacheFile("dead"), loopback("dead")} {
		then := time.Now().Add(-365 * 24 * time.Hour)
		if err := os.Chtimes(path, then, then); err != nil {
			t.Fatal(err)
		}
	}
	touch(t, n.reserved("dead")[0])
	if left := n.left(); len(left) > 0 {
		t.Errorf("its reservation is young: %q", left)
	}
	then := time.Now().Add(-oldEnough)
	if err := os.Chtimes(n.reserved("dead")[0], then, then); err != nil {
		t.Fatal(err)
	}
	n.netns("dead")
	if left := n.left(); len(left) > 0 {
		t.Errorf("its namespace is there: %q", left)
	}
	n.drop("dead")
	out := n.ctl("sweep")
	_, script, found := strings.Cut(out.stdout, "To remove it, run:\n")
	if !found || out.code != 0 || !slices.Equal(before.Cached, n.all().Cached) {
		t.Fatalf("%+v", out)
	}
	n.must(home.command(n.machine, "sh", "-ec", script))
	after := n.all()
	if diff := cmp.Diff([]string{filepath.Base(loopback("live")), filepath.Base(n.cacheFile("live"))}, after.Cached); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if text := strings.Join(after.Rules, "\n"); strings.Contains(text, "dead") || !strings.Contains(text, "live") {
		t.Error(text)
	}
}
