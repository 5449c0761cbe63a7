package delegate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"
)

// early is the type of this test program as a plugin.
const early = "early"

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == early {
		os.Exit(pluginMain())
	}
	os.Exit(m.Run())
}

// pluginMain is a plugin that reads all of its configuration first, and then writes it to the file
// "fed" beside itself, and prints its process ID. It ends before it reads if there is a file "dies". If
// there is a file "locks", it makes the file "lock" before it reads, and removes it at its end.
func pluginMain() int {
	dir := filepath.Dir(os.Args[0])
	if _, err := os.Stat(filepath.Join(dir, "locks")); err == nil {
		lock := filepath.Join(dir, "lock")
		if err := os.WriteFile(lock, nil, 0o600); err != nil {
			return 4
		}
		defer os.Remove(lock)
	}
	if _, err := os.Stat(filepath.Join(dir, "dies")); err == nil {
		return 3
	}
	stdin, err := io.ReadAll(os.Stdin)
	if err != nil || !json.Valid(stdin) {
		return 1
	}
	if err := os.WriteFile(filepath.Join(dir, "fed"), stdin, 0o600); err != nil {
		return 2
	}
	fmt.Print(os.Getpid())
	return 0
}

// earlyCall returns a call of this test program, in a directory of its own.
func earlyCall(t *testing.T) *Call {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := &Call{Command: "ADD", Plugin: early, Path: t.TempDir(), ContainerID: "a", Netns: "/none", Ifname: "eth0"}
	if err := os.Symlink(self, c.file(early)); err != nil {
		t.Fatal(err)
	}
	return c
}

// isThere says whether a process is there, be it as a zombie.
// isThere says whether a process runs, or has ended and could be reaped.
func isThere(pid int) bool {
	Reap()
	return !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
}

// TestReaped: a process that has ended is not reaped at once, but soon, also in a program that goes on.
func TestReaped(t *testing.T) {
	t.Parallel()
	c := script(t, `echo $$`)
	stdout, f := (&Processes{}).Run(context.Background(), c, nil, io.Discard)
	if f != nil {
		t.Fatal(f)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(stdout)))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is reaped", func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) })
}

// with returns the call with a configuration.
func (c *Call) with(config string) *Call {
	fed := *c
	fed.Stdin = []byte(config)
	return &fed
}

// TestStartedEarly: a process that was started before its turn gets its configuration in its turn,
// and is the one that runs. What it was started for, and does not come, leaves nothing.
func TestStartedEarly(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		then  func(t *testing.T, r *Processes, c *Call) (again *Call) // after Start; nil: nothing runs
		early bool                                                    // the process that was started early runs
	}{
		{"its turn comes", func(_ *testing.T, _ *Processes, c *Call) *Call { return c }, true},
		{"its turn comes too late", func(t *testing.T, r *Processes, c *Call) *Call {
			eventually(t, "it ends", func() bool { return !isThere(r.early.pid) })
			return c
		}, false},
		{"its turn does not come", func(_ *testing.T, r *Processes, _ *Call) *Call { r.Drop(); return nil }, false},
		{"another call comes", func(_ *testing.T, _ *Processes, c *Call) *Call {
			other := *c
			other.Netns = "/other"
			return &other
		}, false},
		{"another lock is held", func(t *testing.T, _ *Processes, c *Call) *Call {
			other := *c
			f, err := os.Open(c.Path)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = f.Close() })
			other.Lock = f
			return &other
		}, false},
		{"it dies early", func(t *testing.T, r *Processes, c *Call) *Call {
			_ = syscall.Kill(r.early.pid, syscall.SIGKILL)
			eventually(t, "it ends", func() bool { return !r.early.lives() })
			return c
		}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c, r := earlyCall(t), &Processes{}
			r.Start(c)
			if r.early == nil {
				t.Fatal("nothing was started")
			}
			pid := r.early.pid
			time.Sleep(50 * time.Millisecond)
			if _, err := os.Stat(c.file("fed")); err == nil {
				t.Fatal("it did something before its turn")
			}
			again := tt.then(t, r, c)
			if again == nil {
				if isThere(pid) {
					t.Error("its process is still there")
				}
				return
			}
			stdout, f := r.Run(context.Background(), again.with(`{"x": 1}`), nil, io.Discard)
			if f != nil {
				t.Fatal(f)
			}
			if got := string(stdout) == fmt.Sprint(pid); got != tt.early {
				t.Errorf("process %s ran, %d was started early", stdout, pid)
			}
			if fed, err := os.ReadFile(c.file("fed")); string(fed) != `{"x": 1}` || err != nil {
				t.Errorf("it was fed %q (%v)", fed, err)
			}
			if isThere(pid) {
				t.Error("the process that was started early is still there")
			}
		})
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not so after a minute: " + what)
		}
	}
}

// TestDiesEarly: a delegate that ends before its turn is started again in its turn, and what it says
// then counts.
func TestDiesEarly(t *testing.T) {
	t.Parallel()
	c, r := earlyCall(t), &Processes{}
	if err := os.WriteFile(c.file("dies"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.Start(c)
	eventually(t, "it ends", func() bool { return !r.early.lives() })
	if _, f := r.Run(context.Background(), c.with("{}"), nil, io.Discard); f == nil || !strings.Contains(f.Msg, "exit status 3") {
		t.Errorf("%v, want its exit status", f)
	}
	r.Start(c)
	eventually(t, "it ends", func() bool { return !r.early.lives() })
	if err := os.Remove(c.file("dies")); err != nil {
		t.Fatal(err)
	}
	if _, f := r.Run(context.Background(), c.with("{}"), nil, io.Discard); f != nil {
		t.Error(f)
	}
}

// lives says whether the process has not ended, with all of its threads.
func (p *process) lives() bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(p.pidfd.Fd()), Events: unix.POLLIN}}, 0)
	return n == 0 && err == nil
}

// TestNextIsStarted: the next delegate's process is there while one runs, and has done nothing.
func TestNextIsStarted(t *testing.T) {
	t.Parallel()
	next, r := earlyCall(t), &Processes{}
	c := script(t, `sleep 0.3; echo '{}'`)
	if _, f := r.Run(context.Background(), c, next, io.Discard); f != nil {
		t.Fatal(f)
	}
	if r.early == nil || !isThere(r.early.pid) {
		t.Fatal("it was not started")
	}
	if _, err := os.Stat(next.file("fed")); err == nil {
		t.Error("it did something before its turn")
	}
	pid := r.early.pid
	r.Drop()
	if isThere(pid) {
		t.Error("it is still there")
	}
}

// TestEarlyBlocksRunning: a process that holds, while it waits for its turn, what the running delegate
// waits for is ended, and gives it back. It runs in its turn, and none is started early after it.
func TestEarlyBlocksRunning(t *testing.T) {
	t.Parallel()
	next, r := earlyCall(t), &Processes{}
	if err := os.WriteFile(next.file("locks"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	lock := next.file("lock")
	running := script(t, fmt.Sprintf(`until [ -e %s ]; do sleep 0.02; done; while [ -e %s ]; do sleep 0.02; done`, lock, lock))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, f := r.Run(ctx, running, next, io.Discard); f != nil {
		t.Fatal(f)
	}
	if _, f := r.Run(ctx, next.with("{}"), earlyCall(t), io.Discard); f != nil {
		t.Error(f)
	}
	if r.early != nil {
		t.Error("another one was started early")
		r.Drop()
	}
}

// TestScriptIsNotStartedEarly: a script may do something before it reads, or ignore what it reads.
func TestScriptIsNotStartedEarly(t *testing.T) {
	t.Parallel()
	r := &Processes{}
	r.Start(script(t, `echo >ran`))
	if r.early != nil {
		t.Error("it was started")
		r.Drop()
	}
}

// TestNotFed: a delegate whose unwind dies before it gets its configuration reads an empty one. Each
// reference plugin then fails to decode it, and does nothing.
func TestNotFed(t *testing.T) {
	t.Parallel()
	tools, err := filepath.Abs("../../../.tools/cni")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(tools, "bridge")); err != nil {
		t.Skip("make tools builds the reference plugins")
	}
	for _, plugin := range []string{
		"bandwidth", "bridge", "firewall", "host-device", "loopback", "macvlan", "portmap", "ptp", "sbr", "tuning",
	} {
		for _, command := range []string{"ADD", "DEL"} {
			t.Run(plugin+" "+command, func(t *testing.T) {
				t.Parallel()
				c := &Call{Command: command, Plugin: plugin, Path: tools, ContainerID: "a", Netns: "/none", Ifname: "eth0"}
				p, err := startProcess(filepath.Join(tools, plugin), c.environ(), nil)
				if err != nil {
					t.Fatal(err)
				}
				_ = p.stdin.Close() // as the kernel does when unwind dies
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				status := p.finish(ctx)
				var said types.Error
				if err := json.Unmarshal(p.stdout.kept.Bytes(), &said); err != nil || said.Code != types.ErrDecodingFailure || status.ExitStatus() != 1 {
					t.Errorf("%s, %q; want an error that it cannot decode its configuration", ending(status), p.stdout.kept.Bytes())
				}
			})
		}
	}
}

// TestLargeInAndOut: a configuration and an answer that no pipe holds, at once, cannot block each
// other.
func TestLargeInAndOut(t *testing.T) {
	t.Parallel()
	c := script(t, `head -c 1000000 /dev/zero; cat`)
	c.Stdin = bytes.Repeat([]byte("x"), 1<<20)
	stdout, f := new(Processes).Run(context.Background(), c, nil, io.Discard)
	if f != nil || len(stdout) != 1000000+1<<20 {
		t.Errorf("%d bytes, %v", len(stdout), f)
	}
}

// TestDeadlineWhileItIsFed: a delegate that does not read a large configuration is killed in time,
// also if a child in a session of its own holds the pipe.
func TestDeadlineWhileItIsFed(t *testing.T) {
	t.Parallel()
	for _, text := range []string{`sleep 60`, `setsid sleep 60 & sleep 60`} {
		t.Run(text, func(t *testing.T) { t.Parallel(); deadlineWhileItIsFed(t, text) })
	}
}

func deadlineWhileItIsFed(t *testing.T, text string) {
	t.Helper()
	c := script(t, text)
	c.Stdin = bytes.Repeat([]byte("x"), 1<<20)
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	done := make(chan *Failure, 1)
	go func() {
		_, f := new(Processes).Run(ctx, c, nil, io.Discard)
		done <- f
	}()
	select {
	case f := <-done:
		if f == nil || !f.Killed {
			t.Errorf("%+v, want killed", f)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("it still runs")
	}
}
