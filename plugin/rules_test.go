package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/plugins/pkg/utils"

	"cni-unwind/plugin/internal/host"
)

// masquerade are statements about pod $p, of the name that its rules have.
var masquerade = acts{
	// static PLUGIN FAMILIES BACKEND [PLUGIN …]: the chain; its IPAM plugin keeps no store that unwind can read
	"static": func(s *story, w []string) {
		var addresses []string
		for i, a := range s.prefixes(w[1], 9) {
			addresses = append(addresses, fmt.Sprintf(`{"address": %q, "gateway": %q}`, a, s.prefixes(w[1], 1)[i].Addr()))
		}
		s.vars["p"] = s.network + "-killed"
		s.chain = append([]string{fmt.Sprintf(`{"type": %q, "bridge": %q, "ipMasq": true, "ipMasqBackend": %q, "ipam": {"type": "static", "addresses": [%s]}}`,
			w[0], s.bridge, w[2], strings.Join(addresses, ", "))}, w[3:]...)
	},
	"masqueraded": func(s *story, w []string) { // masqueraded yes|no: it has rules
		rules := s.masqueradeRules(s.who(s.vars["p"]))
		s.want(len(rules) > 0 == (w[0] == "yes"), "it has the rules\n%s", strings.Join(rules, ""))
	},
	"unjump": func(s *story, w []string) { // unjump COMMAND: no rule leads to its chain
		for _, rule := range s.node.rules("-A POSTROUTING") {
			if strings.Contains(rule, s.vars["p"]) {
				run(s, "sh", "-c", w[0]+" -w -t nat "+strings.Replace(rule, "-A ", "-D ", 1))
			}
		}
	},
}

// TestKilledBeforeResult: unwind is killed after bridge or ptp has finished its ADD, before
// anything of it is written. The IPAM plugin keeps no store that unwind can read, and the namespace
// is gone. A STATUS removes their masquerading rules.
func TestKilledBeforeResult(t *testing.T) {
	stories(t, `
	patient
	either bridge: let plugin bridge
	or ptp: let plugin ptp
	either iptables: let backend iptables
	or nftables: let backend nftables
	either IPv4: static $plugin IPv4 $backend
	or IPv6: static $plugin IPv6 $backend
	or dual: static $plugin dual $backend
	kill added 1 add $p; was-killed; masqueraded yes
	drop $p; status; masqueraded no`, masquerade)
}

// TestKilledUnknownToJournal is the same with a journal that could not be written either. The
// runtime's DEL removes the rules.
func TestKilledUnknownToJournal(t *testing.T) {
	stories(t, `
	static bridge IPv4 iptables firewall
	kill added 1 add $p; was-killed; masqueraded yes
	lose journal; drop $p; del $p; masqueraded no`, masquerade)
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
	stories(t, `
	patient
	either IPv4: static bridge IPv4 iptables; let command iptables
	or IPv6: static bridge IPv6 iptables; let command ip6tables
	kill added 1 add $p; was-killed; unjump $command; masqueraded yes
	drop $p; status; masqueraded no`, masquerade)
}

// TestStrayRules: a rule of an unknown ADD, whose DEL never comes, leads to the container's chain. The
// kernel does not remove the chain, so bridge's DEL always fails. If the container has another interface
// in the network, the rule may belong to that one, and stays.
func TestStrayRules(t *testing.T) {
	stories(t, `
	either bridge: chain masquerading bridge IPv4
	or ptp: chain masquerading ptp IPv4
	past add a; let first $a; drop a; lose $dir/cache/results/$network-a-eth0; lose $data/$network/$a
	move a again; add a; shell 'test $a != $first'
	del a`)
}
