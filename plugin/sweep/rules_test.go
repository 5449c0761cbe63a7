package sweep

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/journal"
	"cni-unwind/plugin/known"
)

// TestRulesOf: a rule of IPv6 and one of nftables have their container and its address. A rule that
// a shell or iptables would read differently, or whose comment is not a plugin's, is not named.
func TestRulesOf(t *testing.T) {
	t.Parallel()
	masquerade, port := known.Of("bridge").Chain("net", "id"), known.Of("portmap").Chain("net", "id")
	label := `-m comment --comment "name: \"net\" id: \"id\"" `
	ports := `-m comment --comment "dnat name: \"net\" id: \"id\"" `
	for _, c := range []struct {
		name      string
		iptables  []string
		nft       []string
		of        journal.Key
		commands  []string
		addresses []string
	}{
		{"IPv6", []string{
			"*nat", ":" + port + " - [0:0]", "-A POSTROUTING -s fd00::3/128 " + label + "-j " + masquerade,
			"-A CNI-HOSTPORT-DNAT -p tcp " + ports + "-m multiport --dports 8080 -j " + port,
			"-A " + port + " -s fd00::/64 -p tcp -m tcp --dport 8080 -j CNI-HOSTPORT-SETMARK",
			"-A " + port + " -d 2001:db8::9/128 -p tcp -m tcp --dport 8080 -j DNAT --to-destination [fd00::4]:80"},
			nil, journal.Key{Network: "net", ContainerID: "id"}, []string{
				"ip6tables -w -t nat -D POSTROUTING -s fd00::3/128 " + label + "-j " + masquerade,
				"ip6tables -w -t nat -D CNI-HOSTPORT-DNAT -p tcp " + ports + "-m multiport --dports 8080 -j " +
					port,
				"ip6tables -w -t nat -F " + port, "ip6tables -w -t nat -X " + port},
			[]string{"fd00::3", "fd00::4"}},
		{"a subnet is no address",
			[]string{"*nat", "-A POSTROUTING -s fd00::/64 " + label + "-j " + masquerade}, nil,
			journal.Key{Network: "net", ContainerID: "id"},
			[]string{"ip6tables -w -t nat -D POSTROUTING -s fd00::/64 " + label + "-j " + masquerade}, nil},
		{"a shell would run it", []string{"*nat", "-A POSTROUTING -s fd00::3/128 " + label +
			`-m comment --comment "$(reboot)" -j ` + masquerade}, nil,
			journal.Key{Network: "net", ContainerID: "id"}, nil, nil},
		{"a name that a shell would run",
			[]string{"*nat", `-A POSTROUTING -m comment --comment "name: \"net\" id: \"$(reboot)\"" -j CNI-1`},
			nil, journal.Key{}, nil, nil},
		{"lines of a comment", []string{
			"*nat; reboot;", "-A CNI-FORWARD -s 10.1.2.3/32 -j ACCEPT",
			"-A POSTROUTING -s fd00::3/128 " + label + "-j " + masquerade,
			"*nat", "-A POSTROUTING --modprobe=/tmp/x " + label + "-j " + masquerade,
			"-A POSTROUTING --mod /tmp/x " + label + "-j " + masquerade,
			"-A POSTROUTING -M /tmp/x " + label + "-j " + masquerade,
			"-A POSTROUTING -nM/tmp/x " + label + "-j " + masquerade,
			`-A POSTROUTING "-M" "/tmp/x" ` + label + "-j " + masquerade,
			"-A POSTROUTING -s !! " + label + "-j " + masquerade,
			"-A CNI-FORWARD -s fe80::1%$(reboot) -j ACCEPT"},
			[]string{"table $(reboot) cni_hostport {", "chain hostports {",
				`dnat to 10.1.2.3:80 comment "id" # handle 7`,
				"table ip cni_hostport {", `dnat to 10.1.2.3:80 comment "id" # handle 7`, "chain ;reboot; {",
				`dnat to 10.1.2.3:80 comment "id" # handle 7`},
			journal.Key{Network: "net", ContainerID: "id"}, nil, nil},
		{"conditions of portmap", []string{"*nat", "-A CNI-HOSTPORT-DNAT ! -d 192.0.2.0/24 -p tcp " +
			"-m set --match-set a-b dst,src -m addrtype ! --src-type LOCAL " + ports +
			"-m multiport --dports 80,81 -j " + port}, nil,
			journal.Key{Network: "net", ContainerID: "id"},
			[]string{"ip6tables -w -t nat -D CNI-HOSTPORT-DNAT ! -d 192.0.2.0/24 -p tcp " +
				"-m set --match-set a-b dst,src -m addrtype ! --src-type LOCAL " + ports +
				"-m multiport --dports 80,81 -j " + port}, nil},
		{"another's chain", []string{"*nat", "-A POSTROUTING -s fd00::3/128 " + label + "-j CNI-other"},
			nil,
			journal.Key{Network: "net", ContainerID: "id"}, nil, nil},
		{"nftables of IPv6", nil,
			[]string{"table ip6 cni_hostport { # handle 2", "chain hostports { # handle 1",
				`tcp dport 8080 dnat to [fd00::3]:80 comment "id" # handle 7`},
			journal.Key{ContainerID: "id"}, []string{"nft delete rule ip6 cni_hostport hostports handle 7"},
			[]string{"fd00::3"}},
		{"nftables of localhost", nil,
			[]string{"table ip cni_hostport { # handle 2", "chain masquerading { # handle 1",
				`ip saddr 127.0.0.1 ip daddr 10.1.2.3 masquerade comment "id" # handle 8`},
			journal.Key{ContainerID: "id"},
			[]string{"nft delete rule ip cni_hostport masquerading handle 8"}, []string{"10.1.2.3"}},
		{"another table of nftables", nil,
			[]string{"table ip mine { # handle 2", "chain hostports { # handle 1",
				`tcp dport 8080 dnat to 10.1.2.3:80 comment "id" # handle 7`}, journal.Key{}, nil, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			l := &leftovers{of: map[journal.Key]*leftover{}, firewall: map[netip.Addr][]string{}}
			l.addIPTables("ip6tables", c.iptables)
			l.addNFTables(c.nft)
			got := &leftover{}
			for key, o := range l.of {
				if got = o; key != c.of {
					t.Errorf("of %s, want %s", key, c.of)
				}
			}
			var addresses []string
			for _, a := range got.addresses {
				addresses = append(addresses, a.String())
			}
			if diff := cmp.Diff(c.commands, slices.Concat(got.commands, got.chains)); diff != "" {
				t.Errorf("commands, -want +got:\n%s", diff)
			}
			if len(l.firewall) > 0 {
				t.Errorf("of firewall: %q", l.firewall)
			}
			if diff := cmp.Diff(c.addresses, addresses); diff != "" {
				t.Errorf("addresses, -want +got:\n%s", diff)
			}
		})
	}
}
