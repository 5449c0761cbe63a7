package e2e

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// Tries is the number of attempts to start a pod. It exceeds the number of addresses in a /28.
const Tries = 20

// healTime bounds the time from the plugins' repair until the journal contains only records of
// running pods. After a failed DEL, unwind waits for up to 30 s before it retries the DEL.
const healTime = 60 * time.Second

// Trouble is a fault in a chain of bridge, firewall and the test plugin faulty. Begin causes the
// fault, and End repairs it.
type Trouble struct {
	Name  string
	Begin func(n *Node)
	End   func(n *Node)
}

var Troubles = []Trouble{
	{
		Name:  "a plugin fails ADD and DEL",
		Begin: func(n *Node) { n.Plan(map[string]string{"ADD": "fail", "DEL": "fail"}) },
		End:   func(n *Node) { n.Plan(nil) },
	},
	{
		Name:  "a plugin's binary is missing",
		Begin: func(n *Node) { moveFaulty(n, "faulty", "faulty.away") },
		End:   func(n *Node) { moveFaulty(n, "faulty.away", "faulty") },
	},
	{
		Name:  "a plugin fails DEL",
		Begin: func(n *Node) { n.Plan(map[string]string{"DEL": "fail"}) },
		End:   func(n *Node) { n.Plan(nil) },
	},
}

func moveFaulty(n *Node, from, to string) {
	check(n, os.Rename(n.File(PluginDir, from), n.File(PluginDir, to)))
}

// Outcome describes a node during and after a trouble.
type Outcome struct {
	During  Left         // during the trouble; in Suffer, after RemovePods
	After   Left         // after the trouble, once all pods are removed and, with unwind, Heal has run
	Known   int          // sandboxes that the runtime lists at the end of the trouble
	Stops   int          // sandboxes that could not be stopped or removed during the trouble
	Begun   int          // pods that started during the trouble
	Owed    int          // records in the journal at the end of the trouble
	Records []Attachment // the records in the journal after Heal
	Healed  time.Duration
	Starts  error // the error if one more pod fails to start at the very end
}

// Suffer creates a node, makes Tries attempts to start a pod during the trouble, and then ends the
// trouble. If prepare is not nil, Suffer first calls it to change the node.
func Suffer(t *testing.T, v Version, trouble Trouble, unwind bool, prepare func(*Node)) (o Outcome) {
	n := NewNode(t)
	if prepare != nil {
		prepare(n)
	}
	n.Configure(Network{Subnet: Small, Plugins: []string{Firewall, n.Faulty()}, Unwind: unwind})
	rt := n.StartContainerd(v)
	rt.HealthyPod()

	trouble.Begin(n)
	for attempt := range Tries {
		id, err := rt.RunPod(Pod{Name: "crashing", Attempt: uint32(attempt)})
		if err == nil {
			o.Begun++
			err = rt.StopPod(id)
		}
		if err == nil {
			t.Fatalf("try %d succeeded although %s", attempt, trouble.Name)
		}
	}
	o.Stops = len(rt.RemovePods())
	o.During, o.Known = n.Settled(), len(rt.Pods())
	o.During.NetNS = max(0, o.During.NetNS-o.Known) // the runtime keeps its sandboxes' namespaces
	if unwind {
		o.Owed = len(n.Journal())
	}

	trouble.End(n)
	if errs := rt.RemovePods(); len(errs) > 0 {
		t.Errorf("after the trouble: %v", errs)
	}
	if unwind {
		o.Healed = rt.Heal()
		o.Records = n.Journal()
	}
	o.After = n.Settled()
	_, o.Starts = rt.RunPod(Pod{Name: "next"})
	return o
}

// Heal requests the runtime's status repeatedly, as kubelet does, until the journal contains only
// records of running pods or healTime has passed. containerd 1 never calls STATUS, so with
// containerd 1, Heal runs one sweep instead, as unwind's systemd timer does.
func (c *Containerd) Heal() time.Duration {
	n := c.node
	n.Helper()
	begin := time.Now()
	if c.Version.Major == 1 {
		n.Unwindctl("sweep")
		return time.Since(begin)
	}
	for len(n.Owed(c.CRI)) > 0 && time.Since(begin) < healTime {
		time.Sleep(100 * time.Millisecond)
		c.NetworkReady()
	}
	return time.Since(begin)
}

// Owed returns the records in the journal, except the live records of running pods.
func (n *Node) Owed(c *CRI) []Attachment {
	n.Helper()
	pods := c.Pods()
	return slices.DeleteFunc(n.Journal(), func(a Attachment) bool {
		state, known := pods[a.ContainerID]
		return known && state == Ready && a.State == "live"
	})
}

// HealthyPod checks that a pod starts and can be removed, and that Left counts its resources.
func (c *Containerd) HealthyPod() {
	n := c.node
	n.Helper()
	c.AwaitNetwork()
	id := c.MustRunPod(Pod{Name: "healthy"})
	left := n.Left()
	if left.Addresses != 1 || left.NetNS != 1 || left.Veths != 1 || left.Rules == 0 {
		n.Errorf("a pod that runs has %s", left)
	}
	if n.Reserved()[c.IP(id)] != id {
		n.Errorf("the pod's address %s is not reserved for it: %v", c.IP(id), n.Reserved())
	}
	if errs := c.RemovePods(); len(errs) > 0 {
		n.Fatal(errs)
	}
	if left := n.Settled(); left != (Left{}) {
		n.Fatalf("a pod that was removed leaves %s:\n%s", left, strings.Join(n.Rules(), "\n"))
	}
}

func SomePods(count int) []Pod {
	pods := make([]Pod, count)
	for i := range pods {
		pods[i].Name = fmt.Sprintf("pod-%d", i)
	}
	return pods
}

// CheckLive calls CheckPod for each running pod.
func (n *Node) CheckLive(c *CRI) {
	n.Helper()
	for id, state := range c.Pods() {
		if state == Ready {
			n.CheckPod(c, id)
		}
	}
}
