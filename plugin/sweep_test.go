package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// sweep runs a person's sweep in this process. It acts in the place of the runtime, since process 1
// of the machine is in other namespaces than the tests: see alive.Node.SameNamespaces.
func (n *node) sweep(budgets undo.Budgets) []sweep.Finding {
	n.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	p := &Plugin{Stderr: n.Output(), Budgets: budgets, CacheDir: n.cacheDir()}
	findings, err := p.sweepAsRuntime(ctx, n.stateDir, sweep.Job{})
	if err != nil {
		n.Errorf("sweep: %v", err)
	}
	return findings
}

// copies writes changed copies of the pod's entry for other containers: a-1, a-2 and so on. The
// faulty plugins hold for these too what they hold for the pod.
func (p *pod) copies(many int, change func(i int, e *journal.Entry)) {
	p.Helper()
	err := p.store.Update(p.Context(), func(tx *journal.Tx) error {
		for i := range many {
			e, err := tx.Get(p.key())
			if err != nil {
				return err
			}
			state := e.State
			e.ContainerID, e.Newest().Number = fmt.Sprintf("%s-%d", p.ContainerID, i+1), 0
			change(i, e)
			for _, e.State = range []journal.State{journal.Adding, state} {
				if err := tx.Put(e); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		p.Fatal(err)
	}
	for _, name := range p.taken() {
		for i := range many {
			if rest, is := strings.CutPrefix(name, p.ContainerID+"."); is {
				p.write(filepath.Join(p.faultyDir(), "taken", fmt.Sprintf("%s-%d.%s", p.ContainerID, i+1, rest)), "")
			}
		}
	}
}

// TestSweepAfterReboot: there are many entries of an earlier boot. The ADD of a new sandbox settles
// what its own pod left, and no more. One sweep releases the rest: several attachments at once,
// each in the order of its chain, and no two DELs of one at once.
func TestSweepAfterReboot(t *testing.T) {
	t.Parallel()
	const many = 60
	n := newNode(t)
	list := n.unwind(n.faulty("p0", `, "delayMS": 20`), n.faulty("p1", `, "delayMS": 20`))
	p := n.pod("a")
	p.mustAdd(list)
	p.edit(func(g *journal.Generation) { g.Host.BootID = earlier })
	p.copies(many, func(i int, e *journal.Entry) { e.Pod.Name = "other" })
	n.forgetCalls()
	n.plan(map[string]map[string]string{"*": {"DEL": "late"}})

	next := p.nextSandbox("next")
	next.mustAdd(list)
	n.wantCalls("ADD of the day after", "DEL p1", "DEL p0", "ADD p0", "ADD p1")

	for _, f := range n.sweep(undo.DefaultBudgets) {
		if f.Released == (f.Key == next.key()) || f.Err != nil {
			t.Errorf("%s: %+v", f.Key, f)
		}
		if buried := n.tombstone(f.Key); f.Released && (buried == nil || buried.Reason != "it was added before the last boot") {
			t.Errorf("%s: tombstone %+v", f.Key, buried)
		}
	}
	if together := n.together("p1", "p0"); together < 2 {
		t.Errorf("%d attachments at once", together)
	}
	if got := len(n.calls()); got != 2*many {
		t.Errorf("%d DELs, want %d", got, 2*many)
	}
	next.mustDel(list)
	n.nothingLeft()
}

// tombstone returns the tombstone of an attachment, or nil.
func (n *node) tombstone(key journal.Key) (tomb *journal.Tombstone) {
	n.Helper()
	err := n.store.View(n.Context(), func(tx *journal.Tx) (err error) {
		tomb, err = tx.Tombstone(key)
		return err
	})
	if err != nil {
		n.Fatal(err)
	}
	return tomb
}

// together checks that the DELs of each attachment ran in an order, one after the other. It returns
// how many attachments had theirs at the same time.
func (n *node) together(order ...string) (most int) {
	n.Helper()
	running, done := map[string]string{}, map[string][]string{}
	for line := range strings.Lines(read(n, filepath.Join(n.faultyDir(), "log"))) {
		var l logged
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			n.Fatal(err)
		}
		if l.Phase == "end" {
			delete(running, l.ContainerID)
			continue
		}
		if other, is := running[l.ContainerID]; is {
			n.Errorf("%s: %s during %s", l.ContainerID, l.Instance, other)
		}
		running[l.ContainerID] = l.Instance
		done[l.ContainerID] = append(done[l.ContainerID], l.Instance)
		most = max(most, len(running))
	}
	for id, instances := range done {
		if !slices.Equal(instances, order) {
			n.Errorf("%s: %q, want %q", id, instances, order)
		}
	}
	return most
}

// TestTwoSweeps: two processes sweep at once. Each DEL runs once, and neither reports an error for
// what the other one does.
func TestTwoSweeps(t *testing.T) {
	t.Parallel()
	const many = 20
	n := newNode(t)
	chain := []string{n.faulty("p0", `, "delayMS": 20`), n.faulty("p1", `, "delayMS": 20`)}
	p := n.pod("a")
	p.mustAdd(n.unwind(chain...))
	p.edit(func(g *journal.Generation) { g.Host.BootID = earlier })
	p.copies(many, func(int, *journal.Entry) {})
	n.forgetCalls()
	n.plan(map[string]map[string]string{"*": {"DEL": "late"}})
	outs := make(chan outcome)
	for range 2 {
		go func() { outs <- n.ask("GC", "1.0.0", nil, chain...) }()
	}
	for range 2 {
		if out := <-outs; out.code != 0 {
			t.Errorf("GC: %s", out.stdout)
		}
	}
	if n.together("p1", "p0"); len(n.calls()) != 2*(many+1) {
		t.Errorf("%d DELs, want %d", len(n.calls()), 2*(many+1))
	}
	n.nothingLeft()
}

// TestRoomAfterFailedADD: a pool that is full of dead pods' addresses has room for the runtime's
// second try. The ADD leaves other networks alone.
func TestRoomAfterFailedADD(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	other := *n
	other.network, other.bridge = n.network+"-other", "o"+n.bridge
	other.subnet = strings.TrimSuffix(n.subnet, "0/24") + "128/25"
	elsewhere := other.pod("elsewhere")
	elsewhere.mustAdd(other.unwind(other.bridgePlugin("")))
	n.subnet = strings.TrimSuffix(n.subnet, "24") + "29"
	list := n.unwind(n.bridgePlugin(""))
	elsewhere.dropNetNS()
	for i := range 5 {
		p := n.pod(fmt.Sprintf("old%d", i))
		p.mustAdd(list)
		p.dropNetNS()
	}
	p := n.pod("a")
	if _, err := p.add(list); err == nil || !strings.Contains(err.Error(), "no IP addresses available") {
		t.Fatalf("ADD: %v", err)
	}
	p.mustAdd(list)
	if all := n.entries(); len(all) != 2 || elsewhere.entry() == nil || len(other.reserved()) != 1 {
		t.Errorf("%d entries, %v", len(all), other.reserved())
	}
	p.mustDel(list)
	other.sweep(undo.DefaultBudgets)
	n.nothingLeft()
	other.nothingLeft()
}

// TestSweepOfOneAddress: several dead attachments with one address do not keep each other.
func TestSweepOfOneAddress(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.faulty("p0", `, "address": "192.0.2.7/24", "delayMS": 20`), n.faulty("p1", `, "delayMS": 20`))
	p := n.pod("a")
	p.mustAdd(list)
	p.edit(func(g *journal.Generation) { g.Host.BootID = earlier })
	p.copies(7, func(int, *journal.Entry) {})
	n.plan(map[string]map[string]string{"*": {"DEL": "late"}})
	sweeps := 0
	for len(n.entries()) > 0 && sweeps < 10 {
		n.sweep(undo.DefaultBudgets)
		sweeps++
	}
	if sweeps > 2 { // in the first one, those that are not undone yet may keep others
		t.Errorf("it took %d sweeps", sweeps)
	}
	n.nothingLeft()
}

// TestReasonStays: the reason for a release stays that of the sweep that began it, however many
// sweeps it takes.
func TestReasonStays(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("a")
	p.mustAdd(n.unwind(n.faulty("p0", "")))
	p.dropNetNS()
	n.plan(map[string]map[string]string{"p0": {"DEL": "fail"}})
	for range 3 {
		found := n.sweep(undo.DefaultBudgets)
		if e := p.entry(); found[0].Reason != alive.NetNSGone || e.Reason != found[0].Reason.Text || e.Cause != found[0].Reason.Code {
			t.Errorf("found: %q, on record: %q", found[0].Reason, e.Reason)
		}
	}
	n.plan(nil)
	n.sweep(undo.DefaultBudgets)
	if tomb := n.tombstone(p.key()); tomb == nil || tomb.Reason != "its network namespace is gone" {
		t.Errorf("there is a tombstone: %t", tomb != nil)
	}
	n.nothingLeft()
}

// TestSweepOfOrphans: unwind was killed, and only delegates hold the lock of an attachment. If it
// is dead, they are killed when their time is over, and it is settled. As long as it lives, the
// holder is left alone: it may be a daemon.
func TestSweepOfOrphans(t *testing.T) {
	t.Parallel()
	for _, state := range []journal.State{journal.Adding, journal.Removing, journal.Live} {
		t.Run(string(state), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["gracePeriod"] = "1h"
			list := n.unwind(n.faulty("p0", ""), n.faulty("p1", ""))
			p := n.pod("a")
			switch state {
			case journal.Adding:
				n.plan(map[string]map[string]string{"p0": {"ADD": "kill-parent"}})
				if _, err := p.add(list); !wasKilled(err) {
					t.Fatalf("ADD: %v", err)
				}
			case journal.Removing:
				p.mustAdd(list)
				n.plan(map[string]map[string]string{"p1": {"DEL": "kill-parent"}})
				if err := p.del(list); !wasKilled(err) {
					t.Fatalf("DEL: %v", err)
				}
				p.setState(journal.Removing) // as after half a second
			case journal.Live:
				p.mustAdd(list)
				p.holdLock()
			}
			n.plan(nil)
			var holders []int
			eventually(t, "one holds the lock, and none waits for its turn any more", func() bool {
				holders = p.holders()
				return len(holders) == 1
			})
			budgets := undo.DefaultBudgets
			for _, budgets.Orphans = range []time.Duration{time.Hour, time.Millisecond} {
				time.Sleep(2 * time.Millisecond)
				n.sweep(budgets)
				ends := state != journal.Live && budgets.Orphans < time.Hour
				err := syscall.Kill(holders[0], 0)
				if e := p.entry(); ends != errors.Is(err, syscall.ESRCH) || e == nil {
					t.Errorf("orphans have %s: the delegate: %v, the entry: %+v", budgets.Orphans, err, e)
				}
			}
			if state != journal.Live {
				p.wantSecondDEL(time.Hour)
				// The delegate was killed, so it gets one more DEL.
				p.edit(func(g *journal.Generation) {
					for i := range g.Steps {
						g.Steps[i].RepeatAt = 1
					}
				})
			} else {
				p.dropNetNS() // it is dead by now, so what holds its lock is killed
			}
			eventually(t, "settled", func() bool {
				n.sweep(undo.DefaultBudgets)
				return p.entry() == nil
			})
			n.nothingLeft()
		})
	}
}

// TestSecondDELInGracePeriod: a sweep that knows no network's configuration schedules the second
// DEL of a killed delegate by the grace period that the attachment's network had at the ADD.
func TestSecondDELInGracePeriod(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.conf["gracePeriod"] = "1s"
	p := n.pod("a")
	p.mustAdd(n.unwind(n.faulty("p0", "")))
	p.dropNetNS()
	n.plan(map[string]map[string]string{"p0": {"DEL": "crash"}})
	n.sweep(undo.DefaultBudgets)
	p.wantSecondDEL(time.Second)
	n.plan(nil)
	eventually(t, "the second DEL", func() bool {
		n.sweep(undo.DefaultBudgets)
		return p.entry() == nil
	})
	n.nothingLeft()
}

// wantSecondDEL checks that the pod's one pending step gets its second DEL after a grace period
// that has just begun.
func (p *pod) wantSecondDEL(grace time.Duration) {
	p.Helper()
	e := p.entry()
	if e == nil || e.Pending() == 0 {
		p.Fatalf("the journal has %+v, want steps", e)
	}
	for _, s := range e.Newest().Steps {
		in := time.Duration(s.RepeatAt - journal.BootNanos())
		if in > grace || in < grace-time.Minute {
			p.Errorf("the second DEL of %s is due in %s, want %s", s.Type, in, grace)
		}
	}
}

// holdLock starts a process that holds the pod's lock as a delegate does.
func (p *pod) holdLock() {
	p.Helper()
	f, err := os.OpenFile(p.store.LockPath(p.key()), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		p.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		p.Fatal(err)
	}
	cmd := exec.Command("sleep", "60")
	cmd.ExtraFiles = make([]*os.File, delegate.LockFD-3+1)
	cmd.ExtraFiles[delegate.LockFD-3] = f
	if err := cmd.Start(); err != nil {
		p.Fatal(err)
	}
	go func() { _ = cmd.Wait() }()
	p.Cleanup(func() { _ = cmd.Process.Kill() })
}

// holders returns the processes that hold the pod's lock.
func (p *pod) holders() []int {
	p.Helper()
	f, err := os.Open(p.store.LockPath(p.key()))
	if err != nil {
		p.Fatal(err)
	}
	defer f.Close()
	pids, err := host.HoldersOf(f, delegate.LockFD)
	if err != nil {
		p.Fatal(err)
	}
	return pids
}

// sweepAsRuntime is Sweep, by a process that the runtime started.
func (p *Plugin) sweepAsRuntime(ctx context.Context, stateDir string, job sweep.Job) ([]sweep.Finding, error) {
	conf := netconf.DefaultConf()
	conf.StateDir, conf.LogLevel = stateDir, slog.LevelWarn
	o, closeLog := p.newOp(&skel.CmdArgs{}, conf)
	defer closeLog()
	o.node.Invoked = true
	return sweep.New(o.w, job).Run(ctx)
}
