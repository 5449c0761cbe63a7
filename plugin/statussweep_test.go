package plugin

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest/sandbox"
)

// TestStatusSweeps: a STATUS releases the dead attachments of its own network and of any other, and
// nothing else: none that lives or is being worked on, and nothing where sweeping is disabled. It
// waits for no lock.
func TestStatusSweeps(t *testing.T) {
	sandbox.Concurrent(t)
	stories(t, `
	chain p0 | p1 | p2 | p3
	add live
	either namespace gone: add a; drop a
	or ADD cut off in its first delegate: plan p0 ADD kill-parent-effect; killed add a; free a
	or ADD cut off after its first result, namespace gone: plan p2 ADD kill-parent-effect; killed add a; free a; drop a
	or ADD and its DEL failed: plan p2 ADD fail-effect, p1 DEL fail; fails add a
	or DEL failed: add a; plan p2 DEL fail; fails del a
	or earlier boot: add a; boot a
	plan; steady
	network of-another
	status sweepOnStatus=false; steady
	unless first delegate: lock a; status; unlock; steady
	until 1 status
	entry live live 4; taken live.eth0.p0 live.eth0.p1 live.eth0.p2 live.eth0.p3
	del live`, acts{
		"steady": func(s *story, _ []string) { s.steady("taken", fmt.Sprint(s.taken())) },
	})
}

// TestStatusHasNoList: a runtime's list of valid attachments is for GC. On the stdin of a STATUS it
// makes nothing dead, and no delegate sees it. With the same list, a GC releases.
func TestStatusHasNoList(t *testing.T) {
	stories(t, `
	chain p0 | p1 | p2 | p3; add a; forgets
	either valid: let list valid=[]
	or slip: let list slip=[]
	status $list; versions 1.0.0 1.1.0; status $list
	unlisted; entry a live 4
	versions 1.0.0 1.0.0; gc $list`, acts{"unlisted": func(s *story, _ []string) {
		s.want(len(s.callLog()) == 4, "%d calls", len(s.callLog()))
		for _, l := range s.callLog() {
			s.want(l.Command == "STATUS" && l.Stdin[validKey] == nil && l.Stdin[slipKey] == nil, "%s: %v", l.Command, l.Stdin)
		}
	}})
}

// TestStatusReleasesEmpty: a STATUS, and the sweep after a failed ADD, release an address whose
// owner host-local never wrote, also if they cannot know that the pool is full (as of flannel).
func TestStatusReleasesEmpty(t *testing.T) {
	stories(t, `
	chain bridge; add a; del a; reserve $ip2; reserved 1
	either STATUS: status
	or a failed ADD: status; reserve $ip2; chain bridge | p1; plan p1 ADD fail; fails add b
	reserved 0; leaves`)
}

// TestCutOffReservation: a power loss leaves a host-local file of a dead pod empty or cut off. The record
// and the file go with the next sweep. A living pod's file of the same pool stays.
func TestCutOffReservation(t *testing.T) {
	stories(t, `
	chain bridge | firewall; add container; add other; reboot container
	let file $data/$network/$container
	either empty: cut 0 0
	or zeros: cut 0 12
	or in the container ID: cut 4 4
	or before the interface: cut 10 10
	or in the interface: cut 12 12
	or in the interface, then zeros: cut 12 15
	each by status gc sweep
	until 1 $by; owners '$other other eth0'; del other`, acts{
		"cut": func(s *story, w []string) { // to this many bytes, and fills it up with zeros
			file := s.value("$file")
			run(s, "sh", "-ec", fmt.Sprintf("touch -r %[1]s %[1]s.ref; truncate -s %[2]s %[1]s; truncate -s %[3]s %[1]s; touch -r %[1]s.ref %[1]s; rm %[1]s.ref",
				file, w[0], w[1]))
		},
	})
}

// TestEmptiedFileOfALivePod: an address whose file somebody emptied stays a living pod's.
func TestEmptiedFileOfALivePod(t *testing.T) {
	stories(t, `
	chain bridge; add a; reserve $ip2
	either STATUS: status
	or unwindctl sweep: sweep
	reserved 1; add b; reserved 2
	del b; del a; chain bridge | p1; plan p1 ADD fail; fails add c
	reserved 0; leaves`)
}

// TestSlowDELBehindStatus: the DELs of three failed ADDs take longer than a STATUS and than the
// patience with orphans, and the DEL of a fourth fails. Only STATUS is called, again and again. Each
// STATUS ends meanwhile; each slow DEL runs once, is not killed, and is done.
func TestSlowDELBehindStatus(t *testing.T) {
	stories(t, `
	budget Status 2s; versions 1.1.0 1.0.0; chain p0 | p1; plan p1 ADD fail, p0 DEL fail; let held $dir/faulty/held/DEL
	fails add a; fails add b; fails add c; fails add worst; pauses 4 0s; forgets
	plan p0 DEL hold, pod:worst DEL fail
	libcni-status; appears $held.a.p0; appears $held.b.p0; appears $held.c.p0
	pause 2500ms; libcni-status; libcni-status
	deleted a 1; deleted b 1; deleted c 1
	plan pod:worst DEL fail; shell 'rm $held.*'; swept
	deleted a 1; deleted b 1; deleted c 1; gone a b c; entry worst rolling-back 1
	plan; sweep`, acts{"swept": func(s *story, _ []string) { s.awaitSweep() }})
}

// TestStatusOpensJournalOnce: a STATUS opens the journal once, however many DELs are pending, and
// starts no sweep while none of them is due. ADD and DEL of another pod open it twice each.
func TestStatusOpensJournalOnce(t *testing.T) {
	stories(t, `
	each many 1 300
	owes a 7; copies a $many; pauses $many 4m; wait-for a; openings 1 status; deleted a 0
	plan; pair-opens 2 2; leaves`, owing(), acts{
		"wait-for": func(s *story, w []string) {
			s.who(w[0]).edit(func(e *journal.Entry) { e.Undo.Steps[0].Next.At = journal.BootNanos() + int64(4*time.Minute) })
		},
		// pair-opens N M: an ADD of b opens the journal N times, its DEL M times. A slow DEL is recorded once more.
		"pair-opens": func(s *story, w []string) {
			eventually(s, "a pair that opens the journal so often", func() bool {
				add, del := openings(s, "add", "b"), openings(s, "del", "b")
				return add == s.number(w[0]) && del == s.number(w[1])
			})
		},
		"openings": func(s *story, w []string) { s.wantCount(openings(s, w[1:]...), w[0]) }, // openings N STATEMENT
	})
}

// openings returns how often a statement opens the journal's file.
func openings(s *story, statement ...string) (n int) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	s.must(err)
	defer func() { _ = unix.Close(fd) }()
	// the kernel merges equal events, so that openings are counted with what is between them
	_, err = unix.InotifyAddWatch(fd, s.store.Path(), unix.IN_OPEN|unix.IN_CLOSE)
	s.must(err)
	s.verb(statement[0])(s, statement[1:])
	events := make([]byte, 1<<20)
	size, err := unix.Read(fd, events)
	s.must(err)
	for at := 0; at < size; at += unix.SizeofInotifyEvent { // an event of a file has no name
		if binary.NativeEndian.Uint32(events[at+4:])&unix.IN_OPEN != 0 {
			n++
		}
	}
	return n
}

// sweepAlone is a script in which the first DEL of a is held, in a sweep that a STATUS has started.
const sweepAlone = `
	budget Status 2s; versions 1.1.0 1.0.0; chain p0 | p1; let held $dir/faulty/held/DEL.a.p1
	add a; drop a; forgets; plan pod:a DEL hold; libcni-status; appears $held
`

// sweeper are statements about the sweep that a STATUS has started.
var sweeper = acts{
	"swept": func(s *story, _ []string) { s.awaitSweep() },
	"running-for": func(s *story, w []string) { // running-for TIME: it has the lock for so long
		begun := time.Now().Add(-s.duration(w[0]))
		s.must(os.Chtimes(filepath.Join(s.stateDir, "sweep.lock"), time.Time{}, begun))
	},
	"terminate": func(s *story, _ []string) {
		pid := s.number(strings.TrimSpace(read(s, filepath.Join(s.stateDir, "sweep.lock"))))
		s.must(syscall.Kill(pid, syscall.SIGTERM))
	},
	"tried": func(s *story, w []string) { // tried POD N …: its pending DELs, in the order of the chain
		var got []string
		for _, step := range s.who(w[0]).entry().Undo.Steps {
			got = append(got, strconv.Itoa(step.Tries))
		}
		s.want(slices.Equal(got, w[1:]), "%q", got)
	},
}

// TestOneSweepBehindStatus: while the sweep of a STATUS runs, that of another one ends at once. One
// that runs for five minutes keeps nobody from starting; the attachment that it works on stays its
// own.
func TestOneSweepBehindStatus(t *testing.T) {
	stories(t, sweepAlone+`
	add b; drop b
	libcni-status; running-for 4m; libcni-status; entry b live
	running-for 6m; libcni-status; goes b; deleted a 1
	running-for 1h; plan; shell 'rm $held'; swept; gone a`, sweeper)
}

// TestSweepBehindStatusEnds: SIGTERM ends the sweep that a STATUS started, with its delegate, and it
// starts no other one. The try is in the journal, and the next sweep does the rest.
func TestSweepBehindStatusEnds(t *testing.T) {
	sandbox.Concurrent(t)
	stories(t, sweepAlone+`
	add b; drop b; terminate; swept
	entry a deleting 2; tried a 0 1; ends DEL p1; plan
	status; gone a b`, sweeper)
}

// TestSweepBehindStatusInherits: the process that a STATUS starts has a session, no descriptor of the
// runtime, and not the configuration where others can read it. Its delegates get no CNI variables of the STATUS.
func TestSweepBehindStatusInherits(t *testing.T) {
	sandbox.Concurrent(t)
	stories(t, `
	script spy 'cat >/dev/null; if [ $CNI_COMMAND = ADD ]; then echo "{\"cniVersion\": \"1.0.0\"}"; exit; fi;
		p=/proc/$PPID; cat $p/cmdline >$dir/args; cat $p/environ >$dir/environ; cut -d" " -f1,5,6 $p/stat >$dir/ids;
		ls -l $p/fd >$dir/fds; ls -l /proc/self/fd >$dir/its-fds'
	versions 1.1.0 1.0.0; chain {"type": "spy", "password": "s3cret"}; add a; drop a
	file $dir/leaked; give status a MARK=1 'first=: && exec 7<$dir/leaked'
	gone a; spied`, acts{"spied": func(s *story, _ []string) {
		file := func(name string) string { return read(s, filepath.Join(s.dir, name)) }
		args, environ, fds := file("args"), file("environ"), file("fds")
		s.want(strings.HasSuffix(args, "/unwind\x00sweep\x00"), "arguments %q", args)
		s.want(!strings.Contains(args+environ, "s3cret"), "%s %s", args, environ)
		s.want(strings.Contains(environ, "MARK=1\x00") && strings.Contains(environ, "CNI_PATH=") &&
			!strings.Contains(environ, "CNI_COMMAND"), "environment %s", environ)
		for _, what := range []string{" 0 -> /memfd:unwind (deleted)", " 1 -> /dev/null", " 2 -> /dev/null", "/sweep.lock"} {
			s.want(strings.Contains(fds, what), "no %s in %s", what, fds)
		}
		s.want(!strings.Contains(fds, "/leaked") && !strings.Contains(file("its-fds"), "sweep.lock"), "%s %s", fds, file("its-fds"))
		var pid, group, session int
		_, err := fmt.Sscan(file("ids"), &pid, &group, &session)
		s.want(err == nil && pid == group && pid == session, "process, group, session: %s", file("ids"))
	}})
}

// TestSweepIsForStatus: nobody else starts the process that sweeps behind a STATUS.
func TestSweepIsForStatus(t *testing.T) {
	sandbox.Concurrent(t)
	stories(t, `
	chain p0; add a; drop a
	either a person: refused
	or with a configuration: refused $entry
	entry a live; sweep`, acts{"refused": func(s *story, w []string) {
		cmd := exec.Command(filepath.Join(s.path[0], "unwind"), "sweep")
		if len(w) > 0 {
			cmd.Stdin = strings.NewReader(s.entryOf(s.chainOf(s.plugins(s.node)...), nil))
		}
		out, err := cmd.CombinedOutput()
		s.want(err != nil && strings.Contains(string(out), "run unwindctl sweep instead"), "%v: %s", err, out)
	}})
}
