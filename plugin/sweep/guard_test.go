package sweep

import (
	"slices"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
)

// TestMassReleaseGuard: the mass-release guard keeps the live attachments of this boot if more than 10 of
// them, and more than 30 %, seem dead.
func TestMassReleaseGuard(t *testing.T) {
	t.Parallel()
	// live counts those that are not dead.
	type counts struct{ dead, live, deleting, earlier, unknown int }
	for _, c := range []struct {
		name   string
		counts counts
		force  bool
		kept   bool
	}{
		{"none", counts{}, false, false},
		{"ten, all there are", counts{dead: 10}, false, false},
		{"eleven, all there are", counts{dead: 11}, false, true},
		{"eleven, forced", counts{dead: 11}, true, false},
		{"eleven of 36", counts{dead: 11, live: 25}, false, true},
		{"eleven of 37", counts{dead: 11, live: 26}, false, false},
		{"thirty of a hundred", counts{dead: 30, live: 70}, false, false},
		{"thirty of 99", counts{dead: 30, live: 69}, false, true},
		{"eleven of 37, some of them not to be told", counts{dead: 11, live: 20, unknown: 6}, false,
			false},
		{"ten, and what has to go anyway", counts{dead: 10, deleting: 50, earlier: 50}, false, false},
		{"eleven of 36, and many of an earlier boot", counts{dead: 11, live: 25, earlier: 50}, false,
			true},
		{"eleven of 36, and many that are being removed", counts{dead: 11, live: 25, deleting: 50}, false,
			true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var findings []Finding
			add := func(many int, f Finding) {
				findings = append(findings, slices.Repeat([]Finding{f}, many)...)
			}
			add(c.counts.earlier, Finding{State: journal.Live, Verdict: decide.Verdict{Fate: decide.Dead}})
			add(c.counts.dead, Finding{State: journal.Live, Verdict: decide.Verdict{Fate: decide.Dead}, thisBoot: true})
			add(c.counts.deleting, Finding{State: journal.Deleting, Verdict: decide.Verdict{Fate: decide.Dead}, thisBoot: true})
			add(c.counts.live, Finding{State: journal.Live, Verdict: decide.Verdict{Fate: decide.Live}, thisBoot: true})
			add(c.counts.unknown, Finding{State: journal.Live, Verdict: decide.Verdict{Fate: decide.Unknown}, thisBoot: true})
			s := &Sweep{Job: Job{Force: c.force}}
			err := s.guardMassRelease(findings)
			if (err != nil) != c.kept {
				t.Errorf("the guard says %v", err)
			}
			for i, f := range findings {
				live := f.State == journal.Live && f.Fate == decide.Dead && f.thisBoot
				if kept := f.Err != nil; kept != (live && c.kept) {
					t.Errorf("finding %d, %+v: kept %t", i, f, kept)
				}
			}
		})
	}
}
