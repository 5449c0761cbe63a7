package plugin

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/undo"
)

// userNetNS starts a process in a user namespace and a network namespace of its own, and returns it
// once a shell's commands in it have passed.
func (n *node) userNetNS(as *syscall.Credential, commands string) *os.Process {
	n.Helper()
	cmd := exec.Command("unshare", "--user", "--map-root-user", "--net", "sh", "-ec", commands+"\necho\nexec sleep 600")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	cmd.Dir, cmd.Stderr = "/", n.stderr()
	out, err := cmd.StdoutPipe()
	if err != nil {
		n.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		n.Fatal(err)
	}
	n.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if _, err := bufio.NewReader(out).ReadByte(); err != nil && err != io.EOF {
		n.Fatal(err)
	} else if err == io.EOF {
		n.Fatal("a user namespace cannot be made")
	}
	return cmd.Process
}

// forge has a user without rights make an interface like a pod's, with an address of the pod.
func (n *node) forge(address string) {
	n.Helper()
	n.userNetNS(&syscall.Credential{Uid: 65534, Gid: 65534}, `ip link add eth0 type veth peer name peer0
		ip address add `+address+`/24 dev eth0`)
}

// TestForgedNetNS: an interface that a user without rights makes in a network namespace of its own
// neither keeps a dead pod nor parks a late DEL nor holds an address.
func TestForgedNetNS(t *testing.T) {
	t.Parallel()
	t.Run("a dead pod", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		p := n.pod("a")
		p.mustAdd(n.unwind(n.staticChain()...))
		p.dropNetNS()
		n.forge(n.prefix(4, 7).Addr().String())
		n.sweep(undo.DefaultBudgets)
		n.nothingLeft()
	})
	t.Run("a late DEL", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		list := n.unwind(n.staticChain()...)
		p := n.pod("a")
		p.mustAdd(list)
		p.dropNetNS()
		n.forge(n.prefix(4, 7).Addr().String())
		p.mustDel(list)
		n.nothingLeft()
	})
	t.Run("an address without an owner", func(t *testing.T) {
		t.Parallel()
		n := newNode(t)
		n.conf["gracePeriod"] = "1ms"
		address := n.prefix(4, 7).Addr().String()
		n.mkdir(filepath.Join(n.dataDir(), n.network))
		n.write(filepath.Join(n.dataDir(), n.network, address), "orphan\r\neth0")
		time.Sleep(10 * time.Millisecond)
		n.forge(address)
		if out := n.ask("GC", "1.0.0", valid(), n.bridgePlugin("")); out.code != 0 {
			t.Fatalf("GC: %s", out.stdout)
		}
		n.nothingLeft()
	})
}

// TestUserNetNSOfPod: the network namespace of a pod that was added past the journal belongs to a
// user namespace, as with hostUsers: false. It speaks for the pod, whose rules a dead pod with the
// same address must not take.
func TestUserNetNSOfPod(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		// netns makes the pod's network namespace, and returns its path.
		netns func(n *node) string
	}{
		// containerd, pkg/netns/netns_linux.go: NewNetNSFromPID; CRI-O, pinns/src/pinns.c.
		{"mounted, without a process", func(n *node) string {
			process := n.userNetNS(nil, "true")
			path := filepath.Join(n.dir, "netns", "pod")
			n.mkdir(filepath.Dir(path))
			n.write(path, "")
			n.mount(netnsOf(process), path, "", unix.MS_BIND, "")
			_ = process.Kill()
			return path
		}},
		// nerdctl, pkg/ocihook/ocihook.go: getNetNSPath.
		{"of a process, not mounted", func(n *node) string { return netnsOf(n.userNetNS(nil, "true")) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			chain := n.staticChain()
			old := n.pod("old")
			old.mustAdd(n.unwind(chain...))
			old.dropNetNS()
			next := n.pod("next")
			next.NetNS = c.netns(n)
			marks := next.marks(next.mustAdd(n.plain(chain...)))
			want := next.whole(marks)
			for name, sweep := range sweeps {
				sweep(n, chain)
				if got := next.whole(marks); got != want || old.entry() == nil {
					t.Fatalf("after %s:\n%s\nwant\n%s", name, got, want)
				}
			}
			next.mustDel(n.plain(chain...))
			n.sweep(undo.DefaultBudgets)
			n.nothingLeft()
		})
	}
}
