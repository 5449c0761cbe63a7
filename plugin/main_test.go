package plugin

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/sandbox"
)

const (
	// unlockedEnv is the environment variable that keeps init from locking the main thread. unwind
	// itself does not lock that thread.
	unlockedEnv = "UNWIND_TEST_UNLOCKED"
	// headlessEnv is the environment variable that makes this program end its first thread: see
	// headless.
	headlessEnv = "UNWIND_TEST_HEADLESS"
)

func TestMain(m *testing.M) {
	if os.Getenv(headlessEnv) != "" {
		headless()
	}
	os.Exit(sandbox.RunInMemory(m))
}

// underTest builds the plugin under test once, with the race detector if the tests have it, and
// returns its path. go test doesn't see which files this build reads: it reuses a cached result
// unless package plugin, or a file that the tests opened, has changed. So underTest opens the two
// source files outside that package.
var underTest = sync.OnceValues(func() (path string, err error) {
	const source = "../testdata/unwind"
	for _, file := range []string{source + "/main.go", "plugintest/env/env.go"} {
		if _, err := os.ReadFile(file); err != nil {
			return "", err
		}
	}
	dir, err := os.MkdirTemp("", "under-test-") // in memory: see sandbox.RunInMemory
	if err != nil {
		return "", err
	}
	path = filepath.Join(dir, netconf.Name)
	race, cgo := "-race=false", "CGO_ENABLED=0"
	if info, ok := debug.ReadBuildInfo(); ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		race, cgo = "-race=true", "CGO_ENABLED=1"
	}
	cmd := exec.Command("go", "build", "-buildvcs=false", "-ldflags", "-s -w", race, "-o", path, "./"+source)
	cmd.Env = append(os.Environ(), cgo)
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", cmd.Args, err, out)
	}
	return path, nil
})

// toolsDir returns the directory in which `make tools` puts the reference plugins (in cni) and the
// tests' own programs (in test).
func toolsDir(t testing.TB) string {
	t.Helper()
	dir, err := filepath.Abs("../.tools")
	must(t, err)
	if _, err := os.Stat(filepath.Join(dir, "cni", "bridge")); err != nil {
		t.Fatalf("%v; run make tools", err)
	}
	return dir
}

// must ends the test if there is an error.
func must(t interface {
	Helper()
	Fatal(args ...any)
}, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
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

// init locks the main thread, so that no test runs on it: a thread that enters another network
// namespace must end afterwards, and the main thread cannot. The race detector delays the exit of
// programs, such as the plugin under test, by a second; init turns that off.
func init() {
	if os.Getenv(unlockedEnv) == "" {
		runtime.LockOSThread()
	}
	if os.Getenv("GORACE") == "" {
		_ = os.Setenv("GORACE", "atexit_sleep_ms=0")
	}
}

// eventually waits until the condition holds.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(sandbox.Patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if condition() {
			return
		}
	}
	t.Fatalf("not in time: %s", what)
}

// makeSharedChains creates, once, the iptables chains that all pods of a host share. Plugins that
// create the same chain at the same time fail, because iptables has no command that creates a chain
// only if it is missing.
var makeSharedChains = sync.OnceValue(func() error {
	for _, restore := range []string{"iptables-restore", "ip6tables-restore"} {
		cmd := exec.Command(restore, "--noflush")
		cmd.Stdin = strings.NewReader("*filter\n:CNI-FORWARD -\n:CNI-ADMIN -\nCOMMIT\n*nat\n:CNI-HOSTPORT-DNAT -\n" +
			":CNI-HOSTPORT-SETMARK -\n:CNI-HOSTPORT-MASQ -\nCOMMIT\n")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", restore, err, out)
		}
	}
	return nil
})
