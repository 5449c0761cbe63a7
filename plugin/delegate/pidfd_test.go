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
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// noPidfd is the environment variable for the errno that pidfd_open returns in TestWithoutPidfd.
const noPidfd = "UNWIND_TEST_NO_PIDFD"

func TestMain(m *testing.M) {
	if errno, err := strconv.Atoi(os.Getenv(noPidfd)); err == nil {
		refusePidfds(syscall.Errno(errno))
	}
	os.Exit(m.Run())
}

// TestReapedElsewhere: other code in the process reaps the delegate first, so its exit code is
// lost. Run reports a failure, but not that the delegate was killed.
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

// TestTraced: Run gets the exit code of a delegate that a debugger traces. The pidfd is readable
// before the debugger releases the exit code. The debugger is the test binary, started again.
func TestTraced(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("tracing a process needs root")
	}
	t.Parallel()
	const traceEnv = "UNWIND_TEST_TRACE"
	if pid, err := strconv.Atoi(os.Getenv(traceEnv)); err == nil {
		trace(t, pid)
		return
	}
	d := script(t, `mkfifo go; >started; read line <go; exit 7`)
	debugger := exec.Command("/proc/self/exe", "-test.run=^TestTraced$", "-test.count=1")
	r := &Processes{Point: func(string) {
		awaitFile(t, d.file("started"))
		debugger.Env = append(os.Environ(), fmt.Sprintf("%s=%d", traceEnv, childOf(t, d.file("delegate"))))
		debugger.Dir = d.Path
		if err := debugger.Start(); err != nil {
			t.Error(err)
		}
		awaitFile(t, d.file("traced"))
		if err := os.WriteFile(d.file("go"), []byte("go\n"), 0o600); err != nil {
			t.Error(err)
		}
	}}
	_, f := r.Run(context.Background(), d, io.Discard)
	if err := debugger.Wait(); err != nil {
		t.Error(err)
	}
	if f == nil || f.Killed || !strings.Contains(f.Msg, "exit status 7") {
		t.Errorf("%+v, want exit status 7", f)
	}
}

// trace traces a process. The parent of that process gets the exit code only 300 ms after the
// process has ended.
func trace(t *testing.T, pid int) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.PtraceSeize(pid); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("traced", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	var info unix.Siginfo
	if err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	time.Sleep(300 * time.Millisecond)
	if _, err := unix.Wait4(pid, nil, unix.WALL, nil); err != nil {
		t.Fatal(err)
	}
}

// childOf returns the ID of the process that runs the script at path.
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

// TestWithoutPidfd: Run works just as well if the kernel has no pidfds, or if seccomp forbids them.
func TestWithoutPidfd(t *testing.T) {
	t.Parallel()
	if os.Getenv(noPidfd) != "" {
		t.Skip("this is the process without pidfds")
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
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // load the system call's number
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
