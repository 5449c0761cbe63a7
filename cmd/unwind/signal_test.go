package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/plugin/plugintest/sandbox"
)

// TestStopped: SIGTERM during an ADD makes the plugin kill its slow delegate, roll back the ADD,
// and return an error. The plugin handles signals only once a delegate is slow (see
// delegate.Processes.Slow). If SIGTERM comes too early, the test tries again with a longer wait.
func TestStopped(t *testing.T) {
	t.Parallel()
	sandbox.Need(t)
	binary := build(t)
	for long := time.Second; ; long *= 2 {
		if stopped(t, binary, long) || long > sandbox.Patience {
			return
		}
	}
}

// stopped sends SIGTERM to an ADD after its delegate has run for the given time. It returns false
// if the plugin did not handle signals yet, so that SIGTERM killed it.
func stopped(t *testing.T, binary string, long time.Duration) bool {
	t.Helper()
	dir := t.TempDir()
	script := "#!/bin/sh\ncat >/dev/null\necho $CNI_COMMAND >>" + dir + "/calls\n[ $CNI_COMMAND = DEL ] || sleep 600\n"
	check(t, os.WriteFile(filepath.Join(dir, "p"), []byte(script), 0o700))
	namespace(t, filepath.Join(dir, "netns"))
	cmd := exec.Command(binary)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "CNI_COMMAND=ADD", "CNI_CONTAINERID=c", "CNI_IFNAME=eth0", "CNI_NETNS=" + filepath.Join(dir, "netns"), "CNI_PATH=" + dir}
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "net", "type": "unwind", "stateDir": "%s/state",
		"chain": {"cniVersion": "1.0.0", "plugins": [{"type": "p"}]}}`, dir))
	var stdout bytes.Buffer
	cmd.Stdout = &stdout
	check(t, cmd.Start())
	calls := func() string {
		data, _ := os.ReadFile(filepath.Join(dir, "calls"))
		return string(data)
	}
	for end := time.Now().Add(sandbox.Patience); calls() == ""; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the delegate did not start in time")
		}
	}
	time.Sleep(long)
	check(t, cmd.Process.Signal(syscall.SIGTERM))
	err := cmd.Wait()
	if cmd.ProcessState.ExitCode() < 0 && long <= sandbox.Patience {
		return false
	}
	if cmd.ProcessState.ExitCode() != 1 || !strings.Contains(stdout.String(), "unwind was told to stop") || calls() != "ADD\nDEL\n" {
		t.Errorf("%v, %s, calls %q", err, &stdout, calls())
	}
	return true
}
