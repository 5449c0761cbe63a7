package sweep

import (
	"fmt"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
)

// MassReleaseError means that the mass-release guard kept attachments that seem dead, because they
// are too many: more than 10, and more than 30 % of the live attachments of this boot. A wrong
// verdict is likelier than so many pods of a node dying at the same time.
type MassReleaseError struct{ Dead, Live int }

func (e *MassReleaseError) Error() string {
	return fmt.Sprintf("%d of the %d attachments of this boot seem dead, which is implausibly "+
		"many; they are kept. If they really are dead, run unwindctl sweep --force", e.Dead, e.Live)
}

// guarded reports whether the mass-release guard counts an attachment: one of this boot in state
// Live.
func (f *Finding) guarded() bool { return f.State == journal.Live && f.thisBoot }

// guardMassRelease keeps the guarded attachments if too many of them seem dead.
func (s *Sweep) guardMassRelease(findings []Finding) error {
	live, dead := 0, []*Finding{}
	for i := range findings {
		f := &findings[i]
		if !f.guarded() {
			continue
		}
		live++
		if f.Fate == decide.Dead {
			dead = append(dead, f)
		}
	}
	if s.Force || len(dead) <= 10 || len(dead)*10 <= live*3 {
		return nil
	}
	err := &MassReleaseError{len(dead), live}
	for _, f := range dead {
		f.Err = err
	}
	return err
}
