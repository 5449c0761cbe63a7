//go:build e2e

package e2e_test

import (
	"fmt"
	"testing"

	"cni-unwind/plugin/e2e"
)

// aws is a node with the plugins of the AWS VPC CNI and a stand-in for their daemon, which has two
// addresses.
type aws struct {
	e2e.Chained
	*e2e.IPAMD
}

func (n *aws) start() { n.IPAMD = n.StartIPAMD("10.0.12.34", "10.0.12.35") }

// ports returns the environment variable for cnitool that maps host port 8080 to a port of the
// container. With port 0, portmap fails ADD and DEL.
func ports(port int) string {
	const mapping = `CAP_ARGS={"portMappings": [{"hostPort": 8080, "containerPort": %d, "protocol": "tcp"}]}`
	return fmt.Sprintf(mapping, port)
}

// add starts a sandbox of a pod, and returns its address.
func (n *aws) add(t *testing.T, sandbox, pod string) string {
	t.Helper()
	n.AddNetNS(sandbox)
	if err := n.call(t, "add", sandbox, pod, 80); err != nil {
		t.Fatalf("ADD: %v\n%s", err, n.AWSLog())
	}
	all := n.AWSAllocations()
	if len(all) == 0 {
		t.Fatal("the daemon has allocated no address")
	}
	return all[len(all)-1].IPv4
}

// del deletes a sandbox and then its network namespace, as a runtime does after a successful DEL.
func (n *aws) del(t *testing.T, sandbox, pod string) {
	t.Helper()
	if err := n.call(t, "del", sandbox, pod, 80); err != nil {
		t.Fatalf("DEL: %v\n%s", err, n.AWSLog())
	}
	n.RemoveNetNS(sandbox)
}

func (n *aws) call(t *testing.T, verb, sandbox, pod string, port int) error {
	t.Helper()
	return n.Chained.Call(t, verb, sandbox, pod, ports(port))
}

// TestE2EAWS deletes a pod with the real aws-cni, egress-cni and portmap. In some cases, the
// stand-in for the AWS daemon is stopped or refuses aws-cni's call. Even so, aws-cni's DEL exits 0,
// so unwind considers the DEL done. If another pod gets the deleted pod's address, a later sweep
// must not take anything from the other pod.
func TestE2EAWS(t *testing.T) {
	e2e.Long(t)
	table := e2e.NewTable(t, "a pod of the AWS VPC CNI is deleted; left are addresses/veths/"+
		"routing rules/iptables rules, and pending DELs",
		"IPAMD AND THE POD", "CHAIN", "LEFT", "PENDING", "LATER", "PENDING")
	for _, c := range []struct {
		name string
		run  func(t *testing.T, n *aws) (left e2e.AWSLeft, pending int)
	}{
		{"running", awsThere},
		{"stopped, then started again", awsAway},
		{"refuses, and the pod comes back under its name", awsRefuses},
		{"stopped, and the address gets another owner", awsReused},
		{"refuses while the address gets another owner", awsRefusesNext},
		{"running, and portmap fails ADD and DEL", awsFailingADD},
	} {
		for _, chain := range []string{"plain", "unwind"} {
			t.Run(c.name+"/"+chain, func(t *testing.T) {
				t.Parallel()
				n := &aws{Chained: e2e.Chained{Node: e2e.NewNode(t), Unwind: chain == "unwind"}}
				n.ConfigureAWS(n.Unwind)
				n.start()
				left, pending := c.run(t, n)
				table.Row(c.name, chain, left, pending, n.AWSSettled(), n.Pending())
			})
		}
	}
}

// awsThere: the daemon is running and all plugins work.
func awsThere(t *testing.T, n *aws) (e2e.AWSLeft, int) {
	n.add(t, "a", "web-0")
	left := n.AWSSettled()
	if left.Addresses != 1 || left.Veths != 1 || left.Routing != 2 || left.Rules == 0 {
		t.Errorf("a pod has %s, so the test proves nothing", left)
	}
	n.del(t, "a", "web-0")
	left = n.AWSSettled()
	pending := n.Pending()
	n.Settle()
	if left != (e2e.AWSLeft{}) || n.Pending() != 0 {
		t.Errorf("left %s, %d pending", left, n.Pending())
	}
	return left, pending
}

// awsAway: the daemon is stopped during the DEL, so the address stays allocated. The daemon
// releases it at its next start, because the pod no longer has an interface.
func awsAway(t *testing.T, n *aws) (e2e.AWSLeft, int) {
	n.add(t, "a", "web-0")
	n.Stop()
	n.del(t, "a", "web-0")
	left, pending := n.awsKept(t)
	n.start()
	n.Settle()
	if after := n.AWSSettled(); after != (e2e.AWSLeft{}) || n.Pending() != 0 {
		t.Errorf("after the daemon's start: left %s, %d pending", after, n.Pending())
	}
	return left, pending
}

// awsKept checks the state after a DEL that exited 0 although the daemon did not release the
// address: only the address is left, and no DEL is pending. It returns the resources that are left
// and the number of pending DELs.
func (n *aws) awsKept(t *testing.T) (e2e.AWSLeft, int) {
	t.Helper()
	left, pending := n.AWSSettled(), n.Pending()
	if left != (e2e.AWSLeft{Addresses: 1}) {
		t.Errorf("left %s; want only the address", left)
	}
	if pending != 0 {
		t.Errorf("%d pending after a DEL that exited 0", pending)
	}
	return left, pending
}

// awsRefuses: the daemon refuses the DEL, and never releases the address on its own while it runs.
// Even its next start releases nothing, because the pod then has a new sandbox with an interface.
func awsRefuses(t *testing.T, n *aws) (e2e.AWSLeft, int) {
	n.add(t, "a", "web-0")
	n.Refuse("open /var/run/aws-node/ipam.json.tmp1: no space left on device")
	n.del(t, "a", "web-0")
	left, pending := n.awsKept(t)
	n.Refuse("")
	n.add(t, "b", "web-0")
	n.Settle()
	n.Stop()
	n.start()
	n.del(t, "b", "web-0")
	n.Settle()
	if after := n.AWSSettled(); after != (e2e.AWSLeft{Addresses: 1}) || n.Pending() != 0 {
		t.Errorf("left %s, %d pending; want the address, with unwind and without", after, n.Pending())
	}
	return left, pending
}

// awsReused: a sandbox is deleted while the daemon is stopped, and another pod gets its address.
// Then unwind's sweeps take nothing from that pod, even while the daemon refuses DELs.
func awsReused(t *testing.T, n *aws) (e2e.AWSLeft, int) {
	return n.reuse(t, func(address string) {
		n.addNext(t, address)
		n.Refuse(uidMismatch)
	})
}

// awsRefusesNext is like awsReused, but the daemon refuses DELs before the other pod gets the
// address.
func awsRefusesNext(t *testing.T, n *aws) (e2e.AWSLeft, int) {
	return n.reuse(t, func(address string) {
		n.Refuse(uidMismatch)
		n.addNext(t, address)
	})
}

func (n *aws) reuse(t *testing.T, next func(address string)) (e2e.AWSLeft, int) {
	address := n.add(t, "a", "web-0")
	n.Stop()
	n.del(t, "a", "web-0")
	left, pending := n.awsKept(t)
	n.start()
	next(address)
	if n.Pending() != 0 {
		t.Errorf("%d pending although another pod has the address", n.Pending())
	}
	n.Sweep()
	n.next(t, address)
	n.Refuse("")
	n.Sweep()
	n.next(t, address)
	n.del(t, "b", "api-0")
	n.Settle()
	return left, pending
}

// uidMismatch is ipamd's error if security groups for pods are enabled, ipamd does not know the
// sandbox, and a pod of the same name exists with another UID. After this error, aws-cni's DEL
// removes the rules for the address in its prevResult, even if another pod has that address.
const uidMismatch = "pod UID mismatch: got , expected 7f3c1b6e-5a0e-4b2c-9d1f-3f0f8a7c2e11"

// addNext starts a second pod, which must get the first pod's former address.
func (n *aws) addNext(t *testing.T, address string) {
	t.Helper()
	if got := n.add(t, "b", "api-0"); got != address {
		t.Fatalf("the other pod has %s, not %s, so the test proves nothing", got, address)
	}
	n.next(t, address)
}

// next checks that the pod from addNext still has all its resources.
func (n *aws) next(t *testing.T, address string) {
	t.Helper()
	all, routing := n.AWSAllocations(), n.RoutingRules(address)
	own := len(all) == 1 && all[0].IPv4 == address && all[0].Metadata.Name == "api-0"
	if !own || len(routing) != 2 {
		t.Errorf("the other pod has %+v and the rules %v; want its address and two rules", all, routing)
	}
	if left := n.AWSSettled(); left.Veths != 1 || left.Rules == 0 {
		t.Errorf("the other pod has %s", left)
	}
}

// awsFailingADD: portmap fails ADD after aws-cni has allocated an address. Without unwind, the
// address leaks: the runtime's DEL begins with portmap, which fails, so aws-cni gets no DEL.
func awsFailingADD(t *testing.T, n *aws) (e2e.AWSLeft, int) {
	n.AddNetNS("a")
	if n.call(t, "add", "a", "web-0", 0) == nil {
		t.Fatal("ADD succeeded")
	}
	left, pending := n.AWSSettled(), n.Pending()
	if n.Unwind == (left.Addresses == 1) || n.Unwind == (left.Routing == 2) {
		t.Errorf("left after the ADD: %s", left)
	}
	if n.call(t, "del", "a", "web-0", 0) == nil && !n.Unwind {
		t.Error("the DEL without unwind succeeds, so the test proves nothing")
	}
	n.RemoveNetNS("a")
	n.Sweep()
	after := n.AWSSettled()
	if want := (e2e.AWSLeft{Addresses: 1, Routing: 2}); !n.Unwind && after != want {
		t.Errorf("without unwind, left %s; want %s", after, want)
	}
	// With unwind, only portmap's own DEL, which still fails, is pending.
	if n.Unwind && (after != (e2e.AWSLeft{}) || n.Pending() != 1) {
		t.Errorf("left %s, %d pending; want nothing, and 1", after, n.Pending())
	}
	return left, pending
}
