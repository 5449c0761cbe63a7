//go:build e2e

package e2e_test

import (
	"maps"
	"path/filepath"
	"testing"

	"cni-unwind/plugin/e2e"
	"cni-unwind/plugin/plugintest/sandbox"
)

// TestE2EUpstream: the integration suite of the reference plugins passes with its own
// configurations, and with the output of "unwindctl wrap" for these configurations.
func TestE2EUpstream(t *testing.T) {
	sandbox.Need(t)
	built, err := filepath.Glob("../../.tools/e2e/upstream-*/.built")
	if err != nil || len(built) != 1 {
		t.Fatalf("make e2e-tools builds the suite: %q, %v", built, err)
	}
	module, err := filepath.Abs(filepath.Dir(built[0]))
	check(t, err)
	plain, unwind := e2e.Upstream(t, module, false), e2e.Upstream(t, module, true)
	table := e2e.NewTable(t, "the integration suite of containernetworking/plugins", "SPEC", "PLAIN", "UNWIND")
	for spec, state := range plain {
		table.Row(spec, state, unwind[spec])
		if state != "passed" {
			t.Errorf("%s: %s without unwind, so the test proves nothing", spec, state)
		}
	}
	if len(plain) < 2 || !maps.Equal(plain, unwind) {
		t.Errorf("without unwind: %v; with unwind: %v", plain, unwind)
	}
}
