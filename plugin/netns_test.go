package plugin

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
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

// TestDELNamesHostNetNS: a DEL's CNI_NETNS is the host's own network namespace, or another pod's, since
// its path is that of a process that is the host's by now, or was used again. A DEL that has undone
// everything passes. No delegate is shown it.
func TestDELNamesHostNetNS(t *testing.T) {
	stories(t, `
	chain bridge | p1; host; let calls DEL p1, DEL p1
	either added: add a; drop a; recorded a
	or swept: add a; recorded a; drop a; sweep; gone a
	or refused: names a $host; fails add a code=8
	or never added:
	or another pod is there: add a; drop a; takes b a; add b; let host $netns/a
	or swept, another pod is there with its address: add a; drop a; sweep; gone a
		lowest; takes b a; add b; given b $a; let host $netns/a
	forgets; names a $host
	del a; del a
	unshown; calls $calls
	if another: del b`, acts{
		"host": func(s *story, _ []string) { s.vars["host"] = fmt.Sprintf("/proc/%d/ns/net", os.Getpid()) },
		"recorded": func(s *story, w []string) {
			s.who(w[0]).edit(func(e *journal.Entry) { e.Added.NetNS.Path = s.vars["host"] })
		},
		"unshown": func(s *story, _ []string) {
			for _, l := range s.callLog() {
				s.want(l.NetNS != s.vars["host"], "a delegate was shown %s", l.NetNS)
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
	add a; remember a; bind pin; unpin a
	del a; vanished a; entries 0; leaves`, mounts())
}

// mounts are statements about the network namespace of pod a, which is mounted elsewhere at $path.
func mounts() acts {
	at := func(s *story) string { return s.vars["path"] }
	mount := func(s *story, name string, flags uintptr) {
		s.vars["path"] = filepath.Join(s.dir, name)
		s.write(at(s), "")
		s.mount(s.who("a").NetNS, at(s), "", flags, "")
	}
	return acts{
		"macvlan": func(s *story, _ []string) {
			s.chain = []string{fmt.Sprintf(`{"type": "macvlan", "master": %q, "ipam": %s}`, s.hostVeth("IPv4"), s.hostLocal(s.subnet))}
		},
		"identify": func(s *story, _ []string) {
			seen, err := facts.Look(s.who("a").NetNS, "")
			s.must(err)
			s.own = seen.Netns
		},
		"bind":  func(s *story, w []string) { mount(s, strings.Join(w, " "), unix.MS_BIND) },
		"moved": func(s *story, _ []string) { mount(s, "moved", unix.MS_MOVE) },
		// other [NAME]: the namespace of another container, with an eth0, is there
		"other": func(s *story, w []string) {
			path := s.netns(strings.Join(append(w, "a")[:1], ""))
			run(s, "nsenter", "--net="+path, "ip", "link", "add", "eth0", "type", "veth",
				"peer", "name", "peer0")
		},
		"covered": func(s *story, _ []string) { s.mount("/dev/null", at(s), "", unix.MS_BIND, "") },
		"unbind":  func(s *story, _ []string) { s.must(unix.Unmount(at(s), unix.MNT_DETACH)) },
		"there": func(s *story, _ []string) {
			seen, err := facts.Look(at(s), "")
			s.want(err == nil && seen.Netns.Same(s.own) && slices.Contains(s.links(at(s)), "eth0"), "%+v (%v)", seen, err)
		},
		"emptied": func(s *story, _ []string) { s.want(!slices.Contains(s.links(at(s)), "eth0"), "%q", s.links(at(s))) },
		// others: the other container, if there is one, still has its eth0
		"others": func(s *story, _ []string) {
			for _, name := range s.names(filepath.Join(s.dir, "netns")) {
				path := filepath.Join(s.dir, "netns", name)
				if seen, err := facts.Look(path, ""); err == nil && seen.Netns.Known() {
					links := s.links(path)
					s.want(slices.Contains(links, "peer0") == slices.Contains(links, "eth0"), "%v", links)
				}
			}
		},
	}
}

// TestMountedElsewhere: the namespace of a pod with a macvlan, which has no end on the host, moves
// from its path to another one. It lives as long as it is mounted, and a DEL runs in it.
func TestMountedElsewhere(t *testing.T) {
	stories(t, `
	macvlan; add a; identify
	either the mount is moved: moved
	or bound a second time: bind 'a b"c\d'; unpin a
	or bound a second time, another one at its path: bind bound; unpin a; other
	or below another mount: bind below; unpin a; covered
	status; sweep; status; sweep
	entry a live 1; reserved 1
	if below: unbind
	there; del a; emptied; others`, mounts())
}

// TestCoveredPod: another mount covers the directory of the network namespaces, as the node's first
// `ip netns add` does, which binds the directory over itself. The pod below
// is kept, since nothing says that it is dead.
func TestCoveredPod(t *testing.T) {
	stories(t, `
	macvlan; add a; identify
	cover; status; lives; entry a live 1; reserved 1
	uncover; there; del a; emptied`, mounts(), acts{
		"cover": func(s *story, _ []string) {
			dir := filepath.Join(s.dir, "netns")
			s.mount(dir, dir, "", unix.MS_BIND, "")
		},
		"uncover": func(s *story, _ []string) {
			s.must(unix.Unmount(filepath.Join(s.dir, "netns"), unix.MNT_DETACH))
			s.vars["path"] = s.who("a").NetNS
		},
		"lives": func(s *story, _ []string) {
			for _, f := range s.sweep() {
				s.want(f.Fate == decide.Unknown, "%s: %s (%s)", f.Key, f.Fate, f.Reason)
			}
		},
	})
}

// providers are statements about the stand-in for a provider's plugin (testdata/standin), which keeps
// a file for each attachment whose address it holds.
func providers() acts {
	return acts{
		// provider TYPE [KEYS]: the chain is this plugin. Where it is not installed, a DEL fails.
		"provider": func(s *story, w []string) {
			s.vars["provider"], s.vars["holds"] = w[0], filepath.Join(s.dir, "held")
			s.mkdir(s.vars["holds"])
			s.chain = []string{fmt.Sprintf(`{"type": %q, "dir": %q%s}`, w[0], s.vars["holds"], strings.Join(w[1:], " "))}
			s.link(w[0], filepath.Join(s.path[2], "standin"))
		},
		"before":    func(s *story, w []string) { s.chain = append(s.chain, strings.Join(w, " ")) }, // before PLUGIN: the next in the chain
		"uninstall": func(s *story, _ []string) { s.must(os.Remove(filepath.Join(s.path[0], s.vars["provider"]))) },
		"install":   func(s *story, _ []string) { s.link(s.vars["provider"], filepath.Join(s.path[2], "standin")) },
		// occupy POD: another's eth0 is in its namespace; the other end is elsewhere
		"occupy": func(s *story, w []string) {
			run(s, "nsenter", "--net="+s.who(w[0]).NetNS, "ip", "link", "add", "eth0", "type", "veth",
				"peer", "name", "far0", "netns", s.netns("far"))
		},
		"occupied": func(s *story, w []string) {
			s.want(slices.Contains(s.links(s.who(w[0]).NetNS), "eth0"), "another's interface is gone")
		},
	}
}

// TestShownToProviders: where the plain chain's DEL frees what a provider's plugin holds, so does
// unwind's, although the container's network namespace is gone or must not be shown. It also frees
// where the plain chain's DEL fails or frees nothing: terway and ovn-kubernetes need a namespace to
// look into.
func TestShownToProviders(t *testing.T) {
	stories(t, `
	let how passes; let left 0
	either plain: let past past; let occupied leaves
	or unwind: let past; let occupied occupied a
	either terway: provider terway
	or kube-ovn: provider kube-ovn
	or sriov: provider sriov
	or ovn: provider ovn-k8s-cni-overlay
	either gone, and the runtime names it: $past add a; drop a
	or gone after a DEL that failed: $past add a; uninstall; fails $past del a; drop a; install
	or with an interface of another before an ADD that fails: before p1, "modes": {"ADD": "fail"}; occupy a; fails $past add a
	or with the interface of an earlier ADD: $past add a; uninstall; fails $past del a; install; occupy a; $past add a
	if plain, terway, gone: let how fails; let left 1
	if plain, ovn, gone: let how fails; let left 1
	$how $past del a; held $left
	if interface of another: $occupied
	if plain: leaves`, providers())
}

// TestNextPodAtSamePath: a sweep runs A's DELs. Meanwhile the runtime removes A's network namespace, and
// makes pod B at the same path. The DEL of bridge still runs in A's namespace, so A's interface goes
// and B's stays; that of p0, which may take its path for a name, is shown none.
func TestNextPodAtSamePath(t *testing.T) {
	stories(t, `
	chain bridge | p0 | p2; let held $dir/faulty/held/DEL.a.p2
	kill added 1 add a; was-killed; ports 1
	plan p2 DEL hold
	each by sweep status gc ADD
	unless ADD: start $by
	if ADD: sandbox a c; start add c
	appears $held; unpin a; takes b a; add b; remember b; ports 2
	plan; lose $held
	unless ADD: wait $by
	if ADD: wait add c; del c
	gone a; pathless DEL a p0; ports 1; reserved 1; unchanged b; pings b
	del b`, acts{
		"ports": func(s *story, w []string) { s.wantCount(len(s.node.ports()), w[0]) },
		"pathless": func(s *story, w []string) {
			i := slices.IndexFunc(s.callLog(), func(l logged) bool { return l.Command == w[0] && l.ContainerID == w[1] && l.Instance == w[2] })
			s.want(i >= 0 && s.callLog()[i].NetNS == "", "shown %q", s.callLog()[max(0, i)].NetNS)
		},
	})
}
