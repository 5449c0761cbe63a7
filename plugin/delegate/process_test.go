package delegate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/plugintest/sandbox"
)

// noPidfd is the environment variable with the error that pidfd_open returns: see TestWithoutPidfd.
const noPidfd = "UNWIND_TEST_NO_PIDFD"

func TestMain(m *testing.M) {
	if errno, err := strconv.Atoi(os.Getenv(noPidfd)); err == nil {
		refusePidfds(syscall.Errno(errno))
	}
	os.Exit(m.Run())
}

// large is more than a pipe takes.
const large = 4 << 20

// TestPipes: neither side waits for the other, whatever the delegate reads and prints, in any order.
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

// TestDaemonPrintsOn: a daemon that prints for ever does not hold the result up.
func TestDaemonPrintsOn(t *testing.T) {
	t.Parallel()
	d := script(t, `(while :; do echo more; sleep 0.01; done) & echo result; sleep 0.1`)
	stdout, f := new(Processes).Run(context.Background(), d, io.Discard)
	if f != nil || !bytes.Contains(stdout, []byte("result\n")) {
		t.Errorf("%q, %v", stdout, f)
	}
}

// TestKilledWhilePipesAreFull: a delegate that waits for its pipes is killed at the deadline.
func TestKilledWhilePipesAreFull(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"it prints for ever":               `yes`,
		"it prints on both":                `yes >&2 & yes`,
		"its child reads nothing":          `(sleep 600) & yes`,
		"it is stopped":                    `kill -STOP $$`,
		"a child elsewhere prints on both": `setsid yes & yes`,
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

// TestInterrupted: signals interrupt every poll, and nothing is lost.
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
				_ = unix.Tgkill(os.Getpid(), tid, unix.SIGURG) // Go's own; more of them do no harm
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

// TestNoSpin: unwind sleeps while a delegate runs whose pipes are closed or kept open. It runs by
// itself, for the processor time of others would be counted too.
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
			if used, took := processorTime()-before, time.Since(began); f != nil || used > took/20 {
				t.Errorf("%v, %s of %s", f, used, took)
			}
		})
	}
}

// TestFed: the crash point "fed" is passed once, when the delegate runs and its pipe contains the
// last byte of its configuration.
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

// TestSlow: Slow is called once, while a delegate runs that takes long.
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

// TestNothingIsLeft: however a call ends, it leaves neither a descriptor nor a goroutine. It runs by
// itself, for the calls of others would be counted too.
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
				t.Error("it was not killed")
			}
			cancel()
			_, _ = new(Processes).Run(ctx, c, io.Discard)
		}
	}
	run() // Go's own descriptors are opened at the first use
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

// descriptors returns the number of this process's descriptors.
func descriptors(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

// TestDescriptorsOfADelegate: a delegate inherits its pipes and its lock only, also if others are
// started at the same time.
func TestDescriptorsOfADelegate(t *testing.T) {
	t.Parallel()
	lock, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	want := map[string]bool{"0": true, "1": true, "2": true, "20": true}
	for fd := LockFD + 1; fd < 1024; fd++ { // of what started the tests
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			want[strconv.Itoa(fd)] = true
		}
	}
	d := script(t, `cd /proc/self/fd && for fd in *; do [ -e /proc/$$/fd/$fd ] && [ $fd != 10 ] && echo $fd; done; :`) // 10 is the script
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

// TestEnvironment: a variable of the call replaces unwind's own, and occurs once.
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

// TestReapedElsewhere: a delegate whose exit code is lost has failed, and is not said to have been
// killed.
func TestReapedElsewhere(t *testing.T) {
	t.Parallel()
	d := script(t, `until [ -e fed ]; do sleep 0.01; done; echo bye >&2`)
	r := &Processes{Point: func(string) {
		pid := childOf(t, d.file("delegate"))
		if err := os.WriteFile(d.file("fed"), nil, 0o600); err != nil {
			t.Error(err)
		}
		if _, err := syscall.Wait4(pid, nil, 0, nil); err != nil {
			t.Error(err)
		}
	}}
	var stderr bytes.Buffer
	_, f := r.Run(context.Background(), d, &stderr)
	if f == nil || f.Killed || f.Unstarted || !strings.Contains(f.Msg, "no child processes") || stderr.String() != "bye\n" {
		t.Errorf("%+v, %q", f, &stderr)
	}
}

// TestTraced: the exit of a delegate that is traced is noticed before its exit code can be had.
func TestTraced(t *testing.T) {
	t.Parallel()
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Skip(err)
	}
	d := script(t, `until [ -e traced ]; do sleep 0.01; done; echo ended`)
	var traced atomic.Pointer[exec.Cmd]
	r := &Processes{Point: func(string) {
		pid := childOf(t, d.file("delegate"))
		cmd := exec.Command(strace, "-f", "-qq", "-o", "/dev/null", "-p", strconv.Itoa(pid))
		if err := cmd.Start(); err != nil {
			t.Error(err)
			return
		}
		traced.Store(cmd)
		for end := time.Now().Add(sandbox.Patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
			status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
			if !bytes.Contains(status, []byte("TracerPid:\t0\n")) {
				break
			}
		}
		if err := os.WriteFile(d.file("traced"), nil, 0o600); err != nil {
			t.Error(err)
		}
	}}
	stdout, f := r.Run(context.Background(), d, io.Discard)
	if f != nil || string(stdout) != "ended\n" {
		t.Errorf("%q, %v", stdout, f)
	}
	if cmd := traced.Load(); cmd != nil {
		_ = cmd.Wait()
	}
}

// childOf returns the ID of the process that runs a script.
func childOf(t *testing.T, path string) int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Error(err)
	}
	for _, file := range files {
		if line, _ := os.ReadFile(file); bytes.Contains(line, []byte("\x00"+path+"\x00")) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			if err != nil {
				t.Error(err)
			}
			return pid
		}
	}
	t.Errorf("%s does not run", path)
	return 0
}

// TestWithoutPidfd: on a kernel without pidfds, and where seccomp forbids them, delegates run alike.
func TestWithoutPidfd(t *testing.T) {
	t.Parallel()
	if os.Getenv(noPidfd) != "" {
		t.Skip("it has none")
	}
	for _, errno := range []syscall.Errno{syscall.ENOSYS, syscall.EPERM} {
		t.Run(errno.Error(), func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command("/proc/self/exe", "-test.count=1", "-test.run=^Test(Pipes|DaemonPrints|Killed|Words|Reaped)")
			cmd.Env = append(os.Environ(), noPidfd+"="+strconv.Itoa(int(errno)))
			if out, err := cmd.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("PASS")) {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// refusePidfds makes pidfd_open fail in this process from now on.
func refusePidfds(errno syscall.Errno) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the system call's number
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_PIDFD_OPEN, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(errno)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	if _, _, err := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&program))); err != 0 {
		panic(err)
	}
	if _, err := unix.PidfdOpen(os.Getpid(), 0); !errors.Is(err, errno) {
		panic(err)
	}
}
