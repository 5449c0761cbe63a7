package facts

import (
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// started runs a shell script in a process group of its own, as unwind runs a delegate, and returns
// the process IDs that it prints in its first line.
func started(t *testing.T, script string) (pids []int) {
	t.Helper()
	cmd := exec.Command("sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, 100)
	n, _ := out.Read(line)
	for _, word := range strings.Fields(string(line[:n])) {
		pid, err := strconv.Atoi(word)
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	t.Cleanup(func() {
		for _, pid := range append(pids, cmd.Process.Pid) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		_ = cmd.Wait()
	})
	return pids
}

// TestSplitDaemons: who has made a session of its own is a daemon, and so is its child in another
// group. A delegate and its children are none.
func TestSplitDaemons(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, script      string
		daemons, delegate int
	}{
		{"a delegate and its child", `sleep 600 & echo $$ $!; wait`, 0, 2},
		{"a daemon", `setsid sh -c 'echo $$; exec sleep 600' & wait`, 1, 0},
		{"whose parent has ended", `setsid -f sh -c 'echo $$; exec sleep 600'`, 1, 0},
		{"with a child in a group of its own", `setsid sh -c 'set -m; sleep 600 & echo $$ $!; wait' & wait`, 2, 0},
		{"a process that is gone", `sh -c 'echo $$'`, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			pids := started(t, c.script)
			if c.daemons+c.delegate == 0 {
				for syscall.Kill(pids[0], 0) == nil {
					time.Sleep(time.Millisecond)
				}
			}
			daemons, delegates := SplitDaemons(pids)
			if len(daemons) != c.daemons || len(delegates) != c.delegate {
				t.Errorf("of %v daemons are %v, delegates %v", pids, daemons, delegates)
			}
		})
	}
	both := append(started(t, `echo $$; exec sleep 600`), started(t, `setsid sh -c 'echo $$; exec sleep 600' & wait`)...)
	if daemons, delegates := SplitDaemons(both); !slices.Equal(delegates, both[:1]) || !slices.Equal(daemons, both[1:]) {
		t.Errorf("of %v daemons are %v, delegates %v", both, daemons, delegates)
	}
}

// TestOlder: a process that began before another one is older, one that began in the same tick or is
// gone is not.
func TestOlder(t *testing.T) {
	t.Parallel()
	time.Sleep(30 * time.Millisecond)
	self, child := os.Getpid(), started(t, `echo $$; exec sleep 600`)[0]
	for _, c := range []struct {
		pid, than int
		want      bool
	}{
		{self, child, true}, {child, self, false}, {self, self, false}, {1 << 30, self, false}, {self, 1 << 30, false},
	} {
		if got := Older(c.pid, c.than); got != c.want {
			t.Errorf("%d, %d: %t", c.pid, c.than, got)
		}
	}
}

// TestMemberOfReaped: a process that is reaped while its network namespace is read has ended. The
// kernel answers EACCES in that moment, which is not the answer of a process that hides.
func TestMemberOfReaped(t *testing.T) {
	t.Parallel()
	rounds := 300
	if testing.Short() {
		rounds = 30
	}
	for range rounds {
		cmd := exec.Command("/bin/true")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		reaped := make(chan struct{})
		go func() {
			_ = cmd.Wait()
			close(reaped)
		}()
		for ended := false; !ended; {
			select {
			case <-reaped:
				ended = true
			default:
			}
			if _, _, err := memberOf(cmd.Process.Pid); err != nil {
				t.Fatal(err)
			}
		}
	}
}
