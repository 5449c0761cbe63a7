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
	// unlockedEnv leaves the first thread unlocked, as in the program.
	unlockedEnv = "UNWIND_TEST_UNLOCKED"
	// headlessEnv makes this program one whose first thread has ended.
	headlessEnv = "UNWIND_TEST_HEADLESS"
)

func TestMain(m *testing.M) {
	if os.Getenv(headlessEnv) != "" {
		headless()
	}
	os.Exit(sandbox.RunInMemory(m))
}

// underTest builds, once, the plugin under test, with the race detector if the tests have it, and
// returns its path. go test does not see what this build reads: it finds a change because it runs
// the tests again if the package plugin has changed, or a file that they open.
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

// toolsDir is where `make tools` puts the reference plugins (cni) and the faulty plugin (test).
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

// init keeps the main thread out of the tests' network namespaces: it cannot end, so it would stay
// in one for good. It also turns off the second for which the race detector makes every program
// wait before it exits, for the plugin under test.
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

// makeSharedChains makes, once, the chains that all pods of a host share. Plugins that make them at
// the same time fail: iptables cannot make a chain only if it does not exist.
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
