package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// terminal is a pseudo-terminal, with what is written to it.
type terminal struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (term *terminal) String() string {
	term.mu.Lock()
	defer term.mu.Unlock()
	return term.text.String()
}

// newTerminal makes a pseudo-terminal and returns its far end, for a program.
func newTerminal(t *testing.T) (term *terminal, program *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = master.Close() })
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = program.Close() })
	term = &terminal{}
	go func() {
		data := make([]byte, 4096)
		for {
			n, err := master.Read(data)
			term.mu.Lock()
			term.text.Write(data[:n])
			term.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return term, program
}

// screen is what a terminal shows of a text, line by line: with carriage returns and "erase to the
// end of the line".
func screen(text string) (lines []string) {
	for _, line := range strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n") {
		var shown []rune
		at := 0
		for rest := line; rest != ""; {
			switch {
			case strings.HasPrefix(rest, "\x1b[K"):
				shown, rest = shown[:min(at, len(shown))], rest[3:]
			case rest[0] == '\r':
				at, rest = 0, rest[1:]
			default:
				r := []rune(rest)[0]
				if rest = rest[len(string(r)):]; at < len(shown) {
					shown[at] = r
				} else {
					shown = append(shown, r)
				}
				at++
			}
		}
		lines = append(lines, string(shown))
	}
	return lines
}

// dead adds attachments that are dead, and whose DEL goes so.
func (n *machine) dead(many int, mode string) {
	n.Helper()
	n.netns("d")
	n.add(home, "d", n.pin("d"))
	e := n.entry("d")
	err := n.store.Update(context.Background(), func(tx *journal.Tx) error {
		e.Newest().Host.BootID = "earlier"
		for i := range many {
			e.ContainerID, e.Newest().Number, e.State = fmt.Sprintf("d-%d", i), 0, journal.Live
			if err := putIn(tx, e); err != nil {
				return err
			}
		}
		return tx.Delete(journal.Key{Network: network, ContainerID: "d", IfName: "eth0"})
	})
	if err != nil {
		n.Fatal(err)
	}
	n.plan(map[string]string{"DEL": mode})
}

// TestProgress: on a terminal a sweep shows how far it has come, and in the end nothing of it is
// left on the screen. Elsewhere there is none.
func TestProgress(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	n.dead(12, "fail")
	term, stderr := newTerminal(t)
	cmd := n.ctl("", "sweep")
	var stdout bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, stderr
	_ = cmd.Run()
	eventually(t, "the error", func() bool { return strings.Contains(term.String(), "error: 12 attachments could not") })
	text := term.String()
	for _, want := range []string{"1 of 12 attachments tried", "11 of 12 attachments tried", "level=WARN"} {
		if !strings.Contains(text, want) {
			t.Errorf("no %q in %q", want, text)
		}
	}
	for _, line := range screen(text) {
		if strings.Contains(line, " of 12 ") || line != "" && !strings.HasPrefix(line, "time=") && !strings.HasPrefix(line, "error: ") {
			t.Errorf("on the screen: %q", line)
		}
	}
	if strings.Contains(stdout.String(), "tried") {
		t.Errorf("stdout: %s", stdout.String())
	}
	if out := n.sweep(home); strings.Contains(out.stderr, " of 12 ") {
		t.Errorf("without a terminal: %s", out.stderr)
	}
	n.plan(nil)
	term, stderr = newTerminal(t)
	cmd = n.ctl("", "sweep")
	cmd.Stderr = stderr
	if err := cmd.Run(); err != nil {
		t.Error(err)
	}
	eventually(t, "the progress", func() bool { return strings.Contains(term.String(), "11 of 12 ") })
	time.Sleep(100 * time.Millisecond)
	if got := screen(term.String()); strings.Join(got, "") != "" {
		t.Errorf("left on the screen: %q", got)
	}
}

// TestInterrupted: what a sweep has begun when it is interrupted is finished, and nothing more is
// begun. A second signal ends it at once; a DEL that is cut off stays pending.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		sig   syscall.Signal
		twice bool
	}{{syscall.SIGINT, false}, {syscall.SIGTERM, false}, {syscall.SIGHUP, false}, {syscall.SIGINT, true}} {
		t.Run(fmt.Sprintf("%v, twice %t", c.sig, c.twice), func(t *testing.T) {
			t.Parallel()
			const many = 40
			n := newMachine(t)
			n.dead(many, "hold")
			term, stderr := newTerminal(t)
			cmd := n.ctl("", "sweep")
			var stdout bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			held := func() []string {
				files, _ := filepath.Glob(filepath.Join(n.dir, "held", "DEL.*"))
				return files
			}
			workers := 0
			eventually(t, "the workers", func() bool {
				before := workers
				workers = len(held())
				time.Sleep(200 * time.Millisecond)
				return workers > 0 && workers == before
			})
			if err := cmd.Process.Signal(c.sig); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the answer", func() bool { return strings.Contains(term.String(), "interrupted: ") })
			if c.twice {
				if err := cmd.Process.Signal(c.sig); err != nil {
					t.Fatal(err)
				}
				_ = cmd.Wait()
				if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); !ws.Signaled() || ws.Signal() != c.sig {
					t.Errorf("it ended with %v", cmd.ProcessState)
				}
				if left := len(n.ids()); left != many {
					t.Errorf("%d are left, want all %d", left, many)
				}
				n.plan(nil)
				for _, file := range held() {
					_ = os.Remove(file)
				}
				eventually(t, "all released", func() bool { n.sweep(home); return len(n.ids()) == 0 })
				return
			}
			n.plan(nil)
			for _, file := range held() {
				_ = os.Remove(file)
			}
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != 130 {
				t.Errorf("exit code %d", code)
			}
			if left := len(n.ids()); left != many-workers {
				t.Errorf("%d are left, of %d with %d workers", left, many, workers)
			}
			want := fmt.Sprintf("40 attachments: %d released, %d not tried.\n", workers, many-workers)
			if !strings.HasSuffix(stdout.String(), want) || strings.Count(stdout.String(), "\n") != workers+2 {
				t.Errorf("stdout, want %d rows and %q:\n%s", workers, want, stdout.String())
			}
			want = fmt.Sprintf("error: %d attachments not tried; run unwindctl sweep again", many-workers)
			eventually(t, "the error", func() bool { return strings.Contains(term.String(), want) })
			if text := term.String(); strings.Contains(text, " tried\r") || strings.Count(text, "error: ") != 1 {
				t.Errorf("on the terminal: %q", text)
			}
		})
	}
}
