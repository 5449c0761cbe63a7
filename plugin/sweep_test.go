package plugin

import (
	"context"
	"io"
	"log/slog"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/env"
	"cni-unwind/plugin/plugintest/sandbox"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// sweep runs a sweep in this process, as unwindctl sweep does.
func (n *node) sweep() []sweep.Finding {
	n.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	findings, err := sweep.New(n.worker(), sweep.Options{}).Run(ctx)
	if err != nil {
		n.Errorf("sweep: %v", err)
	}
	return findings
}

// worker returns a worker that sweeps in this process. It sets Invoked, because this process is not
// in the namespaces of process 1 (see facts.Node.SameNamespaces).
func (n *node) worker() *undo.Worker {
	conf := netconf.DefaultConf()
	conf.StateDir, conf.LogLevel = n.stateDir, slog.LevelWarn
	o, closeLog := n.plugin().newOp(&skel.CmdArgs{}, conf)
	n.Cleanup(closeLog)
	o.Node.Invoked = true
	return o.Worker
}

// plugin returns an unwind that works in this process.
func (n *node) plugin() *Plugin {
	budgets := env.BudgetsOf(strings.Join(n.budgets, " "))
	return &Plugin{Env: undo.Env{Stderr: n.Output(), Budgets: budgets, Runner: &delegate.Processes{}},
		Stdout: io.Discard, CacheDir: n.cacheDir()}
}

// TestSweepAfterReboot: many records are from an earlier boot. The ADD of a new sandbox releases
// only what its own pod left. One sweep releases the rest: several attachments at the same time,
// but the DELs of each attachment one after another, in reverse chain order.
func TestSweepAfterReboot(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	n := newNode(t)
	n.chain(p0.delay(20), p1.delay(20))
	a := n.add("a")
	a.ofEarlierBoot()
	a.copies(60, "other")
	n.forgetCalls()
	n.plan(everyone.DEL("late"))
	next := a.nextSandbox("next")
	next.add()
	n.wantCalls("DEL p1", "DEL p0", "ADD p0", "ADD p1")
	n.sweep()
	n.wantRecords(1)
	next.wantRecord(journal.Live)
	n.wantTogether(2)
	n.wantTimes(60, "DEL p0")
	n.wantTimes(60, "DEL p1")
	n.wantCounters("swept earlier-boot 61")
	next.del()
	n.wantClean()
}

// abandoned returns an attachment's record in state abandoned (see unwindctl forget), or nil.
func (n *node) abandoned(key journal.Key) (mark *journal.Record) {
	n.Helper()
	err := n.store.View(n.Context(), func(tx *journal.Tx) (err error) {
		all, err := tx.Records(key)
		for _, e := range all {
			if e.State == journal.Abandoned {
				mark = e
			}
		}
		return journal.IgnoreDamaged(err)
	})
	must(n, err)
	return mark
}

// TestTwoSweeps: two processes sweep at the same time. Each DEL runs once, and neither process
// reports an error because of the other one.
func TestTwoSweeps(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	n := newNode(t)
	n.chain(p0.delay(20), p1.delay(20))
	a := n.add("a")
	a.ofEarlierBoot()
	a.copies(20, "")
	n.forgetCalls()
	n.plan(everyone.DEL("late"))
	first, second := n.beginGC(), n.beginGC()
	first.passes()
	second.passes()
	n.wantTogether(1)
	n.wantTimes(21, "DEL p0")
	n.wantTimes(21, "DEL p1")
	n.wantClean()
}

// TestRoomAfterFailedADD: a pool is full of dead pods' addresses. After an ADD fails, unwind
// releases them, so the runtime's second ADD succeeds. The failed ADD releases nothing in other
// networks.
func TestRoomAfterFailedADD(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge)
	network := strings.TrimSuffix(n.subnet, "0/24")
	other := n.newNetworkOn("o", "other")
	other.subnet = network + "128/25"
	elsewhere := other.add("elsewhere")
	n.subnet = network + "0/29"
	all := n.crowd(5, "all")
	elsewhere.dropNetNS()
	for _, p := range all {
		p.dropNetNS()
	}
	a := n.newPod("a")
	n.wantError(a.tryAdd(), "no IP addresses available")
	a.add()
	n.wantRecords(2)
	elsewhere.wantKept()
	other.wantReserved(1)
	a.del()
	n.sweep()
	n.wantClean()
}

// dels returns the instances of the faulty plugins that got a DEL of the pod.
func (p *pod) dels() (instances []string) {
	p.Helper()
	for _, l := range p.callLog() {
		if l.Command == "DEL" && l.ContainerID == p.ContainerID {
			instances = append(instances, l.Instance)
		}
	}
	return instances
}

// message matches the message in a line of the log.
var message = regexp.MustCompile(` msg=(?:"([^"]*)"|(\S+))`)

// addOwing adds a pod, and makes p1's DEL fail. It sets the recorded number of tries, and makes the
// pending DEL due now.
func (n *node) addOwing(name string, tries int) *pod {
	n.Helper()
	n.chain(p0, p1)
	n.plan()
	p := n.add(name)
	n.plan(p1.DEL("fail"))
	n.wantError(p.tryDel())
	n.forgetCalls()
	p.edit(func(e *journal.Record) {
		e.Steps[0].Tries, e.Steps[0].Next.At = tries, 0
	})
	return p
}

// retryIn makes the pod's first pending DEL due after a pause.
func (p *pod) retryIn(pause time.Duration) {
	p.Helper()
	p.edit(func(e *journal.Record) { e.Steps[0].Next.At = journal.BootNanos() + int64(pause) })
}

// TestCrashLoop: a pod has many old sandboxes, each with a DEL that fails. The pod's next ADD
// retries the DELs whose pause is over. The pod's later ADDs retry no DEL.
func TestCrashLoop(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := n.addOwing("a", 7)
	a.copies(12, "")
	n.pauseLast(8, 25*time.Second)
	b := a.nextSandbox("b")
	b.add()
	n.wantTimes(5, "DEL p1")
	n.forgetCalls()
	c := a.nextSandbox("c")
	c.add()
	n.wantCalls("ADD p0", "ADD p1")
	d := a.nextSandbox("d")
	d.add()
	n.wantCalls("ADD p0", "ADD p1")
	n.plan()
	b.del()
	c.del()
	d.del()
	n.sweep()
	n.wantClean()
}

// TestQuiet: a DEL fails with a different message each time, and succeeds in the end. The log has
// one line for the first failure and one for the release, plus one if the error code changes. The
// plugin's stderr is passed on only once.
func TestQuiet(t *testing.T) {
	const failed = "DEL failed and is pending"
	type failure struct {
		name, script string
		logged       []string
	}
	failures := []failure{
		{"on stdout", `echo words >&2; echo "{\"code\": 11, \"msg\": \"process $$\"}"; exit 1`,
			[]string{failed, "released"}},
		{"on stderr only", `echo "words $$" >&2; exit 1`, []string{failed, "released"}},
		{"killed", `echo "words $$" >&2; kill -9 $$`, []string{failed, "released"}},
		{"with another code once", `echo words >&2; [ -e $0.code ] && code=12; touch $0.code
			echo "{\"code\": ${code:-11}}"; exit 1`, []string{failed, failed, "released"}},
	}
	each1(t, failures, func(t *testing.T, failure failure) {
		n := newNode(t)
		log, well := filepath.Join(n.dir, "log"), filepath.Join(n.dir, "well")
		n.conf["logLevel"], n.conf["logFile"] = nil, log
		n.script("p1", `[ $CNI_COMMAND = ADD ] && echo "{\"cniVersion\": \"1.0.0\"}" && exit
			[ -e `+well+` ] && exit; `+failure.script)
		n.chain(p0, named("p1"))
		wantWords := func(count int) {
			n.Helper()
			n.wantCount("words on stderr", strings.Count(n.said.stderr, "words"), count)
		}
		a := n.add("a")
		_ = a.tryGive("DEL", given{})
		wantWords(1)
		for range 3 {
			_ = n.tryGC()
			wantWords(0)
		}
		n.write(well, "")
		n.gc()
		wantWords(0)
		var messages []string
		for _, m := range message.FindAllStringSubmatch(read(n, log), -1) {
			messages = append(messages, m[1]+m[2])
		}
		n.wantEqual("logged", messages, failure.logged)
		n.wantClean()
	})
}

// These are copies of other packages' constants: of decide's manyTries and of sweep's maxFailing.
const (
	often      = 20
	maxFailing = 20
)

// TestPace: a STATUS retries only 20 of the attachments whose DELs fail, those with the fewest
// tries first. A GC retries all.
func TestPace(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	const pods = 40
	n := newNode(t)
	n.conf["logLevel"] = nil
	a := n.addOwing("a", often+10)
	a.dropNetNS()
	a.copies(pods-1, "")
	n.status()
	n.wantTimes(maxFailing, "DEL p1")
	n.status()
	n.wantTimes(pods, "DEL p1")
	n.status()
	n.wantTimes(pods, "DEL p1")
	tried := map[string]bool{}
	for _, l := range n.callLog() {
		tried[l.ContainerID] = true
	}
	n.want(len(tried) == pods, "%d attachments had their turn", len(tried))
	n.forgetCalls()
	_ = n.tryGC()
	n.wantTimes(pods, "DEL p1")
	n.plan()
	n.gc()
	n.wantClean()
}

// TestAgentKeepsPauses: many DELs fail. A sweep by the agent retries at most 20 of them, and none
// before its pause is over. unwindctl sweep retries all.
func TestAgentKeepsPauses(t *testing.T) {
	sandbox.Concurrent(t)
	t.Parallel()
	n := newNode(t)
	a := n.addOwing("a", 2)
	a.dropNetNS()
	a.copies(24, "")
	wantSweepOfAgent := func(dels int) {
		n.Helper()
		n.forgetCalls()
		_, err := n.plugin().Sweep(n.Context(), n.stateDir, sweep.Options{Periodic: true})
		must(n, err)
		n.wantTimes(dels, "DEL p1")
		n.forgetCalls()
	}
	// Up to the 20th try, a DEL's pause is at most 30 s, so it is over before the agent's next sweep,
	// a minute later.
	n.pauseLast(25, 0)
	wantSweepOfAgent(20)
	n.pauseLast(25, 0)
	wantSweepOfAgent(20)
	n.pauseLast(25, 4*time.Minute)
	wantSweepOfAgent(0)
	n.sweep()
	n.wantTimes(25, "DEL p1")
	n.plan()
	n.pauseLast(25, 0)
	wantSweepOfAgent(20)
	wantSweepOfAgent(5)
	n.wantRecords(0)
	n.wantClean()
}

// TestForeign: the disk is a clone or a backup of another machine's. A sweep runs no DEL of that
// machine's pods, because that machine may still use their addresses. The sweep removes exactly
// these pods' host-local files from this disk, even files in the format of old host-local releases.
// The runtime's own DEL still runs the plugins, as without unwind.
func TestForeign(t *testing.T) {
	copied := oneOf("live, STATUS", "live, GC", "live, sweep", "DEL pending", "ADD failed", "ADD cut off")
	each1(t, copied, func(t *testing.T, what choice) {
		n := newNode(t)
		n.chain(bridge, p1)
		sweepBy := func() { n.gc() }
		a := n.newPod("a")
		switch {
		case what.is("live, STATUS"):
			sweepBy = func() { n.status() }
			a.add()
		case what.is("live, GC"):
			a.add()
		case what.is("live, sweep"):
			sweepBy = func() { n.sweep() }
			a.add()
		case what.is("DEL pending"):
			a.add()
			n.plan(p1.DEL("fail"))
			n.wantError(a.tryDel())
		case what.is("ADD failed"):
			n.plan(p1.ADD("fail-effect"), p1.DEL("fail"))
			n.wantError(a.tryAdd())
		case what.is("ADD cut off"):
			n.plan(p1.ADD("kill-parent-effect"))
			n.wantKilled(a.tryAdd())
			a.awaitLock()
		}
		n.plan()
		a.ofAnotherMachine()
		a.dropNetNS()
		n.reserve(n.ip(100), "a", "eth1")
		n.reserve(n.ip(101), "aa", "eth0")
		n.reserve(n.ip(102), "b", "eth0")
		n.reserve(n.ip(99), "a") // as old host-local releases wrote it
		n.forgetCalls()
		n.until(0, sweepBy)
		n.wantCalls()
		n.wantOwners(n.ip(100)+" a eth1", n.ip(101)+" aa eth0", n.ip(102)+" b eth0")
		n.wantRecords(0)
		a.del()
		n.wantCalls("DEL p1")
		n.wantLocks(0)
	})
}

// TestForeignContainerIDAgain: this disk is a copy of another machine's, and an ADD here has the
// container ID of an attachment of that machine. unwind runs no DEL of that attachment, but removes
// its host-local file from this disk.
func TestForeignContainerIDAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(bridge, p1)
	a := n.add("a")
	a.ofAnotherMachine()
	a.dropNetNS()
	n.forgetCalls()
	a.move("a")
	a.add()
	n.wantReserved(1)
	n.wantCalls("ADD p1")
	a.wantRecord(journal.Live, 2, 1)
	a.del()
	n.wantClean()
}

// TestReboot: pods are from an earlier boot. Their files on disk and, in this test, their rules
// still exist. Any sweep releases everything, and removes the pods from libcni's cache. So the
// runtime's later DEL has no prevResult.
func TestReboot(t *testing.T) {
	sweeps := oneOf("STATUS", "GC", "sweep", "GC of the network, renamed")
	each1(t, sweeps, func(t *testing.T, by choice) {
		n := newNode(t)
		n.chain(bridge.masq(), firewall, portmap, faulty("last"))
		a, b := n.add("a"), n.add("b")
		a.reboot()
		b.reboot()
		n.forgetCalls()
		switch {
		case by.is("STATUS"):
			n.until(0, func() { n.status() })
		case by.is("GC"):
			n.until(0, func() { n.gc() })
		case by.is("sweep"):
			n.until(0, func() { n.sweep() })
		case by.is("GC of the network, renamed"):
			renamed := n.newNetwork("renamed")
			n.until(0, func() { renamed.gc() })
		}
		n.wantClean()
		n.wantCalls("DEL last", "DEL last")
		a.wantGone()
		b.wantGone()
		a.wantUncached()
		b.wantUncached()
		a.del()
		b.del()
		n.wantCalls("DEL last", "DEL last")
		n.wantClean()
	})
}

// TestForget forgets a dead attachment. No DEL runs, so what the plugin allocated remains. The
// runtime's DEL succeeds without running a plugin, and the container ID can be used again.
func TestForget(t *testing.T) {
	each1(t, oneOf("intact", "damaged"), func(t *testing.T, record choice) {
		n := newNode(t)
		n.chain(p0, p1)
		n.plan(p1.ADD("fail-effect"), p1.DEL("fail"))
		a := n.newPod("a")
		n.wantError(a.tryAdd())
		if record.is("damaged") {
			a.damage()
		}
		n.forgetCalls()
		a.giveUp()
		n.wantEvents("", "forgotten a ")
		a.wantAbandoned()
		n.wantLocks(0)
		a.del()
		n.wantCalls()
		n.wantTaken("a.eth0.p1")
		n.wantError(a.tryGiveUp(), n.network+"/a/eth0 is not in the journal")
		n.plan()
		a.add()
		a.del()
		n.wantClean()
	})
}

// TestForgetRefuses: an attachment that is or may be live, or whose lock is held, stays unchanged.
func TestForgetRefuses(t *testing.T) {
	type test struct {
		name                       string
		live, damaged, locked, far bool // far: added in other namespaces
		why                        string
	}
	tests := []test{
		{"live", true, false, false, false, "is live, not dead (its network namespace exists)"},
		{"dead, seen from elsewhere", false, false, false, true,
			"is unknown, not dead (cannot tell from these namespaces whether it is live"},
		{"dead, locked", false, false, true, false, "its lock is held"},
		{"dead, damaged and locked", false, true, true, false, "its lock is held"},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		a := n.newPod("a")
		if tt.live {
			n.chain(p0)
			a.add()
		} else {
			n.chain(p0, p1)
			n.plan(p1.ADD("fail-effect"), p1.DEL("fail"))
			n.wantError(a.tryAdd())
		}
		if tt.damaged {
			a.damage()
		}
		if tt.locked {
			a.lock()
		}
		if tt.far {
			a.seenElsewhere()
		}
		events, abandoned := len(n.events()), n.abandoned(a.key())
		n.wantError(a.tryGiveUp(), tt.why)
		n.want(len(n.events()) == events && reflect.DeepEqual(n.abandoned(a.key()), abandoned), "it has changed")
		if !tt.damaged {
			a.wantKept()
		}
	})
}
