package plugin

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/plugintest/sandbox"
)

var details = acts{"details": func(s *story, w []string) { s.want(s.said.said.Details == w[0], "%s", s.said.said.Details) }}

// TestStatusOfMissingPlugin: a plugin of the chain, or an IPAM one, that is in no directory is code
// 50. STATUS looks for it again after a second.
func TestStatusOfMissingPlugin(t *testing.T) {
	stories(t, `
	let missing gone
	either delegate: chain p0 | {"type": "gone"}
	or IPAM: chain p0 | {"type": "bridge", "ipam": {"type": "gone"}}
	or both: chain p0 | {"type": "gone"} | {"type": "bridge", "ipam": {"type": "away"}}; let missing gone, away
	versions 1.1.0 1.1.0; fails status code=50 'unwind: failed to find plugin "gone" in path [$dir/bin $cni '; waited
	details '$missing'`, details, acts{"waited": func(s *story, _ []string) {
		s.want(s.said.took >= time.Second, "it was looked for once only: STATUS took %s", s.said.took)
	}})
}

// TestStatusDuringUpgrade: a plugin that is missing when STATUS looks and is back soon after,
// as in an upgrade, is no failure, even if STATUS must then ask it for its own STATUS. STATUS
// looks at several things at once.
func TestStatusDuringUpgrade(t *testing.T) {
	stories(t, `
	budget Exchange 3m; script upgraded 'echo asked >>$dir/asked'; shell 'mv $dir/bin/upgraded $dir/bin/away'
	either delegate: chain {"type": "upgraded"}
	or IPAM: chain {"type": "faulty", "dir": "$dir", "ipam": {"type": "upgraded"}}
	either 1.0.0: versions 1.1.0 1.0.0
	or 1.1.0: versions 1.1.0 1.1.0
	start status; appears $state; pause 100ms; shell 'mv $dir/bin/away $dir/bin/upgraded'; wait status
	if delegate, 1.1.0: shell 'test $(cat $dir/asked) = asked'
	unless delegate, 1.1.0: absent $dir/asked`)
}

// TestStatusOfDelegates: STATUS asks delegates if the chain speaks 1.1. The runtime gets the delegate's words and code. Of several failures it gets the
// gravest: 51 before 50 before all others. Slow ones together take longer than a STATUS has.
func TestStatusOfDelegates(t *testing.T) {
	sandbox.Concurrent(t)
	stories(t, `
	either well: codes 0 0 0 ok
	or not available: codes 0 50 0 fail; let code 50; let says faulty: p1 STATUS refused
	or limited: codes 0 0 51 fail; let code 51; let says faulty: p2 STATUS refused
	or 50 and 51: codes 50 0 51 fail; let code 51; let says faulty: p2 STATUS refused
	or 51 and 50: codes 51 0 50 fail; let code 51; let says faulty: p0 STATUS refused
	or 50 among others: codes 999 50 147 fail; let code 50; let says faulty: p1 STATUS refused
	or others: codes 0 147 11 fail; let code 147; let says faulty: p1 STATUS refused
	or crash: codes 0 1 0 crash; let code 999; let says netplugin failed with no error message: signal: killed
	or well, nothing said: codes 1 1 1 empty
	or well, slow: codes 1 1 1 late
	versions 1.1.0 1.1.0
	if well: status
	unless well: fails status code=$code 'plugin type="faulty" failed (status): $says'
	sorted-calls STATUS p0, STATUS p1, STATUS p2
	forgets; versions 1.1.0 1.0.0; status; calls`, acts{
		"codes": func(s *story, w []string) { // codes C0 C1 C2 MODE: of the delegates, which have that mode unless it is 0
			plan := map[string]map[string]string{}
			s.chain = nil
			for i, code := range w[:3] {
				s.chain = append(s.chain, fmt.Sprintf(`p%d, "code": %s, "delayMS": 600`, i, code))
				if code != "0" {
					plan[fmt.Sprint("p", i)] = map[string]string{"STATUS": w[3]}
				}
			}
			s.node.setModes(plan)
		},
	})
}

// TestStatusOfJournal: an unusable journal is an error if no ADD goes on without it, and otherwise
// a warning. A journal that others are using is no problem.
func TestStatusOfJournal(t *testing.T) {
	var broken strings.Builder
	for how := range breakages {
		fmt.Fprintf(&broken, "\n\tor %s: break %s", how, how)
	}
	stories(t, `
	chain p0; journal; let warning 'the journal cannot be used; ADDs continue without it'
	either a folder that anybody can write to: shell 'chmod 777 $state'; let mend chmod 700 $state
	or not a folder: shell 'mv $state $state.away; touch $state'
		let mend 'rm $state; mv $state.away $state'`+broken.String()+`
	status
	if stranger: warned '$warning' 0; status onJournalFailure="fail"
	unless stranger: warned '$warning'
		fails status onJournalFailure="fail" code=50 'unwind: journal: ' ' (onJournalFailure is "fail")'
	if a folder that: shell '$mend'
	if not a folder: shell '$mend'
	unless folder: mend
	status onJournalFailure="fail"; warned '$warning' 0`)
}

// flock holds the lock of a file until it is unlocked, at the latest when the test ends.
func (n *node) flock(path string) (unlock func()) {
	n.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	must(n, err)
	n.Cleanup(func() { _ = f.Close() })
	must(n, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	return func() { _ = f.Close() }
}

// TestStatusEndsInTime: each thing hangs that a STATUS may wait for. STATUS still ends in time, and
// fails for the hang only if it is in a delegate's own STATUS. No delegate is left of it, nor of the
// sweep, which has its own time.
func TestStatusEndsInTime(t *testing.T) {
	stories(t, `
	budget Status 2s; budget Undo 10s; conf onJournalFailure fail; versions 1.1.0 1.0.0; chain p0 | p1; let asks other | asked
	either a delegate hangs: plan asked STATUS hang
	or a delegate ignores SIGTERM: plan asked STATUS ignore-term
	or a delegate hangs, and a daemon holds its output: let asks {"type": "hanging"}
		script hanging 'setsid sleep 120 & exec sleep 120'
	or a daemon holds its output: plan asked STATUS daemon
	or the journal's queue is held: journal; flock $state/journal.lock
	or the journal's file is held: journal; flock $state/journal.db
	or a DEL of the sweep hangs: add a; drop a; plan p1 DEL hang
	or a daemon holds the output of a DEL of the sweep: add a; drop a; plan p1 DEL daemon
	or the lock of host-local's pool is held: chain bridge; add a; drop a; flock $data/$network/lock
	versions 1.1.0 1.1.0; chain $asks; forgets
	unless a delegate: budget Status 3m; budget Behind 2s
	if a delegate: fails status code=50 'timed out'
	unless a delegate: status
	took-less 30s; all-ended
	if sweep hangs: undeleted
	leaves`, acts{
		"took-less": func(s *story, w []string) {
			s.want(s.said.took < s.duration(w[0]), "it took %s", s.said.took)
		},
		"all-ended": func(s *story, _ []string) {
			for _, l := range s.callLog() {
				err := syscall.Kill(l.PID, 0)
				s.want(errors.Is(err, syscall.ESRCH), "%s of %s is still there: %v", l.Command, l.Instance, err)
			}
		},
		"undeleted": func(s *story, _ []string) { s.want(len(s.entries()[0].Undo.Steps) > 0, "no DEL is pending") },
	})
}

// warnedUnknown is logged by a CHECK without an entry.
const warnedUnknown = "the attachment is not in the journal"

// TestCheck: CHECK asks every delegate in the order of the chain, with the configuration of its ADD
// and the final result, even if the conflist has changed.
func TestCheck(t *testing.T) {
	stories(t, `
	chain p0 | p1, "key": "as added" | p2, "address": "192.0.2.7/24"
	add a; forgets
	either same conflist:
	or another conflist: chain p9 | p1, "key": "changed"
	or a chain that cannot be read: chain {}
	check a
	stdin p1 key "as added"; previous 192.0.2.7; shown a a a; calls CHECK p0, CHECK p1, CHECK p2
	logged '`+warnedUnknown+`' 0
	del a`)
}

// TestCheckBesideOthers: a CHECK waits for nobody, and nobody for it, even after its unwind was killed.
// It makes no lock file.
func TestCheckBesideOthers(t *testing.T) {
	stories(t, `
	hasty; chain p0; add a; let held $dir/faulty/held/CHECK.a.p0
	lock a; check a; unlock
	either it lasts: plan p0 CHECK hold; start check a; appears $held
	or its unwind was killed: plan p0 CHECK kill-parent; killed check a
	plan; check a
	sandbox a b; add b; del b
	del a; past add a; check a; locks 0; del a
	if lasts: lose $held; fails wait check a`)
}

// TestCheckFails: the runtime gets the error of the delegate that fails, with its code and words,
// and the delegates after it are not asked.
func TestCheckFails(t *testing.T) {
	stories(t, `
	chain p0 | p1, "code": 117 | p2
	add a; forgets; plan p1 CHECK fail
	fails check a code=117 'plugin type="faulty" failed (check): faulty: p1 CHECK refused'
	calls CHECK p0, CHECK p1
	plan; check a
	del a`)
}

// TestCheckWithoutEntry: without an entry the delegates decide; the missing entry is a warning.
func TestCheckWithoutEntry(t *testing.T) {
	stories(t, `
	chain p0 | p1, "address": "192.0.2.7/24"
	past add a; forgets
	either they agree: check a; logged '`+warnedUnknown+`'
	or one refuses: plan p1 CHECK fail; fails check a
	previous 192.0.2.7; shown a a; calls CHECK p0, CHECK p1
	del a`)
}
