package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"testing"

	"cni-unwind/journal"
)

// process starts a program that does nothing until stop is called.
func (n *machine) process(attr *syscall.SysProcAttr, name string, args ...string) (pid int, stop func()) {
	n.Helper()
	cmd := exec.Command(name, args...)
	cmd.SysProcAttr = attr
	if err := cmd.Start(); err != nil {
		n.Fatal(err)
	}
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	n.Cleanup(stop)
	return cmd.Process.Pid, stop
}

// TestSharedNetNS: a network namespace that is known by /proc/PID/ns/net is not gone with that
// process while another one is in it. To release its address then would give it to a second
// container.
func TestSharedNetNS(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	const bridge = "unwindctl0"
	n.removeLink(bridge)
	pool := filepath.Join(n.dir, "ipam")
	n.chain = fmt.Sprintf(`{"type": "bridge", "bridge": %q, "ipam": {"type": "host-local", "subnet": "10.99.1.0/24", "dataDir": %q}}`,
		bridge, pool)
	first, end := n.process(&syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}, "sleep", "300")
	netns := fmt.Sprintf("/proc/%d/ns/net", first)
	second, endOther := n.process(nil, "nsenter", "--net="+netns, "sleep", "300")
	n.awaitInside(second, netns)
	n.add(home, "shared", netns)
	n.edit("shared", func(e *journal.Entry) { e.Newest().GracePeriod = 1 })
	address := filepath.Join(pool, network, "10.99.1.2")

	end()
	for _, list := range [][]string{nil, {"--network", network, "--valid", n.listOf()}} {
		out := n.sweep(home, append(list, network+"/shared/eth0")...)
		why := "a process is in its network namespace"
		if list != nil {
			why += ", though the runtime does not list it"
		}
		if r := out.results()["shared"]; out.code != 0 || r != [2]string{"live", why} {
			t.Errorf("sweep %v: exit code %d, %q\n%s", list, out.code, r, out.stderr)
		}
		if _, err := os.Stat(address); err != nil {
			t.Fatal(err)
		}
	}

	endOther()
	eventually(t, "the attachment released", func() bool { n.sweep(home); return len(n.ids()) == 0 })
	if _, err := os.Stat(address); !os.IsNotExist(err) {
		t.Errorf("the address is not released (%v)", err)
	}
}

// awaitInside waits until a process is in a network namespace.
func (n *machine) awaitInside(pid int, netns string) {
	n.Helper()
	eventually(n, "a process in "+netns, func() bool {
		theirs, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", pid))
		want, wantErr := os.Stat(netns)
		return err == nil && wantErr == nil && os.SameFile(theirs, want)
	})
}

// TestWallClock: how old an attachment is does not go by the wall clock. A test cannot set the
// clock, so here it is the times in the journal that are a year off.
func TestWallClock(t *testing.T) {
	t.Parallel()
	for _, years := range []int{-1, 1} {
		t.Run(fmt.Sprintf("%+d years", years), func(t *testing.T) {
			t.Parallel()
			n := newMachine(t)
			n.netns("young", "old", "gone", "there")
			for _, id := range []string{"young", "old", "gone", "there"} {
				n.add(home, id, n.pin(id))
			}
			n.edit("old", func(e *journal.Entry) { e.Newest().GracePeriod = 1 })
			n.drop("gone")
			n.shiftYears(years)
			out := n.sweep(home, "--network", network, "--valid", n.listOf("there"))
			if got := fmt.Sprint(n.ids()); got != "[there young]" || out.code != 0 {
				t.Errorf("the journal has %v, want [there young]; exit code %d\n%s%s", got, out.code, out.stdout, out.stderr)
			}
		})
	}
}

// shiftYears moves the wall times of all entries: of the ADD, of the state, and of the last change.
func (n *machine) shiftYears(years int) {
	n.Helper()
	wall := regexp.MustCompile(`"wall":"\d{4}`)
	for _, id := range n.ids() {
		moved := 0
		err := inFile(n.store, "entries", network+"\x00"+id+"\x00eth0", func(entry []byte) []byte {
			return wall.ReplaceAllFunc(entry, func(b []byte) []byte {
				moved++
				year, _ := strconv.Atoi(string(b[len(b)-4:]))
				return fmt.Appendf(nil, `"wall":"%d`, year+years)
			})
		})
		if err != nil || moved != 3 {
			n.Fatalf("%d times moved (%v)", moved, err)
		}
	}
}
