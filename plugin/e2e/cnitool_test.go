//go:build e2e

package e2e_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"cni-unwind/plugin/e2e"
)

// TestE2ECnitool runs every verb of CNI 1.1 with cnitool, libcni's own tool. cnitool's GC sends
// plugins no list of valid attachments. unwind must not treat this like an empty list. Before a GC,
// libcni sends DEL for cached attachments (GCNetworkList), so the first GC runs without the cache.
func TestE2ECnitool(t *testing.T) {
	n := e2e.NewNode(t)
	n.Configure(e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall, e2e.Portmap, n.Faulty()}, Unwind: true,
		Keys: map[string]any{"gracePeriod": "1ns"}})
	n.AddNetNS("pod")
	must := func(command string) string {
		t.Helper()
		stdout, stderr, err := n.Cnitool("pod", command, "")
		if err != nil {
			t.Fatalf("cnitool %s: %v\n%s%s", command, err, stdout, stderr)
		}
		return stdout
	}
	must("status")
	if result := must("add"); !strings.Contains(result, `"10.22.0.2/28"`) {
		t.Errorf("result: %s", result)
	}
	attached := n.Left()
	if attached.Addresses != 1 || attached.Veths != 1 || attached.Rules == 0 || len(n.Journal()) != 1 {
		t.Errorf("attached: %s, %+v", attached, n.Journal())
	}
	must("check")
	cache := n.File("/var/lib/cni/results")
	check(t, os.Rename(cache, cache+".away"))
	must("gc")
	check(t, errors.Join(os.RemoveAll(cache), os.Rename(cache+".away", cache)))
	must("check")
	if left := n.Left(); left != attached {
		t.Errorf("GC without a list removed resources: %s before, %s after", attached, left)
	}
	must("del")
	must("del") // a repeated DEL is no error (SPEC 1.1 §2 DEL)
	must("add")
	must("gc")
	if _, stderr, err := n.Cnitool("pod", "check", ""); err == nil {
		t.Errorf("CHECK succeeds after GC: %s", stderr)
	}
	if left := n.Settled(); !left.HasNothing() || len(n.Journal()) != 0 {
		t.Errorf("left: %s, %+v", left, n.Journal())
	}
	n.Plan(map[string]string{"STATUS": "fail"})
	if _, stderr, err := n.Cnitool("pod", "status", ""); err == nil || !strings.Contains(stderr, "faulty") {
		t.Errorf("STATUS of a plugin that is not ready: %v: %s", err, stderr)
	}
}
