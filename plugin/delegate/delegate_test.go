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
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest/sandbox"
)

// script returns a call of a delegate that is a shell script in a directory of its own. The script
// runs in that directory.
func script(t *testing.T, text string) *Call {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "delegate"), []byte("#!/bin/sh\ncd "+dir+"\n"+text), 0o755); err != nil {
		t.Fatal(err)
	}
	return &Call{Command: "ADD", Plugin: "delegate", Path: dir, ContainerID: "a", Netns: "/none", Ifname: "eth0", Stdin: []byte("{}")}
}

func (c *Call) file(name string) string { return filepath.Join(c.Path, name) }

// awaitFile waits until a file exists.
func awaitFile(t *testing.T, path string) {
	t.Helper()
	for end := time.Now().Add(sandbox.Patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(path); err == nil {
			return
		}
	}
	t.Errorf("%s was not created in time", path)
}

// TestGroupEndsAtDeadline: when the context ends, Run kills the delegate and all processes that the
// delegate started. When Run returns, none of them is running.
func TestGroupEndsAtDeadline(t *testing.T) {
	t.Parallel()
	text := `trap "" TERM HUP INT; sleep 600 & echo $! >child; sh -c 'trap "" TERM; sleep 600 & echo $! >grandchild.new; ` +
		`mv grandchild.new grandchild; wait' & wait`
	for _, c := range []struct{ name, msg string }{
		{"deadline", "timed out and was killed"},
		{"cancelled", "killed because unwind was told to stop"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var d *Call
			for limit := time.Second; ; limit *= 2 { // doubled until all three processes start in time
				d = script(t, text)
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				if c.name == "cancelled" {
					ctx, cancel = context.WithCancel(context.Background())
					go func() {
						awaitFile(t, d.file("grandchild"))
						cancel()
					}()
				}
				_, f := new(Processes).Run(ctx, d, io.Discard)
				cancel()
				if _, err := os.Stat(d.file("grandchild")); err != nil && limit < sandbox.Patience {
					continue
				}
				if f == nil || !f.Killed || f.Msg != c.msg {
					t.Errorf("%+v, want killed, %q", f, c.msg)
				}
				break
			}
			for _, name := range []string{"child", "grandchild"} {
				text, err := os.ReadFile(d.file(name))
				if err != nil {
					t.Fatal(err)
				}
				pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
				if err != nil {
					t.Fatal(err)
				}
				stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
				if err == nil && !strings.Contains(string(stat), ") Z ") { // a zombie has ended
					t.Errorf("the %s is still running: %s", name, stat)
				}
			}
		})
	}
}

// TestLockIsInherited: a delegate and its children inherit the attachment's lock.
func TestLockIsInherited(t *testing.T) {
	t.Parallel()
	store := &journal.Store{Dir: filepath.Join(t.TempDir(), "state")}
	key := journal.Key{Network: "net", ContainerID: "a", IfName: "eth0"}
	lock, err := store.TryAcquire(key)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Release()
	d := script(t, `readlink /proc/$$/fd/20; sh -c 'readlink /proc/$$/fd/20'`)
	d.Lock = lock.File()
	stdout, f := new(Processes).Run(context.Background(), d, os.Stderr)
	path := store.LockPath(key)
	if want := path + "\n" + path + "\n"; f != nil || string(stdout) != want {
		t.Errorf("%q, %v; want %q", stdout, f, want)
	}
}

// TestTextFileBusy: while a plugin's binary is being written, Run keeps trying to start the plugin,
// for up to busyDelay. After that, Run returns a failure, whereas libcni's RawExec returns success.
func TestTextFileBusy(t *testing.T) {
	t.Parallel()
	for _, command := range []string{"ADD", "DEL"} {
		for _, held := range []time.Duration{busyDelay / 8, sandbox.Patience} {
			t.Run(fmt.Sprintf("%s, held for %s", command, held), func(t *testing.T) {
				t.Parallel()
				for late := true; late; { // the timer may fire too late on a loaded machine
					late = textFileBusy(t, command, held)
				}
			})
		}
	}
}

// textFileBusy runs a script whose file stays open for writing for the given time. It returns true
// if the file was closed too late, so that the outcome proves nothing.
func textFileBusy(t *testing.T, command string, held time.Duration) (late bool) {
	t.Helper()
	d := script(t, `echo ran >ran`)
	d.Command = command
	f, err := os.OpenFile(d.file(d.Plugin), os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	began, took := time.Now(), make(chan time.Duration, 1)
	timer := time.AfterFunc(held, func() {
		_ = f.Close()
		took <- time.Since(began)
	})
	_, failed := new(Processes).Run(context.Background(), d, io.Discard)
	_, err = os.Stat(d.file("ran"))
	ran := err == nil
	switch {
	case timer.Stop():
		if failed == nil || ran || failed.Killed || !strings.Contains(failed.Msg, "text file busy") {
			t.Errorf("%+v, ran %t; want \"text file busy\"", failed, ran)
		}
	case <-took > busyDelay/2:
		return true
	case failed != nil || !ran:
		t.Errorf("%v, ran %t; want a success", failed, ran)
	}
	return false
}

// TestOutputIsBounded: Run drops a delegate's output beyond maxStdout and maxStderr. Too much
// output on stdout is an error, because an incomplete result is useless.
func TestOutputIsBounded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name           string
		stdout, stderr int
		ok             bool
	}{
		{"at the bounds", maxStdout, maxStderr, true},
		{"more on stdout", maxStdout + 1, 0, false},
		{"more on stderr", 1, 10 * maxStderr, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d := script(t, fmt.Sprintf(`head -c %d /dev/zero; head -c %d /dev/zero >&2`, c.stdout, c.stderr))
			var stderr bytes.Buffer
			stdout, f := new(Processes).Run(context.Background(), d, &stderr)
			if (f == nil) != c.ok || c.ok && len(stdout) != c.stdout || stderr.Len() != min(c.stderr, maxStderr) {
				t.Errorf("%v, %d and %d bytes", f, len(stdout), stderr.Len())
			}
			if !c.ok && (f.Code != types.ErrDecodingFailure || !strings.Contains(f.Msg, strconv.Itoa(maxStdout))) {
				t.Errorf("%+v", f)
			}
		})
	}
}

// TestHugeOutput: Run does not keep 100 MB of stdout in memory. The test is not parallel, because
// it measures the allocations of the whole process.
func TestHugeOutput(t *testing.T) {
	c := script(t, `head -c 100000000 /dev/zero`)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, f := new(Processes).Run(context.Background(), c, os.Stderr)
	runtime.ReadMemStats(&after)
	if f == nil || f.Code != types.ErrDecodingFailure || f.Killed {
		t.Errorf("%+v, want an error for a result that cannot be decoded", f)
	}
	if used := after.TotalAlloc - before.TotalAlloc; used > 8*maxStdout {
		t.Errorf("Run allocated %d MB", used>>20)
	}
}

// TestDaemonHoldsOutput: a delegate leaves a daemon that keeps stdout and stderr open. Run neither
// waits until the daemon ends nor kills it.
func TestDaemonHoldsOutput(t *testing.T) {
	t.Parallel()
	d := script(t, `sleep 600 & echo $! >daemon; echo '{"some": "result"}'`)
	stdout, f := new(Processes).Run(context.Background(), d, os.Stderr)
	if f != nil || string(stdout) != "{\"some\": \"result\"}\n" {
		t.Errorf("%q, %v", stdout, f)
	}
	pid, err := os.ReadFile(d.file("daemon"))
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("kill", strings.TrimSpace(string(pid))).CombinedOutput(); err != nil {
		t.Errorf("the daemon was killed: %s", out)
	}
}

// TestWordsOfFailure: Run returns a delegate's CNI error unchanged. If the delegate prints none,
// Run returns the same message as libcni, because existing alerts match it.
func TestWordsOfFailure(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, text string
		code       uint
		killed     bool
	}{
		{"a CNI error", `echo '{"cniVersion": "1.0.0", "code": 123, "msg": "no room", "details": "in the pool"}'; exit 1`, 123, false},
		{"a CNI error, and stderr", `echo noise >&2; echo '{"code": 7, "msg": "no room"}'; exit 3`, 7, false},
		{"an error without words", `echo '{"code": 11}'; exit 1`, 11, false},
		{"nothing", `exit 4`, types.ErrInternal, false},
		{"stderr only", `echo "what is" >&2; echo wrong >&2; exit 1`, types.ErrInternal, false},
		{"no JSON", `echo panic: no JSON; exit 2`, types.ErrInternal, false},
		{"killed", `kill -KILL $$`, types.ErrInternal, true},
		{"ended", `echo bye >&2; kill -TERM $$`, types.ErrInternal, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d := script(t, c.text)
			_, f := new(Processes).Run(context.Background(), d, io.Discard)
			_, err := (&invoke.RawExec{}).ExecPlugin(context.Background(), d.file(d.Plugin), d.Stdin, os.Environ())
			var libcni *types.Error
			if f == nil || !errors.As(err, &libcni) {
				t.Fatalf("%v; libcni %v", f, err)
			}
			if libcni.Msg == "" {
				libcni.Msg = "netplugin failed with no error message: exit status 1"
			}
			if f.Msg != libcni.Msg || f.Details != libcni.Details || f.Code != c.code || f.Killed != c.killed {
				t.Errorf("%+v, want %+v, code %d, killed %t", f, libcni, c.code, c.killed)
			}
		})
	}
}

// TestNoBinary: if a plugin's binary is missing, Run returns the same message as libcni.
func TestNoBinary(t *testing.T) {
	t.Parallel()
	d := script(t, "")
	d.Plugin, d.Path = "absent", d.Path+":/none"
	_, f := new(Processes).Run(context.Background(), d, io.Discard)
	_, err := invoke.FindInPath("absent", filepath.SplitList(d.Path))
	if f == nil || err == nil || f.Msg != err.Error() || f.Code != types.ErrPluginNotAvailable || f.Killed {
		t.Errorf("%+v, want %v, code %d", f, err, types.ErrPluginNotAvailable)
	}
}
