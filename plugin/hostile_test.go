package plugin

import (
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/env"
)

// keeper is a delegate that neither writes nor needs a file. It takes and releases a directory,
// which taken lists. It is a shell script that runs more first.
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

// keepers have the statements "keeper NAME [MORE]", which makes such a delegate, and "long N": $long has
// N bytes.
var keepers = acts{
	"keeper": func(s *story, w []string) { s.keeper(w[0], strings.Join(w[1:], " ")) },
	"long": func(s *story, w []string) {
		s.vars["long"] = strings.Repeat("a", s.number(w[0]))
	},
}

// TestLongNames: names are too long for a file or for a key of the journal. An ADD goes on without
// the journal and says so, or is refused before it takes anything. The DEL releases all.
func TestLongNames(t *testing.T) {
	stories(t, `
	chain {"type": "one"} | {"type": "two"}; keeper one; keeper two; let result
	either a container ID of 300 bytes: long 300; let edit CNI_CONTAINERID=$long
	or a container ID of 30,000 bytes: long 30000; let edit CNI_CONTAINERID=$long
	or a container ID too long: long 100000; let edit CNI_CONTAINERID=$long
	or a network of 300 bytes: long 300; let edit name=$long
	or a network too long: long 100000; let edit name=$long
	either degrade: conf onJournalFailure degrade
	or fail: conf onJournalFailure fail
	if too long, fail: fails give add a $edit 'key too large'; taken
	unless too long, fail: give add a $edit; taken one two
	if too long, degrade: warned 'key too large' 1
	give del a $edit 'prevResult=$result'`, keepers)
}

// TestBigConfiguration: a configuration of a size or depth that no network has is either refused
// with an error that says why, or carried out in full.
func TestBigConfiguration(t *testing.T) {
	t.Parallel()
	many := func(count int, plugin string) string { return strings.Repeat(`{"type": "`+plugin+`"}, `, count) }
	deep := func(levels int) string {
		return `{"type": "one", "x": ` + strings.Repeat(`[`, levels) + strings.Repeat(`]`, levels) + `}, {"type": "two"}`
	}
	for _, tt := range []struct{ name, plugins, want string }{ // in the error of the ADD; "": it succeeds
		{"10,000 plugins", many(9_999, "one") + `{"type": "two"}`, `unwind: key "chain": key "plugins" has 10000 plugins, but a chain may have at most 500`},
		{"500 plugins, the first fails", many(499, "fails") + `{"type": "fails"}`, `plugin type="fails" failed (add)`},
		{"500 plugins", many(498, "idle") + `{"type": "one"}, {"type": "two"}`, ""},
		{"4 MiB", `{"type": "one"}, {"type": "two", "x": "` + strings.Repeat("x", netconf.MaxConfig-2000) + `"}`, ""},
		// encoding/json reads 10,000 levels; the journal's entry adds some around the delegate's own.
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
			// No encoder has to handle the chain.
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

// TestNotTextAtDEL: an ADD refuses text that the journal could not reproduce. A DEL of an earlier
// attachment accepts it and goes on without the journal.
func TestNotTextAtDEL(t *testing.T) {
	stories(t, strings.ReplaceAll(`
	chain {"type": "one"}; keeper one '[ $CNI_COMMAND = DEL ] && [ -e $dir/refuse ] && exit 1'
	shell 'mkdir $dir/faulty/taken/one; touch $dir/refuse'
	either CNI_IFNAME: let edit CNI_IFNAME=eth0xFF
	or CNI_ARGS: let edit CNI_ARGS=X=0xFF
	let edit $edit prevResult={"cniVersion":"1.0.0","ips":[]}
	fails give del a $edit 'DEL incomplete'; warned 'is not valid UTF-8'; entries 0
	lose $dir/refuse; give del a $edit; taken; entries 0; leaves`, "0xFF", "\xff"), keepers)
}

// TestPlantedLinks: stateDir has links, and other things that no journal consists of, which only
// root can have put there. No verb creates, changes or waits for their targets. Pods come and go as
// without a journal.
func TestPlantedLinks(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.0.0; conf gracePeriod 1h; chain p0
	let victim $dir/outside/victim; let plant ln -s $victim; shell 'mkdir $dir/outside'
	either a file: shell 'echo victim >$victim'
	or nothing:
	or a folder: shell 'mkdir $victim'
	or a pipe: shell 'mkfifo $victim'; let plant mkfifo
	either stateDir: let at $state
	or the journal: let at $state/journal.db
	or a new journal: let at $state/journal.db.new
	or the queue: let at $state/journal.lock
	or the locks: let at $state/locks
	or a lock: its-lock a; let at $lock
	or the log: let at $state/log; conf logFile $state/log
	shell 'umask 077; mkdir -p $(dirname $at); $plant $at'
	outside
	give status a; give add a; taken a.eth0.p0; give check a 'prevResult=$result'
	# A GC is an error if it could not look.
	tries give gc a; give status a; give del a 'prevResult=$result'; tries give gc a
	taken; outside; leaves`, acts{
		"its-lock": func(s *story, w []string) { s.vars["lock"] = s.store.LockPath(s.who(w[0]).key()) },
		"outside": func(s *story, _ []string) { // is as before
			s.steady("outside", run(s, "find", s.dir+"/outside", "-printf", "%p %M %T@\n", "-type", "f", "-exec", "cat", "{}", ";"))
		},
	})
}

// TestStateDirOfOthers: others can write to stateDir, or own it. The message names it and says what
// to do.
func TestStateDirOfOthers(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.1.0; chain p0; shell 'mkdir -m 700 $state'
	either mode: shell 'chmod 777 $state'; let want 'is writable by others (mode 0777); chmod it to 0700'
	or owner: shell 'chown 65534 $state'; let want 'belongs to user 65534; chown it to root'
	or file: shell 'touch $state/locks'; let want not a directory
	fails give add a onJournalFailure=fail '$want'; fails give status a onJournalFailure=fail '$want'; taken
	give add a; warned '$want'; warned $state
	give status a; warned '$want'; warned $state
	give del a 'prevResult={"cniVersion": "1.1.0", "ips": []}'; warned '$want'; warned $state
	taken; absent $state/journal.db; leaves`)
}

// TestHostileDelegate: the second of two delegates misbehaves. What an ADD took is released, also
// when a process escaped the delegate's process group. The DEL of a delegate that was killed stays
// pending: it gets another one.
func TestHostileDelegate(t *testing.T) {
	stories(t, `
	hasty; conf gracePeriod 1ms; chain p0 | {"type": "bad"}
	let result echo "{\"cniVersion\": \"1.0.0\", \"ips\": []}"
	let says '>$hangs/$CNI_COMMAND.$CNI_CONTAINERID.$CNI_IFNAME.bad;'
	let open head -c 9990 /dev/zero | tr "\0" "["; let close head -c 9990 /dev/zero | tr "\0" "]"
	either 100 MB on stdout: let does head -c 100000000 /dev/zero
	or 100 MB on stderr: let does 'head -c 100000000 /dev/zero >&2; exit 1'
	or nothing: let does :
	or passes, a result of 9,990 levels: let does 'printf "{\"cniVersion\": \"1.0.0\", \"ips\": [], \"x\": "; $open; $close; echo "}"'
	or a result, and an error code: let does '$result; exit 1'
	or a result twice: let does '$result; $result'
	or killed, ignores SIGTERM: let does 'trap "" TERM INT HUP; $says sleep 600'
	or killed, closes stdout and hangs: let does 'exec >&- 2>&-; $says sleep 600'
	or passes, unlocks the lock: let does 'flock -u 20; $result'
	or killed, stops itself: let does '$says kill -STOP $$'
	or killed, leaves its group and hangs: let does '$says setsid sleep 600'
	or passes, leaves a daemon: let does 'setsid sleep 600 >/dev/null 2>&1 & $result'
	or passes, leaves a daemon with the output: let does 'setsid sleep 600 & $result'
	script bad '[ -e $dir/well ] && { $result; exit; }; $does'
	if passes: add a; taken a.eth0.p0
	unless passes: fails add a 'plugin type="unwind" failed (add): plugin type="bad" failed (add): '; taken
	if killed: entry a rolling-back 1
	file $dir/well; del a`)
}

// TestNoProc runs every verb without /proc. unwind cannot tell who is alive, so it releases
// nothing. An ADD takes nothing, since it could not print its success: skel looks at /proc after
// the ADD. With /proc, a is dead.
func TestNoProc(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.0.0; conf gracePeriod 1ms; keeper one; keeper two; let blind `+env.NoProc+`=1 first=:
	chain {"type": "one"}; give add a; pause 10ms; drop a
	give status a $blind; taken one; give gc a $blind valid=[]; taken one; entry a live
	chain {"type": "two"}; fails give add b $blind code=8 /proc; taken one
	chain {"type": "one"}; give del a $blind; taken`, keepers)
}

// TestNoPermission runs unwind as a user who may not write to stateDir.
func TestNoPermission(t *testing.T) {
	stories(t, `
	journal; chain {"type": "one"}; keeper one; let as `+env.UID+`=65534
	shell 'chmod 755 $dir/.. $dir/bin $dir/bin/one; chmod 777 $dir/faulty/taken'
	fails give add a $as onJournalFailure=fail code=11 'permission denied'; taken
	give add a $as; taken one; warned $state
	give del a $as 'prevResult=$result'; taken`, keepers)
}

// TestLimits runs unwind with low resource limits: an ADD takes all or nothing, and a DEL releases
// all, or says that it did not. No delegate can be started by one that is helpless.
func TestLimits(t *testing.T) {
	stories(t, `
	chain {"type": "one"} | {"type": "two"}; keeper one; let says; let result
	# The delegate's lock has a higher number.
	either 20 files, able: let limit ulimit -n 20
	or 12 files, helpless: let limit ulimit -n 12; let says too many open files
	or 8 files, helpless: let limit ulimit -n 8; let says too many open files
	# Of 512 bytes each.
	or no block, able: let limit ulimit -f 0; let says file too large
	or 8 blocks, able: let limit ulimit -f 8; let says file too large
	or 40 blocks, able: let limit ulimit -f 40
	or umask 0777, able: let limit umask 0777
	or umask 0, able: let limit umask 0
	either passes: keeper two
	or fails: keeper two '[ $CNI_COMMAND != ADD ] || exit 1'
	if able, passes: give add a 'first=$limit'; says '$says'; taken one two
	unless able, passes: fails give add a 'first=$limit'; says '$says'; taken
	if helpless, passes: give add a; fails give del a 'first=$limit' 'prevResult=$result'
	if able: give del a 'first=$limit' 'prevResult=$result'; taken
	give del a 'prevResult=$result'`, keepers, acts{"says": func(s *story, w []string) {
		s.want(strings.Contains(s.said.stdout+s.said.stderr, w[0]), "%s\n%s", s.said.stdout, s.said.stderr)
	}})
}

// TestNoOutput: an ADD whose result cannot be printed is undone, as when the runtime is gone. A DEL has
// nothing to print.
func TestNoOutput(t *testing.T) {
	stories(t, `
	chain p0
	fails give add a 'first=exec >/dev/full'; warned 'no space left on device'; clean
	shell 'mkfifo $dir/pipe'
	fails give add a 'first=exec 3<>$dir/pipe >$dir/pipe 3<&-'; calls ADD p0, DEL p0, ADD p0, DEL p0; clean
	give add a; give del a 'first=exec >&- 2>&-'`)
}
