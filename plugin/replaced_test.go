package plugin

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/journal"
)

// TestPowerLossOfALaterADD: the entry has a pending DEL of a later delegate alone, the
// container ID was added again past the journal, and the power fails in the DEL of both. What
// host-local has on the disk must not be forgotten.
func TestPowerLossOfALaterADD(t *testing.T) {
	stories(t, `
	chain bridge | kernel
	add a; plan kernel DEL fail; fails del a; plan
	pending a kernel
	past add a; reserved 1
	kill undone 1 del a; was-killed
	off a; until sweep; on-disk 0; leaves`, acts{
		"off":     func(s *story, w []string) { s.who(w[0]).powerOff() },
		"on-disk": func(s *story, _ []string) { s.nothingOnDisk() },
	})
}

// TestJournalReplaced: the journal is removed, or another ADD has set it aside, while a delegate runs. The ADD's entry is written anew.
func TestJournalReplaced(t *testing.T) {
	stories(t, `
	chain p0, "delayMS": 500 | p1 | p2 | p3
	either degrade: conf onJournalFailure degrade
	or fail: conf onJournalFailure fail
	plan p0 ADD late; start add a; awaits ADD p0
	either removed: lose $dir/state/journal.db
	or set aside by another: damaged
	wait add a; plan
	entry a live
	tries del a`, acts{"damaged": func(s *story, _ []string) {
		s.write(s.store.Path(), strings.Repeat("damaged ", 4096))
		s.must((&journal.Store{Dir: s.stateDir}).Update(s.Context(), func(*journal.Tx) error { return nil }))
	}})
}

// TestSweepsThatCannotFinish: a backup holds the bbolt file, so it can be read and not
// written. Sweeps run no DEL whose end they could not write.
func TestSweepsThatCannotFinish(t *testing.T) {
	stories(t, `
	chain p0 | p1
	add a; plan p1 DEL fail; state a removing; forgets
	shared
	sweep; sweep; sweep
	calls; leaves`, acts{"shared": func(s *story, _ []string) {
		f, err := os.Open(s.store.Path())
		s.must(err)
		s.Cleanup(func() { _ = f.Close() })
		s.must(syscall.Flock(int(f.Fd()), syscall.LOCK_SH))
	}})
}

// TestSameAddressAtOnce: two ADDs get the same address at once, of no pool. One of them waits for the
// other, and not each for the other until its time is over.
func TestSameAddressAtOnce(t *testing.T) {
	t.Parallel()
	worst := time.Duration(0)
	for range 5 {
		n := newNode(t)
		list := n.unwind(addressed(n, "")...)
		took := make(chan time.Duration)
		pods := []*pod{n.pod("a"), n.pod("b")}
		for _, p := range pods {
			go func() {
				began := time.Now()
				if _, err := p.add(list); err != nil {
					t.Error(err)
				}
				took <- time.Since(began)
			}()
		}
		worst = max(worst, <-took, <-took)
		for _, p := range pods {
			p.mustDel(list)
		}
	}
	if worst > 2*time.Second {
		t.Errorf("an ADD took %v", worst)
	}
}
