package plugin

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
)

// other makes a network namespace of another container, with an eth0.
func (n *node) other(name string) string {
	n.Helper()
	path := n.netns(name)
	run(n, "nsenter", "--net="+path, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "peer0")
	return path
}

// othersSurvive checks that the other container, if there is one, still has its eth0.
func (n *node) othersSurvive() {
	n.Helper()
	for _, name := range n.names(filepath.Join(n.dir, "netns")) {
		path := filepath.Join(n.dir, "netns", name)
		if id, err := host.Identify(path); err == nil && id.Known() {
			if links := n.links(path); slices.Contains(links, "peer0") != slices.Contains(links, "eth0") {
				n.Errorf("the other container's interfaces: %v", links)
			}
		}
	}
}

// TestScratchNetNS removes the network namespace before the DEL of plugins that need one to clean
// up. The plain chain leaves something, which shows that there is something to remove. unwind
// leaves nothing, and succeeds.
func TestScratchNetNS(t *testing.T) {
	t.Parallel()
	const nft = `, "ipMasqBackend": "nftables"`
	bridge := func(families, extra string) func(*node) []string {
		return func(n *node) []string { return []string{n.masquerading("bridge", families, extra)} }
	}
	ptp := func(families, extra string) func(*node) []string {
		return func(n *node) []string { return []string{n.masquerading("ptp", families, extra)} }
	}
	for _, c := range []struct {
		name       string
		chain      func(n *node) []string
		plainFails bool
	}{
		{"bridge, IPv4", bridge("IPv4", ""), false},
		{"bridge, IPv6", bridge("IPv6", ""), false},
		{"bridge, dual", bridge("dual", ""), false},
		{"bridge, dual, nftables", bridge("dual", nft), false},
		{"ptp, IPv4", ptp("IPv4", ""), false},
		{"ptp, IPv6", ptp("IPv6", ""), false},
		{"ptp, dual", ptp("dual", ""), false},
		{"ptp, dual, nftables", ptp("dual", nft), false},
		{"sbr", func(n *node) []string {
			return []string{n.bridgePlugin(""), `{"type": "sbr"}`}
		}, true},
		{"tuning", func(n *node) []string {
			return []string{n.bridgePlugin(""), fmt.Sprintf(`{"type": "tuning", "mtu": 1400, "mac": "02:00:00:00:00:09", "promisc": true,
				"allmulti": true, "txQLen": 700, "dataDir": %q}`, n.tuningDir())}
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			left, err := n.delAfterNetNS(n.plain(c.chain(n)...))
			if len(left) == 0 || err == nil == c.plainFails {
				t.Errorf("the plain chain leaves %q and returns %v", left, err)
			}

			n = newNode(t)
			left, err = n.delAfterNetNS(n.unwind(c.chain(n)...))
			if len(left) > 0 || err != nil {
				t.Errorf("unwind leaves %q and returns %v", left, err)
			}
			n.nothingLeft()
		})
	}
}

// delAfterNetNS takes a pod through ADD and DEL, removes its network namespace before the DEL, and
// returns what is left.
func (n *node) delAfterNetNS(list *libcni.NetworkConfigList) (left []string, err error) {
	n.Helper()
	p := n.pod("a")
	marks := p.marks(p.mustAdd(list))
	p.dropNetNS()
	eventually(n, "the host's ends of the interfaces are gone", func() bool {
		return !slices.ContainsFunc(marks.links, func(name string) bool {
			_, err := netlink.LinkByName(name)
			return err == nil
		})
	})
	err = p.del(list)
	left = p.traces(marks)
	if _, err := os.Lstat(p.NetNS); err == nil {
		left = append(left, "a file at "+p.NetNS)
	}
	return left, err
}

// TestScratchNetNSIsForCleaningUp: only the plugins that clean up by it get a scratch network
// namespace with the interface and its addresses. A plugin that moves devices would move unwind's
// scratch interface.
func TestScratchNetNSIsForCleaningUp(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	var chain []string
	for _, plugin := range []string{"bridge", "ptp", "tuning", "host-device", "macvlan", "firewall", "unheard-of"} {
		run(t, "cp", filepath.Join(toolsDir(t), "test", "faulty"), filepath.Join(n.path[0], plugin))
		chain = append(chain, strings.Replace(n.faulty(plugin, ""), `"type": "faulty"`, fmt.Sprintf(`"type": %q`, plugin), 1))
	}
	seen := filepath.Join(n.dir, "seen")
	n.script("sbr", `cat >/dev/null; case $CNI_COMMAND in
		ADD) echo '{"cniVersion": "1.0.0", "ips": [{"address": "192.0.2.7/24"}, {"address": "2001:db8::7/64"}]}' ;;
		DEL) nsenter --net="$CNI_NETNS" ip -o address show dev "$CNI_IFNAME" >`+seen+` ;;
		esac`)
	list := n.unwind(append(chain, `{"type": "sbr"}`)...)
	p := n.pod("a")
	p.mustAdd(list)
	p.dropNetNS()
	n.forgetCalls()
	p.mustDel(list)
	for _, l := range n.callLog() {
		scratch := slices.Contains([]string{"bridge", "ptp", "tuning"}, l.Instance)
		want := p.NetNS
		if l.Instance == "host-device" {
			want = ""
		}
		if scratch && !strings.HasPrefix(l.NetNS, "/proc/") || !scratch && l.NetNS != want {
			t.Errorf("%s was shown %q", l.Instance, l.NetNS)
		}
	}
	addresses, err := os.ReadFile(seen)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"eth0", "192.0.2.7/24", "2001:db8::7/64"} {
		if !strings.Contains(string(addresses), want) {
			t.Errorf("no %s in the scratch network namespace: %s", want, addresses)
		}
	}
	n.nothingLeft()
}

// TestRulesOfSBR: sbr's first DEL does not pass, and the pod's network namespace lives on. By the
// second one the interface is gone, by whose addresses sbr finds its rules. The rules are still
// removed from that namespace.
func TestRulesOfSBR(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]string{
		"fails": `echo '{"code": 11, "msg": "sbr is broken"}'; exit 1`, "is killed": "kill -9 $$",
		"unwind is killed": "kill -9 $PPID; exit 1",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			sbr := filepath.Join(n.path[1], "sbr")
			n.path[1] = n.few("bridge", "host-local")
			broken := filepath.Join(n.dir, "broken")
			n.script("sbr", fmt.Sprintf(`[ $CNI_COMMAND = DEL ] && [ -e %s ] && { %s; }; exec %s`,
				broken, fault, sbr))
			list := n.unwind(n.masquerading("bridge", "dual", ""), `{"type": "sbr"}`)
			p := n.pod("a")
			before := p.ruleCount()
			p.mustAdd(list)
			if with := p.ruleCount(); with != before+2 {
				t.Fatalf("%d rules with sbr, %d without", with, before)
			}
			n.write(broken, "")
			for len(n.reserved()) > 0 { // after a pass that was cut off, another step goes first
				if err := p.del(list); err == nil {
					t.Fatal("the DEL succeeded")
				}
			}
			if err := p.del(list); err == nil { // now with a scratch interface
				t.Error("the DEL succeeded")
			}
			eventually(t, "the interface that was lent is gone", func() bool {
				return slices.Equal(n.links(p.NetNS), []string{"lo"})
			})
			if err := os.Remove(broken); err != nil {
				t.Fatal(err)
			}
			p.mustDel(list)
			if left := p.ruleCount(); left != before {
				t.Errorf("%d rules are left", left-before)
			}
			if links := n.links(p.NetNS); !slices.Equal(links, []string{"lo"}) {
				t.Errorf("interfaces are left: %q", links)
			}
			n.nothingLeft()
		})
	}
}

// ruleCount returns the number of routing rules in the pod's network namespace.
func (p *pod) ruleCount() (count int) {
	p.Helper()
	err := ns.WithNetNSPath(p.NetNS, func(ns.NetNS) error {
		rules, err := netlink.RuleList(netlink.FAMILY_ALL)
		count = len(rules)
		return err
	})
	if err != nil {
		p.Fatal(err)
	}
	return count
}

// TestNetNSOfDEL: a pod's network namespace may be anywhere when its DEL comes. Delegates are shown
// the pod's own ($own) if it can be found, by a descriptor of unwind's where no path leads to it, never
// another one, and nothing is left. If it is gone, they are shown what the runtime names, unless
// something is there.
func TestNetNSOfDEL(t *testing.T) {
	stories(t, `
	chain masquerading bridge dual | p0
	add a; remember a; let shown $netns/a; let own $netns/a
	either named by the runtime:
	or not named: names a
	or gone: drop a; let own
	or gone and not named: drop a; names a; let shown; let own
	or gone, a file at its path: drop a; touch; let shown /proc/0/ns/net; let own
	or gone, another at its path: drop a; other; let shown /proc/0/ns/net; let own
	or there, another named by the runtime: bind bound; other x; names a $netns/x
	or at a path that the runtime names: bind bound; unpin a; names a $path; let own $path; let shown $path
	or at no path, a process inside: process a; unpin a; let own $inside; let shown held
	or at no path, a process inside, another at its path: process a; unpin a; other; let own $inside; let shown held
	or at no path, a process inside, not named: process a; unpin a; names a; let own $inside; let shown held
	forgets; del a
	saw '$shown'
	names a $own; vanished a; others`, mounts(), acts{
		"touch": func(s *story, _ []string) { s.write(s.who("a").NetNS, "") },
		"saw": func(s *story, w []string) {
			got := s.callLog()[0].NetNS
			if matched, err := path.Match("/proc/[1-9]*/fd/[1-9]*", got); err == nil && matched {
				got = "held"
			}
			s.want(got == w[0], "%q", got)
		},
	})
}

// TestDELNamesHostNetNS: a DEL's CNI_NETNS is the host's own network namespace, since its path is
// that of a process that is the host's by now. A DEL that has undone everything passes. So does the
// DEL of an attachment that was never added, since an ADD into that namespace is refused. No
// delegate is shown it.
func TestDELNamesHostNetNS(t *testing.T) {
	stories(t, `
	chain bridge | p1; host; let calls
	either added: add a; drop a; recorded a; let calls DEL p1
	or swept: add a; drop a; sweep; tombstone a
	or refused: names a $host; fails add a code=8
	or never added:
	forgets; names a $host
	del a; del a
	unshown; calls $calls`, acts{
		"host": func(s *story, _ []string) { s.vars["host"] = fmt.Sprintf("/proc/%d/ns/net", os.Getpid()) },
		"recorded": func(s *story, w []string) {
			s.who(w[0]).edit(func(g *journal.Generation) { g.NetNS.Path = s.vars["host"] })
		},
		"unshown": func(s *story, _ []string) {
			for _, l := range s.callLog() {
				s.want(l.NetNS != s.vars["host"], "a delegate was shown the host's network namespace")
			}
		},
	})
}

// TestProcessInsideEnds: the pod's network namespace is at no path, and its only process ends
// during a DEL. Later delegates still find the namespace.
func TestProcessInsideEnds(t *testing.T) {
	stories(t, `
	chain masquerading bridge IPv4 | p0, "delayMS": 500
	add a; remember a; process a; unpin a
	plan p0 DEL late; forgets; start del a; awaits DEL p0
	end; wait del a
	vanished a`)
}
