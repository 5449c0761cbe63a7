package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/testdata/nodetest"
	"cni-unwind/testdata/sandbox"
)

// TestOffWithoutRoom: off takes unwind out of use on a full disk and on one that cannot be written
// to, with an agent and without. It says what it could not record.
func TestOffWithoutRoom(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		spoil func(n *machine)
		code  int
		want  string
		by    string // on record; "" if nothing is
	}{
		{"full", func(n *machine) { n.fill("data", 1<<20) }, 0,
			"by somebody: the disk is too full to record ann; unwindctl on switches it on again", "somebody"},
		{"full of files", func(n *machine) { n.fill("file", 0) }, 5, "error: pods start without unwind, but an agent", ""},
		{"read-only", func(n *machine) { n.readOnly(n.state) }, 5, "error: pods start without unwind, but an agent", ""},
		{"well", func(*machine) {}, 0, ", switched off by ann; unwindctl on switches it on again", "ann"},
	} {
		for _, agent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/agent %t", c.name, agent), func(t *testing.T) {
				t.Parallel()
				n := newAgentMachine(t)
				n.small(n.state)
				n.installedByAgent(agent)
				c.spoil(n)
				out := n.run(n.unwindctl("off", "--conf-dir", n.ConfDir(), "--cni-bin-dir", n.BinDir(), "--by", "ann"))
				want := c.want
				if agent && c.by == "somebody" { // the agent may be the first to record it
					want = "switched off by somebody"
				}
				if out.code != c.code || !out.says(want) {
					t.Errorf("exit code %d, want %d and %q\n%s%s", out.code, c.code, want, out.stdout, out.stderr)
				}
				if !out.says("renamed:   " + n.Own()) {
					t.Errorf("off does not say that unwind's file is gone\n%s", out.stdout)
				}
				by := ""
				if off := install.ReadOff(n.state); off != nil {
					by = off.By
				}
				if by != c.by {
					t.Errorf("switched off by %q, want %q", by, c.by)
				}
				if agent {
					time.Sleep(2500 * time.Millisecond) // it looks each second, and at each change
				}
				if got := n.Installed(); got != "" {
					t.Errorf("unwind is in use: %s", got)
				}
			})
		}
	}
}

// TestOffFails: if unwind's file cannot be removed, unwind is not said to be off.
func TestOffFails(t *testing.T) {
	t.Parallel()
	n := newAgentMachine(t)
	n.installedByAgent(false)
	n.readOnly(n.ConfDir())
	out := n.run(n.unwindctl("off", "--conf-dir", n.ConfDir(), "--cni-bin-dir", n.BinDir()))
	if out.code != 1 || !strings.Contains(out.stderr, "read-only file system") || out.stdout != "" ||
		!out.says("hint: unwind is still in use; run this again once "+n.ConfDir()+" is writable") {
		t.Errorf("exit code %d\n%s%s", out.code, out.stdout, out.stderr)
	}
	if off := install.ReadOff(n.state); off != nil {
		t.Error(off)
	}
}

// installedByAgent installs unwind, with an agent that stays or not.
func (n *machine) installedByAgent(stays bool) {
	n.Helper()
	r := n.agent(home)
	n.await(nodetest.First)
	if !stays {
		r.signal(unix.SIGTERM, sandbox.Patience)
	}
}

// small puts a file system with little room over a directory.
func (n *machine) small(dir string) {
	n.Helper()
	check(n, errors.Join(os.MkdirAll(dir, 0o700), unix.Mount("small", dir, "tmpfs", 0, "size=64k,nr_inodes=64,mode=0700")))
	n.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}

// fill makes files of a size in the state directory until there is no room.
func (n *machine) fill(name string, size int) {
	n.Helper()
	for i := range 1000 {
		if err := os.WriteFile(filepath.Join(n.state, fmt.Sprint(name, i)), make([]byte, size), 0o600); err != nil {
			return
		}
	}
	n.Fatal("there is still room")
}

// readOnly makes a directory one that cannot be written to. What is open there stays so.
func (n *machine) readOnly(dir string) {
	n.Helper()
	const flags = unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY
	check(n, errors.Join(unix.Mount(dir, dir, "", unix.MS_BIND, ""), unix.Mount("", dir, "", flags, "")))
	n.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
}
