//go:build e2e

package e2e_test

import (
	"maps"
	"slices"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

// soon is the time by which a test of containerd may take longer than twice its time with the plain chain: the tests look
// each second whether something has happened.
const soon = 2 * time.Second

// TestE2ESandboxTests: containerd's own tests of sandboxes pass with unwind in front of their chains as they do without it,
// none in more than twice the time, and nothing is pending or reserved in the end. A test that is slower runs once more, both
// ways, since the machine may have been busy.
func TestE2ESandboxTests(t *testing.T) {
	v := e2e.Newest(t)
	tests := e2e.SandboxTests()
	plain, unwind := sandboxTests(t, v, tests, false), sandboxTests(t, v, tests, true)
	slower := func(test string) bool { return unwind[test].Took > 2*plain[test].Took+soon }
	again := slices.DeleteFunc(slices.Clone(tests), func(test string) bool { return !slower(test) })
	if len(again) > 0 {
		t.Logf("once more, since they were slower through unwind: %v", again)
		maps.Copy(plain, sandboxTests(t, v, again, false))
		maps.Copy(unwind, sandboxTests(t, v, again, true))
	}
	table := e2e.NewTable(t, "the sandbox tests of "+v.Name, "TEST", "PLAIN", "UNWIND")
	for _, test := range tests {
		p, u := plain[test], unwind[test]
		table.Row(test, p.State+" "+p.Took.String(), u.State+" "+u.Took.String())
		if p.State != "PASS" {
			t.Errorf("%s: %q with the plain chain, so this shows nothing", test, p.State)
		}
		if u.State != p.State {
			t.Errorf("%s: %q through unwind, %q with the plain chain", test, u.State, p.State)
		}
		if slower(test) {
			t.Errorf("%s: %s through unwind, %s with the plain chain", test, u.Took, p.Took)
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
		t.Errorf("unwind %t: pods stay: %v", unwind, errs)
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
	if t.Failed() {
		t.Logf("unwind %t:\n%s\n%s", unwind, out, rt.Log())
	}
	return results
}
