package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/env"
)

// keeper creates a plugin: a shell script that reads and writes no file. Its ADD creates a
// directory, which node.taken lists, and its DEL removes that directory. The script first runs the
// commands in the parameter more.
func (n *node) keeper(name, more string) {
	n.Helper()
	n.mkdir(filepath.Join(n.faultyDir(), "taken"))
	folder := filepath.Join(n.faultyDir(), "taken", name)
	n.script(name, more+`
case $CNI_COMMAND in
ADD) mkdir `+folder+` || exit 1; echo '{"cniVersion": "1.0.0", "ips": []}' ;;
DEL) rmdir `+folder+` 2>/dev/null || : ;;
esac`)
}

// TestLongNames: a container ID or a network's name is too long for a file name, or even for a key
// of the journal. In the latter case, onJournalFailure decides whether an ADD continues without the
// journal and logs a warning, or fails before any plugin runs. The DEL releases everything.
func TestLongNames(t *testing.T) {
	type test struct {
		name    string
		bytes   int
		network bool // the network's name is long, not the container ID
		tooLong bool // for the journal
	}
	tests := []test{
		{"a container ID of 300 bytes", 300, false, false},
		{"a container ID of 30,000 bytes", 30000, false, false},
		{"a container ID too long", 100000, false, true},
		{"a network of 300 bytes", 300, true, false},
		{"a network too long", 100000, true, true},
	}
	each2(t, tests, []string{"degrade", "fail"}, func(t *testing.T, tt test, onJournalFailure string) {
		n := newNode(t)
		n.chain(named("one"), named("two"))
		n.keeper("one", "")
		n.keeper("two", "")
		n.conf["onJournalFailure"] = onJournalFailure
		long := strings.Repeat("a", tt.bytes)
		edit := given{keys: keys{}}
		if tt.network {
			edit.keys["name"] = long
		} else {
			edit.env = map[string]string{"CNI_CONTAINERID": long}
		}
		a := n.newPod("a")
		if tt.tooLong && onJournalFailure == "fail" {
			n.wantError(a.tryGive("ADD", edit), "key too large")
			n.wantTaken()
		} else {
			a.give("ADD", edit)
			n.wantTaken("one", "two")
		}
		if tt.tooLong && onJournalFailure == "degrade" {
			n.wantWarned("key too large")
		}
		edit.keys["prevResult"] = a.prevResult()
		a.give("DEL", edit)
		n.wantClean()
	})
}

// TestBigConfiguration: unwind either runs an unusually large or deep configuration completely, or
// refuses it with an error that says why.
func TestBigConfiguration(t *testing.T) {
	t.Parallel()
	many := func(count int, plugin string) string { return strings.Repeat(`{"type": "`+plugin+`"}, `, count) }
	deep := func(levels int) string {
		return `{"type": "one", "x": ` + strings.Repeat(`[`, levels) + strings.Repeat(`]`, levels) + `}, {"type": "two"}`
	}
	for _, tt := range []struct{ name, plugins, want string }{ // want: the ADD's error, or ""
		{"10,000 plugins", many(9_999, "one") + `{"type": "two"}`, `unwind: key "chain": key "plugins" has 10000 plugins, but a chain may have at most 500`},
		{"500 plugins, the first fails", many(499, "fails") + `{"type": "fails"}`, `plugin type="fails" failed (add)`},
		{"500 plugins", many(498, "idle") + `{"type": "one"}, {"type": "two"}`, ""},
		{"4 MiB", `{"type": "one"}, {"type": "two", "x": "` + strings.Repeat("x", netconf.MaxConfig-2000) + `"}`, ""},
		// encoding/json reads at most 10,000 levels. The journal's record adds some levels around the
		// configuration of a plugin.
		{"9,990 levels", deep(9_990), ""},
		{"10,000 levels", deep(10_000), "exceeded max depth"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.keeper("one", "")
			n.keeper("two", "")
			n.script("fails", "[ $CNI_COMMAND != ADD ]")
			n.script("idle", `[ $CNI_COMMAND != ADD ] || echo '{"cniVersion": "1.0.0", "ips": []}'`)
			// The chain is inserted as text, so that no JSON encoder processes it.
			entry := strings.Replace(n.entryOf(`"CHAIN"`, nil), `"CHAIN"`, `{"plugins": [`+tt.plugins+`]}`, 1)
			p := n.pod("a")
			out := n.start(p.input("ADD", entry))
			if (out.code == 0) != (tt.want == "") || !strings.Contains(out.said.Msg, tt.want) {
				t.Errorf("ADD: exit %d, %.500s\n%.2000s", out.code, out.stdout, out.stderr)
			}
			if taken := n.taken(); len(taken) != 2 && out.code == 0 || len(taken) != 0 && out.code != 0 {
				t.Errorf("taken: %v", taken)
			}
			out = n.start(p.input("DEL", entry))
			if refused := strings.Contains(tt.want, "max depth"); (out.code != 0) != refused {
				t.Errorf("DEL: %.500s\n%.2000s", out.stdout, out.stderr)
			}
			n.nothingLeft()
		})
	}
}

// TestNotTextAtDEL: the environment of a DEL is not valid UTF-8, so the journal cannot store it.
// unwind refuses an ADD with such an environment, but the DEL continues without the journal.
func TestNotTextAtDEL(t *testing.T) {
	type test struct{ name, value string }
	tests := []test{{"CNI_IFNAME", "eth\xff"}, {"CNI_ARGS", "X=\xff"}}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.chain(named("one"))
		refuse := filepath.Join(n.dir, "refuse")
		n.keeper("one", "[ $CNI_COMMAND = DEL ] && [ -e "+refuse+" ] && exit 1")
		n.mkdir(filepath.Join(n.faultyDir(), "taken", "one"))
		n.write(refuse, "")
		edit := given{
			env:  map[string]string{tt.name: tt.value},
			keys: keys{"prevResult": rawJSON(`{"cniVersion":"1.0.0","ips":[]}`)},
		}
		a := n.newPod("a")
		n.wantError(a.tryGive("DEL", edit), "DEL incomplete")
		n.wantWarned("is not valid UTF-8")
		n.wantRecords(0)
		n.remove(refuse)
		a.give("DEL", edit)
		n.wantTaken()
		n.wantRecords(0)
	})
}

// TestPlantedLinks: a link or a pipe, which only root can have created, is in the place of stateDir
// or of something in it. No verb creates or changes the link's target, or waits for the pipe. ADD
// and DEL succeed all the same.
func TestPlantedLinks(t *testing.T) {
	targets := oneOf("a file", "nothing", "a folder", "a pipe")
	places := oneOf("stateDir", "the journal", "a new journal", "the queue", "the locks", "a lock", "the log")
	each2(t, targets, places, func(t *testing.T, target, place choice) {
		n := newNode(t)
		n.versions("1.1.0", "1.0.0")
		n.conf["gracePeriod"] = "1h"
		n.chain(p0)
		outside := filepath.Join(n.dir, "outside")
		n.mkdir(outside)
		victim := filepath.Join(outside, "victim")
		plant := "ln -s " + victim
		switch {
		case target.is("a file"):
			n.write(victim, "victim\n")
		case target.is("a folder"):
			n.mkdir(victim)
		case target.is("a pipe"):
			n.shell("mkfifo %s", victim)
			plant = "mkfifo"
		}
		a := n.newPod("a")
		var at string
		switch {
		case place.is("stateDir"):
			at = n.stateDir
		case place.is("the journal"):
			at = n.store.Path()
		case place.is("a new journal"):
			at = n.store.Path() + ".new"
		case place.is("the queue"):
			at = filepath.Join(n.stateDir, "journal.lock")
		case place.is("the locks"):
			at = filepath.Join(n.stateDir, "locks")
		case place.is("a lock"):
			at = n.store.LockPath(a.key())
		case place.is("the log"):
			at = filepath.Join(n.stateDir, "log")
			n.conf["logFile"] = at
		}
		n.shell("umask 077; mkdir -p $(dirname %[1]s); %[2]s %[1]s", at, plant)
		lookOutside := func() string {
			return run(n, "find", outside, "-printf", "%p %M %T@\n", "-type", "f", "-exec", "cat", "{}", ";")
		}
		before := lookOutside()
		a.give("STATUS", given{})
		a.give("ADD", given{})
		n.wantTaken("a.eth0.p0")
		a.give("CHECK", given{keys: keys{"prevResult": a.prevResult()}})
		_ = a.tryGive("GC", given{}) // it fails if unwind cannot read the journal
		a.give("STATUS", given{})
		a.give("DEL", given{keys: keys{"prevResult": a.prevResult()}})
		_ = a.tryGive("GC", given{})
		n.wantTaken()
		n.wantEqual("outside", []string{lookOutside()}, []string{before})
	})
}

// TestStateDirOfOthers: stateDir is writable by others, belongs to another user, or contains a file
// in the place of the directory "locks". The message names stateDir and the problem.
func TestStateDirOfOthers(t *testing.T) {
	each1(t, oneOf("mode", "owner", "file"), func(t *testing.T, fault choice) {
		n := newNode(t)
		n.versions("1.1.0", "1.1.0")
		n.chain(p0)
		must(n, os.Mkdir(n.stateDir, 0o700))
		var want string
		switch {
		case fault.is("mode"):
			must(n, os.Chmod(n.stateDir, 0o777))
			want = "is writable by others (mode 0777); chmod it to 0700"
		case fault.is("owner"):
			must(n, os.Chown(n.stateDir, 65534, -1))
			want = "belongs to user 65534; chown it to root"
		case fault.is("file"):
			n.write(filepath.Join(n.stateDir, "locks"), "")
			want = "not a directory"
		}
		fail := given{keys: keys{"onJournalFailure": "fail"}}
		a := n.newPod("a")
		n.wantError(a.tryGive("ADD", fail), want)
		n.wantError(a.tryGive("STATUS", fail), want)
		n.wantTaken()
		a.give("ADD", given{})
		n.wantWarned(want)
		n.wantWarned(n.stateDir)
		a.give("STATUS", given{})
		n.wantWarned(want)
		n.wantWarned(n.stateDir)
		a.give("DEL", given{keys: keys{"prevResult": rawJSON(`{"cniVersion": "1.1.0", "ips": []}`)}})
		n.wantWarned(want)
		n.wantWarned(n.stateDir)
		n.wantTaken()
		n.wantAbsent(n.store.Path())
	})
}

// TestHostileDelegate: the second of two plugins misbehaves. The rollback releases what a failed
// ADD allocated, even if a process has left the plugin's process group. If unwind has to kill the
// plugin both in ADD and in the rollback, the plugin's DEL stays pending until the runtime's DEL.
func TestHostileDelegate(t *testing.T) {
	const (
		result = `echo "{\"cniVersion\": \"1.0.0\", \"ips\": []}"`
		// hangs is a command that tells unwind that the plugin hangs: see env.Hangs.
		hangs = `>HANGS/$CNI_COMMAND.$CNI_CONTAINERID.$CNI_IFNAME.bad; `
		open  = `head -c 9990 /dev/zero | tr "\0" "["`
		shut  = `head -c 9990 /dev/zero | tr "\0" "]"`

		fails, passes, killed = "fails", "passes", "killed"
	)
	type delegate struct{ name, end, does string }
	delegates := []delegate{
		{"100 MB on stdout", fails, `head -c 100000000 /dev/zero`},
		{"100 MB on stderr", fails, `head -c 100000000 /dev/zero >&2; exit 1`},
		{"nothing", fails, `:`},
		{"a result of 9,990 levels", passes,
			`printf "{\"cniVersion\": \"1.0.0\", \"ips\": [], \"x\": "; ` + open + `; ` + shut + `; echo "}"`},
		{"a result, and an error code", fails, result + `; exit 1`},
		{"a result twice", fails, result + `; ` + result},
		{"ignores SIGTERM", killed, `trap "" TERM INT HUP; ` + hangs + `sleep 600`},
		{"closes stdout and hangs", killed, `exec >&- 2>&-; ` + hangs + `sleep 600`},
		{"unlocks the lock", passes, `flock -u 20; ` + result},
		{"stops itself", killed, hangs + `kill -STOP $$`},
		{"leaves its group and hangs", killed, hangs + `setsid sleep 600`},
		{"leaves a daemon", passes, `setsid sleep 600 >/dev/null 2>&1 & ` + result},
		{"leaves a daemon with the output", passes, `setsid sleep 600 & ` + result},
	}
	each1(t, delegates, func(t *testing.T, d delegate) {
		n := newNode(t)
		n.hasty()
		n.conf["gracePeriod"] = "1ms"
		n.chain(p0, named("bad"))
		well := filepath.Join(n.dir, "well")
		n.script("bad", `[ -e `+well+` ] && { `+result+`; exit; }; `+
			strings.ReplaceAll(d.does, "HANGS", n.hangsDir()))
		a := n.newPod("a")
		if d.end == passes {
			a.add()
			n.wantTaken("a.eth0.p0")
		} else {
			n.wantError(a.tryAdd(), `plugin type="unwind" failed (add): plugin type="bad" failed (add): `)
			n.wantTaken()
		}
		if d.end == killed {
			a.wantRecord(journal.RollingBack, 1)
		}
		n.write(well, "")
		a.del()
		n.wantClean()
	})
}

// TestNoProc runs STATUS, GC, ADD and DEL without /proc. unwind cannot tell that a pod is dead, so
// STATUS and GC release nothing. unwind refuses an ADD, because skel reads /proc after the ADD, and
// would fail. A DEL succeeds.
func TestNoProc(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.versions("1.1.0", "1.0.0")
	n.conf["gracePeriod"] = "1ms"
	n.keeper("one", "")
	n.keeper("two", "")
	blind := given{env: map[string]string{env.NoProc: "1"}, first: ":"}
	n.chain(named("one"))
	a := n.newPod("a")
	a.give("ADD", given{})
	time.Sleep(10 * time.Millisecond)
	a.dropNetNS()
	a.give("STATUS", blind)
	n.wantTaken("one")
	blindGC := blind
	blindGC.keys = valid()
	a.give("GC", blindGC)
	n.wantTaken("one")
	a.wantRecord(journal.Live)
	n.chain(named("two"))
	n.wantCode(n.newPod("b").tryGive("ADD", blind), 8, "/proc")
	n.wantTaken("one")
	n.chain(named("one"))
	a.give("DEL", blind)
	n.wantTaken()
	n.wantClean()
}

// TestNoPermission: unwind may not write to stateDir. ADD obeys onJournalFailure, and DEL succeeds.
func TestNoPermission(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.makeJournal()
	n.chain(named("one"))
	n.keeper("one", "")
	n.shell("chmod 755 %[1]s/.. %[1]s/bin %[1]s/bin/one; chmod 777 %[1]s/faulty/taken", n.dir)
	asNobody := map[string]string{env.UID: "65534"}
	a := n.newPod("a")
	refused := given{env: asNobody, keys: keys{"onJournalFailure": "fail"}}
	n.wantCode(a.tryGive("ADD", refused), 11, "permission denied")
	n.wantTaken()
	a.give("ADD", given{env: asNobody})
	n.wantTaken("one")
	n.wantWarned(n.stateDir)
	a.give("DEL", given{env: asNobody, keys: keys{"prevResult": a.prevResult()}})
	n.wantTaken()
	n.wantClean()
}

// TestLimits runs unwind with low resource limits. An ADD allocates everything or nothing, and a
// DEL releases everything or fails. With a limit marked helpless, unwind can start no plugin.
func TestLimits(t *testing.T) {
	type limit struct {
		name, command, says string
		helpless            bool
	}
	limits := []limit{
		{"20 files", "ulimit -n 20", "", false}, // plugins cannot inherit the lock as descriptor 20
		{"12 files", "ulimit -n 12", "too many open files", true},
		{"8 files", "ulimit -n 8", "too many open files", true},
		{"no block", "ulimit -f 0", "file too large", false}, // a block has 512 bytes
		{"8 blocks", "ulimit -f 8", "file too large", false},
		{"40 blocks", "ulimit -f 40", "", false},
		{"umask 0777", "umask 0777", "", false},
		{"umask 0", "umask 0", "", false},
	}
	each2(t, limits, oneOf("passes", "fails"), func(t *testing.T, limit limit, second choice) {
		n := newNode(t)
		n.chain(named("one"), named("two"))
		n.keeper("one", "")
		if second.is("passes") {
			n.keeper("two", "")
		} else {
			n.keeper("two", "[ $CNI_COMMAND != ADD ] || exit 1")
		}
		wantSaid := func() {
			n.Helper()
			said := n.said.stdout + n.said.stderr
			n.want(strings.Contains(said, limit.says), "no %q in %s", limit.says, said)
		}
		a := n.newPod("a")
		limited := given{first: limit.command, keys: keys{}}
		if !limit.helpless && second.is("passes") {
			a.give("ADD", limited)
			wantSaid()
			n.wantTaken("one", "two")
		} else {
			n.wantError(a.tryGive("ADD", limited))
			wantSaid()
			n.wantTaken()
		}
		if limit.helpless && second.is("passes") {
			a.give("ADD", given{})
			limited.keys["prevResult"] = a.prevResult()
			n.wantError(a.tryGive("DEL", limited))
		}
		if !limit.helpless {
			limited.keys["prevResult"] = a.prevResult()
			a.give("DEL", limited)
			n.wantTaken()
		}
		a.give("DEL", given{keys: keys{"prevResult": a.prevResult()}})
		n.wantClean()
	})
}

// TestNoOutput: unwind rolls back an ADD whose result it cannot print, for example because the
// runtime is dead. A DEL prints nothing, so it succeeds.
func TestNoOutput(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(p0)
	a := n.newPod("a")
	n.wantError(a.tryGive("ADD", given{first: "exec >/dev/full"}))
	n.wantWarned("no space left on device")
	n.wantClean()
	pipe := filepath.Join(n.dir, "pipe")
	n.shell("mkfifo %s", pipe)
	brokenPipe := fmt.Sprintf("exec 3<>%[1]s >%[1]s 3<&-", pipe)
	n.wantError(a.tryGive("ADD", given{first: brokenPipe}))
	n.wantCalls("ADD p0", "DEL p0", "ADD p0", "DEL p0")
	n.wantClean()
	a.give("ADD", given{})
	a.give("DEL", given{first: "exec >&- 2>&-"})
	n.wantClean()
}
