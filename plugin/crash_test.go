package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
	"cni-unwind/testdata/sandbox"
	"cni-unwind/testdata/unwind/env"
)

// crash is a verb in which unwind is killed, and its chain, which may fail its ADD.
type crash struct {
	verb  string // ADD, failing ADD, DEL
	chain func(n *node) []string
}

// TestKilledAtEveryPoint kills unwind at each point that leaves another state behind, until it
// survives the verb. Then one of three things follows: the runtime's DEL; an ADD of the same
// container ID; the pod's next sandbox. Nothing may be left. TestKilledThenRecovered does so with
// reference plugins.
func TestKilledAtEveryPoint(t *testing.T) {
	t.Parallel()
	for v, verb := range []string{"ADD", "failing ADD", "DEL"} {
		t.Run(verb, func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 7, func(t *testing.T, at int) (killed bool) {
				for r, recovery := range []string{"DEL", "ADD", "next sandbox"} {
					if !sampled(3, at, v, r) {
						continue
					}
					t.Run("then "+recovery, func(t *testing.T) {
						p, list, isKilled := crash{verb, chainOfFour}.at(t, at)
						recoverBy(p, list, recovery)
						p.nothingLeft()
						killed = isKilled
					})
				}
				return killed
			})
		})
	}
}

// everyPoint calls try with 1, 2, … until unwind is no longer killed there, and checks that there
// are at least atLeast points.
func everyPoint(t *testing.T, atLeast int, try func(t *testing.T, at int) (killed bool)) {
	t.Helper()
	sandbox.Need(t)
	for at := 1; ; at++ {
		killed := false
		t.Run(fmt.Sprintf("at point %d", at), func(t *testing.T) { killed = try(t, at) })
		if !killed {
			t.Logf("%d points", at-1)
			if at <= atLeast {
				t.Errorf("unwind was killed at %d points only", at-1)
			}
			return
		}
	}
}

// realChain is a chain of reference plugins, each of which leaves rules behind.
func realChain(n *node) []string {
	return []string{
		n.bridgePlugin(`, "ipMasq": true`), `{"type": "firewall"}`,
		`{"type": "portmap", "capabilities": {"portMappings": true}}`,
	}
}

// at kills the verb of a new pod at the point.
func (c crash) at(t *testing.T, at int) (p *pod, list *libcni.NetworkConfigList, killed bool) {
	n := newNode(t)
	chain := c.chain(n)
	if c.verb == "failing ADD" {
		chain = append(chain, n.faulty("last", ""))
		n.plan(map[string]map[string]string{"last": {"ADD": "fail-effect"}})
	}
	list = n.unwind(chain...)
	p = n.pod("a")
	p.CapabilityArgs = portMappings
	if c.verb == "DEL" {
		p.mustAdd(list)
	}
	err := n.killedAt(at, func() error {
		if c.verb == "DEL" {
			return p.del(list)
		}
		_, err := p.add(list)
		return err
	})
	n.plan(nil)
	return p, list, wasKilled(err)
}

var portMappings = map[string]any{"portMappings": []map[string]any{
	{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
}}

// killedAt runs a verb in which unwind kills itself at the n-th point.
func (n *node) killedAt(at int, verb func() error) error {
	return n.killedAtPoint("", at, verb)
}

// killedAtPoint runs a verb in which unwind kills itself at the n-th point of a name, of any name
// if that is "".
func (n *node) killedAtPoint(name string, nth int, verb func() error) error {
	n.env = append(n.env, env.KillAt+"="+strings.TrimSpace(fmt.Sprintf("%s %d", name, nth)))
	defer func() { n.env = n.env[:len(n.env)-1] }()
	err := verb()
	n.awaitDelegates()
	return err
}

// awaitDelegates waits, for a while, until no delegate holds a lock: one that was started early sees
// that its unwind is dead, and ends; one that has its configuration carries it out.
func (n *node) awaitDelegates() {
	n.Helper()
	files, err := filepath.Glob(filepath.Join(n.stateDir, "locks", "*"))
	if err != nil {
		n.Fatal(err)
	}
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if !slices.ContainsFunc(files, held) {
			return
		}
	}
}

// held says whether somebody has the lock of a file.
func held(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	return unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB) != nil
}

// wasKilled reports whether a verb failed because unwind was killed.
func wasKilled(err error) bool {
	var cniErr *types.Error
	return errors.As(err, &cniErr) && strings.HasSuffix(cniErr.Msg, "signal: killed")
}

// recoverBy does what a runtime may do next. An attachment that was live when unwind was killed
// stays live until its DEL, or until its namespace is gone and the pod's next sandbox comes. The
// DELs come with another chain, so that they undo only what the journal has.
func recoverBy(p *pod, list *libcni.NetworkConfigList, recovery string) {
	p.Helper()
	e := p.entry()
	live := e != nil && e.State == journal.Live
	over := false // its interface and libcni's result are gone: see TestADDAfterAnUnseenDEL
	if _, err := os.Stat(p.cacheFile()); os.IsNotExist(err) && live && len(e.Newest().HostLinks) > 0 {
		there, _ := host.LinkThere(e.Newest().HostLinks)
		over = !there
	}
	another := p.anotherChain()
	switch recovery {
	case "DEL":
		p.mustDel(another)
	case "ADD":
		if _, err := p.add(list); (err != nil) != (live && !over) {
			p.Errorf("ADD of the same container ID, live %t, over %t: %v", live, over, err)
		}
		p.mustDel(another)
	case "next sandbox":
		next := p.pod("b")
		next.Args, next.CapabilityArgs = p.Args, p.CapabilityArgs
		next.mustAdd(list)
		_, gone := os.Stat(p.NetNS)
		if e := p.entry(); (e != nil) != (live && gone == nil) {
			p.Errorf("the old sandbox, live %t, its namespace %v, is in the journal as %+v", live, gone, e)
		}
		next.mustDel(another)
		p.mustDel(another)
	}
}

// anotherChain is a chain whose DELs have nothing to release.
func (n *node) anotherChain() *libcni.NetworkConfigList { return n.unwind(n.faulty("another", "")) }

// TestKilledTwice kills unwind in an ADD, and then again at each point of the recovery.
func TestKilledTwice(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		first    int // the delegate that has run; its result is not on record
		recovery string
	}{
		{1, "ADD"},
		{1, "next sandbox"},
		{3, "DEL"},
	} {
		t.Run(fmt.Sprintf("ADD after delegate %d, then %s", c.first, c.recovery), func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 4, func(t *testing.T, at int) bool { return killedTwice(t, c.first, c.recovery, at) })
		})
	}
}

func killedTwice(t *testing.T, first int, recovery string, second int) (killed bool) {
	n := newNode(t)
	list, p := n.unwind(chainOfFour(n)...), n.pod("a")
	if err := n.killedAtPoint("added", first, func() error { _, err := p.add(list); return err }); !wasKilled(err) {
		t.Fatalf("not killed: %v", err)
	}
	next := p
	if recovery == "next sandbox" {
		next = p.pod("b")
		next.Args = p.Args
	}
	err := p.killedAt(second, func() error {
		if recovery == "DEL" {
			return p.del(p.anotherChain())
		}
		_, err := next.add(list)
		return err
	})
	next.mustDel(p.anotherChain())
	p.mustDel(p.anotherChain())
	p.nothingLeft()
	return wasKilled(err)
}

// TestRuntimeDied: a runtime that is gone when its ADD succeeds never learns that, so unwind undoes
// the ADD.
func TestRuntimeDied(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	conf, err := libcni.InjectConf(list.Plugins[0], map[string]any{"name": list.Name, "cniVersion": list.CNIVersion})
	if err != nil {
		t.Fatal(err)
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	reader.Close()
	cmd := exec.Command(n.path[0] + "/" + netconf.Name)
	cmd.Env = append(os.Environ(), "CNI_COMMAND=ADD", "CNI_CONTAINERID="+p.ContainerID, "CNI_NETNS="+p.NetNS,
		"CNI_IFNAME="+p.IfName, "CNI_PATH="+strings.Join(n.path, ":"))
	cmd.Stdin = strings.NewReader(string(conf.Bytes))
	cmd.Stdout, cmd.Stderr = writer, writer
	if err := cmd.Run(); err == nil {
		t.Error("ADD succeeded, though its result went nowhere")
	}
	if !slices.Contains(n.calls(), "ADD p3") {
		t.Errorf("the ADD was not carried out: %v", n.calls())
	}
	n.nothingLeft()
}

// killedIn are the verbs in which unwind is killed. Beside those of crash they include sweeps with
// an attachment to release and one to leave alone.
var killedIn = []string{"ADD", "failing ADD", "DEL", "GC", "STATUS"}

// scene is a node on which unwind was killed in a verb: the pod of the verb, and one that lives,
// which has only an interface and an address.
type scene struct {
	*pod
	bystander *pod
	theirs    *libcni.NetworkConfigList // the bystander's
	list      *libcni.NetworkConfigList
	killed    bool
}

// killedScene makes the scene: the pod was being added, deleted, or swept after its namespace went.
func killedScene(t *testing.T, verb string, chainOf func(*node) []string, at int) scene {
	n := newNode(t).patient()
	n.outer = "1.1.0"
	chain := chainOf(n)
	if verb == "failing ADD" {
		chain = append(chain, n.faulty("last", ""))
	}
	s := scene{bystander: n.pod("bystander"), pod: n.pod("a"), list: n.unwind(chain...), theirs: n.unwind(n.bridgePlugin(""))}
	s.bystander.mustAdd(s.theirs)
	s.pod.CapabilityArgs = portMappings
	if verb == "failing ADD" {
		n.plan(map[string]map[string]string{"last": {"ADD": "fail-effect"}})
	}
	if verb != "ADD" && verb != "failing ADD" {
		s.pod.mustAdd(s.list)
	}
	if verb == "GC" || verb == "STATUS" {
		s.dropNetNS()
	}
	s.killed = wasKilled(n.killedAt(at, func() error { return s.do(verb) }))
	n.plan(nil)
	return s
}

// do runs a verb for the pod, or on the node.
func (s *scene) do(verb string) error {
	switch verb {
	case "DEL":
		return s.del(s.list)
	case "GC":
		// libcni runs a DEL for each attachment in its cache.
		if err := os.RemoveAll(filepath.Join(s.dir, "cache", "results")); err != nil {
			s.Error(err)
		}
		return s.cni.GCNetworkList(context.Background(), s.list, &libcni.GCArgs{ValidAttachments: []types.GCAttachment{
			{ContainerID: s.bystander.ContainerID, IfName: s.bystander.IfName},
		}})
	case "STATUS":
		return s.cni.GetStatusNetworkList(context.Background(), s.list)
	}
	_, err := s.add(s.list)
	return err
}

// recovered runs one of the recoveries and checks that nothing is left, nor of the bystander after
// its own DEL.
func (s *scene) recovered(recovery string) {
	s.Helper()
	switch recovery {
	case "DEL", "ADD":
		recoverBy(s.pod, s.list, recovery)
	case "next sandbox":
		s.gone()
		recoverBy(s.pod, s.list, recovery)
	case "GC", "STATUS":
		s.gone()
		s.sweptBy(recovery, 1)
	case "reboot":
		s.gone()
		s.bystander.dropNetNS()
		for _, p := range []*pod{s.pod, s.bystander} {
			if p.entry() != nil {
				p.edit(func(g *journal.Generation) { g.Host.BootID = earlier })
			}
		}
		s.sweptBy("STATUS", 0)
		s.nothingLeft()
		return
	}
	if e := s.bystander.entry(); e == nil || e.State != journal.Live || len(s.reserved()) != 1 {
		s.Errorf("the pod that lives: %+v; reserved: %v", e, s.reserved())
	}
	s.bystander.mustDel(s.theirs)
	s.nothingLeft()
}

// gone ends the sandbox, if it has not ended yet.
func (s *scene) gone() {
	if _, err := os.Stat(s.NetNS); err == nil {
		s.dropNetNS()
	}
}

// sweptBy sweeps until this many entries are left.
func (s *scene) sweptBy(verb string, left int) {
	s.Helper()
	for range 30 {
		if err := s.do(verb); err != nil {
			s.Errorf("%s: %v", verb, err)
		}
		if len(s.entries()) == left {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	s.Errorf("%s does not release all", verb)
}

// recoveries are what may follow after unwind was killed; afterADD where the pod's namespace is there.
var (
	recoveries = []string{"DEL", "next sandbox", "GC", "STATUS", "reboot"}
	afterADD   = append(recoveries[:5:5], "ADD")
)

// TestKilledThenRecovered kills unwind at every point of every verb; then one recovery follows
// alone. A new point is covered automatically. The test proves what a SIGKILL leaves, not what a
// loss of power does: see the journal's tests for that.
func TestKilledThenRecovered(t *testing.T) {
	t.Parallel()
	for v, verb := range killedIn {
		for r, recovery := range recoveries {
			if !sampled(5, v, r) {
				continue
			}
			t.Run(fmt.Sprintf("%s, then %s", verb, recovery), func(t *testing.T) {
				t.Parallel()
				everyPoint(t, 3, func(t *testing.T, at int) bool {
					s := killedScene(t, verb, shortChain, at)
					s.recovered(recovery)
					return s.killed
				})
			})
		}
		t.Run(verb+" of reference plugins, then one of them", func(t *testing.T) {
			t.Parallel()
			follow := afterADD
			if verb == "GC" || verb == "STATUS" {
				follow = recoveries
			}
			everyPoint(t, 3, func(t *testing.T, at int) bool {
				s := killedScene(t, verb, realChain, at)
				s.recovered(follow[(at+v)%len(follow)])
				return s.killed
			})
		})
	}
}

// shortChain gives an address, and has a plugin after that.
func shortChain(n *node) []string {
	return []string{n.bridgePlugin(""), n.faulty("p1", "")}
}

// TestKilledTwiceAnywhere kills unwind at every point of a verb, and then at every point of the
// recovery.
func TestKilledTwiceAnywhere(t *testing.T) {
	t.Parallel()
	for v, verb := range killedIn {
		for r, second := range []string{"DEL", "GC", "STATUS"} {
			if !sampled(3, r, -v) {
				continue
			}
			t.Run(fmt.Sprintf("%s, then %s", verb, second), func(t *testing.T) {
				t.Parallel()
				for at := 1; ; at++ {
					more := false
					for again := 1; ; again++ {
						if !sampled(12, at, -again) {
							more = more || again == 1
							if again > 12 {
								break
							}
							continue
						}
						killed := false
						t.Run(fmt.Sprintf("at points %d and %d", at, again), func(t *testing.T) {
							s := killedScene(t, verb, shortChain, at)
							more = s.killed
							if second != "DEL" {
								s.gone()
							}
							killed = wasKilled(s.killedAt(again, func() error { return s.do(second) }))
							s.recovered(recoveries[(at+again)%len(recoveries)])
						})
						if !killed || t.Failed() {
							break
						}
					}
					if !more || t.Failed() {
						t.Logf("%d points", at-1)
						return
					}
				}
			})
		}
	}
}

// TestCutOffPass: the runtime kills unwind in each DEL, because a delegate hangs. Every other
// delegate is still reached in as many DELs as there are delegates.
func TestCutOffPass(t *testing.T) {
	stories(t, `
	hasty; chain p0 | p1 | p2 | p3
	add a
	either p3: plan p3 DEL kill-parent; let hanging a.eth0.p3
	or p0: plan p0 DEL kill-parent; let hanging a.eth0.p0
	or p2 and p3: plan p2 DEL kill-parent, p3 DEL kill-parent; let hanging a.eth0.p2 a.eth0.p3
	or p1 and p3: plan p1 DEL kill-parent, p3 DEL kill-parent; let hanging a.eth0.p1 a.eth0.p3
	or p1, p2 and p3: plan p1 DEL kill-parent, p2 DEL kill-parent, p3 DEL kill-parent; let hanging a.eth0.p1 a.eth0.p2 a.eth0.p3
	killed del a; killed del a; killed del a; killed del a
	taken $hanging
	plan; del a`)
}
