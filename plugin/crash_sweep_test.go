package plugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
)

// killedIn are the verbs in which unwind is killed, beside those of crash: sweeps that have something to release, and something
// to leave alone.
var killedIn = []string{"ADD", "failing ADD", "DEL", "GC", "STATUS"}

// scene is a node on which unwind was killed in a verb: the pod that it was about, and one that lives.
type scene struct {
	*pod
	bystander *pod
	chain     []string
	list      *libcni.NetworkConfigList
	killed    bool
}

// killed makes the scene: of a pod that is being added, deleted, or swept since its namespace is gone.
func killedScene(t *testing.T, verb string, chainOf func(*node) []string, at int) scene {
	n := newNode(t).patient()
	n.outer = "1.1.0"
	s := scene{chain: chainOf(n)}
	if verb == "failing ADD" {
		s.chain = append(s.chain, n.faulty("last", ""))
	}
	s.list = n.unwind(s.chain...)
	s.bystander, s.pod = n.pod("bystander"), n.pod("a")
	s.bystander.mustAdd(s.list)
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
		if err := os.RemoveAll(filepath.Join(s.dir, "cache", "results")); err != nil { // libcni runs a DEL for each that it knows
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

// recovered brings the node back by one of the recoveries, and sees that nothing is left, of the bystander neither once its own
// DEL has come.
func (s *scene) recovered(recovery string) {
	s.Helper()
	switch recovery {
	case "DEL":
		s.mustDel(s.list)
	case "next sandbox":
		s.gone()
		next := s.node.pod("b")
		next.Args, next.CapabilityArgs = s.Args, s.CapabilityArgs
		next.mustAdd(s.list)
		next.mustDel(s.list)
		s.mustDel(s.list) // of what that ADD had no time for, or which it does not know of
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
	s.bystander.mustDel(s.list)
	s.nothingLeft()
	s.noRules()
}

// gone has the sandbox be gone, where it is not yet.
func (s *scene) gone() {
	if _, err := os.Stat(s.NetNS); err == nil {
		s.dropNetNS()
	}
}

// sweptBy sweeps until so many entries are left.
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

// recoveries are what may come after unwind was killed.
var recoveries = []string{"DEL", "next sandbox", "GC", "STATUS", "reboot"}

// TestKilledThenRecovered kills unwind at every point of every verb; then one of the recoveries comes alone. A point that is new
// is covered by being there. It proves what a SIGKILL leaves, not what a loss of power does: see the journal's tests for that.
func TestKilledThenRecovered(t *testing.T) {
	t.Parallel()
	for v, verb := range killedIn {
		for r, recovery := range recoveries {
			if os.Getenv(longEnv) == "" && (v+r)%2 == 1 && verb != "GC" { // a half of them; the other tests have most of the rest
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
			everyPoint(t, 3, func(t *testing.T, at int) bool {
				s := killedScene(t, verb, realChain, at)
				s.recovered(recoveries[(at+v)%len(recoveries)])
				return s.killed
			})
		})
	}
}

// shortChain has an address, and a plugin behind it.
func shortChain(n *node) []string {
	return []string{n.bridgePlugin(""), n.faulty("p1", "")}
}

// TestKilledTwiceAnywhere kills unwind at every point of a verb, and then at every point of what comes next.
func TestKilledTwiceAnywhere(t *testing.T) {
	t.Parallel()
	for v, verb := range killedIn {
		for r, second := range []string{"DEL", "GC", "STATUS"} {
			if os.Getenv(longEnv) == "" && r != v%3 {
				continue
			}
			t.Run(fmt.Sprintf("%s, then %s", verb, second), func(t *testing.T) {
				t.Parallel()
				for at := 1; ; at++ {
					more := false
					for again := 1; ; again++ {
						if os.Getenv(longEnv) == "" && (at+again)%3 != 0 {
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
