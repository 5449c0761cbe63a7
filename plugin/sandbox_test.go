package plugin

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/testdata/sandbox"

	"golang.org/x/sys/unix"
)

// outliveEnv marks the processes that TestOutlive leaves.
const outliveEnv = "UNWIND_TEST_OUTLIVE"

// TestOutlive is run by TestNothingOutlives. It leaves processes in sessions of their own, and
// stays.
func TestOutlive(t *testing.T) {
	if os.Getenv(outliveEnv) == "" {
		return
	}
	if err := exec.Command("sh", "-c", "setsid sh -c 'sleep 300 & sleep 300' & setsid -f sleep 300").Run(); err != nil {
		t.Fatal(err)
	}
	if os.Getenv(outliveEnv+"_STAYS") != "" {
		time.Sleep(time.Hour) // without cgo, the Go runtime takes a select that nobody ends for a deadlock
	}
}

// TestNothingOutlives: processes that tests start end with them, however the tests end.
func TestNothingOutlives(t *testing.T) {
	sandbox.Need(t)
	t.Parallel()
	for _, c := range []struct {
		name   string
		signal unix.Signal // sent to the process that was started; 0 if the tests end by themselves
		group  bool        // sent to its whole group, as a terminal does
	}{
		{"they end", 0, false},
		{"killed", unix.SIGKILL, false},
		{"interrupted", unix.SIGINT, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			mark := outliveEnv + "=" + t.TempDir()
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestOutlive$")
			cmd.Env = slices.DeleteFunc(os.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "UNWIND_TEST_SANDBOX=") })
			cmd.Env = append(cmd.Env, mark)
			if c.signal != 0 {
				cmd.Env = append(cmd.Env, outliveEnv+"_STAYS=1")
			}
			cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) })
			if c.signal != 0 {
				eventually(t, "what is left by the tests", func() bool { return sleeping(t, mark) == 3 })
				pid := cmd.Process.Pid
				if c.group {
					pid = -pid
				}
				if err := unix.Kill(pid, c.signal); err != nil {
					t.Fatal(err)
				}
			}
			if err := cmd.Wait(); (err == nil) != (c.signal == 0) {
				t.Errorf("the tests: %v", err)
			}
			eventually(t, "the end of all", func() bool { return sleeping(t, mark) == 0 })
		})
	}
}

// sleeping counts the sleeps that have a text in their environment.
func sleeping(t *testing.T, mark string) (count int) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		environ, _ := os.ReadFile(file)
		name, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "comm"))
		if string(name) == "sleep\n" && bytes.Contains(environ, []byte(mark+"\x00")) {
			count++
		}
	}
	return count
}
