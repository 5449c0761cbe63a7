package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"cni-unwind/cmd/unwindctl/internal/agent"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// newAgentMachine returns a node with a runtime's directories, a plugin to install, and a
// provider's conflist.
func newAgentMachine(t *testing.T) *machine {
	t.Helper()
	n := newMachine(t)
	n.Dirs = nodetest.NewDirs(t, n.dir)
	return n
}

// await waits until unwind's conflist matches a description: see nodetest.Dirs.Installed.
func (n *machine) await(want string) {
	n.Helper()
	eventually(n, want, func() bool { return n.Installed() == want })
}

// running is a started program. Its stderr is the log.
type running struct {
	*machine
	cmd   *exec.Cmd
	ended chan struct{}

	mu     sync.Mutex
	stderr bytes.Buffer
}

func (r *running) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stderr.Write(p)
}

func (r *running) log() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stderr.String()
}

// says returns how often a text occurs in the log.
func (r *running) says(text string) int { return strings.Count(r.log(), text) }

// address waits until an agent logs the address of its HTTP server, and returns the address.
func (r *running) address() (at string) {
	r.Helper()
	eventually(r, "it serves", func() bool {
		_, rest, _ := strings.Cut(r.log(), "address=")
		at, _, _ = strings.Cut(rest, "\n")
		return at != ""
	})
	return at
}

// get returns an agent's HTTP response: one line with the status, and then the body.
func (r *running) get(path string) string {
	r.Helper()
	answer, err := http.Get("http://" + r.address() + path)
	if err != nil {
		r.Error(err)
		return ""
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		r.Error(err)
	}
	return answer.Status + "\n" + string(body)
}

// start starts a program that is killed when the test ends.
func (n *machine) start(cmd *exec.Cmd) *running {
	n.Helper()
	r := &running{machine: n, cmd: cmd, ended: make(chan struct{})}
	cmd.Stderr = r
	check(n, cmd.Start())
	go func() {
		_ = cmd.Wait()
		close(r.ended)
	}()
	n.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-r.ended
		if strings.Contains(r.log(), secret) {
			n.Error("a secret is in the log")
		}
		if n.Failed() {
			n.Logf("%v:\n%s", cmd.Args, r.log())
		}
	})
	return r
}

// signal sends a signal, and returns the exit code if the program ends in time, else -2.
func (r *running) signal(sig os.Signal, within time.Duration) (code int) {
	r.Helper()
	check(r, r.cmd.Process.Signal(sig))
	return r.wait(within)
}

// wait returns the exit code if the program ends in time, else -2.
func (r *running) wait(within time.Duration) (code int) {
	select {
	case <-r.ended:
		return r.cmd.ProcessState.ExitCode()
	case <-time.After(within):
		return -2
	}
}

// agent starts an agent with an interval of one second and without an HTTP server. args may
// override both.
func (n *machine) agent(where place, args ...string) *running {
	n.Helper()
	args = append([]string{"run", "--conf-dir", n.ConfDir(), "--cni-bin-dir", n.BinDir(), "--state-dir", n.state, "--cri", "none",
		"--binary", filepath.Join(n.dir, "unwind"), "--interval", "1s", "--listen", ""}, args...)
	cmd := where.command(n, filepath.Join(n.bin, "unwindctl"), args...)
	cmd.Dir = n.dir
	return n.start(cmd)
}

// addDead adds an attachment, and then removes its network namespace.
func (n *machine) addDead(id string) {
	n.Helper()
	n.netns(id)
	n.add(home, id, n.pin(id))
	n.drop(id)
}

func (n *machine) awaitReleased(id string) {
	n.Helper()
	eventually(n, id+" released", func() bool { return !strings.Contains(fmt.Sprint(n.ids()), id) })
}

func (o outcome) says(text string) bool { return strings.Contains(o.stdout+o.stderr, text) }

// TestRunFollows: the agent updates unwind's conflist when the provider's file changes, and the
// conflist is complete at every moment. testdata/agent covers files that are missing, half written,
// or without a chain.
func TestRunFollows(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	next := nodetest.Conflist(network, "portMappings", "custom")
	const want = `podnet of 10-bridge.conflist with {"custom":true}`
	for name, change := range map[string]func(n *machine, path string){
		"renamed into place": func(n *machine, path string) { n.Rename(path, next) },
		"written in place":   func(n *machine, path string) { n.Write(path, next) },
		"among changes that never end": func(n *machine, path string) {
			n.Rename(path, next)
			eventually(n, "meanwhile", func() bool {
				n.Rename(n.InConf("other"), "")
				return n.Installed() == want
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newAgentMachine(t)
			r := n.agent(home, "--interval", "1h")
			n.await(nodetest.First)
			stop := n.AlwaysThere()
			time.Sleep(200 * time.Millisecond) // the agent reacts to its own changes meanwhile
			change(n, n.InConf("10-bridge.conflist"))
			n.await(want)
			stop()
			eventually(t, "that it is over", func() bool { return r.says(`msg=recovered`) == min(r.says("level=WARN"), 1) })
		})
	}
}

// TestRunElsewhere: an agent in a container cannot judge attachments without --host. It logs this
// once, and changes nothing.
func TestRunElsewhere(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	n := newAgentMachine(t)
	n.netns("there")
	n.addDead("gone")
	n.add(home, "there", n.pin("there"))
	before := n.file()
	flags := []string{"--mount"}
	there := n.newPlace(flags, flags, "umount -l "+filepath.Join(n.dir, "netns")+"/*")
	r := n.agent(there, "--no-install")
	eventually(t, "nothing can be told", func() bool { return r.says("cannot tell from its namespaces whether attachments are live") > 0 })
	time.Sleep(2500 * time.Millisecond)
	if r.says("cannot tell from its namespaces whether attachments are live") != 1 || !bytes.Equal(n.file(), before) || n.calls("DEL") > 0 {
		t.Error("it is not said once, or something was done")
	}
	if n.Installed() != "" {
		t.Error("it has installed")
	}
}

// TestAgentFlat: over many reconciles, sweeps and changes of the provider's file, the agent
// accumulates no goroutines, descriptors or memory.
func TestAgentFlat(t *testing.T) { // not parallel: it counts this process's goroutines
	sandbox.Concurrent(t)
	n := newAgentMachine(t)
	n.addDead("pending")
	n.plan(map[string]string{"DEL": "fail"})
	o := agent.Options{
		Options: install.Options{
			Target: install.Target{ConfDir: n.ConfDir(), BinDir: n.BinDir()},
			Binary: filepath.Join(n.dir, "unwind"), StateDir: n.state,
		},
		CRI: "none", Listen: "127.0.0.1:0", Interval: 5 * time.Millisecond,
	}
	_, err := facts.InterfaceAt("/proc/self/ns/net", "") // starts the thread that enters namespaces
	check(t, err)
	before := runtime.NumGoroutine()
	fds := openDescriptors(t)
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() {
		if err := agent.Run(ctx, io.Discard, o); err != nil {
			t.Error(err)
		}
	})
	change := func(changes int) (goroutines, descriptors int, heap uint64) {
		for i := range changes {
			n.Rename(n.InConf("10-bridge.conflist"), nodetest.Conflist(network, fmt.Sprintf("c%d", i%2)))
			time.Sleep(10 * time.Millisecond)
		}
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		goroutines, descriptors = runtime.NumGoroutine(), openDescriptors(t)
		for range 20 { // take the minimum, because a running sweep needs more
			time.Sleep(3 * time.Millisecond)
			goroutines, descriptors = min(goroutines, runtime.NumGoroutine()), min(descriptors, openDescriptors(t))
		}
		return goroutines, descriptors, m.HeapAlloc
	}
	g1, d1, h1 := change(20)
	g2, d2, h2 := change(100)
	if g2 > g1+8 || d2 > d1+8 || h2 > h1+4<<20 {
		t.Errorf("goroutines %d → %d, descriptors %d → %d, heap %d → %d", g1, g2, d1, d2, h1, h2)
	}
	eventually(t, "the DELs before the first pause", func() bool { return n.calls("DEL") >= 2 })
	n.plan(nil)
	n.addDead("last")
	n.awaitReleased("last")
	cancel()
	ended.Wait()
	eventually(t, "as many goroutines and descriptors as before", func() bool {
		return runtime.NumGoroutine() <= before && openDescriptors(t) <= fds
	})
}

func openDescriptors(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	check(t, err)
	return len(files)
}
