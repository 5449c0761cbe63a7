package plugin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// again returns the pod with a new network namespace under the same container ID, as nerdctl,
// podman and Nomad do.
func (p *pod) again() *pod {
	p.Helper()
	next := &pod{p.node, p.RuntimeConf}
	next.NetNS = p.netns(p.ContainerID + "-again")
	return next
}

// TestOldGenerationIsSettledFirst: before the first delegate of the next ADD runs, unwind undoes
// what an earlier ADD of the container ID left, if the old namespace has no process any more.
func TestOldGenerationIsSettledFirst(t *testing.T) {
	t.Parallel()
	for _, old := range []string{"live, namespace gone", "live, namespace empty", "DEL pending", "ADD failed"} {
		t.Run(old, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(n.faulty("p0", ""), n.faulty("p1", ""))
			p := n.pod("a")
			switch old {
			case "ADD failed":
				n.plan(map[string]map[string]string{"p1": {"ADD": "fail-effect", "DEL": "fail"}})
				if _, err := p.add(list); err == nil {
					t.Fatal("the ADD succeeded")
				}
			case "DEL pending":
				p.mustAdd(list)
				n.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
				if err := p.del(list); err == nil {
					t.Fatal("the DEL succeeded")
				}
			default:
				p.mustAdd(list)
			}
			n.plan(nil)
			n.forgetCalls()
			next := p.again()
			if old == "live, namespace gone" {
				p.dropNetNS()
			}
			next.mustAdd(list)
			if strings.HasPrefix(old, "live") {
				n.wantCalls("ADD", "DEL p1", "DEL p0", "ADD p0", "ADD p1")
			} else {
				n.wantCalls("ADD", "DEL p1", "ADD p0", "ADD p1")
			}
			if e := next.entry(); e == nil || e.State != journal.Live || len(e.Generations) != 1 {
				t.Errorf("the journal has %+v, want one live generation", e)
			}
			next.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestOldGenerationMovesOn: if the rest of an earlier ADD of the container ID cannot be undone yet,
// the DEL of the next ADD undoes it, after its own.
func TestOldGenerationMovesOn(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	p.mustAdd(list)
	n.plan(map[string]map[string]string{"p1": {"DEL": "fail"}, "p2": {"DEL": "fail"}})
	if err := p.del(list); err == nil {
		t.Fatal("the DEL succeeded")
	}
	p.dropNetNS()
	next := p.again()
	n.plan(map[string]map[string]string{"p2": {"DEL": "fail"}})
	next.mustAdd(list)
	e := next.entry()
	if e == nil || e.State != journal.Live || len(e.Generations) != 2 || len(e.Generations[0].Steps) != 1 || e.Generations[0].Steps[0].Index != 2 {
		t.Fatalf("the journal has %+v, want one step of the first generation, and the second", e)
	}
	if e.Generations[0].Number >= e.Generations[1].Number {
		t.Errorf("generations %d and %d", e.Generations[0].Number, e.Generations[1].Number)
	}
	n.forgetCalls()
	n.plan(nil)
	next.mustDel(list)
	log := n.callLog()
	n.wantCalls("DEL", "DEL p3", "DEL p2", "DEL p1", "DEL p0", "DEL p2")
	if old := log[len(log)-1]; old.NetNS != p.NetNS || log[0].NetNS != next.NetNS {
		t.Errorf("DELs in the namespaces %q, then %q; want the new one, then the path of the old", log[0].NetNS, old.NetNS)
	}
	n.nothingLeft()
}

// TestHungNewGenerationLeavesTime: a delegate that hangs in the DEL of the newest ADD leaves time
// for the DELs of older ones.
func TestHungNewGenerationLeavesTime(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(n.faulty("p0", ""), n.faulty("p1", ""))
	p := n.pod("a")
	p.mustAdd(list)
	n.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
	if err := p.del(list); err == nil {
		t.Fatal("the DEL succeeded")
	}
	next := p.again()
	next.mustAdd(list)
	n.plan(map[string]map[string]string{"p0": {"DEL": "hang"}}) // the last of its generation
	if err := next.del(list); err == nil {
		t.Error("DEL: no error")
	}
	if e := next.entry(); e == nil || e.Pending() != 1 || e.Newest().Steps[0].Index != 0 {
		t.Errorf("the journal has %+v, want the step that hangs", e)
	}
	n.plan(nil)
	next.mustDel(list)
	n.nothingLeft()
}

// TestPortOfNewGeneration: portmap's rules are keyed by the container ID. The retry of an old DEL
// must not remove the port of the container that has the ID now.
func TestPortOfNewGeneration(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	broken := n.breakable("portmap")
	list := n.unwind(n.bridgePlugin(""), `{"type": "portmap", "capabilities": {"portMappings": true}}`)
	p := n.pod("a")
	p.CapabilityArgs = portMappings
	p.mustAdd(list)
	broken(true)
	if err := p.del(list); err == nil {
		t.Fatal("the DEL succeeded")
	}
	p.dropNetNS()
	next := p.again()
	ip := address(t, next.mustAdd(list))
	broken(false)

	// Two pods that would settle the pod, or its old address, if it were dead.
	other := n.pod("b")
	other.Args = p.Args
	other.mustAdd(list)
	other.mustDel(list)
	jumps := n.rules(fmt.Sprintf(`dnat name: \"%s\" id: \"a\"`, n.network))
	if len(jumps) != 1 {
		t.Fatalf("jumps to the container's ports: %q, want one", jumps)
	}
	chain := jumps[0][strings.LastIndex(jumps[0], " ")+1:]
	if rules := strings.Join(n.rules("-A "+chain), "\n"); !strings.Contains(rules, "--to-destination "+ip+":80") {
		t.Errorf("the port does not lead to %s: %q", ip, rules)
	}
	next.mustDel(list)
	n.nothingLeft()
	if rules := n.rules(chain); len(rules) > 0 {
		t.Errorf("rules are left: %q", rules)
	}
}

// breakable puts a program before a reference plugin, whose DEL fails while broken is set.
func (n *node) breakable(plugin string) (broken func(bool)) {
	n.Helper()
	real, err := netconf.FindPlugin(plugin, strings.Join(n.path, ":"))
	if err != nil {
		n.Fatal(err)
	}
	flag := filepath.Join(n.dir, plugin+".broken")
	n.script(plugin, fmt.Sprintf("[ \"$CNI_COMMAND\" = DEL ] && [ -e %s ] && exit 1\nexec %s", flag, real))
	return func(is bool) {
		if is {
			err = os.WriteFile(flag, nil, 0o600)
		} else {
			err = os.Remove(flag)
		}
		if err != nil {
			n.Fatal(err)
		}
	}
}

// TestAddOverLive: an ADD over an attachment in use is refused before any delegate runs.
func TestAddOverLive(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, why string }{
		{"same namespace", "in the same network namespace"},
		{"process in the old namespace", "in a network namespace that a process is in"},
		{"process in the old namespace, which has no name", "in a network namespace that a process is in"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(chainOfFour(n)...)
			p := n.pod("a")
			p.mustAdd(list)
			n.forgetCalls()
			next := p
			if c.name != "same namespace" {
				p.processInside()
				next = p.again()
			}
			if strings.HasSuffix(c.name, "no name") {
				p.dropNetNS()
			}
			_, err := next.add(list)
			var refused *types.Error
			want := fmt.Sprintf("unwind: %s is added already, %s; DEL it first", p.key(), c.why)
			if !errors.As(err, &refused) || !strings.HasSuffix(refused.Msg, want) {
				t.Errorf("ADD: %v, want %s", err, want)
			}
			n.wantCalls("ADD")
			if e := p.entry(); e == nil || e.State != journal.Live || e.Pending() != 4 {
				t.Errorf("the journal has %+v, want the live entry as it was", e)
			}
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestSecondDelAfterGrace: a delegate that was killed gets one more DEL after gracePeriod, even if
// the first one passed, since an agent behind it may have gone on. Until then every verb leaves the
// entry.
func TestSecondDelAfterGrace(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"hang-effect", "crash-effect"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			n := newNode(t).hasty()
			n.conf["gracePeriod"] = "1h"
			n.conf["delegateTimeout"] = "300ms"
			list := n.unwind(n.faulty("p0", ""), n.faulty("p1", ""), n.faulty("p2", ""))
			p := n.pod("a")
			n.plan(map[string]map[string]string{"p1": {"ADD": mode}})
			_, err := p.add(list)
			if err == nil || !strings.Contains(err.Error(), "pending DEL: faulty (once more: was killed)") {
				t.Errorf("ADD: %v", err)
			}
			for _, verb := range []string{"ADD", "DEL", "ADD of the next sandbox"} {
				switch verb {
				case "DEL":
					p.mustDel(list)
				case "ADD of the next sandbox":
					next := n.pod("b")
					next.Args = p.Args
					n.plan(nil)
					next.mustAdd(list)
					next.mustDel(list)
				}
				if e := p.entry(); e == nil || e.State != journal.Unwinding || e.Pending() != 1 || e.Newest().Steps[0].Index != 1 {
					t.Fatalf("after the %s: %+v, want the one step that waits", verb, e)
				}
			}
			if taken := n.taken(); len(taken) > 0 {
				t.Errorf("%v are taken while the second DEL waits", taken)
			}
			p.edit(func(g *journal.Generation) { g.Steps[0].RepeatAt -= int64(time.Hour) })
			n.forgetCalls()
			p.mustDel(list)
			n.wantCalls("DEL", "DEL p1")
			n.nothingLeft()
		})
	}
}

// TestGraceEndsWithBoot: a reboot ends whatever a killed delegate was doing, so it needs no second
// DEL.
func TestGraceEndsWithBoot(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.conf["gracePeriod"] = "1h"
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	n.plan(map[string]map[string]string{"p1": {"ADD": "crash-effect"}})
	if _, err := p.add(list); err == nil {
		t.Fatal("the ADD succeeded")
	}
	p.mustDel(list)
	if e := p.entry(); e == nil || e.Pending() != 1 {
		t.Fatalf("the journal has %+v, want the step that waits", e)
	}
	p.edit(func(g *journal.Generation) { g.Host.BootID = "another" })
	p.mustDel(list)
	n.nothingLeft()
}

// edit changes the newest generation of the pod's entry in the journal.
func (p *pod) edit(change func(*journal.Generation)) {
	p.Helper()
	err := p.store.Update(context.Background(), func(tx *journal.Tx) error {
		e, err := tx.Get(p.key())
		if err != nil {
			return err
		}
		change(e.Newest())
		state := e.State // a live entry is never written again, except by this helper
		if err := tx.Delete(e.Key); err != nil {
			return err
		}
		for _, e.State = range []journal.State{journal.Adding, state} {
			if err := tx.Put(e); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		p.Fatal(err)
	}
}

// TestSupersededWasNotCutOff: a container ID is added again, and an ADD has no prevResult. That does not
// mean that the earlier ADD was cut off: its delegates keep their own configuration for the DEL.
func TestSupersededWasNotCutOff(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.faulty("p0", ""), n.faulty("p1", ""))
	p := n.pod("a")
	p.mustAdd(list)
	p.dropNetNS()
	n.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
	next := p.again()
	next.mustAdd(list)
	e := next.entry()
	if e == nil || len(e.Generations) != 2 {
		t.Fatalf("the journal has %+v", e)
	}
	for _, s := range e.Generations[0].Steps {
		if s.ADD != "" {
			t.Errorf("the ADD of step %d ended as %q", s.Index, s.ADD)
		}
	}
	n.plan(nil)
	next.mustDel(list)
	n.nothingLeft()
}
