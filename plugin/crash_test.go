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

// pointsApart returns the distance between the crash points that this run tests.
func pointsApart() int { return sandbox.Rounds(12, 4, 1) }

// everyPoint calls try with 1, 2, … until unwind is no longer killed, and checks that it was killed
// at enough points. A short run skips points; the length of the test's name decides which.
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

// killedAtPoint runs a verb in which unwind kills itself at the n-th crash point with this name, or
// at the n-th of all points if the name is "". The sweep that a STATUS starts does the same.
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

// awaitDelegates waits until no plugin holds a lock. After unwind was killed, a child of its plugin
// may hold a lock for some time.
func (n *node) awaitDelegates() {
	n.Helper()
	files, err := filepath.Glob(filepath.Join(n.stateDir, "locks", "*"))
	must(n, err)
	eventually(n, "no delegate runs", func() bool { return !slices.ContainsFunc(files, held) })
}

// held reports whether a process has locked a file.
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

// recovery is what a runtime may do after unwind was killed. A live attachment stays live until its
// DEL or, if its namespace is gone, until the ADD of the pod's next sandbox. The runtime's DELs
// contain a different chain, so they undo only what the journal contains.
type recovery struct {
	name string
	of   func(p *pod)
}

var recoveries = []recovery{
	{"DEL", (*pod).recoverByDEL},
	{"ADD", (*pod).recoverByADD},
	{nextSandbox, (*pod).recoverByNextSandbox},
}

const nextSandbox = "next sandbox"

func (p *pod) recoverByDEL() {
	p.Helper()
	p.mustDel(p.anotherChain())
}

func (p *pod) recoverByADD() {
	p.Helper()
	live := p.isLive()
	seen, _ := facts.InterfaceAt(p.NetNS, p.IfName)
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
	// A DEL that was tried twice pauses, and the next sandbox's ADD does not wait for it. If a plugin
	// is killed in its ADD, that counts as the first try of its DEL.
	isReady := func(s journal.Step) bool { return s.Tries < 2 }
	if e := p.record(); (e != nil) != (live && gone == nil) && (e == nil || slices.ContainsFunc(e.Steps, isReady)) {
		p.Errorf("the old sandbox, live %t, its namespace %v, is in the journal as %+v", live, gone, e)
	}
	next.mustDel(p.anotherChain())
	p.mustDel(p.anotherChain())
}

func (p *pod) isLive() bool {
	p.Helper()
	e := p.record()
	return e != nil && e.State == journal.Live
}

// anotherChain returns a conflist with a chain whose DELs have nothing to release.
func (n *node) anotherChain() *libcni.NetworkConfigList { return n.unwind(n.faulty("another", "")) }

// ends removes a pod's namespace, if it exists.
func (p *pod) ends() {
	p.Helper()
	if _, err := os.Stat(p.NetNS); err == nil {
		p.dropNetNS()
	}
}

// death is a verb in which unwind is killed. prepare uses the test's chain to create what the verb
// needs. try runs the verb.
type death struct {
	name    string
	prepare func(n *node) (a *pod)
	try     func(n *node, a, bystander *pod) error
}

var deaths = []death{
	{"an ADD", preparePod, addOfPod},
	{"a failing ADD", func(n *node) *pod {
		n.chain(append(slices.Clone(n.present), faulty("last"))...)
		n.plan(faulty("last").ADD("fail-effect"))
		return n.newPod("a")
	}, addOfPod},
	{nextADD, func(n *node) *pod {
		a := n.newPod("a")
		old := a.nextSandbox("old")
		old.add()
		old.dropNetNS()
		return a
	}, addOfPod},
	{"a DEL", func(n *node) *pod { return n.add("a") },
		func(_ *node, a, _ *pod) error { return a.tryDel() }},
	{"a GC", prepareDead,
		func(n *node, _, bystander *pod) error { return n.tryLibcniGC(bystander) }},
	{"a STATUS", prepareDead,
		func(n *node, _, _ *pod) error { return n.tryLibcniStatus() }},
}

const nextADD = "the next ADD"

func preparePod(n *node) *pod { return n.newPod("a") }

func addOfPod(_ *node, a, _ *pod) error { return a.tryAdd() }

func prepareDead(n *node) *pod {
	a := n.add("a")
	a.dropNetNS()
	return a
}

// begin sets the test's versions and chain, adds a pod that stays live (the bystander), and
// prepares the verb.
func (d death) begin(n *node, chain ...pluginConf) (a, bystander *pod, verb func() error) {
	n.versions("1.1.0", "1.0.0")
	n.chain(bridge)
	bystander = n.add("bystander")
	n.chain(chain...)
	a = d.prepare(n)
	return a, bystander, func() error { return d.try(n, a, bystander) }
}

// aftermath is what happens after unwind was killed.
type aftermath struct {
	name string
	of   func(n *node, a, bystander *pod)
}

const reboot = "then reboot"

var aftermaths = []aftermath{
	{"then DEL", func(_ *node, a, _ *pod) { a.recoverByDEL() }},
	{"then the next sandbox", func(_ *node, a, _ *pod) {
		a.ends()
		a.recoverByNextSandbox()
	}},
	{"then GC", func(n *node, a, bystander *pod) {
		a.ends()
		n.until(1, func() { n.libcniGC(bystander) })
	}},
	{"then STATUS", func(n *node, a, _ *pod) {
		a.ends()
		n.until(1, n.libcniStatus)
		n.sweep() // removes a lock file without a record, for which a STATUS starts no sweep
	}},
	{reboot, func(n *node, _, _ *pod) {
		for _, p := range n.machine.pods {
			if p.ends(); p.record() != nil {
				p.ofEarlierBoot()
			}
		}
		n.until(0, n.libcniStatus)
		n.sweep()
	}},
	{"then ADD", func(_ *node, a, _ *pod) {
		if _, err := os.Stat(a.NetNS); err == nil {
			a.recoverByADD()
			return
		}
		a = a.again()
		a.add()
		a.mustDel(a.anotherChain())
	}},
}

// end runs the aftermath, and then a GC if the killed verb was nextADD. Except after a reboot, the
// bystander must still be live, and end deletes it. At the end, nothing may be left.
func (f aftermath) end(n *node, d death, a, bystander *pod) {
	n.plan()
	f.of(n, a, bystander)
	if d.name == nextADD {
		n.gc()
	}
	if f.name != reboot {
		bystander.wantRecord(journal.Live)
		n.wantReserved(1)
		n.chain(bridge)
		bystander.del()
	}
	n.wantClean()
}

// TestKilledThenRecovered kills unwind at the crash points of ADD, DEL, GC and STATUS. One
// aftermath follows each kill. "make proof" tests all aftermaths at each point; other runs skip
// points, and use the aftermaths in turn. New crash points are covered automatically. The test
// shows what SIGKILL leaves. The journal's tests show what a power loss leaves.
func TestKilledThenRecovered(t *testing.T) {
	t.Parallel()
	type way struct {
		name      string
		chain     []pluginConf
		aftermath aftermath
	}
	var ways []way
	for _, after := range aftermaths {
		ways = append(ways, way{"faulty plugins, " + after.name, []pluginConf{bridge, p1, p2}, after})
	}
	for _, after := range aftermaths {
		ways = append(ways, way{"reference plugins, " + after.name,
			[]pluginConf{bridge.masq(), firewall, portmap}, after})
	}
	for _, death := range deaths {
		t.Run(death.name, func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 3, func(t *testing.T, at int) (killed bool) {
				return inTurn(t, at, ways, func(t *testing.T, way way) (killed bool) {
					n := newNode(t)
					a, bystander, verb := death.begin(n, way.chain...)
					killed, _ = n.tryKill("", at, verb)
					way.aftermath.end(n, death, a, bystander)
					return killed
				})
			})
		})
	}
}

// TestKilledTwiceAnywhere kills unwind at every point of a verb, and again at every point of the
// verb that follows. "make proof" tests all pairs of points; other runs test a sample.
func TestKilledTwiceAnywhere(t *testing.T) {
	t.Parallel()
	apart := sandbox.Rounds(18, 18, 1)
	seconds := oneOf("and DEL", "and GC", "and STATUS")
	for v, death := range deaths {
		t.Run(death.name, func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 3, func(t *testing.T, at int) (killed bool) {
				for i, second := range seconds {
					if !sandbox.Sampled(sandbox.Rounds(len(seconds), len(seconds), 1), at/pointsApart(), v, i) {
						continue
					}
					for again, more := 1, true; more && !t.Failed(); again++ {
						if !sandbox.Sampled(apart, at, -again) {
							more = again < apart
							continue
						}
						after := aftermaths[(at/pointsApart()+again)%len(aftermaths)]
						name := fmt.Sprintf("and %d: %s, %s", again, second.name, after.name)
						t.Run(name, func(t *testing.T) {
							n := newNode(t)
							a, bystander, verb := death.begin(n, bridge, p1)
							killed, _ = n.tryKill("", at, verb)
							next := a.tryDel
							switch {
							case second.is("and GC"):
								a.ends()
								next = func() error { return n.tryLibcniGC(bystander) }
							case second.is("and STATUS"):
								a.ends()
								next = n.tryLibcniStatus
							}
							more, _ = n.tryKill("", again, next)
							after.end(n, death, a, bystander)
						})
					}
				}
				return killed
			})
		})
	}
}

// TestPowerLossInAVerb kills unwind at each point of a verb, and then removes what a power loss
// removes. The plugins' files on the disk remain. The next boot's sweep releases all of them.
func TestPowerLossInAVerb(t *testing.T) {
	t.Parallel()
	type chain struct {
		name    string
		plugins []pluginConf
	}
	kernel := faulty("kernel") // stands for a plugin with resources in the kernel
	chains := []chain{
		{"all in the kernel", []pluginConf{bridge, firewall, faulty("kernel0"), kernel}},
		{"a delegate in the middle keeps something on the disk",
			[]pluginConf{bridge, faulty("kernel0"), faulty("disk").with(`"dataDir": "on the disk"`), kernel}},
		{"host-local is the second's", []pluginConf{kernel, bridge, faulty("kernel2"), faulty("kernel3")}},
	}
	for _, verb := range oneOf("ADD", "failing ADD", "DEL") {
		t.Run(verb.name, func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 6, func(t *testing.T, at int) (killed bool) {
				return inTurn(t, at, chains, func(t *testing.T, chain chain) (killed bool) {
					n := newNode(t)
					n.chain(chain.plugins...)
					a := n.newPod("a")
					switch {
					case verb.is("ADD"):
						killed, _ = n.tryKill("", at, a.tryAdd)
					case verb.is("failing ADD"):
						n.plan(faulty("last").ADD("fail-effect"))
						n.chain(append(slices.Clone(chain.plugins), faulty("last"))...)
						killed, _ = n.tryKill("", at, a.tryAdd)
					case verb.is("DEL"):
						a.add()
						killed, _ = n.tryKill("", at, a.tryDel)
					}
					n.plan()
					a.losePower()
					n.until(0, func() { n.sweep() })
					n.nothingOnDisk()
					if verb.has("ADD") {
						live := !killed && a.added != nil
						n.want(!live || a.record() == nil, "the sweep released nothing")
					}
					return killed
				})
			})
		})
	}
}

// losePower removes what a power loss may remove: lock files, the network namespace, and the
// kernel's state. The files of the plugins "kernel…" and "last" stand for that state. The record
// moves to an earlier boot.
func (p *pod) losePower() {
	p.Helper()
	for _, lost := range []string{"state/locks/*", "faulty/taken/*.kernel*", "faulty/taken/*.last*"} {
		files, err := filepath.Glob(filepath.Join(p.dir, lost))
		must(p, err)
		for _, file := range files {
			must(p, os.Remove(file))
		}
	}
	if p.dropNetNS(); p.record() != nil {
		p.ofEarlierBoot()
	}
}
