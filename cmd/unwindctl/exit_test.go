package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/testdata/nodetest"
)

// dead adds attachments that are dead, and whose DEL goes so.
func (n *machine) dead(many int, mode string) {
	n.Helper()
	n.netns("d")
	n.add(home, "d", n.pin("d"))
	e, d := n.entry("d"), n.entry("d")
	err := n.store.Update(context.Background(), func(tx *journal.Tx) error {
		e.Added.Host.BootID = "earlier"
		for i := range many {
			e.ContainerID, e.Number, e.Undo.State = fmt.Sprintf("d-%d", i), 0, journal.Live
			if err := nodetest.PutIn(tx, e); err != nil {
				return err
			}
		}
		return tx.Delete(d)
	})
	check(n, err)
	n.plan(map[string]string{"DEL": mode})
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
			term, stderr := nodetest.NewTerminal(t, 0)
			cmd := n.ctl("", "sweep")
			var stdout bytes.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, stderr
			check(t, cmd.Start())
			held := func() []string {
				files, _ := filepath.Glob(filepath.Join(n.dir, "held", "DEL.*"))
				return files
			}
			letGo := func() {
				n.plan(nil)
				for _, file := range held() {
					_ = os.Remove(file)
				}
			}
			workers := 0
			eventually(t, "the workers", func() bool {
				before := workers
				workers = len(held())
				time.Sleep(200 * time.Millisecond)
				return workers > 0 && workers == before
			})
			check(t, cmd.Process.Signal(c.sig))
			eventually(t, "the answer", func() bool { return strings.Contains(term.String(), "interrupted: ") })
			if c.twice {
				check(t, cmd.Process.Signal(c.sig))
				_ = cmd.Wait()
				if ws := cmd.ProcessState.Sys().(syscall.WaitStatus); !ws.Signaled() || ws.Signal() != c.sig {
					t.Errorf("it ended with %v", cmd.ProcessState)
				}
				if left := len(n.ids()); left != many {
					t.Errorf("%d are left, want all %d", left, many)
				}
				letGo()
				eventually(t, "all released", func() bool { n.sweep(home); return len(n.ids()) == 0 })
				return
			}
			letGo()
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
