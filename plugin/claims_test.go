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

	"cni-unwind/journal"
)

// pooled is a delegate that calls host-local, as bridge does, with the addresses from first to last to give.
func (n *node) pooled(instance string, first, last int) string {
	net := strings.TrimSuffix(n.subnet, "0/24")
	return n.faulty(instance, fmt.Sprintf(`, "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q, `+
		`"rangeStart": "%s%d", "rangeEnd": "%s%d"}]]}`, n.dataDir(), n.subnet, net, first, net, last))
}

// addressRules returns the rules of the faulty plugins, as ADDRESS.INSTANCE.
func (n *node) addressRules() []string { return n.names(filepath.Join(n.faultyDir(), "rules")) }

// phase is how far a verb gets: to a delegate that holds it, before or after it takes effect, or to its end.
type phase struct {
	name     string
	instance string // "": to its end
	mode     string
}

// The phases of B's ADD. The chain is p0, which has the address, p1, which has a rule of the address, and p2.
var claimPhases = []phase{
	{"the address is given, not claimed", "p0", "hold-effect"},
	{"the address is claimed", "p1", "hold"},
	{"the rule is made", "p1", "hold-effect"},
	{"live", "", ""},
}

// The phases of A's DEL: those of a chain of which p1 alone is left, and of a whole one.
var (
	latePhases = []phase{
		{"the rule is there", "p1", "hold"},
		{"the rule is removed", "p1", "hold-effect"},
		{"p1 fails", "p1", "fail"},
	}
	wholePhases = []phase{
		{"the rule is there", "p1", "hold"},
		{"p1 fails", "p1", "fail"},
		{"the address is free", "p0", "hold-effect"},
	}
	overPhase = []phase{{"over", "", ""}}
)

// contest is A's DEL against B's ADD of the same address.
type contest struct {
	*node
	list *libcni.NetworkConfigList
	a, b *pod
	held map[string]map[string]string // plan.json

	address string // that B got
	silent  bool   // A's DEL has nothing to undo
}

// kinds are how A's DEL is late. Each leaves A with a DEL that the runtime is about to ask for, and the address for B.
var kinds = []struct {
	name   string
	phases []phase
	make   func(t *testing.T) *contest
}{
	{"A is live", wholePhases, func(t *testing.T) *contest {
		c := newContest(t, func(n *node) string { return n.faulty("p0", `, "address": "192.0.2.7/24"`) })
		c.a.mustAdd(c.list)
		return c
	}},
	{"no entry", wholePhases, func(t *testing.T) *contest {
		c := pendingContest(t)
		if err := os.RemoveAll(c.stateDir); err != nil {
			t.Fatal(err)
		}
		return c
	}},
	{"tombstone", overPhase, func(t *testing.T) *contest {
		c := pendingContest(t)
		c.mustGC(nil)
		c.nothingLeft()
		c.forgetCalls()
		c.silent = true
		return c
	}},
	{"parked", latePhases, pendingContest},
	{"same container ID", latePhases, func(t *testing.T) *contest {
		c := pendingContest(t)
		c.b = c.a.again()
		return c
	}},
	{"same container ID, another address", latePhases, func(t *testing.T) *contest {
		c := pendingContestOf(t, 2)
		c.b = c.a.again()
		return c
	}},
}

func newContest(t *testing.T, p0 func(n *node) string) *contest {
	n := newNode(t)
	c := &contest{node: n, a: n.pod("a"), b: n.pod("b"), held: map[string]map[string]string{}}
	c.list = n.unwind(p0(n), n.faulty("p1", `, "rules": true`), n.faulty("p2", ""))
	return c
}

// pendingContest has one address, which host-local has taken back from A, and A still owe the DEL of its rule.
func pendingContest(t *testing.T) *contest { return pendingContestOf(t, 1) }

// pendingContestOf is the same with so many addresses.
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

// turn is a verb that gets to a phase, and then to its end.
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

// replan has the delegates hold the verb at its phase, or no more.
func (t *turn) replan(mode string) {
	if t.to.instance == "" {
		return
	}
	if t.held[t.to.instance] == nil {
		t.held[t.to.instance] = map[string]string{}
	}
	t.held[t.to.instance][t.command] = mode
	plan := filepath.Join(t.faultyDir(), "plan.json")
	t.write(plan+".new", string(marshal(t.held)))
	if err := os.Rename(plan+".new", plan); err != nil { // a delegate of the other verb may be reading it
		t.Fatal(err)
	}
}

// start brings the verb to its phase. It returns false if the verb does not get there: it waits for the other one.
func (t *turn) start() bool {
	t.Helper()
	t.replan(t.to.mode)
	go func() {
		if t.command == "DEL" {
			t.done <- t.pod.del(t.list)
			return
		}
		address, err := t.pod.tryAdd(t.list)
		t.address = address
		t.done <- err
	}()
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if _, err := os.Lstat(t.heldFile()); err == nil {
			return true
		}
		select {
		case t.err = <-t.done:
			t.ended = true
			return true
		default:
		}
	}
	return false
}

// goOn lets the verb go on, and returns once it has ended or waits for the other one.
func (t *turn) goOn() {
	t.Helper()
	t.replan("ok")
	t.await(time.Second)
}

// await waits for the end of a verb that was let go on.
func (t *turn) await(d time.Duration) {
	t.Helper()
	for end := time.Now().Add(d); !t.ended && time.Now().Before(end); {
		_ = os.Remove(t.heldFile()) // it may come to be held only now
		select {
		case t.err = <-t.done:
			t.ended = true
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// finish brings the verb to its end.
func (t *turn) finish() error {
	t.Helper()
	t.replan("ok")
	if t.await(time.Minute); !t.ended {
		t.Fatalf("the %s of %s does not end", t.command, t.pod.ContainerID)
	}
	return t.err
}

func (t *turn) heldFile() string {
	return filepath.Join(t.faultyDir(), "held", t.command+"."+t.pod.ContainerID+"."+t.to.instance)
}

// wantHas sees that B has all that its ADD took.
func (c *contest) wantHas(what string) {
	c.Helper()
	for _, instance := range []string{"p0", "p1", "p2"} {
		if file := c.b.ContainerID + ".eth0." + instance; !slices.Contains(c.taken(), file) {
			c.Errorf("%s: B has lost what %s took: %v", what, instance, c.taken())
		}
	}
	if rules := c.addressRules(); !slices.Contains(rules, c.address+".p1") {
		c.Errorf("%s: rules %v, want that of %s", what, rules, c.address)
	}
	if e := c.b.entry(); e == nil || e.State != journal.Live {
		c.Errorf("%s: B's entry is %+v", what, e)
	}
}

// TestLateDELAgainstClaim has A's DEL come to each phase while B, which gets A's address, is at each phase of its ADD, or B's
// ADD begin while A's DEL is at each phase. Where one waits for the other, that one goes on. B has its rule when both are over.
// After B's DEL nothing of A is left.
func TestLateDELAgainstClaim(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		for _, a := range kind.phases {
			for _, b := range claimPhases {
				t.Run(fmt.Sprintf("%s/B %s/A %s", kind.name, b.name, a.name), func(t *testing.T) {
					t.Parallel()
					c := kind.make(t)
					errADD, errDEL := c.race(c.turn("ADD", c.b, b), c.turn("DEL", c.a, a))
					if c.a.ContainerID == c.b.ContainerID {
						c.wantOneDEL(errDEL)
						return
					}
					c.wantOutcome(errDEL, errADD)
				})
			}
			t.Run(fmt.Sprintf("%s/A %s/then B", kind.name, a.name), func(t *testing.T) {
				t.Parallel()
				c := kind.make(t)
				errDEL, errADD := c.race(c.turn("DEL", c.a, a), c.turn("ADD", c.b, overPhase[0]))
				c.wantOutcome(errDEL, errADD)
			})
		}
	}
}

// TestSlowLateDELAgainstClaim has A's DEL take longer than B's ADD waits for it: it is ended, and tried again without the
// address as long as B has it.
func TestSlowLateDELAgainstClaim(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		if kind.name != "no entry" && kind.name != "parked" {
			continue // A has its address still, nothing to undo, or B's container ID
		}
		t.Run(kind.name, func(t *testing.T) {
			t.Parallel()
			c := kind.make(t)
			del, add := c.turn("DEL", c.a, phase{"the rule is there", "p1", "hold"}), c.turn("ADD", c.b, overPhase[0])
			if !del.start() {
				t.Fatal("A's DEL does not begin")
			}
			add.start()
			errADD := add.finish()
			c.wantOutcome(del.finish(), errADD)
		})
	}
}

// TestOneSweepIsEnough has A owe a DEL that is parked, or will be, because B has its address, and both be gone when the runtime
// asks for a GC: that one leaves nothing, though A, which has been dead for longer, comes first.
func TestOneSweepIsEnough(t *testing.T) {
	t.Parallel()
	for _, parked := range []bool{true, false} {
		t.Run(fmt.Sprintf("parked before %t", parked), func(t *testing.T) {
			t.Parallel()
			c := pendingContest(t)
			c.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
			c.b.mustAdd(c.list)
			c.plan(nil)
			if parked {
				c.a.mustDel(c.list)
			}
			c.b.dropNetNS()
			c.mustGC(nil)
			c.over()
		})
	}
}

// TestParkedRuleIsNotForgotten has B's chain have no rule of the address, so that A's is removed by A's DEL or not at all.
func TestParkedRuleIsNotForgotten(t *testing.T) {
	t.Parallel()
	c := pendingContest(t)
	c.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
	bare := c.unwind(c.pooled("p0", 2, 2))
	c.b.mustAdd(bare)
	c.plan(nil)
	c.a.mustDel(c.list)
	if rules := c.addressRules(); len(rules) != 1 {
		t.Errorf("rules %v, want A's: its DEL could not be shown the address", rules)
	}
	c.b.mustDel(bare)
	c.over()
}

// TestDELHasAnEarlierResult has the ADD of a container ID be cut off, of which the runtime has the result of an earlier ADD with
// another address. The DEL comes with that one; what the ADD that was cut off did with its own address is undone.
func TestDELHasAnEarlierResult(t *testing.T) {
	t.Parallel()
	c := newContest(t, func(n *node) string { return n.pooled("p0", 2, 3) })
	c.a.mustAdd(c.list)
	c.a.dropNetNS()
	again := c.a.again()
	c.plan(map[string]map[string]string{"p2": {"ADD": "kill-parent-effect"}})
	if _, err := again.add(c.list); !wasKilled(err) {
		t.Fatalf("unwind was not killed: %v", err)
	}
	c.plan(nil)
	if rules := c.addressRules(); len(rules) != 1 || !strings.HasSuffix(rules[0], ".3.p1") {
		t.Fatalf("rules %v, want that of the second address", rules)
	}
	again.mustDel(c.list)
	c.over()
}

// race brings one verb to its phase, then the other, then both to their ends, in this order.
func (c *contest) race(one, two *turn) (errOne, errTwo error) {
	c.Helper()
	one.start()
	two.start()
	one.goOn()
	errTwo = two.finish()
	return one.finish(), errTwo
}

// wantOutcome sees what A's DEL and B's ADD left, then removes B, and only B.
func (c *contest) wantOutcome(errDEL, errADD error) {
	c.Helper()
	if errADD != nil {
		c.Fatalf("B's ADD: %v", errADD)
	}
	c.wantHas("both are over")
	late := slices.ContainsFunc(c.callLog(), func(l logged) bool { return l.ContainerID == c.a.ContainerID && l.Command == "DEL" })
	if c.silent && late {
		c.Errorf("A's DEL was run once more: %v", c.calls())
	}
	if waits := fmt.Sprintf(`"left for later" attachment=%s`, c.b.key()); strings.Contains(c.log(), waits) {
		c.Errorf("A's DEL has waited for B's ADD, which waits for it: %s", waits)
	}
	c.plan(nil)
	if errDEL != nil && c.a.ContainerID != c.b.ContainerID {
		c.a.mustDel(c.list)
		c.wantHas("after another DEL of A")
	}
	c.b.mustDel(c.list)
	c.over()
}

// wantOneDEL is for a DEL of the container ID that B has by now: it is B's.
func (c *contest) wantOneDEL(err error) {
	c.Helper()
	c.plan(nil)
	if err != nil {
		c.b.mustDel(c.list)
	}
	c.over()
}

// over sees that nothing is left, rules included.
func (c *contest) over() {
	c.Helper()
	c.nothingLeft()
	if rules := c.addressRules(); len(rules) > 0 {
		c.Errorf("rules are left: %v", rules)
	}
}
