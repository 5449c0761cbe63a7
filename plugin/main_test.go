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
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/sandbox"
)

const (
	// killAtEnv makes the plugin kill itself at the n-th point that it passes, or at the n-th of a
	// name: "added 2".
	killAtEnv = "UNWIND_TEST_KILL_AT"
	// hastyEnv gives the plugin short budgets: see node.hasty.
	hastyEnv = "UNWIND_TEST_HASTY"
	// patientEnv gives its STATUS, and other attachments during an ADD, more time: see node.patient.
	patientEnv = "UNWIND_TEST_PATIENT"
	// undoEnv is the time that a DEL has.
	undoEnv = "UNWIND_TEST_UNDO"
	// noProcEnv makes the plugin work without /proc, in a mount namespace of its own.
	noProcEnv = "UNWIND_TEST_NO_PROC"
	// unlockedEnv leaves the first thread unlocked, as in the program.
	unlockedEnv = "UNWIND_TEST_UNLOCKED"
	// longEnv makes tests take longer, as make proof does.
	longEnv = "UNWIND_TEST_LONG"
	// lateEnv starts no delegate before its turn.
	lateEnv = "UNWIND_TEST_LATE"
	// cacheEnv is the path of libcni's cache: see node.
	cacheEnv = "UNWIND_TEST_CACHE"
	// uidEnv makes the plugin drop root for that user.
	uidEnv = "UNWIND_TEST_UID"
	// headlessEnv makes this program one whose first thread has ended.
	headlessEnv = "UNWIND_TEST_HEADLESS"
)

// sampled says whether a case of a matrix is one that a normal run has: one in so many, so that each
// value of each dimension meets each of another. make proof has all.
func sampled(oneIn int, indexes ...int) bool {
	sum := 0
	for _, i := range indexes {
		sum += i
	}
	return os.Getenv(longEnv) != "" || sum%oneIn == 0
}

// TestMain runs the tests. Started under the plugin's name, it runs the plugin, with the race
// detector of the tests.
func TestMain(m *testing.M) {
	if os.Getenv(headlessEnv) != "" {
		headless()
	}
	if filepath.Base(os.Args[0]) == netconf.Name {
		os.Exit(pluginMain())
	}
	os.Exit(sandbox.RunInMemory(m))
}

// hastyBudgets are those of node.hasty.
var hastyBudgets = undo.Budgets{
	Undo: 3 * time.Second, Release: 2 * time.Second, LateDel: 1500 * time.Millisecond,
	HostLink: time.Second, Orphans: 500 * time.Millisecond,
	GC: 4 * time.Second, Status: 2 * time.Second, Step: 200 * time.Millisecond, Reserve: 500 * time.Millisecond,
}

func pluginMain() int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	p := &Plugin{Stdout: Unbroken(syscall.Stdout), Stderr: Unbroken(syscall.Stderr), Budgets: undo.DefaultBudgets}
	if os.Getenv(hastyEnv) != "" {
		p.Budgets = hastyBudgets
	}
	p.CacheDir = os.Getenv(cacheEnv)
	if os.Getenv(patientEnv) != "" {
		p.Budgets.Status, p.Budgets.Release = time.Minute, time.Minute
	}
	if d, err := time.ParseDuration(os.Getenv(undoEnv)); err == nil {
		p.Budgets.Undo, p.Budgets.Reserve = d, d/10
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
	killAt := os.Getenv(killAtEnv)
	space := strings.LastIndex(killAt, " ")
	name := killAt[:max(0, space)]
	if at, err := strconv.Atoi(killAt[space+1:]); err == nil {
		p.Point = func(point string) {
			if name != "" && point != name {
				return
			}
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

// init keeps the main thread out of the tests' network namespaces: it cannot end, so it would stay
// in one for good. It also turns off the second for which the race detector makes every program
// wait before it exits, since unwind is started some thousand times.
func init() {
	if os.Getenv(unlockedEnv) == "" {
		runtime.LockOSThread()
	}
	if os.Getenv("GORACE") == "" {
		_ = os.Setenv("GORACE", "atexit_sleep_ms=0")
	}
}
