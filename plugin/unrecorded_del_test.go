package plugin

import (
	"errors"
	"testing"

	"cni-unwind/plugin/sweep"
)

// In the tests of this file DELs pass while the journal cannot be written, so that it has the
// attachments as live from then on.

// TestPassedDELsAreNoMassDeath: 20 pods get their DELs while the disk is full. With room again, all
// of them seem to have died at once. They are released, since their DELs have passed. Pods whose
// namespaces vanish without a DEL are kept.
func TestPassedDELsAreNoMassDeath(t *testing.T) {
	stories(t, `
	patient; conf sweepOnStatus false; chain bridge | p1
	crowd 20
	either deleted: break read-only file system; del $all; unpin $all; mend
	or vanished: unpin $all
	parted
	either by STATUS: conf sweepOnStatus true; status
	or by a sweep: person
	if deleted, by a sweep: passed
	if vanished, by a sweep: refused
	if vanished: entries 20; leaves`, massRelease())
}

// massRelease runs a person's sweep, and tells whether the mass-release guard refused it.
func massRelease() acts {
	is := func(refused bool) func(*story, []string) {
		return func(s *story, _ []string) {
			s.want(errors.As(s.err, new(*sweep.MassReleaseError)) == refused, "%v", s.err)
		}
	}
	return acts{"passed": is(false), "refused": is(true), "person": func(s *story, _ []string) {
		_, s.err = s.plugin().Sweep(s.Context(), s.stateDir, sweep.Job{})
	}}
}
