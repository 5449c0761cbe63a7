package plugin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/plugintest/env"
	"cni-unwind/plugin/plugintest/sandbox"
)

// pointsApart returns how far the points are apart at which this run kills.
func pointsApart() int { return sandbox.Rounds(12, 4, 1) }

// everyPoint calls try with 1, 2, … until unwind is no longer killed there, and checks that there
// are at least atLeast points. It begins at another point in each test.
func everyPoint(t *testing.T, atLeast int, try func(t *testing.T, at int) (killed bool)) {
	t.Helper()
	sandbox.Need(t)
	for at := 1 + len(t.Name())%min(pointsApart(), atLeast); ; at += pointsApart() {
		killed := false
		t.Run(fmt.Sprintf("at point %d", at), func(t *testing.T) { killed = try(t, at) })
		if !killed {
			t.Logf("fewer than %d points", at)
			if at <= atLeast {
				t.Errorf("unwind was killed at fewer than %d points", at)
			}
			return
		}
	}
}

var portMappings = map[string]any{"portMappings": []map[string]any{
	{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
}}

// killedAtPoint runs a verb in which unwind kills itself at the n-th point of a name, of any name
// if that is "". So does the sweep behind a STATUS.
func (n *node) killedAtPoint(name string, nth int, verb func() error) error {
	killed := filepath.Join(n.dir, "killed")
	n.env = append(n.env, env.KillAt+"="+strings.TrimSpace(fmt.Sprintf("%s %d", name, nth)),
		env.Killed+"="+killed)
	defer func() { n.env = n.env[:len(n.env)-2] }()
	err := verb()
	n.awaitDelegates()
	if os.Remove(killed) == nil && err == nil {
		err = types.NewError(types.ErrInternal, "its sweep: signal: killed", "")
	}
	return err
}

// awaitDelegates waits until no delegate holds a lock: it carries out its configuration although its
// unwind is dead.
func (n *node) awaitDelegates() {
	n.Helper()
	files, err := filepath.Glob(filepath.Join(n.stateDir, "locks", "*"))
	must(n, err)
	eventually(n, "no delegate runs", func() bool { return !slices.ContainsFunc(files, held) })
}

// held says whether somebody has the lock of a file.
func held(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	lock := unix.Flock_t{Type: unix.F_WRLCK}
	return unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &lock) != nil || lock.Type != unix.F_UNLCK
}

// wasKilled reports whether a verb failed because unwind was killed.
func wasKilled(err error) bool {
	var cniErr *types.Error
	return errors.As(err, &cniErr) && strings.HasSuffix(cniErr.Msg, "signal: killed")
}

// recovery is what a runtime may do next. An attachment that was live when unwind was killed stays
// live until its DEL, or until its namespace is gone and the pod's next sandbox comes. The DELs come
// with another chain, so that they undo only what the journal has.
type recovery struct {
	name string
	of   func(p *pod)
}

var recoveries = []recovery{
	{"DEL", (*pod).recoverByDEL},
	{"ADD", (*pod).recoverByADD},
	{"next sandbox", (*pod).recoverByNextSandbox},
}

func (p *pod) recoverByDEL() {
	p.Helper()
	p.mustDel(p.anotherChain())
}

func (p *pod) recoverByADD() {
	p.Helper()
	live := p.isLive()
	seen, _ := facts.Look(p.NetNS, p.IfName)
	if err := p.tryAdd(); (err != nil) != (live && seen.There()) {
		p.Errorf("ADD of the same container ID, live %t, with the interface %t: %v", live, seen.There(), err)
	}
	p.mustDel(p.anotherChain())
}

func (p *pod) recoverByNextSandbox() {
	p.Helper()
	live := p.isLive()
	next := p.nextSandbox("b")
	next.add()
	_, gone := os.Stat(p.NetNS)
	if e := p.entry(); (e != nil) != (live && gone == nil) {
		p.Errorf("the old sandbox, live %t, its namespace %v, is in the journal as %+v", live, gone, e)
	}
	next.mustDel(p.anotherChain())
	p.mustDel(p.anotherChain())
}

func (p *pod) isLive() bool {
	p.Helper()
	e := p.entry()
	return e != nil && e.Undo.State == journal.Live
}

// anotherChain is a chain whose DELs have nothing to release.
func (n *node) anotherChain() *libcni.NetworkConfigList { return n.unwind(n.faulty("another", "")) }

// killedIn is a script of how a verb begins. The pod a is added, deleted, or swept after its namespace
// went; the pod bystander lives. chains are the choices of $chain.
func killedIn(chains string) string {
	return `
	versions 1.1.0 1.0.0; chain bridge; add bystander
	either an ADD: let verb add a
	or a failing ADD: let verb add a
	or the next ADD: let verb add a
	or a DEL: let verb del a
	or a GC: let verb libcni-gc bystander
	or a STATUS: let verb libcni-status` + chains + `
	chain $chain
	if a failing ADD: chain $chain | last; plan last ADD fail-effect
	if the next ADD: sandbox a old; add old; drop old
	if a DEL: add a
	if a GC: add a; drop a
	if a STATUS: add a; drop a
`
}

// recoveryScript is a script of one thing alone that follows. Then nothing is left, nor of the bystander
// after its own DEL.
const recoveryScript = `
	plan
	either then DEL: recover a DEL
	or then the next sandbox: ends a; recover a next sandbox
	or then GC: ends a; until 1 libcni-gc bystander
	or then STATUS: ends a; until 1 libcni-status; strays
	or then reboot: reboots; until 0 libcni-status; strays
	or then ADD: readd a
	if the next ADD: gc
	unless reboot: entry bystander live; reserved 1; chain bridge; del bystander
`

// ends removes a pod's namespace, if it is there.
func (p *pod) ends() {
	if _, err := os.Stat(p.NetNS); err == nil {
		p.dropNetNS()
	}
}

// killings are the statements of these scripts.
var killings = acts{
	"ends": each((*pod).ends),
	"reboots": func(s *story, _ []string) {
		for _, p := range s.pods {
			if p.ends(); p.entry() != nil {
				p.ofEarlierBoot()
			}
		}
	},
	// strays: a lock file without an entry, for which no STATUS sweeps, stays until the next sweep
	"strays": func(s *story, _ []string) { s.sweep() },
	"readd": func(s *story, w []string) { // in its namespace, or in a new one if that is gone
		p := s.who(w[0])
		if _, err := os.Stat(p.NetNS); err == nil {
			recoverBy(s, p, "ADD")
			return
		}
		p = p.again()
		p.mustAdd(s.list(p, false))
		p.mustDel(p.anotherChain())
	},
}

// TestKilledThenRecovered kills unwind at every point of every verb; then one recovery follows
// alone, at the points in turn. A new point is covered automatically. The test proves what a SIGKILL leaves, not what a
// loss of power does: see the journal's tests for that.
func TestKilledThenRecovered(t *testing.T) {
	t.Parallel()
	atEveryPoint(t, 3, killedIn(`
	either faulty plugins: let chain bridge | p1 | p2
	or reference plugins: let chain bridge, "ipMasq": true | firewall | portmap`)+`
	kill any $at tries $verb`+recoveryScript, killings)
}

// TestKilledTwiceAnywhere kills unwind at every point of a verb, and then at every point of the
// recovery. A normal run has one second point for each first.
func TestKilledTwiceAnywhere(t *testing.T) {
	t.Parallel()
	all := tellings(killedIn(`
	let chain bridge | p1`) + `
	kill any $at tries $verb; first
	either and DEL: let second del a
	or and GC: ends a; let second libcni-gc bystander
	or and STATUS: ends a; let second libcni-status
	kill any $again tries $second` + recoveryScript)
	const begins, seconds, recoveries = 6, 3, 6
	apart := sandbox.Rounds(18, 18, 1)
	if len(all) != begins*seconds*recoveries {
		t.Fatalf("%d ways", len(all))
	}
	for v := range begins {
		name, _, _ := strings.Cut(all[v*seconds*recoveries].name, ",")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 3, func(t *testing.T, at int) (killed bool) {
				for i := range seconds {
					if !sandbox.Sampled(sandbox.Rounds(seconds, seconds, 1), at/pointsApart(), v, i) {
						continue
					}
					for again, more := 1, true; more && !t.Failed(); again++ {
						if !sandbox.Sampled(apart, at, -again) {
							more = again < apart
							continue
						}
						one := all[(v*seconds+i)*recoveries+(at/pointsApart()+again)%recoveries]
						t.Run(fmt.Sprintf("and %d: %s", again, one.name), func(t *testing.T) {
							s := newStory(t, killings, acts{"first": func(s *story, _ []string) { killed = s.killed }})
							s.vars["at"], s.vars["again"] = fmt.Sprint(at), fmt.Sprint(again)
							s.run(one.statements)
							s.end()
							more = s.killed
						})
					}
				}
				return killed
			})
		})
	}
}

// TestPowerLossInAVerb loses the power at each point of a verb, with the versions of the entry that
// were not synced. The kernel's state is gone, too, and what delegates keep on the disk is not: the
// next boot's sweep releases all of it.
func TestPowerLossInAVerb(t *testing.T) {
	t.Parallel()
	atEveryPoint(t, 6, `
	either ADD: let verb add a
	or failing ADD: let verb add a; plan last ADD fail-effect
	or DEL: let verb del a
	either all in the kernel: let chain bridge | firewall | kernel0 | kernel
	or a delegate in the middle keeps something on the disk: let chain bridge | kernel0 | disk, "dataDir": "on the disk" | kernel
	or host-local is the second's: let chain kernel | bridge | kernel2 | kernel3
	chain $chain
	if failing: chain $chain | last
	if DEL: add a
	kill any $at tries $verb; plan
	off a; until 0 sweep; on-disk
	if ADD: released
	leaves`, acts{
		// off POD: what a loss of power may take is gone: lock files, network namespaces, and what
		// delegates have in the kernel, as those named kernel have
		"off": func(s *story, w []string) {
			for _, lost := range []string{"state/locks/*", "faulty/taken/*.kernel*", "faulty/taken/*.last*"} {
				files, err := filepath.Glob(filepath.Join(s.dir, lost))
				s.must(err)
				for _, file := range files {
					s.must(os.Remove(file))
				}
			}
			p := s.who(w[0])
			if p.dropNetNS(); p.entry() != nil {
				p.ofEarlierBoot()
			}
		},
		"on-disk": func(s *story, _ []string) { s.nothingOnDisk() },
		"released": func(s *story, _ []string) {
			live := !s.killed && s.added["a"] != nil
			s.want(!live || s.who("a").entry() == nil, "the sweep released nothing")
		},
	})
}
