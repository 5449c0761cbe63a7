package plugin

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestNetNSOfDEL has the network namespace of a pod be anywhere when its DEL comes: delegates are shown the pod's own if it
// can be found, never another one, and nothing is left.
func TestNetNSOfDEL(t *testing.T) {
	t.Parallel()
	const none, recorded, held = "", "the path of the ADD", "a descriptor of unwind's"
	for _, c := range []struct {
		name string
		// happens changes what it likes about the pod before its DEL. It returns what delegates are to be shown, and where the
		// pod's namespace is found by then.
		happens func(p *pod) (shown, own string)
	}{
		{"named by the runtime", func(p *pod) (string, string) { return recorded, p.NetNS }},
		{"not named", func(p *pod) (string, string) {
			own := p.NetNS
			p.NetNS = ""
			return recorded, own
		}},
		{"gone", func(p *pod) (string, string) {
			p.dropNetNS()
			return none, none
		}},
		{"gone and not named", func(p *pod) (string, string) {
			p.dropNetNS()
			p.NetNS = ""
			return none, none
		}},
		{"gone, a file at its path", func(p *pod) (string, string) {
			p.dropNetNS()
			p.write(p.NetNS, "")
			return none, none
		}},
		{"gone, another at its path", func(p *pod) (string, string) {
			p.dropNetNS()
			p.other(p.ContainerID)
			return none, none
		}},
		{"there, another named by the runtime", func(p *pod) (string, string) {
			own := p.NetNS
			p.NetNS = p.other("x")
			return recorded, own
		}},
		{"at a path that the runtime names", func(p *pod) (string, string) {
			moved := p.NetNS + ".moved"
			p.write(moved, "")
			if err := unix.Mount(p.NetNS, moved, "", unix.MS_BIND, ""); err != nil {
				p.Fatal(err)
			}
			p.Cleanup(func() { _ = unix.Unmount(moved, unix.MNT_DETACH) })
			p.unpin()
			p.NetNS = moved
			return moved, moved
		}},
		{"at no path, a process inside", func(p *pod) (string, string) {
			process := p.processInside()
			p.unpin()
			return held, netnsOf(process)
		}},
		{"at no path, a process inside, another at its path", func(p *pod) (string, string) {
			process := p.processInside()
			p.unpin()
			if err := os.Remove(p.NetNS); err != nil {
				p.Fatal(err)
			}
			p.other(p.ContainerID)
			return held, netnsOf(process)
		}},
		{"at no path, a process inside, not named", func(p *pod) (string, string) {
			process := p.processInside()
			p.unpin()
			p.NetNS = ""
			return held, netnsOf(process)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(n.masquerading("bridge", "dual", ""), n.faulty("p0", ""))
			p := n.pod("a")
			added := p.NetNS
			marks := p.marks(p.mustAdd(list))
			shown, own := c.happens(p)
			n.forgetCalls()
			p.mustDel(list)
			got := n.callLog()[0].NetNS
			if matched, err := path.Match("/proc/[1-9]*/fd/[1-9]*", got); err == nil && matched {
				got = held
			} else if got == added {
				got = recorded
			}
			if got != shown {
				t.Errorf("delegates were shown %q, not %q", got, shown)
			}
			a := *p
			a.NetNS = own
			for _, trace := range a.traces(marks) {
				t.Errorf("left: %s", trace)
			}
			n.othersSurvive()
			n.nothingLeft()
		})
	}
}

// TestProcessInsideEnds has the only process in the pod's network namespace, which is at no path, end while a DEL runs: those
// after it find the namespace all the same.
func TestProcessInsideEnds(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.masquerading("bridge", "IPv4", ""), n.faulty("p0", `, "delayMS": 500`))
	p := n.pod("a")
	marks := p.marks(p.mustAdd(list))
	process := p.processInside()
	p.unpin()
	n.plan(map[string]map[string]string{"p0": {"DEL": "late"}})
	n.forgetCalls()
	done := make(chan error)
	go func() { done <- p.del(list) }()
	eventually(t, "the first DEL", func() bool { return len(n.calls()) > 0 })
	if err := process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, trace := range p.traces(marks) {
		t.Errorf("left: %s", trace)
	}
	n.nothingLeft()
}

// unpin takes the pod's network namespace off its path, where an empty file is left.
func (p *pod) unpin() {
	p.Helper()
	if err := unix.Unmount(p.NetNS, unix.MNT_DETACH); err != nil {
		p.Fatal(err)
	}
}

// processInside starts a process in the pod's network namespace.
func (p *pod) processInside() *os.Process {
	p.Helper()
	own, err := identify(p.NetNS)
	if err != nil {
		p.Fatal(err)
	}
	cmd := exec.Command("nsenter", "--net="+p.NetNS, "sleep", "60")
	if err := cmd.Start(); err != nil {
		p.Fatal(err)
	}
	p.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	eventually(p, "a process inside", func() bool {
		there, err := identify(netnsOf(cmd.Process))
		return err == nil && there.Same(own)
	})
	return cmd.Process
}

func netnsOf(p *os.Process) string { return fmt.Sprintf("/proc/%d/ns/net", p.Pid) }

// other makes a network namespace that is another container's, with an eth0.
func (n *node) other(name string) string {
	n.Helper()
	path := n.netns(name)
	run(n, "nsenter", "--net="+path, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "peer0")
	return path
}

// othersSurvive sees that the other container, if there is one, still has its eth0.
func (n *node) othersSurvive() {
	n.Helper()
	for _, name := range n.names(filepath.Join(n.dir, "netns")) {
		path := filepath.Join(n.dir, "netns", name)
		if id, err := identify(path); err == nil && id.Known() {
			if links := n.links(path); slices.Contains(links, "peer0") != slices.Contains(links, "eth0") {
				n.Errorf("the other container's interfaces: %v", links)
			}
		}
	}
}

// TestScratchNetNS removes the network namespace before the DEL of plugins that need one to clean up. The plain chain leaves
// something, which shows that there was something to remove; unwind leaves nothing, and succeeds.
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

// delAfterNetNS takes a pod through ADD and DEL, with its network namespace gone before the DEL, and returns what is left.
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

// TestScratchNetNSIsForCleaningUp shows a scratch network namespace, with the interface and its addresses in it, to the
// plugins that clean up by it, and to no other: one that moves devices would move ours.
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
		if scratch && !strings.HasPrefix(l.NetNS, "/proc/") || !scratch && l.NetNS != "" {
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
