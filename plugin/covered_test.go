package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"
)

// staticChain is a chain whose IPAM plugin names no owner of the address: only an interface shows
// that someone else has it.
func (n *node) staticChain() []string {
	return []string{
		fmt.Sprintf(`{"type": "bridge", "bridge": %q, "isGateway": true,
			"ipam": {"type": "static", "addresses": [{"address": "%s"}]}}`, n.bridge, n.prefix(4, 7)),
		`{"type": "firewall"}`,
	}
}

// cover hides the mounts of network namespaces below another mount, as the first `ip netns add` of
// a node does: it binds the directory over itself. With copies the mounts are there too.
func (n *node) cover(copies bool) (uncover func()) {
	n.Helper()
	dir, flags := filepath.Join(n.dir, "netns"), uintptr(unix.MS_BIND)
	if copies {
		flags |= unix.MS_REC
	}
	n.mount(dir, dir, "", flags, "")
	return func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			n.Error(err)
		}
	}
}

// covering has the statements "cover", which covers the network namespaces, and "uncover".
var covering = acts{
	"cover":   func(s *story, _ []string) { s.undo["uncover"] = s.node.cover(false) },
	"uncover": func(s *story, _ []string) { s.undo["uncover"]() },
}

// TestCoveredPod: below another mount is the network namespace of an attachment of the journal. It
// lives, and its DEL runs in the namespace, and leaves the mounts as they are.
func TestCoveredPod(t *testing.T) {
	stories(t, `
	macvlan; add a; identify; let path $netns/a
	cover; mounted; status
	lives; entry a live 1; reserved 1
	del a; mounted; uncover; same; emptied`, mounts(), covering, acts{
		"mounted": func(s *story, _ []string) { s.steady("mounts", strings.Join(s.mountTable(), "\n")) },
		"lives": func(s *story, _ []string) {
			for _, f := range s.sweep(undo.DefaultBudgets) {
				s.want(f.Fate == alive.Live && f.Evidence.NetNS == tristate.Yes, "%s: %s (%s)", f.Key, f.Fate, f.Reason)
			}
		},
		"same": func(s *story, _ []string) {
			there, err := host.Identify(s.vars["path"])
			s.want(err == nil && there.Same(s.own), "%+v (%v)", there, err)
		},
	})
}

// mountTable returns the mounts of this node in this process's mount namespace.
func (n *node) mountTable() []string {
	n.Helper()
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		n.Fatal(err)
	}
	return slices.DeleteFunc(strings.Split(string(data), "\n"), func(line string) bool {
		return !strings.Contains(line, n.dir)
	})
}

// TestCoveredElsewhere: the mount of some network namespace stays below another one for good. It
// keeps no attachment whose address is of an IPAM plugin that names no owner.
func TestCoveredElsewhere(t *testing.T) {
	stories(t, `
	patient; chain static | firewall
	add a; drop a; below
	either STATUS: status
	or GC: gc
	or sweep: sweep`, acts{"below": func(s *story, _ []string) {
		other := s.netns("cni-x")
		s.cover(true)
		s.must(unix.Unmount(other, unix.MNT_DETACH)) // the copy, as its runtime does
	}})
}

// TestCoveredOwner: below another mount is the network namespace of a pod that was added past the
// journal, with the address of a dead one. What the dead one left is not touched before it ends.
func TestCoveredOwner(t *testing.T) {
	stories(t, `
	chain static | firewall
	add old; drop old
	past add next; opened next; names next $open; remember next
	cover
	sweeps unchanged next; entry old
	uncover; names next $netns/next
	past del next; drop next; sweep`, covering, acts{
		"opened": func(s *story, w []string) { // $open leads to the namespace still
			f, err := os.Open(s.who(w[0]).NetNS)
			s.must(err)
			s.Cleanup(func() { _ = f.Close() })
			s.vars["open"] = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), f.Fd())
		},
	})
}
