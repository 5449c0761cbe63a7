package plugin

import (
	"fmt"
	"os"
	"path"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"cni-unwind/journal"
)

// TestScratchNetNS removes the network namespace before the DEL of plugins that need one to clean
// up. The plain chain leaves something, which shows that there is something to remove. unwind
// leaves nothing, and succeeds.
func TestScratchNetNS(t *testing.T) {
	stories(t, `
	let nft "ipMasqBackend": "nftables"; let del past del a
	either bridge, IPv4: chain masquerading bridge IPv4
	or bridge, IPv6: chain masquerading bridge IPv6
	or bridge, dual: chain masquerading bridge dual
	or bridge, dual, nftables: chain masquerading bridge dual, $nft
	or ptp, IPv4: chain masquerading ptp IPv4
	or ptp, IPv6: chain masquerading ptp IPv6
	or ptp, dual: chain masquerading ptp dual
	or ptp, dual, nftables: chain masquerading ptp dual, $nft
	or sbr: chain bridge | sbr; let del fails past del a
	or tuning: chain bridge | {"type": "tuning", "mtu": 1400, "mac": "02:00:00:00:00:09", "promisc": true, "allmulti": true, "txQLen": 700, "dataDir": "$dir/tuning"}
	either plain: past add a; remember a; drop a; unlinked a; $del; remains a; leaves
	or unwind: add a; remember a; drop a; unlinked a; del a; vanished a; absent $netns/a`, acts{
		"unlinked": func(s *story, w []string) {
			eventually(s, "the host's ends of the interfaces are gone", func() bool {
				return !slices.ContainsFunc(s.seen[w[0]].marks.links, func(name string) bool {
					_, err := netlink.LinkByName(name)
					return err == nil
				})
			})
		},
		"remains": func(s *story, w []string) {
			s.want(s.who(w[0]).whole(s.seen[w[0]].marks) != "", "the plain chain leaves nothing")
		},
	})
}

// TestNetNSOfDEL: a pod's network namespace may be anywhere when its DEL comes. Delegates are shown
// the pod's own ($own) if it can be found, by a descriptor of unwind's where no path leads to it, never
// another one, and nothing is left. If it is gone, they are shown what the runtime names.
func TestNetNSOfDEL(t *testing.T) {
	stories(t, `
	chain masquerading bridge dual | p0
	add a; remember a; let shown $netns/a; let own $netns/a
	either named by the runtime:
	or not named: names a
	or gone: drop a; let own
	or gone and not named: drop a; names a; let shown; let own
	or gone, a file at its path: drop a; touch; let own
	or gone, another at its path: drop a; other; let own
	or at a path that the runtime names: bind bound; unpin a; names a $path; let own $path; let shown $path
	or at no path, a process inside: process a; unpin a; let own $inside; let shown held
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
// that of a process that is the host's by now. A DEL that has undone everything passes. No delegate
// is shown it.
func TestDELNamesHostNetNS(t *testing.T) {
	stories(t, `
	chain bridge | p1; host; let calls DEL p1, DEL p1
	either added: add a; drop a; recorded a
	or swept: add a; recorded a; drop a; sweep; tombstone a; let calls
	or refused: names a $host; fails add a code=8
	or never added:
	forgets; names a $host
	del a; del a
	unshown; calls $calls`, acts{
		"host": func(s *story, _ []string) { s.vars["host"] = fmt.Sprintf("/proc/%d/ns/net", os.Getpid()) },
		"recorded": func(s *story, w []string) {
			s.who(w[0]).edit(func(e *journal.Entry) { e.Added.NetNS.Path = s.vars["host"] })
		},
		"unshown": func(s *story, _ []string) {
			for _, l := range s.callLog() {
				s.want(l.NetNS != s.vars["host"], "a delegate was shown the host's network namespace")
			}
		},
	})
}

// TestDELNamesAnother: a DEL names a namespace that is no record's, nor another attachment's in the
// journal. It is taken for another ADD's: its delegates get the path, as without unwind. The ADD on record
// is undone too, in its own namespace.
func TestDELNamesAnother(t *testing.T) {
	stories(t, `
	chain masquerading bridge dual | p0
	add a; remember a; let own $netns/a
	either it is elsewhere: bind bound; other x; names a $netns/x
	or it is at the path of its ADD: process a; unpin a; other; let own $inside
	forgets; del a; calls DEL p0, DEL p0
	names a $own; vanished a`, mounts())
}

// TestNamespaceOutOfReach: the pod's namespace exists, but no path leads the DEL to it, and it has
// no process: it is pinned by a mount elsewhere, or the kernel is about to remove it. Without a
// namespace bridge would leave its nat chain.
func TestNamespaceOutOfReach(t *testing.T) {
	stories(t, `
	budget HostLink 100ms; chain bridge, "ipMasq": true
	add a; bind pin; unpin a
	del a; iptables 0; entries 0; reserved 0; leaves`, mounts())
}
