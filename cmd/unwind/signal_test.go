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

// TestStopped: the program that is asked to stop while a delegate takes long ends the delegate, undoes the ADD, and says so.
// It handles signals once a delegate takes long: see delegate.Processes.Slow.
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

// stopped asks an ADD to stop whose delegate has taken so long. It reports whether that was long.
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
			t.Fatal("the delegate does not run")
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
