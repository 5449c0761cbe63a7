package delegate

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/plugintest/sandbox"
)

// large is a number of bytes that no pipe can hold.
const large = 4 << 20

// TestPipes: Run and the delegate never block each other forever, whatever the delegate reads and
// prints, and in whatever order.
func TestPipes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, text            string
		stdin, stdout, stderr int
	}{
		{"no stdin", `cat`, 0, 0, 0},
		{"a large stdin", `cat`, large, large, 0},
		{"a large stdin, read late", `sleep 0.3; cat`, large, large, 0},
		{"a large stdin, read by halves", `head -c 1000000; sleep 0.3; cat >&2`, large, 1000000, maxStderr},
		{"a large stdin that is not read", `sleep 0.3; echo`, large, 1, 0},
		{"it ends before its stdin is read", `exit 0`, large, 0, 0},
		{"it closes its stdin", `exec <&-; sleep 0.3; echo`, large, 1, 0},
		{"it closes its output", `exec >&- 2>&-; cat >all; sleep 0.3; [ $(stat -c %s all) = 4194304 ]`, large, 0, 0},
		{"both outputs at once", `head -c 1000000 /dev/zero & head -c 1000000 /dev/zero >&2; wait`, 2, 1000000, maxStderr},
		{"one output after the other", `head -c 1000000 /dev/zero >&2; head -c 1000000 /dev/zero`, 2, 1000000, maxStderr},
		{"all three at once", `head -c 1000000 /dev/zero >&2 & cat; wait`, large, large, maxStderr},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d := script(t, c.text)
			d.Stdin = bytes.Repeat([]byte("x"), c.stdin)
			ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
			defer cancel()
			var stderr bytes.Buffer
			stdout, f := new(Processes).Run(ctx, d, &stderr)
			if f != nil || len(stdout) != c.stdout || stderr.Len() != c.stderr {
				t.Errorf("%v, %d and %d bytes, want %d and %d", f, len(stdout), stderr.Len(), c.stdout, c.stderr)
			}
		})
	}
}

// TestDaemonPrintsOn: a delegate leaves a daemon that never stops printing. Run returns while the
// daemon is running.
func TestDaemonPrintsOn(t *testing.T) {
	t.Parallel()
	d := script(t, `(while :; do echo more; sleep 0.01; done) & echo result; sleep 0.1`)
	stdout, f := new(Processes).Run(context.Background(), d, io.Discard)
	if f != nil || !bytes.Contains(stdout, []byte("result\n")) {
		t.Errorf("%q, %v", stdout, f)
	}
}

// TestKilledWhilePipesAreFull: Run kills a delegate when the context ends, even while the
// delegate's pipes are full or a child keeps them open.
func TestKilledWhilePipesAreFull(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"it never stops printing":           `yes`,
		"it prints on both":                 `yes >&2 & yes`,
		"its child reads nothing":           `(sleep 600) & yes`,
		"it is stopped":                     `kill -STOP $$`,
		"a child in another session prints": `setsid yes & yes`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := script(t, ">started; "+text)
			d.Stdin = bytes.Repeat([]byte("x"), large)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			go func() {
				awaitFile(t, d.file("started"))
				time.Sleep(100 * time.Millisecond)
				cancel()
			}()
			if _, f := new(Processes).Run(ctx, d, io.Discard); f == nil || !f.Killed {
				t.Errorf("%+v, want killed", f)
			}
		})
	}
}

// TestInterrupted: while signals interrupt poll(2) continuously, no input or output is lost.
func TestInterrupted(t *testing.T) {
	d := script(t, `for i in 1 2 3 4 5 6 7 8; do echo $i; head -c 100000 /dev/zero >&2; sleep 0.03; done; cat | wc -c`)
	d.Stdin = bytes.Repeat([]byte("x"), large)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ended := make(chan struct{})
	var signals sync.WaitGroup
	signals.Go(func() {
		for {
			select {
			case <-ended:
				return
			default:
			}
			threads, _ := os.ReadDir("/proc/self/task")
			for _, thread := range threads {
				tid, _ := strconv.Atoi(thread.Name())
				_ = unix.Tgkill(os.Getpid(), tid, unix.SIGURG) // the Go runtime ignores extra SIGURGs
			}
			time.Sleep(time.Millisecond)
		}
	})
	stdout, f := new(Processes).Run(ctx, d, io.Discard)
	close(ended)
	signals.Wait()
	if want := "1\n2\n3\n4\n5\n6\n7\n8\n4194304\n"; f != nil || string(stdout) != want {
		t.Errorf("%q, %v; want %q", stdout, f, want)
	}
}

// TestNoSpin: Run sleeps while a delegate runs, even if the delegate closes its pipes or a daemon
// keeps them open. The test is not parallel, because it measures the CPU time of the whole process.
func TestNoSpin(t *testing.T) {
	processorTime := func() time.Duration {
		var used unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &used); err != nil {
			t.Fatal(err)
		}
		return time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	for name, text := range map[string]string{
		"it closes its stdin":      `exec <&-; sleep 1`,
		"it closes its output":     `exec >&- 2>&-; sleep 1`,
		"it reads half":            `head -c 1000000 >/dev/null; sleep 1`,
		"a daemon keeps its pipes": `sleep 3 &`,
		"it is slow":               `sleep 1`,
	} {
		t.Run(name, func(t *testing.T) {
			d := script(t, text)
			d.Stdin = bytes.Repeat([]byte("x"), large)
			began, before := time.Now(), processorTime()
			_, f := new(Processes).Run(context.Background(), d, io.Discard)
			if used, took := processorTime()-before, time.Since(began); f != nil || used > took/3 {
				t.Errorf("%v, %s of %s", f, used, took)
			}
		})
	}
}

// TestFed: Run reaches the crash point "fed" once, when the delegate runs and the last byte of the
// configuration is in its stdin pipe.
func TestFed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, text  string
		stdin, want int
	}{
		{"small", `>started; sleep 0.1`, 2, 1},
		{"large", `>started; cat >/dev/null; sleep 0.1`, large, 1},
		{"never read", `>started; sleep 0.1`, large, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d := script(t, c.text)
			d.Stdin = bytes.Repeat([]byte("x"), c.stdin)
			passed := 0
			r := &Processes{Point: func(point string) {
				passed++
				awaitFile(t, d.file("started"))
				if point != "fed" {
					t.Errorf("point %q", point)
				}
			}}
			if _, f := r.Run(context.Background(), d, io.Discard); f != nil || passed != c.want {
				t.Errorf("%v, passed %d times, want %d", f, passed, c.want)
			}
		})
	}
}

// TestSlow: Run calls Slow once while a slow delegate runs.
func TestSlow(t *testing.T) {
	t.Parallel()
	d := script(t, `for i in 1 2 3 4 5 6 7 8; do echo; sleep 0.1; done; until [ -e slow ]; do sleep 0.01; done; sleep 0.7`)
	calls := 0
	r := &Processes{Slow: func() {
		calls++
		if err := os.WriteFile(d.file("slow"), nil, 0o600); err != nil {
			t.Error(err)
		}
	}}
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	if _, f := r.Run(ctx, d, io.Discard); f != nil || calls != 1 {
		t.Errorf("%v, called %d times", f, calls)
	}
}

// TestNothingIsLeft: however a call ends, it leaks no descriptor and no goroutine. The test is not
// parallel, because it counts the descriptors and goroutines of the whole process.
func TestNothingIsLeft(t *testing.T) {
	call := func(text string) *Call {
		d := script(t, text)
		d.Stdin = bytes.Repeat([]byte("x"), large)
		return d
	}
	noBinary, noProgram := call(""), call("")
	noBinary.Plugin = "absent"
	if err := os.WriteFile(noProgram.file("delegate"), []byte{0}, 0o700); err != nil {
		t.Fatal(err)
	}
	calls := map[string]*Call{
		"a success": call(`cat`), "a failure": call(`exit 1`), "no binary": noBinary, "no program": noProgram,
		"nothing is read": call(`:`), "a daemon": call(`sleep 5 &`), "the deadline": call(`sleep 600`),
	}
	run := func() {
		for name, c := range calls {
			ctx, cancel := context.WithCancel(context.Background())
			if name == "the deadline" {
				ctx, cancel = context.WithTimeout(ctx, 20*time.Millisecond)
			}
			if _, f := new(Processes).Run(ctx, c, io.Discard); f == nil && name == "the deadline" {
				t.Error("the delegate was not killed at the deadline")
			}
			cancel()
			_, _ = new(Processes).Run(ctx, c, io.Discard)
		}
	}
	run() // the Go runtime opens its own descriptors at the first call
	files, goroutines := descriptors(t), runtime.NumGoroutine()
	for range 2 {
		run()
	}
	if now := descriptors(t); now != files {
		t.Errorf("%d descriptors, want %d", now, files)
	}
	for end := time.Now().Add(sandbox.Patience); runtime.NumGoroutine() > goroutines; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines, want %d", runtime.NumGoroutine(), goroutines)
		}
	}
}

// descriptors returns the number of file descriptors that this process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

// TestDescriptorsOfADelegate: a delegate inherits only its pipes and the lock, even if other
// delegates are started at the same time.
func TestDescriptorsOfADelegate(t *testing.T) {
	t.Parallel()
	lock, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	want := map[string]bool{"0": true, "1": true, "2": true, "20": true}
	for fd := LockFD + 1; fd < 1024; fd++ { // descriptors that this test process inherited
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			want[strconv.Itoa(fd)] = true
		}
	}
	d := script(t, `cd /proc/self/fd && for fd in *; do [ -e /proc/$$/fd/$fd ] && [ $fd != 10 ] && echo $fd; done; :`) // fd 10 is the shell's script
	d.Lock = lock
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 5 {
				stdout, f := new(Processes).Run(context.Background(), d, io.Discard)
				fds := strings.Fields(string(stdout))
				if f != nil || len(fds) != len(want) || slices.ContainsFunc(fds, func(fd string) bool { return !want[fd] }) {
					t.Errorf("%v, %v; want %v", fds, f, want)
				}
			}
		})
	}
	all.Wait()
}

// TestEnvironment: a variable that the Call sets replaces an inherited variable of the same name.
// No variable occurs twice.
func TestEnvironment(t *testing.T) {
	t.Setenv("CNI_IFNAME", "old")
	t.Setenv("REPLACED", "old")
	t.Setenv("REMOVED", "old")
	t.Setenv("KEPT", "old")
	d := script(t, `tr '\0' '\n' </proc/$$/environ | grep -E '^(CNI_IFNAME|REPLACED|REMOVED|KEPT|CNI_ARGS)=' | sort`)
	d.Env = map[string]string{"REPLACED": "new", "REMOVED": "", "CNI_ARGS": "not the call's"}
	stdout, f := new(Processes).Run(context.Background(), d, io.Discard)
	if want := "CNI_ARGS=\nCNI_IFNAME=eth0\nKEPT=old\nREPLACED=new\n"; f != nil || string(stdout) != want {
		t.Errorf("%q, %v; want %q", stdout, f, want)
	}
}

// TestWatch: Run calls Watch every 100 ms, but only while the delegate runs. If Watch ends the
// context with a cause, Run kills the delegate, and the failure contains the cause.
func TestWatch(t *testing.T) {
	t.Parallel()
	d := script(t, `for i in 1 2 3 4 5 6 7 8 9 10; do echo; sleep 0.06; done`)
	began, calls := time.Now(), 0
	d.Watch = func() { calls++ }
	if _, f := new(Processes).Run(context.Background(), d, io.Discard); f != nil || calls < 3 || calls > int(time.Since(began)/watchDelay) {
		t.Errorf("%v, called %d times", f, calls)
	}
	d, calls = script(t, `sleep 600 & sleep 600`), 0
	ctx, end := context.WithCancelCause(context.Background())
	d.Watch = func() {
		if calls++; calls == 2 {
			end(errors.New("nobody waits"))
		}
	}
	_, f := new(Processes).Run(ctx, d, io.Discard)
	if f == nil || !f.Killed || f.Msg != "killed: nobody waits" {
		t.Errorf("%+v", f)
	}
}
