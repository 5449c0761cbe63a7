//go:build e2e

package e2e_test

import (
	"fmt"
	"os"
	"testing"

	"cni-unwind/plugin/e2e"
)

// TestE2EPluginsBefore: with unwind, pods that cannot start leave no resources, even with the
// previous release of the reference plugins.
func TestE2EPluginsBefore(t *testing.T) {
	t.Parallel()
	for _, unwind := range []bool{false, true} {
		o := e2e.Suffer(t, e2e.Newest(t), e2e.Troubles[0], unwind, (*e2e.Node).DowngradePlugins)
		if unwind == (o.During.Addresses > 0) || unwind && (o.After != (e2e.Left{}) || o.Starts != nil) {
			t.Errorf("unwind %t: %s, later %s; the next pod: %v", unwind, o.During, o.After, o.Starts)
		}
	}
}

// TestE2EPluginsUpgrade: pods are added with the previous release of the reference plugins. The
// DELs of the current release remove these pods and their host ports.
func TestE2EPluginsUpgrade(t *testing.T) {
	t.Parallel()
	for _, unwind := range []bool{false, true} {
		n := e2e.NewNode(t)
		n.DowngradePlugins()
		n.Configure(e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall, e2e.Portmap}, Unwind: unwind})
		rt := n.StartContainerd(e2e.Newest(t))
		rt.AwaitNetwork()
		pods := e2e.SomePods(3)
		pods[0].HostPorts = []int32{8080}
		rt.RunPods(pods)
		n.UpgradePlugins()
		if errs := rt.RemovePods(); len(errs) > 0 {
			t.Errorf("unwind %t: %v", unwind, errs)
		}
		if left := n.Settled(); left != (e2e.Left{}) {
			t.Errorf("unwind %t: left %s:\n%q", unwind, left, n.Rules())
		}
	}
}

// TestE2EGatewayOutside: host-local 1.9.1 accepts a gateway outside the subnet. host-local 1.10.0
// rejects such a gateway in ADD and DEL. Once the conflist is corrected, the DEL of a pod that
// 1.9.1 added succeeds, with and without unwind. With unwind, a sweep also succeeds.
func TestE2EGatewayOutside(t *testing.T) {
	t.Parallel()
	wrong := e2e.Network{Subnet: e2e.Small, Gateway: "192.0.2.1", Plugins: []string{e2e.Firewall}}
	right := e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall}}
	for _, c := range []struct {
		unwind bool
		how    string
		then   func(n *e2e.Node) error
	}{
		{false, "the DEL", del},
		{true, "the DEL", del},
		{true, "a sweep", func(n *e2e.Node) error {
			n.RemoveNetNS("pod")
			n.Unwindctl("sweep")
			return nil
		}},
	} {
		n := e2e.NewNode(t)
		n.DowngradePlugins()
		wrong.Unwind, right.Unwind = c.unwind, c.unwind
		n.Configure(wrong)
		n.AddByHand("pod")
		n.UpgradePlugins()
		if err := del(n); err == nil {
			t.Errorf("unwind %t: the new plugins accept the gateway, so the test proves nothing", c.unwind)
		}
		n.Configure(right)
		if err := c.then(n); err != nil {
			t.Errorf("unwind %t, %s: %v", c.unwind, c.how, err)
		}
		if _, err := os.Stat(n.File("/run/netns/pod")); err == nil {
			n.RemoveNetNS("pod")
		}
		if left := n.Settled(); left.Addresses > 0 || c.unwind && left != (e2e.Left{}) { // without unwind, 4 rules stay
			t.Errorf("unwind %t, %s: left %s:\n%q", c.unwind, c.how, left, n.Rules())
		}
	}
}

func del(n *e2e.Node) error {
	out, stderr, err := n.Cnitool("pod", "del", "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=pod")
	if err != nil {
		err = fmt.Errorf("%w: %s%s", err, out, stderr)
	}
	return err
}
