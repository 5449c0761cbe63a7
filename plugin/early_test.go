package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"cni-unwind/plugin/netconf"
)

// TestLocksBeforeItReads: plugins with the names of reference ones take a lock of the node before they
// read their configuration. Every ADD and DEL passes, as with the plain chain.
func TestLocksBeforeItReads(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"plain", "unwind"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			var chain []string
			for _, name := range []string{"bridge", "firewall", "portmap"} {
				if err := os.Symlink(filepath.Join(toolsDir(t), "test", "faulty"), filepath.Join(n.path[0], name)); err != nil {
					t.Fatal(err)
				}
				chain = append(chain, fmt.Sprintf(`{"type": %q, "dir": %q, "instance": %q}`, name, n.faultyDir(), name))
			}
			lock := filepath.Join(n.dir, "lock")
			n.env = append(n.env, "CNI_FAULTY_LOCK="+lock)
			list := n.plain(chain...)
			if kind == "unwind" {
				list = n.unwind(chain...)
			}
			var pods []*pod
			for i := range 3 {
				pods = append(pods, n.pod(fmt.Sprint("p", i)))
			}
			for range 2 {
				n.write(lock, "") // by another one, until all processes wait for it
				time.AfterFunc(300*time.Millisecond, func() { _ = os.Remove(lock) })
				var running sync.WaitGroup
				for _, p := range pods {
					running.Go(func() {
						if _, err := p.add(list); err != nil {
							t.Errorf("ADD %s: %v", p.ContainerID, err)
						}
						if err := p.del(list); err != nil {
							t.Errorf("DEL %s: %v", p.ContainerID, err)
						}
					})
				}
				running.Wait()
			}
			if left := n.taken(); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			if _, err := os.Stat(lock); err == nil {
				t.Error("a process that was ended has left its lock")
			}
		})
	}
}

// TestEarlyNeedsRoom: where a cgroup allows few more tasks, no process is started before its turn.
func TestEarlyNeedsRoom(t *testing.T) {
	stories(t, `
	either few: cgroup 500
	or enough: cgroup 5000
	chain p0 | p1
	if enough: kill 'started early' 1 add a; was-killed; kill 'started early' 1 del a; was-killed; leaves
	if few: kill 'started early' 1 add a; was-spared; kill 'started early' 1 del a; was-spared`, acts{
		"cgroup": func(s *story, w []string) {
			tasks, err := strconv.Atoi(w[0])
			s.must(err)
			s.inCgroup(tasks)
		},
		"was-spared": func(s *story, _ []string) { s.want(!s.killed, "it was killed") },
	})
}

// inCgroup runs unwind in a cgroup that allows so many tasks.
func (n *node) inCgroup(tasks int) {
	n.Helper()
	root := "/sys/fs/cgroup/pids" // version 1
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	cgroup, err := os.MkdirTemp(root, "unwind-test-")
	if err != nil {
		n.Skip(err)
	}
	n.Cleanup(func() { eventually(n, "the cgroup is empty", func() bool { return os.Remove(cgroup) == nil }) })
	if err := os.WriteFile(filepath.Join(cgroup, "pids.max"), fmt.Append(nil, tasks), 0); err != nil {
		n.Skip(err)
	}
	outer, inner := filepath.Join(n.path[0], netconf.Name), filepath.Join(n.dir, "inner", netconf.Name)
	n.mkdir(filepath.Dir(inner))
	if err := os.Rename(outer, inner); err != nil {
		n.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\necho $$ >%s/cgroup.procs && exec %s\n", cgroup, inner)
	if err := os.WriteFile(outer, []byte(script), 0o755); err != nil {
		n.Fatal(err)
	}
}
