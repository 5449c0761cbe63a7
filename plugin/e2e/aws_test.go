//go:build e2e

package e2e_test

import (
	"fmt"
	"testing"

	"cni-unwind/plugin/e2e"
)

// aws is a node with the plugins of the AWS VPC CNI and their daemon, which has two addresses.
type aws struct {
	e2e.Chained
	*e2e.IPAMD
}

func (n *aws) start() { n.IPAMD = n.StartIPAMD("10.0.12.34", "10.0.12.35") }

// ports maps host port 8080 to a port of the container. With port 0 portmap fails, in ADD and DEL.
func ports(port int) string {
	const mapping = `CAP_ARGS={"portMappings": [{"hostPort": 8080, "containerPort": %d, "protocol": "tcp"}]}`
	return fmt.Sprintf(mapping, port)
}

// add adds a sandbox of a pod, and returns its address.
func (n *aws) add(t *testing.T, sandbox, pod string) string {
	t.Helper()
	n.AddNetNS(sandbox)
	if err := n.call(t, "add", sandbox, pod, 80); err != nil {
		t.Fatalf("ADD: %v\n%s", err, n.AWSLog())
	}
	all := n.AWSAllocations()
	if len(all) == 0 {
		t.Fatal("the daemon has given no address")
	}
	return all[len(all)-1].IPv4
}

// del deletes a sandbox, and then its network namespace, as a runtime does if the DEL passes.
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

// TestE2EAWS: the real aws-cni, egress-cni and portmap, with a daemon that is away, refuses, or has
// given the address to another pod by the time of a DEL. aws-cni's DEL passes in each case, so unwind
// runs it twice, but for an address that another pod has got.
func TestE2EAWS(t *testing.T) {
	table := e2e.NewTable(t, "a pod of the AWS VPC CNI is deleted; left are addresses/veths/"+
		"routing rules/iptables rules, and pending DELs",
		"IPAMD AND THE POD", "CHAIN", "LEFT", "PENDING", "LATER", "PENDING")
	for _, c := range []struct {
		name string
		run  func(t *testing.T, n *aws) (left e2e.AWSLeft, pending int)
	}{
		{"there", awsThere},
		{"away, and started again", awsAway},
		{"refuses, and the pod comes back under its name", awsRefuses},
		{"away, and the address has another owner", awsReused},
		{"refuses while the address gets another owner", awsRefusesNext},
		{"there, and portmap fails ADD and DEL", awsFailingADD},
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

// awsThere: nothing is wrong.
func awsThere(t *testing.T, n *aws) (e2e.AWSLeft, int) {
	n.add(t, "a", "web-0")
	left := n.AWSSettled()
	if left.Addresses != 1 || left.Veths != 1 || left.Routing != 2 || left.Rules == 0 {
		t.Errorf("a pod has %s, so that the test shows nothing", left)
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

// awsAway: a DEL without the daemon leaves the address taken. A new start of the daemon gives it
// back, as the pod has no interface.
func awsAway(t *testing.T, n *aws) (e2e.AWSLeft, int) {
	n.add(t, "a", "web-0")
	n.Stop()
	n.del(t, "a", "web-0")
	left, pending := n.awsKept(t)
	n.start()
	n.Settle()
	if after := n.AWSSettled(); after != (e2e.AWSLeft{}) || n.Pending() != 0 {
		t.Errorf("the daemon is back, left %s, %d pending", after, n.Pending())
	}
	return left, pending
}

// awsKept asserts what a DEL that passed without the daemon has left: the address alone, which the
// journal knows of.
func (n *aws) awsKept(t *testing.T) (e2e.AWSLeft, int) {
	t.Helper()
	left, pending := n.AWSSettled(), n.Pending()
	if left != (e2e.AWSLeft{Addresses: 1}) {
		t.Errorf("left %s; want the address alone", left)
	}
	if pending != 0 {
		t.Errorf("%d pending after a DEL that exited 0", pending)
	}
	return left, pending
}

// awsRefuses: a daemon that goes on running takes nothing back by itself. One that starts again
// keeps what is left of an earlier sandbox, since the pod has an interface.
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
		t.Errorf("left %s, %d pending; want the address, also on the plain chain", after, n.Pending())
	}
	return left, pending
}

// awsReused: a late DEL of a sandbox takes nothing of the pod that has its address now.
func awsReused(t *testing.T, n *aws) (e2e.AWSLeft, int) {
	return n.reuse(t, func(address string) {
		n.addNext(t, address)
		n.Refuse(uidMismatch)
	})
}

// awsRefusesNext: the same, with a daemon that refuses while the other pod gets the address.
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
		t.Errorf("%d pending, though another pod has the address", n.Pending())
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

// uidMismatch is what ipamd says with security groups for pods about a sandbox that it does not
// know, if the pod has come back. aws-cni's DEL then removes the rules of the address that it was
// told of, whoever has it.
const uidMismatch = "pod UID mismatch: got , expected 7f3c1b6e-5a0e-4b2c-9d1f-3f0f8a7c2e11"

// addNext adds another pod, which gets the address.
func (n *aws) addNext(t *testing.T, address string) {
	t.Helper()
	if got := n.add(t, "b", "api-0"); got != address {
		t.Fatalf("the other pod has %s, not %s, so that the test shows nothing", got, address)
	}
	n.next(t, address)
}

// next asserts that the other pod has all that an ADD gives it.
func (n *aws) next(t *testing.T, address string) {
	t.Helper()
	all, routing := n.AWSAllocations(), n.RoutingRules(address)
	own := len(all) == 1 && all[0].IPv4 == address && all[0].Metadata.Name == "api-0"
	if !own || len(routing) != 2 {
		t.Errorf("the other pod has %+v, and the rules %v; want its address and two rules", all, routing)
	}
	if left := n.AWSSettled(); left.Veths != 1 || left.Rules == 0 {
		t.Errorf("the other pod has %s", left)
	}
}

// awsFailingADD: portmap fails after aws-cni has given an address. The plain chain keeps the
// address, also after the runtime's DEL: portmap comes first in that, and fails it.
func awsFailingADD(t *testing.T, n *aws) (e2e.AWSLeft, int) {
	n.AddNetNS("a")
	if n.call(t, "add", "a", "web-0", 0) == nil {
		t.Fatal("ADD passed")
	}
	left, pending := n.AWSSettled(), n.Pending()
	if n.Unwind == (left.Addresses == 1) || n.Unwind == (left.Routing == 2) {
		t.Errorf("left after the ADD: %s", left)
	}
	if n.call(t, "del", "a", "web-0", 0) == nil && !n.Unwind {
		t.Error("the plain chain's DEL passes, so that the test shows nothing")
	}
	n.RemoveNetNS("a")
	n.Sweep()
	after := n.AWSSettled()
	if want := (e2e.AWSLeft{Addresses: 1, Routing: 2}); !n.Unwind && after != want {
		t.Errorf("the plain chain leaves %s; want %s", after, want)
	}
	// portmap's own DEL stays pending as long as it fails
	if n.Unwind && (after != (e2e.AWSLeft{}) || n.Pending() != 1) {
		t.Errorf("left %s, %d pending; want nothing, and 1", after, n.Pending())
	}
	return left, pending
}
