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

// apartFrom is an environment variable. In a process that Apart starts, it is the test's name.
const apartFrom = "UNWIND_TEST_APART"

// Apart runs a test or a subtest in namespaces of its own, so that it can run in parallel with
// others even if it creates rules, a bridge with a fixed name, or files in /run or /var/lib/cni.
//
// Apart starts a process of this program that runs only this test. If the process fails, Apart
// fails the test. Apart then returns false, and the caller must return. In the new process, Apart
// returns true.
func Apart(t *testing.T) bool {
	t.Helper()
	Need(t)
	if os.Getenv(apartFrom) == t.Name() {
		return true
	}
	t.Parallel()
	log := filepath.Join(t.TempDir(), "opened")
	args := []string{"-test.run=" + Only(t), "-test.count=1", "-test.testlogfile=" + log}
	if end, ok := t.Deadline(); ok { // the process times out first, and prints its goroutines
		args = append(args, "-test.timeout="+(time.Until(end)*9/10).String())
	}
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), marker+"=", apartFrom+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // the kernel sends Pdeathsig when this thread ends
	defer runtime.UnlockOSThread()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("in namespaces of its own: %v\n%s", err, out)
	}
	inspectAgain(log)
	return false
}

// inspectAgain accesses the environment variables and the files that another process of this
// program used, according to that process's test log. So go test knows that the test's result
// depends on them, and does not reuse the result after one of them has changed.
func inspectAgain(log string) {
	data, _ := os.ReadFile(log) // if the log is missing, the process has failed anyway
	for line := range strings.Lines(string(data)) {
		switch verb, name, _ := strings.Cut(strings.TrimSpace(line), " "); verb {
		case "getenv":
			_ = os.Getenv(name)
		case "open", "stat":
			_, _ = os.Stat(name)
		}
	}
}

// Only returns a value for -test.run that selects only this test or subtest.
func Only(t *testing.T) string {
	parts := strings.Split(t.Name(), "/")
	for i, part := range parts {
		parts[i] = "^" + regexp.QuoteMeta(part) + "$"
	}
	return strings.Join(parts, "/")
}
