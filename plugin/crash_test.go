package plugin

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
)

// crash is a verb in which unwind is killed: of a chain, which may be one that fails its ADD.
type crash struct {
	verb  string // ADD, failing ADD, DEL
	chain func(n *node) []string
}

// TestKilledAtEveryPoint kills unwind at each place where that leaves another state behind, until it survives the verb. Then
// one of three things happens: the runtime's DEL, an ADD of the same container ID, the pod's next sandbox, to which the
// reference plugins get without the namespace of the old one. Nothing may be left. It proves what a SIGKILL leaves, not
// what a loss of power does.
func TestKilledAtEveryPoint(t *testing.T) {
	t.Parallel()
	recoveries := []string{"DEL", "ADD", "next sandbox"}
	for i, verb := range []string{"ADD", "failing ADD", "DEL"} {
		for _, recovery := range recoveries {
			t.Run(fmt.Sprintf("%s, then %s", verb, recovery), func(t *testing.T) {
				t.Parallel()
				everyPoint(t, 7, func(t *testing.T, at int) bool {
					p, list, killed := crash{verb, chainOfFour}.at(t, at)
					recoverBy(p, list, recovery)
					p.nothingLeft()
					return killed
				})
			})
		}
		t.Run(verb+" in a chain of reference plugins, then one of the three", func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 6, func(t *testing.T, at int) bool {
				p, list, killed := crash{verb, realChain}.at(t, at)
				recovery := recoveries[(at+i)%3]
				if recovery == "next sandbox" {
					p.dropNetNS()
				}
				recoverBy(p, list, recovery)
				p.nothingLeft()
				p.noRules()
				return killed
			})
		})
	}
}

// everyPoint calls try with 1, 2, … until unwind is not killed there, and sees that there are at least so many points.
func everyPoint(t *testing.T, atLeast int, try func(t *testing.T, at int) (killed bool)) {
	t.Helper()
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

// realChain is one of reference plugins, each of which leaves rules behind.
func realChain(n *node) []string {
	return []string{
		n.bridgePlugin(`, "ipMasq": true`), `{"type": "firewall"}`,
		`{"type": "portmap", "capabilities": {"portMappings": true}}`,
	}
}

// at has the verb of a new pod killed at the point.
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
	n.env = append(n.env, fmt.Sprintf("%s=%d", killAtEnv, at))
	defer func() { n.env = n.env[:len(n.env)-1] }()
	return verb()
}

// wasKilled says whether a verb failed because unwind was killed.
func wasKilled(err error) bool {
	var cniErr *types.Error
	return errors.As(err, &cniErr) && strings.HasSuffix(cniErr.Msg, "signal: killed")
}

// recoverBy does what a runtime may do next. An attachment that was live when unwind was killed stays so until its DEL, or
// until its namespace is gone and its pod's next sandbox comes. The DELs come with another chain, so that nothing is undone but what the journal has.
func recoverBy(p *pod, list *libcni.NetworkConfigList, recovery string) {
	p.Helper()
	e := p.entry()
	live := e != nil && e.State == journal.Live
	another := p.anotherChain()
	switch recovery {
	case "DEL":
		p.mustDel(another)
	case "ADD":
		if _, err := p.add(list); (err != nil) != live {
			p.Errorf("ADD of the same container ID, live %t: %v", live, err)
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

// anotherChain is one whose DELs have nothing to give back.
func (n *node) anotherChain() *libcni.NetworkConfigList { return n.unwind(n.faulty("another", "")) }

// noRules sees that no rule names the network in its comment.
func (n *node) noRules() {
	n.Helper()
	if rules := n.rules(fmt.Sprintf(`name: \"%s\"`, n.network)); len(rules) > 0 {
		n.Errorf("rules are left:\n%s", strings.Join(rules, "\n"))
	}
}

// TestKilledTwice kills unwind in an ADD, and then again at each point of what comes next.
func TestKilledTwice(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		first    int
		recovery string
	}{
		{8, "ADD"},          // the second delegate has run
		{8, "next sandbox"}, //
		{13, "DEL"},         // the fourth is started
	} {
		t.Run(fmt.Sprintf("ADD at point %d, then %s", c.first, c.recovery), func(t *testing.T) {
			t.Parallel()
			everyPoint(t, 4, func(t *testing.T, at int) bool { return killedTwice(t, c.first, c.recovery, at) })
		})
	}
}

func killedTwice(t *testing.T, first int, recovery string, second int) (killed bool) {
	p, list, _ := crash{"ADD", chainOfFour}.at(t, first)
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

// TestCutOffPass: a runtime that kills unwind in each of its DELs, because a delegate hangs, still has every other delegate
// reached in as many DELs as there are delegates.
func TestCutOffPass(t *testing.T) {
	t.Parallel()
	for _, hanging := range [][]string{{"p3"}, {"p0"}, {"p3", "p2"}, {"p3", "p1"}, {"p3", "p2", "p1"}} {
		t.Run(strings.Join(hanging, " "), func(t *testing.T) {
			t.Parallel()
			n := newNode(t).hasty()
			list := n.unwind(chainOfFour(n)...)
			p := n.pod("a")
			p.mustAdd(list)
			plan := map[string]map[string]string{}
			for _, instance := range hanging {
				plan[instance] = map[string]string{"DEL": "kill-parent"}
			}
			n.plan(plan)
			for range 4 {
				if err := p.del(list); !wasKilled(err) {
					t.Errorf("unwind was not killed: %v", err)
				}
			}
			if taken := n.taken(); len(taken) != len(hanging) {
				t.Errorf("%v hang; these were not reached, or should not have been: %v; calls %v", hanging, taken, n.calls())
			}
			n.plan(nil)
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestRuntimeDied: a runtime that is gone when its ADD succeeds will not know that it did, so it is undone.
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
	cmd := exec.Command(n.path[0] + "/" + Name)
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
