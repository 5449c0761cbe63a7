package plugin

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// hangings are the things that can hang in a STATUS. They return the chain.
var hangings = []struct {
	name string
	hang func(n *node) []string
	code uint
}{
	{"a delegate hangs", planned("hang"), 50},
	{"a delegate ignores SIGTERM", planned("ignore-term"), 50},
	{"a daemon holds a delegate's output", planned("daemon"), 0},
	{"a delegate hangs, and a daemon holds its output", func(n *node) []string { return []string{n.hangingWithDaemon()} }, 50},
	{"the journal's queue is held", func(n *node) []string {
		n.makeJournal()
		breakages["queue that a stranger holds"](n)
		return planned("ok")(n)
	}, 0},
	{"the journal's file is held", func(n *node) []string {
		n.makeJournal()
		n.flock(n.store.Path())
		return planned("ok")(n)
	}, 0},
	{"a DEL of the sweep hangs", func(n *node) []string {
		n.deadPod("hang")
		return planned("ok")(n)
	}, 0},
	{"a daemon holds the output of a DEL of the sweep", func(n *node) []string {
		n.deadPod("daemon")
		return planned("ok")(n)
	}, 0},
	{"the lock of host-local's pool is held", func(n *node) []string {
		list := n.unwind(n.bridgePlugin(""))
		p := n.pod("a")
		p.mustAdd(list)
		p.dropNetNS()
		n.flock(filepath.Join(n.dataDir(), n.network, "lock"))
		return planned("ok")(n)
	}, 0},
}

// planned is a chain of two, one of which has its STATUS in this mode.
func planned(mode string) func(n *node) []string {
	return func(n *node) []string {
		data, err := os.ReadFile(filepath.Join(n.faultyDir(), "plan.json"))
		plan := map[string]map[string]string{}
		if err == nil {
			err = json.Unmarshal(data, &plan)
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			n.Fatal(err)
		}
		plan["asked"] = map[string]string{"STATUS": mode}
		n.plan(plan)
		return []string{n.faulty("other", ""), n.faulty("asked", "")}
	}
}

// hangingWithDaemon makes a plugin that never ends, and starts a process outside its process group
// that does not end either.
func (n *node) hangingWithDaemon() string {
	n.script("hanging", "setsid sleep 20 & exec sleep 20")
	return `{"type": "hanging"}`
}

// deadPod leaves an attachment whose namespace is gone, with its DEL in this mode.
func (n *node) deadPod(mode string) {
	n.Helper()
	p := n.pod("a")
	p.mustAdd(n.unwind(n.faulty("p0", ""), n.faulty("p1", "")))
	p.dropNetNS()
	n.plan(map[string]map[string]string{"p1": {"DEL": mode}})
}

// flock holds the lock of a file until it is unlocked, at the latest when the test ends.
func (n *node) flock(path string) (unlock func()) {
	n.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		n.Fatal(err)
	}
	n.Cleanup(func() { _ = f.Close() })
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		n.Fatal(err)
	}
	return func() { _ = f.Close() }
}

// TestStatusEndsInTime: each thing hangs that a STATUS may wait for. STATUS still ends in time, and
// fails for the hang only if it is in a delegate's own STATUS. No delegate is left.
func TestStatusEndsInTime(t *testing.T) {
	t.Parallel()
	for _, tt := range hangings {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["onJournalFailure"] = "fail"
			chain := tt.hang(n)
			n.forgetCalls()
			out := n.status("1.1.0", nil, chain...)
			if out.said.Code != tt.code || tt.code != 0 && !strings.Contains(out.said.Msg, "timed out") {
				t.Errorf("exit %d, %s; want code %d\n%s", out.code, out.stdout, tt.code, out.stderr)
			}
			for _, l := range n.callLog() {
				if err := syscall.Kill(l.PID, 0); !errors.Is(err, syscall.ESRCH) {
					t.Errorf("%s of %s is still there: %v", l.Command, l.Instance, err)
				}
			}
			if strings.Contains(tt.name, "sweep hangs") && n.entries()[0].Pending() == 0 {
				t.Error("no DEL is pending")
			}
		})
	}
}

// TestStatusWhileJournalIsTaken: a sweep that cannot write its outcome is cut off too, and the next
// one repeats it.
func TestStatusWhileJournalIsTaken(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.deadPod("hang")
	answer := make(chan outcome)
	go func() { answer <- n.status("1.0.0", nil, planned("ok")(n)...) }()
	n.running("DEL p1")
	unlock := n.flock(filepath.Join(n.stateDir, "journal.lock"))
	n.wantStatus("STATUS", <-answer, 0, "")
	unlock()
	n.plan(nil)
	n.sweepsAll(0, n.faulty("other", ""))
	n.nothingLeft()
}

// TestStatusInTwoSeconds: several things hang at once. The test runs alone, to show that STATUS
// keeps its two seconds, plus the start of a process; the best of three counts.
func TestStatusInTwoSeconds(t *testing.T) {
	n := newNode(t)
	n.deadPod("hang")
	chain := append(planned("ignore-term")(n), n.hangingWithDaemon())
	for try := range 3 {
		began := time.Now()
		out := n.status("1.1.0", nil, chain...)
		took := time.Since(began)
		switch cutOff := out.said.Msg == "unwind: STATUS timed out: a delegate or a configuration file hangs"; {
		case out.said.Code != 50:
			t.Fatalf("exit %d, %s; want code 50", out.code, out.stdout)
		case cutOff && took < 2500*time.Millisecond:
			return
		case try == 2:
			t.Errorf("STATUS took %s: %s", took, out.stdout)
		}
	}
}
