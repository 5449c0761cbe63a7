package plugin

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/plugintest/sandbox"
)

// TestStatusOfMissingPlugin: a plugin of a CNI 1.1 chain, or an IPAM plugin, is in no directory of
// CNI_PATH. STATUS waits a second for the plugin to appear, and then fails with code 50.
func TestStatusOfMissingPlugin(t *testing.T) {
	type test struct {
		name    string
		chain   []pluginConf
		missing string
	}
	bridgeWith := func(ipam string) pluginConf { return object(`{"type": "bridge", "ipam": {"type": %q}}`, ipam) }
	tests := []test{
		{"delegate", []pluginConf{p0, named("gone")}, "gone"},
		{"IPAM", []pluginConf{p0, bridgeWith("gone")}, "gone"},
		{"both", []pluginConf{p0, named("gone"), bridgeWith("away")}, "gone, away"},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.chain(tt.chain...)
		n.versions("1.1.0", "1.1.0")
		n.wantCode(n.tryStatus(), 50,
			`unwind: failed to find plugin "gone" in path [`+n.path[0]+" "+n.path[1]+" ")
		n.want(n.said.took >= time.Second, "it was looked for once only: STATUS took %s", n.said.took)
		n.wantDetails(tt.missing)
		n.wantClean()
	})
}

// TestStatusDuringUpgrade: a plugin is missing when STATUS begins, and is back soon after, as in an
// upgrade. STATUS succeeds. In a chain of CNI 1.1, unwind also calls that plugin's STATUS, unless
// it is an IPAM plugin.
func TestStatusDuringUpgrade(t *testing.T) {
	choices := oneOf("delegate", "IPAM")
	each2(t, choices, []string{"1.0.0", "1.1.0"}, func(t *testing.T, which choice, inner string) {
		n := newNode(t)
		n.budget("Exchange=3m")
		asked := filepath.Join(n.dir, "asked")
		n.script("upgraded", "echo asked >>"+asked)
		plugin, away := filepath.Join(n.path[0], "upgraded"), filepath.Join(n.path[0], "away")
		must(n, os.Rename(plugin, away))
		if which.is("delegate") {
			n.chain(named("upgraded"))
		} else {
			n.chain(object(`{"type": "faulty", "dir": %q, "ipam": {"type": "upgraded"}}`, n.dir))
		}
		n.versions("1.1.0", inner)
		status := n.beginStatus()
		n.awaitFile(n.stateDir)
		time.Sleep(100 * time.Millisecond)
		must(n, os.Rename(away, plugin))
		status.passes()
		if which.is("delegate") && inner == "1.1.0" {
			n.wantEqual("asked", []string{read(n, asked)}, []string{"asked\n"})
		} else {
			n.wantAbsent(asked)
		}
		n.wantClean()
	})
}

// TestStatusOfDelegates: STATUS calls the plugins' own STATUS if the chain's cniVersion is 1.1. The
// runtime gets the message and the code of a plugin that fails. If several fail, the runtime gets
// the gravest error: 51 before 50, and 50 before any other.
func TestStatusOfDelegates(t *testing.T) {
	sandbox.Concurrent(t)
	type test struct {
		name  string
		codes [3]int // the plugins' error codes; a plugin with a code gets the mode below
		mode  string
		code  uint // the error code of unwind's STATUS; 0: it succeeds
		says  string
	}
	tests := []test{
		{"well", [3]int{0, 0, 0}, "ok", 0, ""},
		{"not available", [3]int{0, 50, 0}, "fail", 50, "faulty: p1 STATUS refused"},
		{"limited", [3]int{0, 0, 51}, "fail", 51, "faulty: p2 STATUS refused"},
		{"50 and 51", [3]int{50, 0, 51}, "fail", 51, "faulty: p2 STATUS refused"},
		{"51 and 50", [3]int{51, 0, 50}, "fail", 51, "faulty: p0 STATUS refused"},
		{"50 among others", [3]int{999, 50, 147}, "fail", 50, "faulty: p1 STATUS refused"},
		{"others", [3]int{0, 147, 11}, "fail", 147, "faulty: p1 STATUS refused"},
		{"crash", [3]int{0, 1, 0}, "crash", 999, "netplugin failed with no error message: signal: killed"},
		{"well, nothing said", [3]int{1, 1, 1}, "empty", 0, ""},
		{"well, slow", [3]int{1, 1, 1}, "late", 0, ""},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		var chain []pluginConf
		var faults []fault
		for i, plugin := range []pluginConf{p0, p1, p2} {
			chain = append(chain, plugin.code(tt.codes[i]).delay(600))
			if tt.codes[i] != 0 {
				faults = append(faults, plugin.STATUS(tt.mode))
			}
		}
		n.chain(chain...)
		n.plan(faults...)
		n.versions("1.1.0", "1.1.0")
		if tt.code == 0 {
			n.status()
		} else {
			n.wantCode(n.tryStatus(), tt.code, `plugin type="faulty" failed (status): `+tt.says)
		}
		n.wantCallsInAnyOrder("STATUS p0", "STATUS p1", "STATUS p2")
		n.forgetCalls()
		n.versions("1.1.0", "1.0.0")
		n.status()
		n.wantCalls()
		n.wantClean()
	})
}

// TestStatusOfJournal: while the journal cannot be used, STATUS fails if ADDs require the journal;
// otherwise, it logs a warning. A journal that is in use by other processes is no problem.
func TestStatusOfJournal(t *testing.T) {
	breakages := []breakage{
		{"a folder that anybody can write to", (*node).makeWorldWritable, ": journal: "},
		{"not a folder", (*node).replaceByFile, ": journal: "},
		readOnly, fullDisk, newerFormat, groupWritable, linked, blocked, strangersTurn,
	}
	each1(t, breakages, func(t *testing.T, breakage breakage) {
		n := newNode(t)
		n.chain(p0)
		n.makeJournal()
		const warning = "the journal cannot be used; ADDs run without it"
		fail := keys{"onJournalFailure": "fail"}
		mend := breakage.of(n)
		n.status()
		if breakage.name == strangersTurn.name {
			n.wantNotWarned(warning)
			n.status(fail)
		} else {
			n.wantWarned(warning)
			n.wantCode(n.tryStatus(fail), 50, "unwind: ", "journal", ` (onJournalFailure is "fail")`)
		}
		mend()
		n.status(fail)
		n.wantNotWarned(warning)
		n.wantClean()
	})
}

func (n *node) makeWorldWritable() (mend func()) {
	n.Helper()
	must(n, os.Chmod(n.stateDir, 0o777))
	return func() { must(n, os.Chmod(n.stateDir, 0o700)) }
}

// replaceByFile replaces stateDir with a file.
func (n *node) replaceByFile() (mend func()) {
	n.Helper()
	must(n, os.Rename(n.stateDir, n.stateDir+".away"))
	n.write(n.stateDir, "")
	return func() {
		must(n, os.Remove(n.stateDir))
		must(n, os.Rename(n.stateDir+".away", n.stateDir))
	}
}

// flock locks a file until unlock is called, or until the test ends.
func (n *node) flock(path string) (unlock func()) {
	n.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	must(n, err)
	n.Cleanup(func() { _ = f.Close() })
	must(n, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	return func() { _ = f.Close() }
}

// TestStatusEndsInTime: unwind's STATUS ends in time, even if a plugin hangs, a daemon keeps a
// plugin's output open, or a lock is held. It fails only if a plugin's own STATUS hangs.
// Afterwards, no plugin that STATUS or its sweep started still runs. The sweep has its own limit.
func TestStatusEndsInTime(t *testing.T) {
	const delHangs = "a DEL of the sweep hangs"
	things := oneOf(
		"a delegate hangs",
		"a delegate ignores SIGTERM",
		"a delegate hangs, and a daemon holds its output",
		"a daemon holds its output",
		"the journal's queue is held",
		"the journal's file is held",
		delHangs,
		"a daemon holds the output of a DEL of the sweep",
		"the lock of host-local's pool is held",
	)
	each1(t, things, func(t *testing.T, thing choice) {
		n := newNode(t)
		n.budget("Status=2s")
		n.budget("Undo=10s")
		n.conf["onJournalFailure"] = "fail"
		n.versions("1.1.0", "1.0.0")
		n.chain(p0, p1)
		addDead := func() {
			a := n.add("a")
			a.dropNetNS()
		}
		asked := faulty("asked")
		asks := []pluginConf{faulty("other"), asked}
		switch {
		case thing.is("a delegate hangs"):
			n.plan(asked.STATUS("hang"))
		case thing.is("a delegate ignores SIGTERM"):
			n.plan(asked.STATUS("ignore-term"))
		case thing.is("a delegate hangs, and a daemon holds its output"):
			asks = []pluginConf{named("hanging")}
			n.script("hanging", "setsid sleep 120 & exec sleep 120")
		case thing.is("a daemon holds its output"):
			n.plan(asked.STATUS("daemon"))
		case thing.is("the journal's queue is held"):
			n.makeJournal()
			n.flock(filepath.Join(n.stateDir, "journal.lock"))
		case thing.is("the journal's file is held"):
			n.makeJournal()
			n.flock(n.store.Path())
		case thing.is(delHangs):
			addDead()
			n.plan(p1.DEL("hang"))
		case thing.is("a daemon holds the output of a DEL of the sweep"):
			addDead()
			n.plan(p1.DEL("daemon"))
		case thing.is("the lock of host-local's pool is held"):
			n.chain(bridge)
			addDead()
			n.flock(n.poolFile("lock"))
		}
		n.versions("1.1.0", "1.1.0")
		n.chain(asks...)
		n.forgetCalls()
		if thing.has("a delegate") {
			n.wantCode(n.tryStatus(), 50, "timed out")
		} else {
			n.budget("Status=3m")
			n.budget("Behind=2s")
			n.status()
		}
		n.want(n.said.took < 30*time.Second, "it took %s", n.said.took)
		for _, l := range n.callLog() {
			err := syscall.Kill(l.PID, 0)
			n.want(errors.Is(err, syscall.ESRCH), "%s of %s is still there: %v", l.Command, l.Instance, err)
		}
		if thing.is(delHangs) {
			n.want(len(n.records()[0].Steps) > 0, "no DEL is pending")
		}
	})
}

// warnedUnknown is logged by a CHECK of an attachment without a record.
const warnedUnknown = "the journal has no live record of the attachment"

// TestCheck: CHECK calls every plugin in chain order, with the configuration of its ADD and the
// final result, even if the conflist has changed.
func TestCheck(t *testing.T) {
	type conflist struct {
		name  string
		chain []pluginConf
	}
	first := []pluginConf{p0, p1.with(`"key": "as added"`), p2.address("192.0.2.7/24")}
	conflists := []conflist{
		{"same conflist", first},
		{"another conflist", []pluginConf{faulty("p9"), p1.with(`"key": "changed"`)}},
		{"a chain that cannot be read", []pluginConf{object(`{}`)}},
	}
	each1(t, conflists, func(t *testing.T, conflist conflist) {
		n := newNode(t)
		n.chain(first...)
		a := n.add("a")
		n.forgetCalls()
		n.chain(conflist.chain...)
		a.check()
		n.wantStdin("p1", "key", `"as added"`)
		n.wantPrevious("192.0.2.7")
		n.wantShown(a, a, a)
		n.wantCalls("CHECK p0", "CHECK p1", "CHECK p2")
		n.wantLoggedTimes(0, warnedUnknown)
		a.del()
		n.wantClean()
	})
}

// TestCheckBesideOthers: a CHECK and other verbs never wait for each other, even after the CHECK's
// unwind process was killed. CHECK creates no lock file.
func TestCheckBesideOthers(t *testing.T) {
	each1(t, oneOf("it lasts", "its unwind was killed"), func(t *testing.T, other choice) {
		n := newNode(t)
		n.hasty()
		n.chain(p0)
		a := n.add("a")
		unlock := a.lock()
		a.check()
		unlock()
		var lasting *underWay
		if other.is("it lasts") {
			n.plan(p0.CHECK("hold"))
			lasting = a.beginCheck()
			n.awaitHeld("CHECK", "a", "p0")
		} else {
			n.plan(p0.CHECK("kill-parent"))
			n.wantKilled(a.tryCheck())
		}
		n.plan()
		a.check()
		b := a.nextSandbox("b")
		b.add()
		b.del()
		a.del()
		a.addPast()
		a.check()
		n.wantLocks(0)
		a.del()
		if lasting != nil {
			n.letGo("CHECK", "a", "p0")
			n.wantError(lasting.wait())
		}
		n.wantClean()
	})
}

// TestCheckFails: the runtime gets the code and the message of the plugin that fails. unwind does
// not call the plugins after that one.
func TestCheckFails(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(p0, p1.code(117), p2)
	a := n.add("a")
	n.forgetCalls()
	n.plan(p1.CHECK("fail"))
	n.wantCode(a.tryCheck(), 117, `plugin type="faulty" failed (check): faulty: p1 CHECK refused`)
	n.wantCalls("CHECK p0", "CHECK p1")
	n.plan()
	a.check()
	a.del()
	n.wantClean()
}

// TestCheckWithoutEntry: if the attachment has no record, the plugins' CHECKs decide, and unwind
// logs a warning.
func TestCheckWithoutEntry(t *testing.T) {
	each1(t, oneOf("they agree", "one refuses"), func(t *testing.T, decision choice) {
		n := newNode(t)
		n.chain(p0, p1.address("192.0.2.7/24"))
		a := n.addPast("a")
		n.forgetCalls()
		if decision.is("they agree") {
			a.check()
			n.wantLogged(warnedUnknown)
		} else {
			n.plan(p1.CHECK("fail"))
			n.wantError(a.tryCheck())
		}
		n.wantPrevious("192.0.2.7")
		n.wantShown(a, a)
		n.wantCalls("CHECK p0", "CHECK p1")
		a.del()
		n.wantClean()
	})
}
