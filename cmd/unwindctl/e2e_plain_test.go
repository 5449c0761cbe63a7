//go:build e2e

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/testdata/e2e"
)

// plainE2E is a node whose runtime runs the plain chain of bridge, firewall and faulty. Nothing of
// unwind is installed; unwindctl alone was copied to it.
type plainE2E struct {
	*e2e.Node
	rt   *e2e.Containerd
	live []string // sandboxes
}

const copied = "/usr/local/bin/unwindctl"

// newPlainE2E has pods that run, and a pool whose last address is given.
func newPlainE2E(t *testing.T, v e2e.Version, last string, live int) *plainE2E {
	n := &plainE2E{Node: e2e.NewLongUpNode(t)}
	check(t, os.Remove(n.File(e2e.PluginDir, "unwind")))
	n.Run("cp", e2e.Path(t, "bin/unwindctl"), copied)
	n.Configure(e2e.Network{Subnet: "10.22.0.0/27", Last: last, Plugins: []string{e2e.Firewall, n.Faulty()}})
	n.rt = n.StartContainerd(v)
	n.rt.AwaitNetwork()
	for i := range live {
		n.live = append(n.live, n.rt.MustRunPod(e2e.Pod{Name: fmt.Sprintf("live-%d", i)}))
	}
	return n
}

// ctl runs unwindctl, which is to end with an exit code.
func (n *plainE2E) ctl(code int, args ...string) string {
	n.Helper()
	stdout, stderr, err := n.Try(copied, args...)
	if (err == nil) != (code == 0) {
		n.Errorf("unwindctl %v: %v, want exit code %d\n%s%s", args, err, code, stdout, stderr)
	}
	return stdout
}

// found is a finding of unwindctl sweep --json.
type found struct {
	ContainerID, Address, Verdict, Result, Why string
	Cached                                     bool
	Addresses, Pending                         []string
}

// sweep returns what a sweep says of each address.
func (n *plainE2E) sweep(code int, args ...string) map[string]found {
	n.Helper()
	var object struct{ Findings []found }
	out := n.ctl(code, append([]string{"sweep", "--json", "--cri", e2e.Socket}, args...)...)
	check(n, json.Unmarshal([]byte(out), &object))
	byAddress := map[string]found{}
	for _, f := range object.Findings {
		for _, a := range append(f.Addresses, f.Address) {
			if a != "" {
				byAddress[a] = f
			}
		}
	}
	return byAddress
}

// results counts the findings by result.
func results(of map[string]found) map[string]int {
	count := map[string]int{}
	for _, f := range of {
		count[f.Result]++
	}
	return count
}

// has is all that is on the node.
type has struct {
	Reserved map[string]string
	Rules    []string
	Cached   []string
}

func (n *plainE2E) look() has {
	n.Helper()
	h := has{n.Reserved(), n.Rules(), n.Cached("")}
	slices.Sort(h.Rules)
	return h
}

// unchanged: nothing of what was there before is gone, and nothing has come.
func (n *plainE2E) unchanged(what string, before has) {
	n.Helper()
	if diff := cmp.Diff(before, n.look()); diff != "" {
		n.Errorf("%s, -want +got:\n%s", what, diff)
	}
}

func (n *plainE2E) checkLive() {
	n.Helper()
	for _, id := range n.live {
		n.CheckPod(n.rt.CRI, id)
	}
}

// failPods has the runtime start pods of which faulty fails ADD and DEL, and stop and remove what it
// still lists of them, as kubelet does.
func (n *plainE2E) failPods(prefix string, count int) {
	n.Helper()
	n.PlanPods(prefix, map[string]string{"ADD": "fail", "DEL": "fail"})
	for i := range count {
		if _, err := n.rt.RunPod(e2e.Pod{Name: fmt.Sprintf("%s-%d", prefix, i)}); err == nil {
			n.Fatalf("pod %d has started, and faulty fails", i)
		}
	}
	n.removePods(nil)
	n.Plan(nil)
}

// removePods stops and removes all pods but those that live, and some others.
func (n *plainE2E) removePods(but []string) {
	n.Helper()
	for id := range n.rt.Pods() {
		if !slices.Contains(n.live, id) && !slices.Contains(but, id) {
			if err := errors.Join(n.rt.StopPod(id), n.rt.RemovePod(id)); err != nil {
				n.Logf("pod %.12s: %v", id, err)
			}
		}
	}
}

// forgetPods has the runtime start pods, which then end, and lose its record of them: no DEL comes.
func (n *plainE2E) forgetPods(prefix string, count int) {
	n.Helper()
	before := n.pins()
	pods := make([]e2e.Pod, count)
	for i := range pods {
		pods[i].Name = fmt.Sprintf("%s-%d", prefix, i)
	}
	ids := slices.Collect(maps.Values(n.rt.RunPods(pods)))
	for _, id := range ids {
		n.rt.KillPod(id)
	}
	n.rt.Forget(ids...)
	for _, pin := range n.pins() {
		if !slices.Contains(before, pin) {
			n.RemoveNetNS(pin)
		}
	}
	n.Settled()
}

// pins returns the network namespaces that are pinned.
func (n *plainE2E) pins() (names []string) {
	n.Helper()
	entries, err := os.ReadDir(n.File("/run/netns"))
	check(n, err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// wantLeaked: unwindctl shows which addresses are leaked, and why each is kept or lost. It changes
// nothing.
func (n *plainE2E) wantLeaked(leaked int, list string) {
	n.Helper()
	all := n.look()
	count := fmt.Sprintf(": %d used (%d live, %d leaked, 0 empty, 0 unknown)\n", len(all.Reserved), len(n.live), leaked)
	next := "\nNo address is leaked.\n"
	if leaked > 0 {
		next = fmt.Sprintf("\n%d addresses are leaked. To see what a sweep would free, run unwindctl sweep --dry-run --cri %s\n", leaked, list)
	}
	if out := n.ctl(0, "ipam", "--cri", list); !strings.Contains(out, count) || !strings.Contains(out, next) {
		n.Errorf("ipam, want %q and %q:\n%s", count, next, out)
	}
	wide := strings.Split(n.ctl(0, "ipam", "-o", "wide", "--cri", list), "\n")
	for address, owner := range all.Reserved {
		state, why := "leaked", "its owner is neither in the journal nor in the runtime's list, none of its processes is running, and no interface has the address"
		if slices.Contains(n.live, owner) {
			state, why = "live", "the runtime lists its owner"
		}
		row := []string{e2e.NetworkName, address, state, owner, "eth0", why}
		if !slices.ContainsFunc(wide, func(line string) bool {
			cells := strings.Fields(line)
			return len(cells) > 3 && (cells[3] != "-" || state != "live") && // the pod
				slices.Equal(slices.Delete(cells, 3, 4), strings.Fields(strings.Join(row, " ")))
		}) {
			n.Errorf("ipam -o wide has no row %v:\n%s", row, strings.Join(wide, "\n"))
		}
	}
	dry := results(n.sweep(0, "--dry-run"))
	if dry["to be released"] != leaked || dry["live"] != len(n.live) || len(all.Reserved) != leaked+len(n.live) {
		n.Errorf("sweep --dry-run: %v, want %d to be released and %d live", dry, leaked, len(n.live))
	}
	n.unchanged("a look", all)
}

// TestE2EPlainNode: the plain chain has leaked all addresses but those of three pods that run.
// unwindctl alone shows each with a reason and frees it.
func TestE2EPlainNode(t *testing.T) {
	e2e.EachContainerd(t, func(t *testing.T, v e2e.Version) {
		n := newPlainE2E(t, v, "10.22.0.17", 3)
		n.freeForgotten()
		n.freeFailing()
		n.wantLeaked(0, "auto")
		n.live = append(n.live, n.rt.MustRunPod(e2e.Pod{Name: "next"}))
		n.checkLive()
		if _, err := os.Lstat(n.File("/var/lib/cni/unwind/journal.db")); !os.IsNotExist(err) {
			n.Errorf("a journal is there: %v", err)
		}
	})
}

// dead is how many addresses there are beside three, and perPod how many rules bridge and firewall make
// for a pod.
const dead, perPod = 13, 6

// freeForgotten leaks what pods have of which the runtime lost its record. libcni's cache has all, and
// the sweep runs their DELs.
func (n *plainE2E) freeForgotten() {
	n.Helper()
	before := n.look()
	n.forgetPods("forgotten", dead)
	n.wantLeak("forgotten pods", before, n.look(), dead)
	n.Age()
	n.wantLeaked(dead, e2e.Socket)
	n.wantSweep("forgotten pods", map[string]int{"released": dead, "live": len(n.live)})
	n.unchanged("the sweep", before)
	n.checkLive()
}

// freeFailing leaks what pods have whose ADD and DEL fail. libcni caches an attachment only once its ADD
// has passed, so of them only host-local knows. The sweep runs the DELs of the conflist.
func (n *plainE2E) freeFailing() {
	n.Helper()
	before := n.look()
	n.failPods("failing", dead)
	leaked, listed := n.look(), len(n.rt.Pods())-len(n.live)
	n.wantLeak("failing pods", before, leaked, 0)
	young := map[string]int{"live": len(n.live), "recent": dead}
	if listed > 0 { // containerd 1.6
		young = map[string]int{"live": len(n.live) + listed}
	}
	n.wantSweep("within the grace period", young)
	n.unchanged("a sweep within the grace period", leaked)
	n.Age()
	if listed > 0 {
		// containerd 1.6 keeps the sandboxes until their DEL passes. Then it frees the addresses itself,
		// and leaves firewall's rules, of which nobody knows.
		n.wantSweep("while the runtime lists them", map[string]int{"live": len(n.live) + listed})
		n.unchanged("a sweep while the runtime lists them", leaked)
		n.removePods(nil)
		after := n.look()
		n.Logf("the runtime lists %d failing pods; once it has removed them %d addresses and %d rules are left", listed,
			len(after.Reserved)-len(before.Reserved), len(after.Rules)-len(before.Rules))
		if listed != dead || !cmp.Equal(after.Reserved, before.Reserved) {
			n.Errorf("-before +after:\n%s", cmp.Diff(before, after))
		}
		return
	}
	n.wantLeaked(dead, "auto")
	n.wantSweep("failing pods", map[string]int{"released": dead, "live": len(n.live)})
	n.unchanged("the sweep", before)
	n.checkLive()
}

// wantLeak: the plain chain has left all addresses and rules of the dead, and so many in libcni's cache.
func (n *plainE2E) wantLeak(of string, before, after has, cached int) {
	n.Helper()
	addresses, rules := len(after.Reserved)-len(before.Reserved), len(after.Rules)-len(before.Rules)
	if got := len(after.Cached) - len(before.Cached); addresses != dead || rules != dead*perPod || got != cached {
		n.Fatalf("%s: the plain chain left %d addresses, %d rules and %d in libcni's cache", of, addresses, rules, got)
	}
}

func (n *plainE2E) wantSweep(what string, want map[string]int) {
	n.Helper()
	if got := results(n.sweep(0)); !cmp.Equal(got, want) {
		n.Errorf("%s: sweep: %v, want %v", what, got, want)
	}
}

// TestE2EPlainNodeOthers: a container of the namespace "default", which is that of nerdctl, is no pod, and
// CRI does not list it. It is live as long as it runs. Once it is dead, nothing can be told of it.
func TestE2EPlainNodeOthers(t *testing.T) {
	e2e.EachContainerd(t, func(t *testing.T, v e2e.Version) {
		n := newPlainE2E(t, v, "10.22.0.17", 1)
		other := n.rt.RunContainer("other")
		n.Age()
		all := n.look()
		var its string
		for address, owner := range all.Reserved {
			if owner == other {
				its = address
			}
		}
		if len(all.Reserved) != 2 || its == "" || len(n.Cached(other)) != 1 {
			t.Fatalf("it has not what a container has: %+v", all)
		}
		n.Run("ping", "-c1", "-W5", its)
		found := n.sweep(0)
		if got, want := results(found), (map[string]int{"live": 2}); !cmp.Equal(got, want) ||
			found[its].Why != "no runtime's list covers its owner, but an interface has the address" {
			t.Errorf("while it runs: %v, %+v", got, found[its])
		}
		n.unchanged("a sweep while it runs", all)
		n.Run("ping", "-c1", "-W5", its)

		n.rt.KillContainer("other")
		e2e.Eventually(t, 10*time.Second, "its interface is gone", func() bool { return n.Left().Veths == 1 })
		found = n.sweep(1)
		if got, want := results(found), (map[string]int{"live": 1, "unknown": 1}); !cmp.Equal(got, want) ||
			found[its].Why != "its owner is not in the journal, and no runtime's list covers it" {
			t.Errorf("once it is dead: %v, %+v", got, found[its])
		}
		n.unchanged("a sweep once it is dead", all)
		n.checkLive()
	})
}

// TestE2EPlainNodeWhileADDs: pods start while two sweeps free what is dead. The pool has one address
// for the two of them, so one gets what a sweep has just freed. Each has all that its ADD made, as have
// the three that run. UNWIND_TEST_LONG=1 does it 200 times.
func TestE2EPlainNodeWhileADDs(t *testing.T) {
	rounds := 4
	if os.Getenv("UNWIND_TEST_LONG") != "" {
		rounds = 200
	}
	e2e.EachContainerd(t, func(t *testing.T, v e2e.Version) {
		n := newPlainE2E(t, v, "10.22.0.7", 3)
		before := n.look()
		freed := 0
		for round := range rounds {
			freed += n.sweepWhileADDs(round)
			n.removePods(nil)
			after := n.look()
			if diff := cmp.Diff(before.Reserved, after.Reserved) + cmp.Diff(before.Cached, after.Cached); diff != "" {
				t.Fatalf("round %d: -what the live pods have +what is there:\n%s", round, diff)
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

// sweepWhileADDs leaks two addresses, and sweeps twice at once while two pods start, which stay. It
// returns how many addresses were leaked.
func (n *plainE2E) sweepWhileADDs(round int) (leaked int) {
	n.Helper()
	n.failPods(fmt.Sprintf("failing%d", round), 1) // nothing of it is in libcni's cache
	forgotten := fmt.Sprintf("forgotten%d", round) // all of it is
	n.AddByHand(forgotten)
	n.RemoveNetNS(forgotten)
	n.Settled()
	n.Age()
	leaked = len(n.Reserved()) - len(n.live)

	var all sync.WaitGroup
	for range 2 {
		all.Go(func() {
			if out, stderr, err := n.Try(copied, "sweep", "--cri", e2e.Socket); err != nil {
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
				if young[i], err = n.rt.RunPod(pod); err == nil || !strings.Contains(err.Error(), "no IP addresses available") {
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
	n.ctl(0, "sweep", "--cri", e2e.Socket)
	n.removePods(young) // sandboxes of tries that found no address
	pods := slices.Sorted(slices.Values(slices.Concat(young, n.live)))
	if got, want := slices.Sorted(maps.Values(n.Reserved())), pods; !slices.Equal(got, want) {
		n.Errorf("round %d: -pods +owners of addresses:\n%s", round, cmp.Diff(want, got))
	}
	n.Run("ip", "neigh", "flush", "dev", "cni0") // it may still have the last owner's MAC address
	for _, id := range pods {
		n.CheckPod(n.rt.CRI, id)
	}
	return leaked
}
