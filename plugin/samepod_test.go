package plugin

import (
	"testing"

	"cni-unwind/journal"
)

// TestManyOldSandboxes: a pod has many old sandboxes, each with a slow DEL. The next sandbox
// settles as many as it has time for, and kills no delegate for the sake of others.
func TestManyOldSandboxes(t *testing.T) {
	stories(t, `
	conf gracePeriod 1h; chain p0, "delayMS": 400
	crowd 20 old; plan p0 DEL fail; all-fail $old; of-one
	plan p0 DEL late; add next; some-left; leaves`, acts{
		"all-fail": each(func(p *pod) {
			if err := p.del(p.unwind(p.faulty("p0", `, "delayMS": 400`))); err == nil {
				p.Error("the DEL passed")
			}
		}),
		"of-one": func(s *story, _ []string) { // all are sandboxes of pod next
			for _, e := range s.entries() {
				e.Pod.Name = "next"
				s.must(s.store.Update(s.Context(), func(tx *journal.Tx) error { return tx.Put(e) }))
			}
		},
		"some-left": func(s *story, _ []string) {
			left := s.entries()
			s.want(len(left) > 1 && len(left) < 21, "%d entries", len(left))
			for _, e := range left {
				for _, step := range e.Newest().Steps {
					s.want(step.RepeatAt == 0, "a delegate of %s was killed", e.Key)
				}
			}
		},
	})
}
