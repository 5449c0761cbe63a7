package plugin

import (
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

var portMappings = map[string]any{"portMappings": []map[string]any{
	{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
}}

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
	atEveryPoint(t, 4, `
	chain p0 | p1 | p2 | p3
	either then ADD: let first 1; let verb add a; let pod a
	or then the next sandbox: let first 1; sandbox a b; let verb add b; let pod b
	or then DEL: let first 3; let verb del a; let pod a
	kill added $first add a; was-killed
	chain another
	unless then DEL: chain p0 | p1 | p2 | p3
	kill any $at $verb
	chain another; del $pod; del a`)
}

// TestRuntimeDied: a runtime that is gone when its ADD succeeds never learns that, so unwind undoes
// the ADD.
func TestRuntimeDied(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(addressed(n, "")...)
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

// killedIn is a script of how a verb begins, with the chain $chain. The pod a is added, deleted, or
// swept after its namespace went; the pod bystander lives.
const killedIn = `
	patient; versions 1.1.0 1.0.0; chain bridge; add bystander
	chain $chain
	either an ADD: let verb add a
	or a failing ADD: chain $chain | last; plan last ADD fail-effect; let verb add a
	or a DEL: add a; let verb del a
	or a GC: add a; drop a; let verb libcni-gc bystander
	or a STATUS: add a; drop a; let verb libcni-status
`

// recovery is a script of one thing alone that follows. Then nothing is left, nor of the bystander
// after its own DEL.
const recovery = `
	plan
	either then DEL: recover a DEL
	or then the next sandbox: ends a; recover a next sandbox
	or then GC: ends a; swept 1 libcni-gc bystander
	or then STATUS: ends a; swept 1 libcni-status
	or then reboot: reboots; swept 0 libcni-status
	or then ADD: readd a
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
				verbs["boot"](s, []string{p.ContainerID})
			}
		}
	},
	"readd": func(s *story, w []string) { // in its namespace, or in a new one if that is gone
		p := s.who(w[0])
		if _, err := os.Stat(p.NetNS); err == nil {
			recoverBy(p, s.list(p, false), "ADD")
			return
		}
		p = p.again()
		p.mustAdd(s.list(p, false))
		p.mustDel(p.anotherChain())
	},
	"swept": func(s *story, w []string) { // swept N STATEMENT: until N entries are left
		for range 30 {
			if s.passes(w[1:]); fmt.Sprint(len(s.entries())) == w[0] {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		s.Errorf("it does not release all")
	},
}

// TestKilledThenRecovered kills unwind at every point of every verb; then one recovery follows
// alone, at the points in turn. A new point is covered automatically. The test proves what a SIGKILL leaves, not what a
// loss of power does: see the journal's tests for that.
func TestKilledThenRecovered(t *testing.T) {
	t.Parallel()
	atEveryPoint(t, 3, `
	one-in 6
	let chain bridge | p1 | p2`+killedIn+`
	kill any $at tries $verb`+recovery, killings)
}

// TestKilledInReferencePlugins kills unwind when a delegate has run and the journal does not know it.
// At each other point of a verb the delegates are as at one of these; TestKilledThenRecovered has all
// points. Each verb meets each recovery.
func TestKilledInReferencePlugins(t *testing.T) {
	stories(t, `
	one-in 3
	let chain bridge, "ipMasq": true | firewall | portmap
	each nth 1 2 3`+killedIn+`
	let point undone
	if an ADD: let point added
	if nth 1, a failing ADD: let nth 4
	kill $point $nth tries $verb; was-killed`+recovery, killings)
}

// TestKilledTwiceAnywhere kills unwind at every point of a verb, and then at every point of the
// recovery. A normal run has one second point for each first.
func TestKilledTwiceAnywhere(t *testing.T) {
	t.Parallel()
	all, _ := tellings(`
	let chain bridge | p1` + killedIn + `
	kill any $at tries $verb; first
	either and DEL: let second del a
	or and GC: ends a; let second libcni-gc bystander
	or and STATUS: ends a; let second libcni-status
	kill any $again tries $second` + recovery)
	const begins, seconds, recoveries, apart = 5, 3, 6, 12
	if len(all) != begins*seconds*recoveries {
		t.Fatalf("%d ways", len(all))
	}
	for v := range begins {
		name, _, _ := strings.Cut(all[v*seconds*recoveries].name, ",")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 3, func(t *testing.T, at int) (killed bool) {
				for i := range seconds {
					if !sampled(seconds, at, v, i) {
						continue
					}
					for again, more := 1, true; more && !t.Failed(); again++ {
						if !sampled(apart, at, -again) {
							more = again < apart
							continue
						}
						one := all[(v*seconds+i)*recoveries+(at+again)%recoveries]
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
