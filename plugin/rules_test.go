package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/plugins/pkg/utils"

	"cni-unwind/plugin/internal/host"
)

// TestKilledBeforeResult: unwind is killed after bridge or ptp has finished its ADD, before
// anything of it is written. The IPAM plugin keeps no store that unwind can read, and the namespace
// is gone. A STATUS removes their masquerading rules.
func TestKilledBeforeResult(t *testing.T) {
	t.Parallel()
	for _, plugin := range []string{"bridge", "ptp"} {
		for _, backend := range []string{"iptables", "nftables"} {
			for _, families := range []string{"IPv4", "IPv6", "dual"} {
				t.Run(plugin+", "+backend+", "+families, func(t *testing.T) {
					t.Parallel()
					n := newNode(t).patient()
					var addresses []string
					for i, a := range n.prefixes(families, 9) {
						gateway := n.prefixes(families, 1)[i].Addr()
						addresses = append(addresses, fmt.Sprintf(`{"address": %q, "gateway": %q}`, a, gateway))
					}
					chain := fmt.Sprintf(`{"type": %q, "bridge": %q, "ipMasq": true, "ipMasqBackend": %q,
						"ipam": {"type": "static", "addresses": [%s]}}`, plugin, n.bridge, backend,
						strings.Join(addresses, ", "))
					list := n.unwind(chain)
					p := n.pod(n.network + "-killed")
					if err := n.killedAtPoint("added", 1, func() error {
						_, err := p.add(list)
						return err
					}); !wasKilled(err) {
						t.Fatalf("not killed: %v", err)
					}
					if len(n.masqueradeRules(p)) == 0 {
						t.Fatal("it made no rules")
					}
					p.dropNetNS()
					if out := n.ask("STATUS", "1.0.0", nil, chain); out.code != 0 {
						t.Errorf("STATUS: %s", out.stdout)
					}
					if left := n.masqueradeRules(p); len(left) > 0 {
						t.Errorf("rules are left:\n%s", strings.Join(left, ""))
					}
					n.nothingLeft()
				})
			}
		}
	}
}

// TestKilledUnknownToJournal is the same with a journal that could not be written either. The
// runtime's DEL removes the rules.
func TestKilledUnknownToJournal(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(fmt.Sprintf(`{"type": "bridge", "bridge": %q, "ipMasq": true, "ipam": {"type": "static",
		"addresses": [{"address": %q}]}}`, n.bridge, n.prefix(4, 9)), `{"type": "firewall"}`)
	p := n.pod(n.network + "-killed")
	if err := n.killedAtPoint("added", 1, func() error {
		_, err := p.add(list)
		return err
	}); !wasKilled(err) || len(n.masqueradeRules(p)) == 0 {
		t.Fatalf("not killed: %v", err)
	}
	if err := os.RemoveAll(n.stateDir); err != nil {
		t.Fatal(err)
	}
	p.dropNetNS()
	p.mustDel(list)
	if left := n.masqueradeRules(p); len(left) > 0 {
		t.Errorf("rules are left:\n%s", strings.Join(left, ""))
	}
	n.nothingLeft()
}

// masqueradeRules returns the pod's rules and chains that bridge or ptp made.
func (n *node) masqueradeRules(p *pod) []string {
	n.Helper()
	all, err := host.Rules(n.Context())
	if err != nil {
		n.Fatal(err)
	}
	chain, id := "CNI-"+utils.MustFormatHashWithPrefix(24, "", n.network+p.ContainerID), p.ContainerID
	return slices.DeleteFunc(all, func(rule string) bool {
		return !strings.Contains(rule, chain) && !strings.Contains(rule, id)
	})
}

// TestKilledBeforeItsRule: bridge itself is cut off too, after it made its chain and before the
// rule that leads there.
func TestKilledBeforeItsRule(t *testing.T) {
	t.Parallel()
	for _, family := range []struct{ iptables, families string }{{"iptables", "IPv4"}, {"ip6tables", "IPv6"}} {
		t.Run(family.families, func(t *testing.T) {
			t.Parallel()
			n := newNode(t).patient()
			chain := fmt.Sprintf(`{"type": "bridge", "bridge": %q, "ipMasq": true, "ipam": {"type": "static",
				"addresses": [{"address": %q}]}}`, n.bridge, n.prefixes(family.families, 9)[0])
			p := n.pod(n.network + "-killed")
			if err := n.killedAtPoint("added", 1, func() error {
				_, err := p.add(n.unwind(chain))
				return err
			}); !wasKilled(err) {
				t.Fatalf("not killed: %v", err)
			}
			for _, rule := range n.rules("-A POSTROUTING") {
				if strings.Contains(rule, p.ContainerID) {
					run(t, "sh", "-c", family.iptables+" -w -t nat "+strings.Replace(rule, "-A ", "-D ", 1))
				}
			}
			if got := len(n.masqueradeRules(p)); got == 0 {
				t.Fatal("there is no chain")
			}
			p.dropNetNS()
			n.ask("STATUS", "1.0.0", nil, chain)
			if left := n.masqueradeRules(p); len(left) > 0 {
				t.Errorf("rules are left:\n%s", strings.Join(left, ""))
			}
			n.nothingLeft()
		})
	}
}

// TestStrayRules: a rule of an unknown ADD leads to the container's chain. The kernel does not
// remove the chain, so bridge's DEL always fails. If the container has another interface in the
// network, the rule may belong to that one, and stays.
func TestStrayRules(t *testing.T) {
	t.Parallel()
	for _, plugin := range []string{"bridge", "ptp"} {
		t.Run(plugin, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			chain := n.masquerading(plugin, "IPv4", "")
			p := n.pod("a")
			first := address(t, p.mustAdd(n.plain(chain)))
			p.dropNetNS() // and its DEL never comes
			if err := os.Remove(p.cacheFile()); err != nil {
				t.Fatal(err)
			}
			if err := os.Remove(filepath.Join(n.dataDir(), n.network, first)); err != nil {
				t.Fatal(err)
			}
			p.NetNS = n.netns("again")
			list := n.unwind(chain)
			if second := address(t, p.mustAdd(list)); second == first {
				t.Fatalf("both have %s", first)
			}
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}
