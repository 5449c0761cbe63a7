//go:build e2e

package e2e_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

// soon is extra time that each of containerd's tests may take with unwind, because these tests poll
// once a second.
const soon = 2 * time.Second

// TestE2ESandboxTests runs containerd's own sandbox tests with and without unwind. With unwind,
// each test passes in at most twice its time without unwind, plus the constant soon. In the end, no
// DEL is pending, and no address is reserved. Tests that take longer run again, with and without
// unwind, because the machine may have been busy.
func TestE2ESandboxTests(t *testing.T) {
	v := e2e.Newest(t)
	tests := e2e.SandboxTests()
	plain, unwind := sandboxTests(t, v, tests, false), sandboxTests(t, v, tests, true)
	slower := func(test string) bool { return unwind[test].Took > 2*plain[test].Took+soon }
	again := slices.DeleteFunc(slices.Clone(tests), func(test string) bool { return !slower(test) })
	if len(again) > 0 {
		t.Logf("running again, because they were slower with unwind: %v", again)
		maps.Copy(plain, sandboxTests(t, v, again, false))
		maps.Copy(unwind, sandboxTests(t, v, again, true))
	}
	table := e2e.NewTable(t, "the sandbox tests of "+v.Name, "TEST", "PLAIN", "UNWIND")
	for _, test := range tests {
		p, u := plain[test], unwind[test]
		table.Row(test, p.State+" "+p.Took.String(), u.State+" "+u.Took.String())
		if p.State != "PASS" {
			t.Errorf("%s: %q without unwind, so the test proves nothing", test, p.State)
		}
		if u.State != p.State {
			t.Errorf("%s: %q with unwind, %q without", test, u.State, p.State)
		}
		if slower(test) {
			t.Errorf("%s: %s with unwind, %s without", test, u.Took, p.Took)
		}
	}
}

// sandboxTests runs tests on a new node.
func sandboxTests(t *testing.T, v e2e.Version, tests []string, unwind bool) map[string]e2e.TestResult {
	t.Helper()
	n := e2e.NewNode(t)
	rt := n.StartForSandboxTests(v, unwind)
	results, out := rt.RunSandboxTests(tests)
	if errs := rt.RemovePods(); len(errs) > 0 {
		t.Errorf("unwind %t: some pods were not removed: %v", unwind, errs)
	}
	if unwind {
		rt.Heal()
		if entries := n.Journal(); len(entries) > 0 {
			t.Errorf("the journal has %+v", entries)
		}
		if left, failing := n.Settled(), n.ReservedByFailing(); left != (e2e.Left{}) || len(failing) > 0 {
			t.Errorf("left: %s, %v", left, failing)
		}
	}
	failed := func(r e2e.TestResult) bool { return r.State != "PASS" }
	if t.Failed() || slices.ContainsFunc(slices.Collect(maps.Values(results)), failed) {
		t.Logf("unwind %t:\n%s\n%s", unwind, out, rt.Log())
	}
	return results
}
