//go:build e2e

package e2e_test

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/plugin/e2e"
	"cni-unwind/plugin/plugintest/sandbox"
)

// plainE2E adds checks to a PlainNode.
type plainE2E struct{ *e2e.PlainNode }

func newPlainE2E(t *testing.T, v e2e.Version, last string, live int) *plainE2E {
	return &plainE2E{e2e.NewPlainNode(t, v, last, live)}
}

// wantLeaked checks the state and the reason of each address in "unwindctl ipam", and the number of
// leaked and live addresses in "unwindctl sweep --dry-run". Neither command may change anything.
func (n *plainE2E) wantLeaked(leaked int, list string) {
	n.Helper()
	all := n.Look()
	count := fmt.Sprintf(": %d used (%d live, %d leaked, 0 empty, 0 unknown)\n", len(all.Reserved), len(n.Live), leaked)
	next := "\nNo address is leaked.\n"
	if leaked > 0 {
		next = fmt.Sprintf("\n%d addresses are leaked. To see what a sweep would free, run unwindctl sweep --dry-run%s\n", leaked,
			strings.TrimSuffix(" --cri "+list, " --cri auto"))
	}
	if out := n.Ctl(0, "ipam", "--cri", list); !strings.Contains(out, count) || !strings.Contains(out, next) {
		n.Errorf("ipam, want %q and %q:\n%s", count, next, out)
	}
	wide := strings.Split(n.Ctl(0, "ipam", "-o", "wide", "--cri", list), "\n")
	for address, owner := range all.Reserved {
		state, why := "leaked", "its owner is in neither the journal nor the runtime's list and has no running process, and no interface has the address"
		if slices.Contains(n.Live, owner) {
			state, why = "live", "the runtime lists its owner"
		}
		row := []string{e2e.NetworkName, address, state, owner, "eth0", why}
		if !slices.ContainsFunc(wide, func(line string) bool {
			cells := strings.Fields(line)
			return len(cells) > 3 && (cells[3] != "-" || state != "live") && // cells[3] is the pod
				slices.Equal(slices.Delete(cells, 3, 4), strings.Fields(strings.Join(row, " ")))
		}) {
			n.Errorf("ipam -o wide has no row %v:\n%s", row, strings.Join(wide, "\n"))
		}
	}
	dry := e2e.Results(n.Sweep(0, "--dry-run"))
	if dry["would be released"] != leaked || dry["live"] != len(n.Live) || len(all.Reserved) != leaked+len(n.Live) {
		n.Errorf("sweep --dry-run: %v, want %d would be released and %d live", dry, leaked, len(n.Live))
	}
	n.Unchanged("ipam and sweep --dry-run", all)
}

// TestE2EPlainNode: on a node without unwind, all addresses are leaked except those of three
// running pods. unwindctl, copied to the node, reports each leaked address with a reason, and
// releases it.
func TestE2EPlainNode(t *testing.T) {
	e2e.EachContainerd(t, func(t *testing.T, v e2e.Version) {
		n := newPlainE2E(t, v, "10.22.0.17", 3)
		n.freeForgotten()
		n.freeFailing()
		n.wantLeaked(0, "auto")
		n.Live = append(n.Live, n.RT.MustRunPod(e2e.Pod{Name: "next"}))
		n.CheckLive()
		if _, err := os.Lstat(n.File("/var/lib/cni/unwind/journal.db")); !os.IsNotExist(err) {
			n.Errorf("unwindctl created a journal: %v", err)
		}
	})
}

// dead is the number of addresses in the pool minus the three of the live pods. perPod is the
// number of rules that bridge and firewall create for a pod.
const dead, perPod = 13, 6

// freeForgotten leaks the resources of pods that the runtime forgot, and releases them with a
// sweep. libcni's cache has an entry for each of these pods, so the sweep's DELs get the data from
// the cache.
func (n *plainE2E) freeForgotten() {
	n.Helper()
	before := n.Look()
	n.ForgetPods("forgotten", dead)
	n.wantLeak("forgotten pods", before, n.Look(), dead)
	n.Age()
	n.wantLeaked(dead, e2e.Socket)
	n.wantSweep("forgotten pods", map[string]int{"released": dead, "live": len(n.Live)})
	n.Unchanged("the sweep", before)
	n.CheckLive()
}

// freeFailing leaks the resources of pods whose ADD and DEL fail, and releases them with a sweep.
// libcni caches an attachment only after a successful ADD, so only host-local's files name these
// pods. The sweep's DELs get their configuration from the conflist.
func (n *plainE2E) freeFailing() {
	n.Helper()
	before := n.Look()
	n.FailPods("failing", dead)
	leaked, listed := n.Look(), len(n.RT.Pods())-len(n.Live)
	n.wantLeak("failing pods", before, leaked, 0)
	n.wantSweep("within the grace period", map[string]int{"live": len(n.Live) + dead})
	n.Unchanged("a sweep within the grace period", leaked)
	n.Age()
	if listed > 0 {
		// containerd 1.6 keeps a sandbox until its DEL succeeds. That DEL releases the address, but leaves
		// firewall's rules: the ADD failed, so libcni has no result from which firewall gets the address.
		n.wantSweep("while the runtime lists them", map[string]int{"live": len(n.Live) + listed})
		n.Unchanged("a sweep while the runtime lists them", leaked)
		n.RemovePods(nil)
		after := n.Look()
		n.Logf("the runtime lists %d failing pods; once it has removed them %d addresses and %d rules are left", listed,
			len(after.Reserved)-len(before.Reserved), len(after.Rules)-len(before.Rules))
		if listed != dead || !cmp.Equal(after.Reserved, before.Reserved) {
			n.Errorf("-before +after:\n%s", cmp.Diff(before, after))
		}
		return
	}
	n.wantLeaked(dead, "auto")
	n.wantSweep("failing pods", map[string]int{"released": dead, "live": len(n.Live)})
	n.Unchanged("the sweep", before)
	n.CheckLive()
}

// wantLeak checks that all addresses and rules of the dead pods are leaked, and that libcni's cache
// has gained the given number of files.
func (n *plainE2E) wantLeak(of string, before, after e2e.Has, cached int) {
	n.Helper()
	addresses, rules := len(after.Reserved)-len(before.Reserved), len(after.Rules)-len(before.Rules)
	if got := len(after.Cached) - len(before.Cached); addresses != dead || rules != dead*perPod || got != cached {
		n.Fatalf("%s: leaked %d addresses, %d rules and %d files in libcni's cache", of, addresses, rules, got)
	}
}

func (n *plainE2E) wantSweep(what string, want map[string]int) {
	n.Helper()
	if got := e2e.Results(n.Sweep(0)); !cmp.Equal(got, want) {
		n.Errorf("%s: sweep: %v, want %v", what, got, want)
	}
}

// TestE2EPlainNodeOthers: CRI does not list a container in containerd's namespace "default", which
// nerdctl uses, because the container is not a pod. While the container runs, its address is live.
// Once the container is dead, its address is unknown, so a sweep keeps the address.
func TestE2EPlainNodeOthers(t *testing.T) {
	e2e.EachContainerd(t, func(t *testing.T, v e2e.Version) {
		n := newPlainE2E(t, v, "10.22.0.17", 1)
		other := n.RT.RunContainer("other")
		n.Age()
		all := n.Look()
		var its string
		for address, owner := range all.Reserved {
			if owner == other {
				its = address
			}
		}
		if len(all.Reserved) != 2 || its == "" || len(n.Cached(other)) != 1 {
			t.Fatalf("the container lacks an address or a cache file: %+v", all)
		}
		n.Run("ping", "-c1", "-W5", its)
		found := n.Sweep(0)
		if got, want := e2e.Results(found), (map[string]int{"live": 2}); !cmp.Equal(got, want) ||
			found[its].Why != "no runtime's list covers its owner, but an interface has the address" {
			t.Errorf("while the container runs: %v, %+v", got, found[its])
		}
		n.Unchanged("a sweep while it runs", all)
		n.Run("ping", "-c1", "-W5", its)

		n.RT.KillContainer("other")
		e2e.Eventually(t, time.Minute, "its interface is gone", func() bool { return n.Left().Veths == 1 })
		found = n.Sweep(1)
		if got, want := e2e.Results(found), (map[string]int{"live": 1, "unknown": 1}); !cmp.Equal(got, want) ||
			found[its].Why != "its owner is not in the journal, and no runtime's list covers it" {
			t.Errorf("once the container is dead: %v, %+v", got, found[its])
		}
		n.Unchanged("a sweep once it is dead", all)
		n.CheckLive()
	})
}

// TestE2EPlainNodeWhileADDs: two pods start while two sweeps release leaked addresses. The pool has
// only one free address, so one of the two pods gets an address that a sweep has just released. The
// two pods and the three that were already running must keep all their resources.
// UNWIND_TEST_LONG=1 runs 200 rounds.
func TestE2EPlainNodeWhileADDs(t *testing.T) {
	rounds := 4
	if sandbox.Long() {
		rounds = 200
	}
	e2e.EachContainerd(t, func(t *testing.T, v e2e.Version) {
		n := newPlainE2E(t, v, "10.22.0.7", 3)
		before := n.Look()
		freed := 0
		for round := range rounds {
			freed += n.sweepWhileADDs(round)
			n.RemovePods(nil)
			after := n.Look()
			if diff := cmp.Diff(before.Reserved, after.Reserved) + cmp.Diff(before.Cached, after.Cached); diff != "" {
				t.Fatalf("round %d: (-live pods' resources +found):\n%s", round, diff)
			}
			for _, rule := range before.Rules {
				if !slices.Contains(after.Rules, rule) {
					t.Fatalf("round %d: a live pod has lost %s", round, rule)
				}
			}
		}
		t.Logf("%d rounds, %d addresses freed", rounds, freed)
	})
}

// sweepWhileADDs leaks two addresses, and runs two sweeps at the same time while two pods start. It
// returns the number of leaked addresses, and leaves the two pods running.
func (n *plainE2E) sweepWhileADDs(round int) (leaked int) {
	n.Helper()
	n.FailPods(fmt.Sprintf("failing%d", round), 1) // leaks an address that is not in libcni's cache
	forgotten := fmt.Sprintf("forgotten%d", round) // leaks an address that is in libcni's cache
	n.AddByHand(forgotten)
	n.RemoveNetNS(forgotten)
	n.Settled()
	n.Age()
	leaked = len(n.Reserved()) - len(n.Live)

	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			if out, stderr, err := n.Try(e2e.Copied, "sweep", "--cri", e2e.Socket); err != nil {
				n.Errorf("round %d: sweep: %v\n%s%s", round, err, out, stderr)
			}
		})
	}
	young := make([]string, 2)
	for i := range young {
		all.Go(func() {
			time.Sleep(time.Duration(round*37%300) * time.Millisecond)
			pod := e2e.Pod{Name: fmt.Sprintf("young%d-%d", round, i)}
			var err error
			for pod.Attempt = range uint32(50) {
				if young[i], err = n.RT.RunPod(pod); err == nil || !strings.Contains(err.Error(), "no IP addresses available") {
					break
				}
			}
			if err != nil {
				n.Errorf("round %d: %s: %v", round, pod.Name, err)
			}
		})
	}
	all.Wait()
	if n.Failed() {
		n.FailNow()
	}
	n.Ctl(0, "sweep", "--cri", e2e.Socket)
	n.RemovePods(young) // removes sandboxes that got no address
	pods := slices.Sorted(slices.Values(slices.Concat(young, n.Live)))
	if got, want := slices.Sorted(maps.Values(n.Reserved())), pods; !slices.Equal(got, want) {
		n.Errorf("round %d: -pods +owners of addresses:\n%s", round, cmp.Diff(want, got))
	}
	n.Run("ip", "neigh", "flush", "dev", "cni0") // entries may have a previous owner's MAC address
	for _, id := range pods {
		n.CheckPod(n.RT.CRI, id)
	}
	return leaked
}
