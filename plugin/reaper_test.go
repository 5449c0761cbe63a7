package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cni-unwind/ipam"
	"cni-unwind/plugin/netconf"
)

// The race of whereabouts#162: a reaper reads what is attached, then an ADD gets an address. The
// reaper releases it, since it is not in what it read. The next pod then gets the same address.

// reap releases each address in a pool whose owner is not listed, as a reaper does that goes by its
// list alone.
func reap(t testing.TB, pool string, listed ...string) {
	t.Helper()
	found, err := ipam.Scan(pool)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range found {
		if !slices.Contains(listed, r.Owner.ContainerID) {
			if err := os.Remove(filepath.Join(pool, r.Address.String())); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestReaperRace runs the same schedule twice on a pool of one address. With such a reaper and the
// plain chain, two pods end with one address. With unwind and its GC, the second ADD fails because
// none is left.
func TestReaperRace(t *testing.T) {
	t.Parallel()
	for _, justDone := range []bool{false, true} {
		for _, naive := range []bool{true, false} {
			t.Run(fmt.Sprintf("just done %t, naive %t", justDone, naive), func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				n.conf["gracePeriod"] = "10m"
				n.subnet = strings.Replace(n.subnet, ".0/24", ".0/30", 1)
				chain := []string{n.bridgePlugin(""), n.faulty("p1", "")}
				list := n.unwind(chain...)
				if naive {
					list = n.plain(chain...)
				}
				listed := []string{} // read before the ADD
				n.plan(map[string]map[string]string{"p1": {"ADD": "hold"}})
				first, second := n.pod("web-1"), n.pod("web-2")
				done := make(chan string, 1)
				go func() {
					r, err := first.add(list)
					if err != nil {
						t.Error(err)
						done <- ""
						return
					}
					done <- address(t, r)
				}()
				held := filepath.Join(n.faultyDir(), "held", "ADD.web-1.p1")
				eventually(t, "the ADD is under way", func() bool { _, err := os.Lstat(held); return err == nil })
				has := ""
				letGo := func() {
					if err := os.Remove(held); err != nil {
						t.Error(err)
					}
					has = <-done
				}
				if justDone {
					letGo()
				}
				if naive {
					reap(t, filepath.Join(n.dataDir(), n.network), listed...)
				} else if out := n.ask("GC", "1.0.0", map[string]any{netconf.ValidKeys[0]: []netconf.Attachment{}}, chain...); out.code != 0 {
					t.Errorf("GC: %s", out.stdout)
				}
				if !justDone {
					letGo()
				}
				n.plan(nil)
				r, err := second.add(list)
				switch {
				case naive && (err != nil || address(t, r) != has):
					t.Errorf("the reaper took nothing: the second pod has %v, %v", r, err)
				case !naive && (err == nil || !strings.Contains(err.Error(), "no IP addresses available")):
					t.Errorf("the second pod has %v, %v", r, err)
				case !naive && n.reserved()[has] != "web-1 eth0":
					t.Errorf("the first pod lost %s: %v", has, n.reserved())
				}
			})
		}
	}
}

// TestReaperWithoutList: the call for the list failed. A missing list does not say that nobody
// lives.
func TestReaperWithoutList(t *testing.T) {
	stories(t, `
	chain bridge; add a
	gc; gc valid=null; gc valid=null slip=null
	entry a; reserved 1; entries 1; leaves`)
}

// TestReaperOfStatefulSet: a pod has the name of an earlier one, and another UID. The list has only
// the new sandbox. The old one goes if it is dead, and stays as long as a process is in it.
func TestReaperOfStatefulSet(t *testing.T) {
	stories(t, `
	chain bridge
	given-args old IgnoreUnknown=1 K8S_POD_NAMESPACE=default K8S_POD_NAME=web-0 K8S_POD_UID=1; add old
	either alive: process old
	or dead:
	given-args new IgnoreUnknown=1 K8S_POD_NAMESPACE=default K8S_POD_NAME=web-0 K8S_POD_UID=2; add new
	gc list new; entry new
	if alive: entry old; end
	if dead: gone old
	del old new`, givenArgs)
}
