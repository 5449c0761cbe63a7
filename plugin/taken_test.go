package plugin

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/tristate"
)

// mistakes are chains of reference plugins whose last one has a mistake in its configuration, or is
// given one. It fails its ADD, and each DEL with that configuration, and takes nothing.
var mistakes = []struct {
	name  string
	wrong func(n *node) []string
	right func(n *node) []string
	args  [][2]string // for the pod, instead of its own
}{
	{"subnet", inBridge(`"ipam": {"type": "host-local", "subnet": "10.1.2.0/33", "dataDir": DIR}`), rightBridge, nil},
	{"subnet of IPv4 and range of IPv6", inBridge(`"ipam": {HOSTLOCAL,
		"rangeStart": "fd00::1"}`), rightBridge, nil},
	{"ranges are no list", inBridge(`"ipam": {"type": "host-local", "dataDir": DIR, "ranges": {"subnet": "10.1.2.0/24"}}`),
		rightBridge, nil},
	{"route", inBridge(`"ipam": {HOSTLOCAL,
		"routes": [{"dst": "10.300.0.0/16"}]}`), rightBridge, nil},
	{"MTU is a string", inBridge(`"mtu": "1500", "ipam": {HOSTLOCAL}`),
		rightBridge, nil},
	{"VLAN out of range", inBridge(`"vlan": 5000, "ipam": {HOSTLOCAL}`),
		rightBridge, nil},
	{"ipMasq is a string, static", inBridge(`"ipMasq": "yes", "ipam": {"type": "static",
		"addresses": [{"address": "10.1.2.3/24"}]}`),
		rightBridge, nil},
	{"no IPAM", inBridge(`"mtu": "1500"`), rightBridge, nil},
	{"IP in CNI_ARGS", rightBridge, rightBridge, [][2]string{{"IgnoreUnknown", "1"}, {"IP", "10.1.2"}}},
	{"unknown argument", rightBridge, rightBridge, [][2]string{{"FAST", "yes"}}},
	{"ptp", func(n *node) []string {
		return []string{fmt.Sprintf(`{"type": "ptp", "mtu": "1500", "ipMasq": true, "ipam": %s}`, n.hostLocal(n.subnet))}
	}, rightBridge, nil},
	{"macvlan", func(n *node) []string {
		return []string{fmt.Sprintf(`{"type": "macvlan", "master": "lo", "mtu": "1500", "ipam": %s}`, n.hostLocal(n.subnet))}
	}, rightBridge, nil},
	{"host-device", func(n *node) []string {
		return []string{fmt.Sprintf(`{"type": "host-device", "ipam": %s}`, n.hostLocal(n.subnet))}
	}, rightBridge, nil},
	{"firewall", afterBridge(`{"type": "firewall", "firewalldZone": 5}`), afterBridge(`{"type": "firewall"}`), nil},
	{"portmap", afterBridge(`{"type": "portmap", "markMasqBit": 40, "capabilities": {"portMappings": true}}`),
		afterBridge(`{"type": "portmap", "capabilities": {"portMappings": true}}`), nil},
	{"bandwidth", afterBridge(`{"type": "bandwidth", "ingressRate": 8000000}`),
		afterBridge(`{"type": "bandwidth", "ingressRate": 8000000, "ingressBurst": 8000000}`), nil},
	{"tuning", afterBridge(`{"type": "tuning", "mtu": "1400"}`), afterBridge(`{"type": "tuning", "mtu": 1400}`), nil},
	{"sbr", afterBridge(`{"type": "sbr", "table": "x"}`), afterBridge(`{"type": "sbr"}`), nil},
}

// inBridge is a bridge with more keys. DIR stands for host-local's directory, and HOSTLOCAL for the
// valid part of its configuration.
func inBridge(more string) func(n *node) []string {
	return func(n *node) []string {
		hostLocal := `"type": "host-local", "dataDir": DIR, "subnet": "10.1.2.0/24"`
		more := strings.ReplaceAll(strings.ReplaceAll(more, "HOSTLOCAL", hostLocal), "DIR", strconv.Quote(n.dataDir()))
		return []string{fmt.Sprintf(`{"type": "bridge", "bridge": %q, %s}`, n.bridge, more)}
	}
}

func rightBridge(n *node) []string { return []string{n.bridgePlugin(`, "ipMasq": true`)} }

func afterBridge(plugin string) func(n *node) []string {
	return func(n *node) []string { return []string{n.bridgePlugin(`, "ipMasq": true`), plugin} }
}

// TestMistake: an ADD that fails for a mistake leaves nothing and has no pending DEL: with the
// mistake in the chain, corrected, or with the namespace gone. The pod's DEL then passes, as the
// plain chain's does once the mistake is corrected.
func TestMistake(t *testing.T) {
	t.Parallel()
	for _, c := range mistakes {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := n.mistaken("mistaken", c.args)
			if _, err := p.add(n.unwind(c.wrong(n)...)); err == nil {
				t.Fatal("the ADD succeeded")
			}
			n.nothingLeft()
			n.noRules()
			p.mustDel(n.unwind(c.wrong(n)...))
			p.mustDel(n.unwind(c.right(n)...))
			if c.args == nil {
				p.mustDel(n.plain(c.right(n)...))
			}
			n.nothingLeft()
		})
	}
}

// mistaken returns a pod with these arguments, or with its own.
func (n *node) mistaken(name string, args [][2]string) *pod {
	p := n.pod(name)
	p.CapabilityArgs = portMappings
	if args != nil {
		p.Args = args
	}
	return p
}

// TestMistakeCutOff: an ADD fails for a mistake, and unwind is killed by SIGKILL before the outcome
// is written. The delegate may have gone on; its second DEL finds that nothing was taken.
func TestMistakeCutOff(t *testing.T) {
	t.Parallel()
	for _, c := range mistakes {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := n.mistaken("mistaken", c.args)
			wrong, right := n.unwind(c.wrong(n)...), n.unwind(c.right(n)...)
			if err := n.killedAtPoint("added", len(c.wrong(n)), func() error {
				_, err := p.add(wrong)
				return err
			}); !wasKilled(err) {
				t.Fatalf("not killed: %v", err)
			}
			state := journal.Adding
			if len(c.wrong(n)) > 1 {
				state = journal.Live // by the result of the delegate before
			}
			if e := p.entry(); e == nil || e.State != state || e.Pending() != len(c.wrong(n)) {
				t.Fatalf("the journal has %+v", e)
			}
			_ = p.del(right)
			p.mustDel(right)
			n.nothingLeft()
			n.noRules()
		})
	}
}

// TestMistakeAfterSuccess: a delegate has a pending DEL, whatever is visible, unless its entry says
// that its ADD failed.
func TestMistakeAfterSuccess(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("added")
	right := n.unwind(n.bridgePlugin(""))
	p.mustAdd(right)
	config := p.entry().Newest().Steps[0].Config
	p.edit(func(g *journal.Generation) {
		g.Steps[0].Config = bytes.Replace(config, []byte(`"isGateway"`), []byte(`"mtu":"1500","isGateway"`), 1)
	})
	p.dropNetNS()
	for range 3 {
		if err := p.del(right); err == nil {
			t.Error("the DEL succeeded")
		}
	}
	if e := p.entry(); e == nil || e.Pending() != 1 {
		t.Fatalf("the journal has %+v", e)
	}
	p.edit(func(g *journal.Generation) { g.Steps[0].Config = config })
	p.mustDel(right)
	n.nothingLeft()
}

const mtuString = `"mtu": "1500", "ipam": {HOSTLOCAL}`

// TestTakenAndFailed: bridge has taken an address, and its IPAM plugin then refuses each DEL. The
// DEL stays pending, whatever the code and bridge's present configuration. When the IPAM plugin
// works again, the DEL releases the address.
func TestTakenAndFailed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	broken := n.breakable("host-local")
	broken(true)
	p := n.pod("taken")
	// bridge takes the address and fails at its rules; its own DEL of the address fails too.
	if _, err := p.add(n.unwind(n.bridgePlugin(`, "ipMasq": true, "ipMasqBackend": "bogus"`))); err == nil {
		t.Fatal("the ADD succeeded")
	}
	for _, chain := range [][]string{
		{n.bridgePlugin("")}, {n.bridgePlugin(`, "mtu": 1400`)}, {`{"type": "loopback"}`},
	} {
		if err := p.del(n.unwind(chain...)); err == nil {
			t.Errorf("the DEL succeeded; host-local has %v", n.reserved())
		}
		if e := p.entry(); e == nil || e.Pending() != 1 || len(n.reserved()) != 1 {
			t.Fatalf("the journal has %+v, host-local %v", e, n.reserved())
		}
	}
	broken(false)
	p.mustDel(n.unwind(n.bridgePlugin("")))
	n.nothingLeft()
}

// TestMistakeThatCannotBeProven: nobody can tell what a plugin that is no reference plugin has
// taken, so its DEL stays pending. As long as the chain has the mistake, the runtime's DEL fails,
// as the plain chain's does. Later the DEL is tried with the chain's present configuration. If that
// fails too, the runtime's DEL succeeds.
func TestMistakeThatCannotBeProven(t *testing.T) {
	t.Parallel()
	wrong := `, "modes": {"ADD": "fail-effect", "DEL": "fail"}`
	for _, c := range []struct {
		name    string
		present func(n *node) []string
		plan    string // the mode with the present configuration
		del     bool   // whether the runtime's DEL passes
		owed    bool
	}{
		{"the mistake is there", func(n *node) []string { return []string{n.faulty("p0", wrong)} }, "", false, true},
		{"put right", func(n *node) []string { return []string{n.faulty("p0", "")} }, "ok", true, false},
		{"put right, and fails", func(n *node) []string { return []string{n.faulty("p0", "")} }, "fail", true, true},
		{"left the chain", func(*node) []string { return []string{`{"type": "loopback"}`} }, "", true, true},
		{"two of them", func(n *node) []string {
			return []string{n.faulty("p0", ""), n.faulty("p1", "")}
		}, "", true, true},
		{"two of them, one with the mistake", func(n *node) []string {
			return []string{n.faulty("p0", wrong), n.faulty("p1", "")}
		}, "", false, true},
		{"the chain cannot be read", func(*node) []string { return []string{`{"type": "unwind"}`} }, "", false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := n.pod("a")
			if _, err := p.add(n.unwind(n.faulty("p0", wrong))); err == nil {
				t.Fatal("the ADD succeeded")
			}
			n.plan(map[string]map[string]string{"p0": {"DEL": c.plan}})
			for range 2 {
				if err := p.del(n.unwind(c.present(n)...)); (err == nil) != c.del {
					t.Errorf("DEL: %v", err)
				}
			}
			if owed := p.entry() != nil; owed != c.owed || owed != (len(n.taken()) == 1) {
				t.Errorf("owed: %t, taken: %q", owed, n.taken())
			}
			if said := strings.Contains(n.log(), "and the runtime is not told"); said != (c.del && c.owed) {
				t.Errorf("a warning: %t", said)
			}
			n.plan(nil)
			n.ask("STATUS", "1.0.0", nil, n.faulty("p0", ""))
			n.ask("GC", "1.0.0", nil, n.faulty("p0", ""))
			n.nothingLeft()
		})
	}
}

// TestMistakeInHistory: a pending DEL that had nothing to undo is an event of its own. In a
// rollback it is part of the rollback's event.
func TestMistakeInHistory(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(inBridge(mtuString)(n)...)
	if _, err := n.pod("told").add(list); err == nil {
		t.Fatal("the ADD succeeded")
	}
	cutOff := n.pod("cut-off")
	_ = n.killedAtPoint("added", 1, func() error {
		_, err := cutOff.add(list)
		return err
	})
	if err := cutOff.del(list); err == nil {
		t.Error("the first DEL after the ADD was cut off succeeded")
	}
	cutOff.mustDel(list)
	n.wantNotes([]string{
		`rolled-back told [] [bridge]: its ADD failed: plugin type="bridge" failed (add): failed to load netconf`,
		`untaken cut-off [] [bridge]: plugin type="bridge" failed (delete): failed to load netconf`,
	}, map[string]uint64{"rollbacks bridge complete": 1})
	n.nothingLeft()
}

// TestTaken adds a pod with the reference plugins. Before, between and after, it asks for each
// plugin whether something is taken, as if its ADD had failed.
func TestTaken(t *testing.T) {
	t.Parallel()
	bandwidth := `{"type": "bandwidth", "ingressRate": 8000000, "ingressBurst": 8000000,
		"egressRate": 8000000, "egressBurst": 8000000}`
	for _, c := range []struct {
		name  string
		chain func(n *node) []string
	}{
		{"bridge, iptables", func(n *node) []string {
			return []string{n.masquerading("bridge", "dual", ""), n.tuned(), bandwidth,
				`{"type": "portmap", "capabilities": {"portMappings": true}}`, `{"type": "firewall"}`}
		}},
		{"bridge, nftables", func(n *node) []string {
			return []string{n.masquerading("bridge", "dual", `, "ipMasqBackend": "nftables"`),
				`{"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}}`}
		}},
		{"bridge, macspoofchk", func(n *node) []string {
			return []string{fmt.Sprintf(`{"type": "bridge", "bridge": %q, "macspoofchk": true}`, n.bridge)}
		}},
		{"ptp, sbr", func(n *node) []string { return []string{n.masquerading("ptp", "dual", ""), `{"type": "sbr"}`} }},
		{"macvlan", func(n *node) []string {
			return []string{fmt.Sprintf(`{"type": "macvlan", "master": %q, "ipam": %s}`,
				n.hostVeth("dual"), n.ranges("dual"))}
		}},
		{"host-device", func(n *node) []string {
			return []string{fmt.Sprintf(`{"type": "host-device", "device": %q, "ipam": %s}`,
				n.hostVeth("dual"), n.ranges("dual"))}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := n.pod(n.network + "-taken")
			p.CapabilityArgs = portMappings
			list := n.unwind(c.chain(n)...)
			p.mustAdd(list)
			e := p.entry()
			p.wantTaken("after the ADD", e, tristate.Yes)
			p.mustDel(list)
			p.wantTaken("after the DEL", e, tristate.No)
		})
	}
}

func (n *node) tuned() string {
	return fmt.Sprintf(`{"type": "tuning", "mtu": 1400, "dataDir": %q}`, n.tuningDir())
}

// wantTaken checks for each step of an entry whether it has taken something.
func (p *pod) wantTaken(when string, e *journal.Entry, want tristate.Value) {
	p.Helper()
	for i, got := range p.emptyList().w.Left(p.Context(), e, p.NetNS) {
		if got != want {
			p.Errorf("%s, %s: %v, want %v", when, e.Newest().Steps[i].Type, got, want)
		}
	}
}

// TestMistakeUnknownToJournal: the journal knows nothing of a DEL, and the runtime has no result.
// The DEL fails for a mistake and is recorded as pending. It gets its second try with the mistake
// corrected.
func TestMistakeUnknownToJournal(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("unknown")
	var cniErr *types.Error
	if err := p.del(n.unwind(inBridge(mtuString)(n)...)); !errors.As(err, &cniErr) {
		t.Fatalf("the first DEL: %v", err)
	}
	p.mustDel(n.unwind(rightBridge(n)...))
	n.nothingLeft()
}
