package main

import (
	"slices"
	"strings"
	"testing"

	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
)

// TestGlossary: each word that a command prints is explained, once for its kind, and nothing else is.
func TestGlossary(t *testing.T) {
	var reasons []string
	for _, r := range install.Reasons {
		reasons = append(reasons, string(r))
	}
	for kind, want := range map[string][]string{
		"state":   {string(journal.Adding), string(journal.Live), "recent", string(decide.Dead), string(journal.RollingBack), string(journal.Deleting), string(decide.Unknown), string(decide.Foreign)},
		"verdict": {string(decide.Live), string(decide.Dead), string(decide.Unknown), string(decide.Foreign)},
		"result":  inspect.Results, "address": {"live", "recent", "leaked", "empty", "unknown", "free"}, "event": eventKinds, "status": reasons,
	} {
		var got []string
		for _, g := range glossary {
			if g.kind == kind {
				got = append(got, g.word)
			}
		}
		if want = slices.Clone(want); strings.Join(slices.Sorted(slices.Values(got)), ",") != strings.Join(slices.Sorted(slices.Values(want)), ",") {
			t.Errorf("%s: %q, want %q", kind, got, want)
		}
		for line := range strings.Lines(describe(kind)) {
			if len(line) > 81 {
				t.Errorf("%d columns: %s", len(line), line)
			}
		}
	}
}
