//go:build e2e

package e2e_test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

// atOnce is the number of pods that are starting or stopping when containerd is killed.
const atOnce = 4

// TestE2EKill: containerd is killed while plugins are running. If systemd kills containerd, the
// plugins survive, because containerd's unit has KillMode=process. If the unit's cgroup runs out of
// memory, the plugins are killed, too. The test covers both cases.
func TestE2EKill(t *testing.T) {
	table := e2e.NewTable(t, fmt.Sprintf("containerd is killed while it starts or stops %d pods, and started again; addresses/netns/veths/rules", atOnce),
		"RUNTIME", "KILLED IN", "PLUGINS", "PLAIN THEN", "AFTER", "UNWIND THEN", "AFTER", "JOURNAL")
	for _, v := range e2e.Containerds(t) {
		for _, command := range []string{"ADD", "DEL"} {
			for _, plugins := range []string{"go on", "are killed too"} {
				t.Run(v.Name+"/"+command+", plugins "+plugins, func(t *testing.T) {
					t.Parallel()
					plain, unwind := kill(t, v, command, plugins, false), kill(t, v, command, plugins, true)
					table.Row(v.Name, command, plugins, plain.During, plain.After, unwind.During, unwind.After, len(unwind.Records))
					if plain.During.Addresses != atOnce || unwind.During.Addresses != atOnce {
						t.Errorf("addresses when containerd is killed: plain %d, unwind %d, want %d",
							plain.During.Addresses, unwind.During.Addresses, atOnce)
					}
					if unwind.After != (e2e.Left{}) || len(unwind.Records) > 0 {
						t.Errorf("unwind leaves %s, and %+v", unwind.After, unwind.Records)
					}
				})
			}
		}
	}
}

// kill kills containerd while the ADDs or DELs of atOnce pods are waiting in faulty.
func kill(t *testing.T, v e2e.Version, command, plugins string, unwind bool) (o e2e.Outcome) {
	n := e2e.NewNode(t)
	n.Configure(e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall, n.Faulty()}, Unwind: unwind})
	rt := n.StartContainerd(v)
	rt.HealthyPod()

	var calls sync.WaitGroup
	if command == "ADD" {
		n.Plan(map[string]string{"ADD": "hold"})
		for _, pod := range e2e.SomePods(atOnce) {
			calls.Go(func() { _, _ = rt.RunPod(pod) })
		}
	} else {
		pods := rt.RunPods(e2e.SomePods(atOnce))
		n.Plan(map[string]string{"DEL": "hold"})
		for _, id := range pods {
			calls.Go(func() { _ = rt.StopPod(id) })
		}
	}
	n.AwaitHeld(command, atOnce)
	o.During = n.Left()
	rt.Kill()
	if plugins != "go on" {
		n.KillPlugins()
	}
	calls.Wait()
	n.Plan(nil)
	n.LetGo()

	rt.Start()
	rt.AwaitNetwork()
	if errs := rt.RemovePods(); len(errs) > 0 {
		t.Errorf("after containerd's start: %v", errs)
	}
	if unwind {
		o.Healed = rt.Heal()
		o.Records = n.Journal()
	}
	o.After = n.Settled()
	return o
}

// In TestE2EReboot, the pool has enough addresses for the pods of one boot, but not for those of
// two.
const (
	rebootPods = 30
	rebootPool = "10.22.0.41" // the last of 40 addresses
)

// booted is the outcome of a reboot.
type booted struct {
	before, after, end e2e.Left
	first, all         time.Duration    // time until the first pod had started, and until all pods had
	failed             int              // pods that did not start
	entries            []e2e.Attachment // the journal's records once all pods are removed
}

// TestE2EReboot: with unwind, the addresses and other resources of the pods from before a reboot
// are available to the new pods.
func TestE2EReboot(t *testing.T) {
	table := e2e.NewTable(t, fmt.Sprintf("the machine is booted again while %d pods run; the pool has 40 addresses; then the same pods are started; "+
		"addresses/netns/veths/rules when they run, and when they are gone", rebootPods),
		"RUNTIME", "CONTAINERD'S DISK", "PLAIN RUNNING", "GONE", "NOT STARTED", "FIRST POD", "ALL", "UNWIND RUNNING", "GONE", "NOT STARTED", "FIRST POD", "ALL", "JOURNAL")
	for _, v := range e2e.Containerds(t) {
		disks := []string{"emptied", "kept"}
		if e2e.Short() {
			disks = disks[:1]
		}
		for _, disk := range disks {
			t.Run(v.Name+"/containerd's disk "+disk, func(t *testing.T) {
				plain, unwind := reboot(t, v, disk, false), reboot(t, v, disk, true)
				table.Row(v.Name, disk, plain.after, plain.end, plain.failed, short(plain.first), short(plain.all),
					unwind.after, unwind.end, unwind.failed, short(unwind.first), short(unwind.all), len(unwind.entries))
				if disk == "emptied" && (plain.failed == 0 || plain.end.Addresses != rebootPods) {
					t.Errorf("without unwind nothing leaks, so the test proves nothing: %+v", plain)
				}
				if unwind.failed > 0 {
					t.Errorf("%d pods did not start", unwind.failed)
				}
				if unwind.after != unwind.before {
					t.Errorf("the pods have %s after the reboot, and had %s before", unwind.after, unwind.before)
				}
				if unwind.end != (e2e.Left{}) || len(unwind.entries) > 0 {
					t.Errorf("unwind leaves %s, and %+v", unwind.end, unwind.entries)
				}
			})
		}
	}
}

func short(d time.Duration) string { return d.Round(10 * time.Millisecond).String() }

// reboot reboots a node with running pods, and starts the pods again as kubelet does: if the
// runtime lists a pod's old sandbox, reboot first stops and removes that sandbox.
func reboot(t *testing.T, v e2e.Version, disk string, unwind bool) (b booted) {
	n := e2e.NewNode(t)
	n.Configure(e2e.Network{Subnet: "10.22.0.0/24", Last: rebootPool, Plugins: []string{e2e.Firewall}, Unwind: unwind})
	rt := n.StartContainerd(v)
	rt.AwaitNetwork()
	pods := e2e.SomePods(rebootPods)
	old := rt.RunPods(pods)
	b.before = n.Settled()

	n.Reboot()
	if disk == "emptied" {
		n.EmptyDisk("containerd")
	}
	begin := time.Now()
	if unwind && v.Major == 1 {
		n.Unwindctl("sweep") // as unwind-sweep-boot.service does
	}
	rt.Start()
	rt.ImportPause()
	rt.AwaitNetwork()
	b.failed = rt.RunAgain(pods, old, func() { b.first = time.Since(begin) })
	b.all = time.Since(begin)
	if unwind {
		rt.Heal()
		if left := n.Owed(rt.CRI); len(left) > 0 {
			t.Errorf("the journal still has entries of the previous boot: %+v", left)
		}
	}
	b.after = n.Settled()
	n.CheckLive(rt.CRI)
	if errs := rt.RemovePods(); len(errs) > 0 {
		t.Errorf("at the end: %v", errs)
	}
	b.end = n.Settled()
	if unwind {
		b.entries = n.Journal()
	}
	return b
}
