package plugin

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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

// commands are a shell's: enter starts a process in the pod's namespace and waits until it is there;
// confined is as above.
var commands = map[string]string{
	"enter": `nsenter --net="$POD" sleep 60 & while
	[ "$(stat -L -c %i /proc/$!/net/dev)" = "$(stat -L -c %i /proc/1/net/dev)" ]; do :; done; `,
	"umount":   `umount "$POD"; `,
	"hide":     `mount -t proc -o hidepid=2,gid=12345 proc /proc; `,
	"confined": less,
}

// onNode is a shell's command that runs a script as process 1 of a PID namespace, instead of
// unwind.
func (p *pod) onNode(script string) string {
	return `exec unshare --pid --fork --kill-child --mount-proc sh -c '` +
		strings.ReplaceAll(script, "$POD", p.NetNS) + `; exit $?' "$0"`
}

// confinement are statements of these tests.
func confinement() acts {
	// by asks unwind, which is $0, by a shell's command in a mount namespace of its own.
	by := func(s *story, verb string, p *pod, command string) {
		s.outer = "1.1.0" // which has them all
		changes := map[string]any{}
		if verb == "GC" {
			changes = valid(p)
		}
		in := p.input(verb, s.entryOf(`{"cniVersion": "1.0.0", "plugins": [`+strings.Join(s.plugins(s.node), ", ")+`]}`, changes))
		in.first = command
		out := s.node.start(in)
		s.want(out.code == 0, "%s", out.stdout)
		s.Logf("%s: %s", verb, out.stderr)
	}
	return acts{
		"confined":   func(s *story, w []string) { by(s, "STATUS", s.who(w[0]), confined) },
		"unconfined": func(s *story, w []string) { by(s, "STATUS", s.who(w[0]), ":") },
		// node VERB POD WORDS: unwind runs where the shell's commands of these words were run before
		"node": func(s *story, w []string) {
			script := ""
			for _, word := range w[2:] {
				script += commands[word]
			}
			by(s, w[0], s.who(w[1]), s.who(w[1]).onNode(script+`"$0"`))
		},
		// headless POD: a process is in it whose first thread has ended
		"headless": func(s *story, w []string) {
			self, err := os.Executable()
			s.must(err)
			cmd := exec.Command("nsenter", "--net="+s.who(w[0]).NetNS, self)
			cmd.Env = append(os.Environ(), headlessEnv+"=1")
			s.spawn(cmd)
			eventually(s, "the first thread gone", func() bool { return ended(cmd.Process) })
		},
	}
}

// TestConfinedNode runs a node in a PID and a mount namespace, with a process 1 and perhaps one in
// the pod.
func TestConfinedNode(t *testing.T) {
	stories(t, `
	chain p0; add a
	either lost: node STATUS a umount
	or lost, processes hidden from others: node STATUS a hide umount
	or unknown, lost: node STATUS a umount confined
	or unknown, a process inside: node STATUS a enter umount confined
	or unknown, lost, processes hidden: node STATUS a hide umount confined
	or unknown, a process inside, processes hidden: node STATUS a enter umount hide confined
	if unknown: entry a; leaves`, confinement())
}

// TestConfinedOrphan: an address that host-local keeps for nobody is released if the network
// namespaces of all processes can be inspected.
func TestConfinedOrphan(t *testing.T) {
	stories(t, `
	conf gracePeriod 1ms; chain bridge; reserve $ip7 orphan eth0; pause 10ms
	either all can be inspected: node GC a enter umount; reserved 0
	or not: node GC a enter umount confined; reserved 1; leaves`, confinement())
}

// TestFirstThreadEnds: a process is in a pod's namespace as long as any of its threads lives.
func TestFirstThreadEnds(t *testing.T) {
	stories(t, `
	chain p0; add a; headless a; unpin a
	unconfined a; entry a live; confined a; entry a live
	leaves`, confinement())
}
