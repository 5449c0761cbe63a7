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
	if vanished: entries 20; leaves`, acts{"person": func(s *story, _ []string) { // whose sweep the mass-release guard refuses, or not
		_, err := s.plugin().Sweep(s.Context(), s.stateDir, sweep.Job{})
		s.want(errors.As(err, new(*sweep.MassReleaseError)) == (len(s.entries()) > 0), "%v, left %d", err, len(s.entries()))
	}})
}
