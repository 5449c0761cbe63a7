package plugin

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
)

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
			run(s, "nsenter", "--net="+path, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "peer0")
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
					s.want(slices.Contains(links, "peer0") == slices.Contains(links, "eth0"), "the other container's interfaces: %v", links)
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
