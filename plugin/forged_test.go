package plugin

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestForgedNetNS: an interface that a user without rights makes in a network namespace of its own
// neither keeps a dead pod nor parks a late DEL nor holds an address.
func TestForgedNetNS(t *testing.T) {
	stories(t, `
	conf gracePeriod 1ms; chain static | firewall
	either a dead pod: add a; drop a; forge; sweep
	or a late DEL: add a; drop a; forge; del a
	or an address without an owner: chain bridge; reserve $ip7 orphan eth0; pause 10ms; forge; gc list`, acts{
		"forge": func(s *story, _ []string) { s.forge(s.prefix(4, 7).Addr().String()) },
	})
}

// TestUserNetNSOfPod: the network namespace of a pod that was added past the journal belongs to a
// user namespace, as with hostUsers: false. It speaks for the pod, whose rules a dead pod with the
// same address must not take.
func TestUserNetNSOfPod(t *testing.T) {
	stories(t, `
	chain static | firewall
	add old; drop old
	# containerd, pkg/netns/netns_linux.go: NewNetNSFromPID; CRI-O, pinns/src/pinns.c.
	either mounted, without a process: user next mounted
	# nerdctl, pkg/ocihook/ocihook.go: getNetNSPath.
	or of a process, not mounted: user next
	past add next; remember next
	sweeps unchanged next; entry old
	past del next; sweep`, acts{"user": func(s *story, w []string) {
		p, process := s.who(w[0]), s.userNetNS(nil, "true")
		if p.NetNS = netnsOf(process); len(w) > 1 {
			p.NetNS = s.emptyFile("user")
			s.mount(netnsOf(process), p.NetNS, "", unix.MS_BIND, "")
			_ = process.Kill()
		}
	}})
}

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
