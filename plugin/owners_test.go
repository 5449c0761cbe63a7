package plugin

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// The tests of this file prove that no late DEL harms another owner (cni#924). firewall knows an
// address from prevResult alone; its ACCEPT rules of an address stay as long as the address has an
// owner, and no longer.

// firewalled is a node with a chain of bridge, firewall and faulty, whose firewall can be broken.
type firewalled struct {
	*node
	list *libcni.NetworkConfigList
}

// newFirewalled puts a script before the real firewall. The script records each call, and its DEL
// can fail, kill unwind or be slow.
func newFirewalled(t *testing.T) *firewalled {
	n := newNode(t).patient()
	firewall := filepath.Join(n.path[1], "firewall")
	n.path[1] = n.few("bridge", "host-local")
	n.script("firewall", fmt.Sprintf(`in=$(tr -d '\n')
		echo "$CNI_COMMAND $CNI_CONTAINERID $in" >>%[1]s/asked
		[ $CNI_COMMAND = DEL ] && case $(cat %[1]s/mode) in
			slow) sleep 0.8 ;;
			fail) echo '{"cniVersion": "1.0.0", "code": 11, "msg": "firewall is broken"}'; exit 1 ;;
			kill-parent) kill -9 $PPID; exit 1 ;;
		esac
		echo "$in" | exec %[2]s`, n.dir, firewall))
	f := &firewalled{n, n.unwind(n.bridgePlugin(""), `{"type": "firewall"}`, n.faulty("p2", ""))}
	f.firewall("works")
	return f
}

// firewall sets the behaviour of firewall's DEL: "works", "slow", "fail", "kill-parent", or
// "missing", without a binary.
func (f *firewalled) firewall(mode string) {
	f.Helper()
	f.write(filepath.Join(f.dir, "mode"), mode)
	file := filepath.Join(f.path[0], "firewall")
	from, to := file+".away", file
	if mode == "missing" {
		from, to = to, from
	}
	if err := os.Rename(from, to); err != nil && !os.IsNotExist(err) {
		f.Fatal(err)
	}
}

// asked returns firewall's calls since asked was last called, as "VERB container addresses".
func (f *firewalled) asked() (asked []string) {
	f.Helper()
	path := filepath.Join(f.dir, "asked")
	data, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		f.Fatal(err)
	}
	_ = os.Remove(path)
	for _, line := range strings.Split(strings.TrimSpace(string(data)), "\n") {
		verb, stdin, _ := strings.Cut(line, "{")
		var conf struct{ PrevResult json.RawMessage }
		if err := json.Unmarshal([]byte("{"+stdin), &conf); line != "" && err != nil {
			f.Fatalf("%v: %s", err, line)
		}
		r, err := netconf.ParseResult(conf.PrevResult)
		if err != nil {
			f.Fatal(err)
		}
		for _, a := range r.Addresses() {
			verb += a.String()
		}
		if line != "" {
			asked = append(asked, strings.TrimSpace(verb))
		}
	}
	return asked
}

func (f *firewalled) wantAsked(what string, want ...string) {
	f.Helper()
	if got := f.asked(); !slices.Equal(got, want) {
		f.Errorf("%s: firewall was asked %q, want %q", what, got, want)
	}
}

// lowestNext makes host-local give the lowest free address to the next pod.
func (n *node) lowestNext() {
	n.Helper()
	if err := os.Remove(filepath.Join(n.dataDir(), n.network, "last_reserved_ip.0")); err != nil {
		n.Fatal(err)
	}
}

// open reports whether the firewall accepts traffic of an address.
func (n *node) open(address string) bool {
	n.Helper()
	switch rules := n.rules(" " + address + "/32 "); len(rules) {
	case 0:
		return false
	case 2:
		return true
	default:
		n.Fatalf("half open: %q", rules)
		return false
	}
}

// wantOpen checks that an address is open.
func (n *node) wantOpen(what, address string) {
	n.Helper()
	if !n.open(address) {
		n.Errorf("%s: %s is closed", what, address)
	}
}

// addAgain adds a pod that must get another pod's former address.
func (p *pod) addAgain(list *libcni.NetworkConfigList, had string) types.Result {
	p.Helper()
	p.lowestNext()
	r := p.mustAdd(list)
	if got := address(p, r); got != had {
		p.Fatalf("%s got %s, not %s", p.ContainerID, got, had)
	}
	return r
}

// killedBeforeItsFirewall adds the pod, and kills unwind in its DELs until bridge has given the
// address back. The journal does not know that they began.
func (p *pod) killedBeforeItsFirewall(f *firewalled) {
	p.Helper()
	p.mustAdd(f.list)
	f.firewall("kill-parent")
	for len(f.reserved()) > 0 { // after a pass that was cut off, another step goes first
		if err := p.del(f.list); err == nil {
			p.Fatal("the DEL succeeded")
		}
	}
}

// TestKilledDELAgain: unwind was killed in a DEL after bridge gave the address back, and the network
// namespace is still there, so that the pod looks alive. Another pod gets the address. The runtime's
// next DEL does not take the rule of the other pod, and nothing is left once that one is gone.
func TestKilledDELAgain(t *testing.T) {
	t.Parallel()
	f := newFirewalled(t)
	a, b := f.pod("a"), f.pod("b")
	a.killedBeforeItsFirewall(f)
	f.firewall("works")
	first := f.prefix(4, 2).Addr().String()
	b.addAgain(f.list, first)
	f.wantOpen("the address is b's", first)
	a.mustDel(f.list)
	f.wantOpen("after the next DEL of a", first)
	if e := a.entry(); e == nil || e.State != journal.Removing {
		t.Errorf("firewall's DEL of a does not wait: %+v", e)
	}
	b.mustDel(f.list)
	f.nothingLeft()
	if f.open(first) {
		t.Error("a's rule is left")
	}
}

// TestPendingDELIsSettledAtClaim: the DEL of firewall is pending in every way, with the address
// free. When another pod gets the address, that DEL runs in full before the other pod's firewall
// does. The runtime's late DEL runs nothing.
func TestPendingDELIsSettledAtClaim(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		pending func(f *firewalled, a *pod)
	}{
		{"its DEL failed", func(f *firewalled, a *pod) {
			a.mustAdd(f.list)
			f.firewall("fail")
			if err := a.del(f.list); err == nil {
				f.Error("the DEL succeeded")
			}
		}},
		{"its binary was missing", func(f *firewalled, a *pod) {
			a.mustAdd(f.list)
			f.firewall("missing")
			if err := a.del(f.list); err == nil {
				f.Error("the DEL succeeded")
			}
		}},
		{"its ADD failed, and its DEL", func(f *firewalled, a *pod) {
			f.plan(map[string]map[string]string{"p2": {"ADD": "fail"}})
			f.firewall("fail")
			if _, err := a.add(f.list); err == nil {
				f.Error("the ADD succeeded")
			}
			f.plan(nil)
		}},
		{"unwind was killed, and its namespace is gone", func(f *firewalled, a *pod) {
			a.killedBeforeItsFirewall(f)
			a.dropNetNS()
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFirewalled(t)
			a, b := f.pod("a"), f.pod("b")
			c.pending(f, a)
			first := f.prefix(4, 2).Addr().String()
			f.wantOpen("a DEL is pending", first)
			f.firewall("works")
			f.asked()

			b.addAgain(f.list, first)
			f.wantAsked("another pod gets the address", "DEL a "+first, "ADD b "+first)
			f.wantOpen("the address is b's", first)
			if e := a.entry(); e != nil {
				t.Errorf("a is still in the journal: %s, %v", e.State, undo.PendingSteps(e))
			}

			a.mustDel(f.list)
			f.wantAsked("the runtime's late DEL of a")
			f.wantOpen("after the late DEL", first)
			b.mustDel(f.list)
			f.nothingLeft()
		})
	}
}

// few makes a directory with only these reference plugins.
func (n *node) few(plugins ...string) string {
	n.Helper()
	dir := filepath.Join(n.dir, "few")
	n.mkdir(dir)
	for _, plugin := range plugins {
		if err := os.Symlink(filepath.Join(toolsDir(n), "cni", plugin), filepath.Join(dir, plugin)); err != nil {
			n.Fatal(err)
		}
	}
	return dir
}

// TestPendingDELIsParked: a pending DEL fails even when another pod gets its address. As long as
// that pod lives, the DEL is tried only without the address, and stays pending. When the pod is
// gone, it runs in full.
func TestPendingDELIsParked(t *testing.T) {
	t.Parallel()
	for _, retried := range []bool{true, false} {
		t.Run(fmt.Sprintf("retried meanwhile %t", retried), func(t *testing.T) {
			t.Parallel()
			f := newFirewalled(t)
			a, b := f.pod("a"), f.pod("b")
			first := address(t, a.mustAdd(f.list))
			f.firewall("fail")
			if err := a.del(f.list); err == nil {
				t.Error("the DEL succeeded")
			}
			f.asked()
			b.addAgain(f.list, first)
			f.wantAsked("another pod gets the address", "DEL a "+first, "ADD b "+first)
			if retried {
				if err := a.del(f.list); err == nil {
					t.Error("the DEL succeeded")
				}
				f.firewall("works")
				a.mustDel(f.list)
				f.wantAsked("the address has another owner", "DEL a", "DEL a")
				if e := a.entry(); e == nil || e.State != journal.Removing || len(e.Newest().Steps) != 1 || e.Newest().Steps[0].State != journal.StepParked {
					t.Errorf("a is not parked: %v", e)
				}
			}
			f.firewall("works")
			f.wantOpen("the address is b's", first)
			b.mustDel(f.list)
			f.wantAsked("the address is free", "DEL b "+first, "DEL a "+first)
			f.nothingLeft()
		})
	}
}

// TestParkedByStaticAddress is TestPendingDELIsParked with the journal as the only record of the
// owner: no IPAM file names it.
func TestParkedByStaticAddress(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.faulty("p0", `, "address": "192.0.2.7/24"`), n.faulty("p1", ""))
	a, b := n.pod("a"), n.pod("b")
	a.mustAdd(list)
	n.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
	if err := a.del(list); err == nil {
		t.Error("the DEL succeeded")
	}
	b.mustAdd(list)
	n.plan(nil)
	for _, step := range []struct {
		p        *pod
		shown    map[string]int // container → number of addresses that p1 is shown
		pendings int
	}{
		{a, map[string]int{"a": 0}, 1},
		{b, map[string]int{"b": 1, "a": 1}, 0},
	} {
		n.forgetCalls()
		step.p.mustDel(list)
		shown := map[string]int{}
		for _, l := range n.callLog() {
			if r, err := netconf.ParseResult(l.Stdin["prevResult"]); err == nil && l.Instance == "p1" {
				shown[l.ContainerID] = len(r.Addresses())
			}
		}
		if !maps.Equal(shown, step.shown) {
			t.Errorf("DEL of %s: addresses shown: %v, want %v", step.p.ContainerID, shown, step.shown)
		}
	}
	n.nothingLeft()
}

// TestLateDELWithoutJournal: the runtime asks for a DEL, with its cached result, after the journal
// was lost, while another pod has the address. host-local's own file names that pod. The rest is
// undone when that pod is gone.
func TestLateDELWithoutJournal(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		lostWhen string
	}{
		{"lost before the address was given again", "before"},
		{"lost after the address was given again", "after"},
		{"the other pod was added by the plain chain", "plain"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			f := newFirewalled(t)
			plain := f.plain(f.bridgePlugin(""), `{"type": "firewall"}`, f.faulty("p2", ""))
			a, b := f.pod("a"), f.pod("b")
			first := address(t, a.mustAdd(f.list))
			f.firewall("fail")
			if err := a.del(f.list); err == nil {
				t.Error("the DEL succeeded")
			}
			f.firewall("works")
			lose := func() {
				if err := os.RemoveAll(f.stateDir); err != nil {
					t.Fatal(err)
				}
			}
			switch c.lostWhen {
			case "before":
				lose()
				b.addAgain(f.list, first)
			case "after":
				b.addAgain(f.list, first)
				lose()
			case "plain":
				lose()
				b.addAgain(plain, first)
			}
			f.asked()
			a.mustDel(f.list)
			a.mustDel(f.list)
			f.wantAsked("the address has another owner", "DEL a", "DEL a")
			f.wantOpen("after the late DEL", first)
			b.mustDel(f.list)
			f.wantAsked("the address is free", "DEL b "+first, "DEL a "+first)
			f.nothingLeft()
		})
	}
}

// TestDELOfPodsFromBefore installs unwind on a node with pods. DELs through unwind release all they
// have, with their network namespace and without it.
func TestDELOfPodsFromBefore(t *testing.T) {
	t.Parallel()
	for _, gone := range []bool{false, true} {
		t.Run(fmt.Sprintf("network namespace gone %t", gone), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			chain := []string{
				n.masquerading("bridge", "dual", ""),
				fmt.Sprintf(`{"type": "tuning", "mtu": 1400, "dataDir": %q}`, n.tuningDir()),
				`{"type": "bandwidth", "capabilities": {"bandwidth": true}}`,
				`{"type": "portmap", "capabilities": {"portMappings": true}}`,
				`{"type": "firewall"}`,
				n.faulty("p5", ""),
			}
			p := n.pod("a")
			p.CapabilityArgs = map[string]any{
				"bandwidth":    map[string]any{"egressRate": 8000000, "egressBurst": 8000000},
				"portMappings": []map[string]any{{"hostPort": 8078, "containerPort": 80, "protocol": "tcp"}},
			}
			marks := p.marks(p.mustAdd(n.plain(chain...)))
			if gone {
				p.dropNetNS()
			}
			list := n.unwind(chain...)
			p.mustDel(list)
			for _, trace := range p.traces(marks) {
				t.Errorf("left: %s", trace)
			}
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestADDWaitsForALateDEL: firewall's DEL comes after bridge's, as in a retry, and is slow, so that
// another pod gets the address in between. That pod's firewall runs after that DEL.
func TestADDWaitsForALateDEL(t *testing.T) {
	t.Parallel()
	f := newFirewalled(t)
	a, b := f.pod("a"), f.pod("b")
	first := address(t, a.mustAdd(f.list))
	f.firewall("kill-parent")
	f.plan(map[string]map[string]string{"p2": {"DEL": "kill-parent-effect"}})
	for range 2 { // after two passes that were cut off, the order is bridge, faulty, firewall
		if err := a.del(f.list); err == nil {
			t.Fatal("the DEL succeeded")
		}
	}
	f.firewall("slow")
	f.plan(nil)
	f.asked()
	done := make(chan error)
	go func() { done <- a.del(f.list) }()
	eventually(t, "the late DEL", func() bool {
		_, err := os.Stat(filepath.Join(f.dir, "asked"))
		return err == nil
	})
	b.addAgain(f.list, first)
	if err := <-done; err != nil {
		t.Error(err)
	}
	f.wantAsked("the address was given again", "DEL a "+first, "ADD b "+first)
	f.wantOpen("after the late DEL", first)
	b.mustDel(f.list)
	f.nothingLeft()
}

// TestStaleOwnerIsNoRival: a pod gets an address that by the journal another one still has. The
// plain chain deleted that one, and its namespace exists. host-local names the new owner, whose DEL
// runs in full. If the other one's interface still has the address, that DEL is parked.
func TestStaleOwnerIsNoRival(t *testing.T) {
	t.Parallel()
	for _, deleted := range []bool{true, false} {
		t.Run(fmt.Sprintf("deleted %t", deleted), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["onDuplicateAddress"] = "warn"
			chain := []string{n.bridgePlugin(""), `{"type": "firewall"}`}
			list := n.unwind(chain...)
			a, b := n.pod("a"), n.pod("b")
			first := address(t, a.mustAdd(list))
			if deleted {
				a.mustDel(n.plain(chain...))
			} else if err := os.Remove(filepath.Join(n.dataDir(), n.network, first)); err != nil {
				t.Fatal(err)
			}
			b.addAgain(list, first)
			if e := a.entry(); e == nil || e.State != journal.Live {
				t.Fatalf("the journal has %+v", e)
			}
			b.mustDel(list)
			if e := b.entry(); (e == nil) != deleted || n.open(first) == deleted {
				t.Errorf("left of b: %+v, its address is open: %t", e, n.open(first))
			}
			a.dropNetNS()
			b.dropNetNS()
			n.sweep(undo.DefaultBudgets)
			n.sweep(undo.DefaultBudgets)
			n.nothingLeft()
		})
	}
}

// TestLongContainerID: host-local's record of an owner whose ID is longer than any runtime's is still
// that owner's: its DEL is shown its own address, and takes its rule.
func TestLongContainerID(t *testing.T) {
	t.Parallel()
	for _, length := range []int{4_094, 4_095, 20_000} {
		t.Run(strconv.Itoa(length), func(t *testing.T) {
			t.Parallel()
			f := newFirewalled(t)
			p := f.pod("a")
			p.ContainerID = strings.Repeat("a", length)
			entry := f.entryOf(`{"cniVersion": "1.0.0", "plugins": [`+f.bridgePlugin("")+`, {"type": "firewall"}]}`, nil)
			added := f.start(p.input("ADD", entry))
			if added.code != 0 {
				t.Fatalf("ADD: %.300s", added.stdout)
			}
			ip := f.prefix(4, 2).Addr().String()
			f.wantOpen("after the ADD", ip)
			if out := f.start(p.input("DEL", entry)); out.code != 0 {
				t.Errorf("DEL: %.300s", out.stdout)
			}
			if f.open(ip) {
				t.Errorf("%s is open after the DEL", ip)
			}
			if entries := f.entries(); len(entries) > 0 {
				t.Errorf("the journal has %d entries", len(entries))
			}
		})
	}
}
