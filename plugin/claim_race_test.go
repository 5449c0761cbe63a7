package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/testdata/sandbox"
)

// pooled is a delegate that calls host-local, as bridge does, with the addresses from first to
// last.
func (n *node) pooled(instance string, first, last int) string {
	net := strings.TrimSuffix(n.subnet, "0/24")
	return n.faulty(instance, fmt.Sprintf(`, "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q, `+
		`"rangeStart": "%s%d", "rangeEnd": "%s%d"}]]}`, n.dataDir(), n.subnet, net, first, net, last))
}

// addressRules returns the rules of the faulty plugins, as ADDRESS.INSTANCE.
func (n *node) addressRules() []string { return n.names(filepath.Join(n.faultyDir(), "rules")) }

// phase is a point in a verb: a delegate holds it, before or after it takes effect; or its end.
type phase struct {
	name     string
	instance string // "": the end of the verb
	mode     string
}

// contest is A's DEL against B's ADD of the same address.
type contest struct {
	*node
	list *libcni.NetworkConfigList
	a, b *pod
	held map[string]map[string]string // plan.json

	result types.Result // of B's ADD
	silent bool         // A's DEL has nothing to undo
}

func newContest(t *testing.T, p0 func(n *node) string) *contest {
	n := newNode(t)
	c := &contest{node: n, a: n.pod("a"), b: n.pod("b"), held: map[string]map[string]string{}}
	c.list = n.unwind(p0(n), n.faulty("p1", `, "rules": true`), n.faulty("p2", ""))
	return c
}

// pendingContest has one address, which A has given back to host-local, while A's DEL of its rule
// is pending.
func pendingContest(t *testing.T) *contest { return pendingContestOf(t, 1) }

// pendingContestOf is the same with several addresses.
func pendingContestOf(t *testing.T, addresses int) *contest {
	c := newContest(t, func(n *node) string { return n.pooled("p0", 2, 1+addresses) })
	c.a.mustAdd(c.list)
	c.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
	if err := c.a.del(c.list); err == nil {
		t.Fatal("the DEL succeeded")
	}
	c.plan(nil)
	if rules := c.addressRules(); len(rules) != 1 || len(c.reserved()) > 0 {
		t.Fatalf("rules %v, reserved %v; want a rule and a free address", rules, c.reserved())
	}
	return c
}

// turn is a verb that runs up to a phase, and then to its end.
type turn struct {
	*contest
	command string
	pod     *pod
	to      phase
	done    chan error
	ended   bool
	err     error
}

func (c *contest) turn(command string, p *pod, to phase) *turn {
	return &turn{contest: c, command: command, pod: p, to: to, done: make(chan error, 1)}
}

// replan sets or clears the hold of the verb at its phase.
func (t *turn) replan(mode string) {
	if t.to.instance == "" {
		return
	}
	if t.held[t.to.instance] == nil {
		t.held[t.to.instance] = map[string]string{}
	}
	t.held[t.to.instance][t.command] = mode
	plan := filepath.Join(t.faultyDir(), "plan.json")
	t.write(plan+".new", string(netconf.Marshal(t.held)))
	// A delegate of the other verb may be reading the plan.
	must(t, os.Rename(plan+".new", plan))
}

// start runs the verb up to its phase, unless it waits for the other one.
func (t *turn) start() {
	t.Helper()
	t.replan(t.to.mode)
	go func() {
		if t.command == "DEL" {
			t.done <- t.pod.del(t.list)
			return
		}
		var err error
		t.result, err = t.pod.add(t.list)
		t.done <- err
	}()
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if _, err := os.Lstat(t.heldFile()); err == nil {
			return
		}
		select {
		case t.err = <-t.done:
			t.ended = true
			return
		default:
		}
	}
}

// goOn lets the verb continue, and returns once it has ended or waits for the other one.
func (t *turn) goOn() {
	t.Helper()
	t.replan("ok")
	t.await(time.Second)
}

// await waits for the end of a verb that continues.
func (t *turn) await(d time.Duration) {
	t.Helper()
	for end := time.Now().Add(d); !t.ended && time.Now().Before(end); {
		_ = os.Remove(t.heldFile()) // it may reach the hold only now
		select {
		case t.err = <-t.done:
			t.ended = true
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// finish runs the verb to its end.
func (t *turn) finish() error {
	t.Helper()
	t.replan("ok")
	if t.await(sandbox.Patience); !t.ended {
		t.Fatalf("the %s of %s does not end", t.command, t.pod.ContainerID)
	}
	return t.err
}

func (t *turn) heldFile() string {
	return filepath.Join(t.faultyDir(), "held", t.command+"."+t.pod.ContainerID+"."+t.to.instance)
}

// wantHas checks that B has all that its ADD took.
func (c *contest) wantHas(what string) {
	c.Helper()
	for _, instance := range []string{"p0", "p1", "p2"} {
		if file := c.b.ContainerID + ".eth0." + instance; !slices.Contains(c.taken(), file) {
			c.Errorf("%s: B has lost what %s took: %v", what, instance, c.taken())
		}
	}
	if own := address(c, c.result); !slices.Contains(c.addressRules(), own+".p1") {
		c.Errorf("%s: rules %v, want that of %s", what, c.addressRules(), own)
	}
	if e := c.b.entry(); e == nil || e.Undo.State != journal.Live {
		c.Errorf("%s: B's entry is %+v", what, e)
	}
}

// race runs one verb to its phase, then the other, then both to their ends, in this order.
func (c *contest) race(one, two *turn) (errOne, errTwo error) {
	c.Helper()
	one.start()
	two.start()
	one.goOn()
	errTwo = two.finish()
	return one.finish(), errTwo
}

// wantOutcome checks what A's DEL and B's ADD left, then removes B, and only B.
func (c *contest) wantOutcome(errDEL, errADD error) {
	c.Helper()
	if errADD != nil {
		c.Fatalf("B's ADD: %v", errADD)
	}
	c.wantHas("both are over")
	ofA := func(l logged) bool { return l.ContainerID == c.a.ContainerID }
	if c.silent && slices.ContainsFunc(c.callLog(), ofA) {
		c.Errorf("A's DEL was run once more: %v", c.calls())
	}
	if waits := fmt.Sprintf(`msg=deferred attachment=%s`, c.b.key()); strings.Contains(c.log(), waits) {
		c.Errorf("A's DEL has waited for B's ADD, which waits for it: %s", waits)
	}
	c.plan(nil)
	if errDEL != nil && c.a.ContainerID != c.b.ContainerID {
		c.a.mustDel(c.list)
		c.wantHas("after another DEL of A")
	}
	c.b.mustDel(c.list)
	c.sweep() // of a DEL of A that waited for B
	c.over()
}

// wantOneDEL is for a DEL of the container ID that B has by now: the DEL is B's.
func (c *contest) wantOneDEL(err error) {
	c.Helper()
	c.plan(nil)
	if err != nil {
		c.b.mustDel(c.list)
	}
	c.over()
}

// over checks that nothing is left, rules included.
func (c *contest) over() {
	c.Helper()
	c.nothingLeft()
	if rules := c.addressRules(); len(rules) > 0 {
		c.Errorf("rules are left: %v", rules)
	}
}
