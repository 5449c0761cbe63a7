package plugin

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/testdata/unwind/env"
)

// headless runs this program as one whose first thread has ended: see TestMain.
func headless() {
	runtime.LockOSThread()
	go func() {
		time.Sleep(time.Minute)
		os.Exit(0)
	}()
	_, _, _ = unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
}

// confined is a shell's command that starts unwind without the right to inspect processes that have
// more capabilities. The tests' processes then have one more: this right.
const (
	confined = `exec ` + less + `"$0"`
	less     = `setpriv --bounding-set -sys_ptrace --inh-caps -sys_ptrace `
)

// enter starts a process in the pod's namespace and waits until it is there.
const enter = `nsenter --net="$POD" sleep 60 & while
	[ "$(stat -L -c %i /proc/$!/net/dev)" = "$(stat -L -c %i /proc/1/net/dev)" ]; do :; done; `

// onNode is a shell's command that runs a script as process 1 of a PID namespace, instead of
// unwind.
func (p *pod) onNode(script string) string {
	return `exec unshare --pid --fork --kill-child --mount-proc sh -c '` +
		strings.ReplaceAll(script, "$POD", p.NetNS) + `; exit $?' "$0"`
}

// statusBy runs a STATUS of the pod's chain by a shell's command in a mount namespace of its own,
// in which $0 is unwind.
func (p *pod) statusBy(command string) {
	p.Helper()
	in := p.asking("STATUS", p.oneStep(), nil)
	in.first, in.more = command, []string{env.Patient + "=1"}
	out := p.start(in)
	if out.code != 0 {
		p.Fatalf("STATUS: %s\n%s", out.stdout, out.stderr)
	}
	p.Logf("STATUS: %s", out.stderr)
}

// oneStep is a chain without an interface on the host: only the namespace and its processes show
// that a pod lives.
func (n *node) oneStep() string {
	return fmt.Sprintf(`{"cniVersion": "1.0.0", "plugins": [%s]}`, n.faulty("p0", ""))
}

// confinement are statements of these tests.
func confinement() acts {
	return acts{
		"confined":  func(s *story, w []string) { s.who(w[0]).statusBy(confined) },
		"status-by": func(s *story, w []string) { s.who(w[0]).statusBy(":") },
		// netdev POD [OTHER]: its net/dev has the inode of the process in the other's, or an unknown one
		"netdev": func(s *story, w []string) {
			id := journal.NetNS{}
			if len(w) > 1 {
				var err error
				id, err = host.Identify(s.vars["inside"])
				s.must(err)
				s.want(id.NetDev != 0, "%+v", id)
			}
			s.who(w[0]).edit(func(g *journal.Generation) { g.NetNS.NetDev = id.NetDev })
		},
		"noted": func(s *story, w []string) {
			netns := s.who(w[0]).entry().Newest().NetNS
			s.want(netns.NetDev != 0, "%+v", netns)
		},
		// headless POD: a process is in it whose first thread has ended
		"headless": func(s *story, w []string) {
			self, err := os.Executable()
			s.must(err)
			cmd := exec.Command("nsenter", "--net="+s.who(w[0]).NetNS, self)
			cmd.Env = append(os.Environ(), headlessEnv+"=1")
			s.must(cmd.Start())
			s.Cleanup(func() {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			})
			eventually(s, "the first thread gone", func() bool { return host.Ended(fmt.Sprintf("/proc/%d", cmd.Process.Pid)) })
		},
	}
}

// TestConfined: an unwind that may not inspect the node's processes releases a lost namespace's
// attachment, unless a process is in the namespace.
func TestConfined(t *testing.T) {
	stories(t, `
	chain p0; add a; noted a
	either lost: drop a
	or lost, beside a zombie: process a; unpin a; end
	or lost, a process in another pod that got the inode: drop a; process other; netdev a other
	or a process inside: process a; unpin a
	or a process inside, no inode of net/dev: process a; unpin a; netdev a
	confined a
	if a process inside: entry a live
	if no inode: leaves
	if a process inside: end
	unless no inode: confined a; left`, confinement())
}

// TestConfinedNode runs a node in a PID and a mount namespace, with a process 1 and perhaps one in
// the pod.
func TestConfinedNode(t *testing.T) {
	t.Parallel()
	const (
		inside = enter + `umount "$POD"; `
		hidden = `mount -t proc -o hidepid=2,gid=12345 proc /proc; `
		denied = `mount -t proc -o hidepid=1,gid=12345 proc /proc; `
		all    = `"$0"`
		some   = less + all
	)
	for _, c := range []struct {
		name     string
		node     string // a shell's commands on the node before unwind starts
		unwind   string
		noNetDev bool // the entry has no inode of net/dev
		released bool
	}{
		{"lost", `umount "$POD"; `, some, false, true},
		{"lost, no inode of net/dev", `umount "$POD"; `, some, true, true},
		{"a process inside", inside, some, false, false},
		{"a process inside, no inode of net/dev", inside, some, true, false},
		{"lost, processes hidden from others", hidden + `umount "$POD"; `, all, false, true},
		{"lost, processes hidden", hidden + `umount "$POD"; `, some, false, false},
		{"a process inside, processes hidden", inside + hidden, some, false, false},
		{"lost, processes closed", denied + `umount "$POD"; `, some, false, false},
		{"a process inside, processes closed", inside + denied, some, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := n.pod("a")
			p.mustAdd(n.unwindChain(n.oneStep()))
			if c.noNetDev {
				p.edit(func(g *journal.Generation) { g.NetNS.NetDev = 0 })
			}
			p.statusBy(p.onNode(c.node + c.unwind))
			if e := p.entry(); (e == nil) != c.released {
				t.Errorf("the journal has %+v", e)
			}
		})
	}
}

// TestConfinedOrphan: an address that host-local keeps for nobody is released if no process is in a
// network namespace that cannot be reached.
func TestConfinedOrphan(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		node     string
		released bool
	}{
		{"process 1 alone", "", true},
		{"a process in a namespace that is mounted", enter, true},
		{"a process in a namespace that is mounted nowhere", enter + `umount "$POD"; `, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["gracePeriod"] = "1ms"
			p := n.pod("a")
			n.mkdir(filepath.Join(n.dataDir(), n.network))
			n.write(filepath.Join(n.dataDir(), n.network, n.prefix(4, 7).Addr().String()), "orphan\r\neth0")
			time.Sleep(10 * time.Millisecond)
			in := p.asking("GC", `{"cniVersion": "1.0.0", "plugins": [`+n.bridgePlugin("")+`]}`, valid())
			in.first = p.onNode(c.node + less + `"$0"`)
			if out := n.start(in); out.code != 0 {
				t.Fatalf("GC: %s\n%s", out.stdout, out.stderr)
			}
			if reserved := n.reserved(); (len(reserved) == 0) != c.released {
				t.Errorf("reserved: %v", reserved)
			}
		})
	}
}

// TestFirstThreadEnds: a process is in a pod's namespace as long as any of its threads lives.
func TestFirstThreadEnds(t *testing.T) {
	stories(t, `
	chain p0; add a; headless a; unpin a
	status-by a; entry a live; confined a; entry a live
	leaves`, confinement())
}
