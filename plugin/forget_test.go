package plugin

import (
	"fmt"
	"testing"
)

// TestForget gives up a dead attachment: no DEL runs, what the delegate took stays, the runtime's
// DEL succeeds and runs nothing, and the container ID can be used again.
func TestForget(t *testing.T) {
	stories(t, `
	chain p0 | p1
	plan p1 ADD fail-effect, p1 DEL fail; fails add a
	either intact:
	or damaged: damage a
	forgets; giveup a
	events '' 'forgotten a '; tombstone a forgotten by an operator; locks 0
	del a; calls; taken a.eth0.p1
	fails giveup a '$network/a/eth0 is not in the journal'
	plan; add a; del a`)
}

// TestForgetRefuses: an attachment that lives, may live, or is being worked on stays unchanged.
func TestForgetRefuses(t *testing.T) {
	stories(t, `
	either live: chain p0; add a; let why is live, not dead (its network namespace exists)
	or dead, seen from elsewhere: let why is unknown, not dead (cannot judge it from these namespaces
	or dead, locked: let why its lock is held
	or dead, damaged and locked: let why its lock is held
	if dead: chain p0 | p1; plan p1 ADD fail-effect, p1 DEL fail; fails add a
	if damaged: damage a
	if locked: lock a
	if elsewhere: elsewhere a
	count; fails giveup a '$why'; count
	unless damaged: entry a
	leaves`, acts{
		"count": func(s *story, _ []string) { // the same as before
			s.steady("count", fmt.Sprint(len(s.node.events()), s.tombstone(s.who("a").key())))
		},
	})
}
