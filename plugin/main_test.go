package plugin

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/testdata/sandbox"
)

const (
	// killAtEnv has the plugin kill itself at the n-th point that it passes.
	killAtEnv = "UNWIND_TEST_KILL_AT"
	// hastyEnv gives the plugin short budgets, see node.hasty.
	hastyEnv = "UNWIND_TEST_HASTY"
	// patientEnv gives its STATUS more time, see node.patient.
	patientEnv = "UNWIND_TEST_PATIENT"
	// noProcEnv has the plugin work without /proc: it is to be in a mount namespace of its own.
	noProcEnv = "UNWIND_TEST_NO_PROC"
	// unlockedEnv leaves the first thread free, as it is in the program.
	unlockedEnv = "UNWIND_TEST_UNLOCKED"
	// uidEnv has the plugin give up root, for that user.
	uidEnv = "UNWIND_TEST_UID"
)

// TestMain runs the tests, or, where this program was started under the plugin's name, the plugin, with
// the race detector of the tests.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == Name {
		os.Exit(pluginMain())
	}
	os.Exit(sandbox.RunInMemory(m))
}

func pluginMain() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	p := &Plugin{Stdout: os.Stdout, Stderr: os.Stderr, Budgets: DefaultBudgets}
	if os.Getenv(hastyEnv) != "" {
		p.Budgets = Budgets{
			Undo: 3 * time.Second, Settle: 2 * time.Second, LateDel: 1500 * time.Millisecond, Lock: 5 * time.Second,
			HostLink: time.Second, Orphans: 500 * time.Millisecond,
			GC: 4 * time.Second, Status: 2 * time.Second, Step: 200 * time.Millisecond,
		}
	}
	if os.Getenv(patientEnv) != "" {
		p.Budgets.Status = time.Minute
	}
	if os.Getenv(noProcEnv) != "" {
		if err := unix.Unmount("/proc", unix.MNT_DETACH); err != nil {
			panic(err)
		}
	}
	if uid, err := strconv.Atoi(os.Getenv(uidEnv)); err == nil {
		if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(uid), syscall.Setuid(uid)); err != nil {
			panic(err)
		}
	}
	if at, err := strconv.Atoi(os.Getenv(killAtEnv)); err == nil {
		p.Point = func(string) {
			if at--; at == 0 {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		}
	}
	return p.Main(ctx, "unwind under test")
}

// toolsDir is where `make tools` puts the reference plugins (cni) and the faulty plugin (test).
func toolsDir(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs("../.tools")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "cni", "bridge")); err != nil {
		t.Fatalf("%v; run make tools", err)
	}
	return dir
}

// run executes a program and returns what it printed.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// init keeps the main thread out of what tests do with network namespaces: it cannot end, so it would stay in one for good.
// And the race detector has every program wait for a second before it exits; unwind is started some thousand times.
func init() {
	if os.Getenv(unlockedEnv) == "" {
		runtime.LockOSThread()
	}
	if os.Getenv("GORACE") == "" {
		_ = os.Setenv("GORACE", "atexit_sleep_ms=0")
	}
}
