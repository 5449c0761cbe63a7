package plugin

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/undo"
)

// TestPowerLossOfALaterADD: the entry has a pending DEL of a later delegate alone, the
// container ID was added again past the journal, and the power fails in the DEL of both. What
// host-local has on the disk must not be forgotten.
func TestPowerLossOfALaterADD(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := []string{n.bridgePlugin(""), n.faulty("kernel", "")}
	list, bypass := n.unwind(chain...), n.plain(chain...)
	p := n.pod("a")
	p.mustAdd(list)
	n.plan(map[string]map[string]string{"kernel": {"DEL": "fail"}})
	if err := p.del(list); err == nil {
		t.Fatal("the DEL passed")
	}
	n.plan(nil)
	if e := p.entry(); e == nil || e.Pending() != 1 || e.Newest().Steps[0].Type != "faulty" {
		t.Fatalf("%+v", e)
	}
	p.mustAdd(bypass)
	if len(n.reserved()) != 1 {
		t.Fatal(n.reserved())
	}
	if err := n.killedAtPoint("undone", 1, func() error { return p.del(list) }); !wasKilled(err) {
		t.Fatal("not killed: ", err)
	}
	p.powerOff()
	p.until("sweep", nil)
	p.nothingOnDisk()
}

// TestJournalReplaced: the journal is removed, or another ADD has set it aside, while a delegate runs. The ADD's entry is written anew.
func TestJournalReplaced(t *testing.T) {
	t.Parallel()
	for what, breakIt := range map[string]func(n *node) error{
		"removed": func(n *node) error { return os.Remove(n.store.Path()) },
		"set aside by another": func(n *node) error {
			err := os.WriteFile(n.store.Path(), []byte(strings.Repeat("damaged ", 4096)), 0o600)
			s := &journal.Store{Dir: n.stateDir}
			return errors.Join(err, s.Update(n.Context(), func(*journal.Tx) error { return nil }))
		},
	} {
		for _, onFailure := range []string{"degrade", "fail"} {
			t.Run(what+", "+onFailure, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				n.conf["onJournalFailure"] = onFailure
				list := n.unwind(slowChain(n)...)
				p := n.pod("a")
				err := p.addWhile(list, 0, func() {
					if err := breakIt(n); err != nil {
						t.Error(err)
					}
				})
				if err != nil {
					t.Errorf("ADD: %v", err)
				}
				if e := p.entry(); e == nil || e.State != journal.Live {
					t.Errorf("the ADD has no live entry: %+v", e)
				}
				_ = p.del(list)
				n.nothingLeft()
			})
		}
	}
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

// TestSweepsThatCannotFinish: a backup holds the bbolt file, so it can be read and not
// written. Sweeps run no DEL whose end they could not write.
func TestSweepsThatCannotFinish(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.faulty("p0", ""), n.faulty("p1", ""))
	p := n.pod("a")
	p.mustAdd(list)
	n.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
	p.setState(journal.Removing)
	n.forgetCalls()
	f, err := os.Open(n.store.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		n.sweep(undo.DefaultBudgets)
	}
	if calls := n.calls(); len(calls) > 0 {
		t.Errorf("calls: %v", calls)
	}
}
