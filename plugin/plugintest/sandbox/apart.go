package sandbox

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

// apartFrom is the environment variable with the name of the test that runs apart.
const apartFrom = "UNWIND_TEST_APART"

// Apart runs a test or a subtest in namespaces of its own, in parallel with others: it makes what all
// tests of a package otherwise share, such as a bridge of a fixed name, rules, and files in /run and
// /var/lib/cni. Apart returns true in a process that Run has started for this test alone. Everywhere
// else it starts that process, which fails the test if it fails, and returns false: the test returns.
func Apart(t *testing.T) bool {
	t.Helper()
	Need(t)
	if os.Getenv(apartFrom) == t.Name() {
		return true
	}
	t.Parallel()
	log := filepath.Join(t.TempDir(), "opened")
	args := []string{"-test.run=" + Only(t), "-test.count=1", "-test.testlogfile=" + log}
	if end, ok := t.Deadline(); ok { // it ends first, and prints what it does
		args = append(args, "-test.timeout="+(time.Until(end)*9/10).String())
	}
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), marker+"=", apartFrom+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is bound to the thread
	defer runtime.UnlockOSThread()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("in namespaces of its own: %v\n%s", err, out)
	}
	inspectAgain(log)
	return false
}

// inspectAgain reads the variables and inspects the files that another process of this program used,
// by its log for go test. So go test runs the tests again if one of them has changed.
func inspectAgain(log string) {
	data, _ := os.ReadFile(log) // without one, the process has failed
	for line := range strings.Lines(string(data)) {
		switch verb, name, _ := strings.Cut(strings.TrimSpace(line), " "); verb {
		case "getenv":
			_ = os.Getenv(name)
		case "open", "stat":
			_, _ = os.Stat(name)
		}
	}
}

// Only returns the value of -test.run for which no other test runs.
func Only(t *testing.T) string {
	parts := strings.Split(t.Name(), "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	return strings.Join(parts, "/")
}
