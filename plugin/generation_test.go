package plugin

import (
	"testing"
)

// TestOldGenerationIsSettledFirst: before the first delegate of the next ADD runs, unwind undoes
// what an earlier ADD of the container ID left, if the old namespace has no process any more.
func TestOldGenerationIsSettledFirst(t *testing.T) {
	stories(t, `
	chain p0 | p1
	either live, namespace gone: add a; forgets; again a b; drop a
	or live, namespace empty: add a; forgets; again a b
	or DEL pending: add a; plan p1 DEL fail; fails del a; forgets; again a b
	or ADD failed: plan p1 ADD fail-effect, p1 DEL fail; fails add a; forgets; again a b
	plan; add b
	if live: calls DEL p1, DEL p0, ADD p0, ADD p1
	unless live: calls DEL p1, ADD p0, ADD p1
	entry b live 2 1
	del b`)
}

// TestOldGenerationMovesOn: if the rest of an earlier ADD of the container ID cannot be undone yet,
// the DEL of the next ADD undoes it, after its own, with the path of the old namespace.
func TestOldGenerationMovesOn(t *testing.T) {
	stories(t, `
	chain p0 | p1 | p2 | p3
	add a
	plan p1 DEL fail, p2 DEL fail; fails del a
	drop a; again a b
	plan p2 DEL fail; add b
	entry b live 5 2; pending b p0 p1 p2 p3 p2
	plan; forgets; del b
	shown b b b b a
	calls DEL p3, DEL p2, DEL p1, DEL p0, DEL p2`)
}

// TestAddOverLive: an ADD over an attachment in use is refused before any delegate runs.
func TestAddOverLive(t *testing.T) {
	stories(t, `
	chain bridge | p1 | p2 | p3
	let why in a network namespace with a running process
	add a; forgets
	either same namespace: names b $netns/a; let why in the same network namespace
	or process in the old namespace: process a
	or process in the old namespace, which has no name: process a
	unless same: again a b
	if same: as b a
	if no name: unpin a
	fails add b 'unwind: $network/a/eth0 is already attached ($why); delete it first'
	calls
	entry a live 4 1
	del a`)
}

// TestSecondDelAfterGrace: a delegate that was killed gets one more DEL after gracePeriod, even if
// the first one passed, since an agent behind it may have gone on. Until then every verb leaves the
// entry.
func TestSecondDelAfterGrace(t *testing.T) {
	stories(t, `
	hasty; conf gracePeriod 1h
	chain p0 | p1 | p2
	either hangs: plan p1 ADD hang-effect
	or crashes: plan p1 ADD crash-effect
	fails add a 'pending DEL: faulty (succeeded; runs once more)'
	entry a rolling-back 1; pending a p1
	del a; entry a rolling-back 1; pending a p1
	sandbox a b; plan; add b; del b
	entry a rolling-back 1; pending a p1
	taken; due a; forgets
	del a; calls DEL p1`)
}

// TestInterruptedAfterAnother: a container ID is added again without a DEL, and unwind is killed
// before it prints the new result. libcni's cache still has the earlier result, whose namespace
// exists: that is no ADD that the journal did not record, so the next ADD and a sweep undo what is
// left. A DEL of the earlier ADD may be pending.
func TestInterruptedAfterAnother(t *testing.T) {
	stories(t, `
	let more
	either no result: chain p0 | bridge
	or a result of its own: chain bridge | p0
	or no result, beside a pending DEL: chain p0, "ipam": $hostlocal | p1; let more , p1 DEL fail
	add a; again a b
	plan p0 ADD kill-parent-effect$more; killed add b; free b; plan; drop b
	either the next ADD: again b c; add c; del c
	or a sweep: sweep; gone b`)
}

// TestInterruptedOverUnknown: a pod was added past the journal, and still runs. unwind is killed in
// another ADD of the same container ID, in another namespace. A sweep keeps that record: its DELs go
// by the container ID, and would release what the pod has.
func TestInterruptedOverUnknown(t *testing.T) {
	stories(t, `
	chain p0 | bridge
	past add a; again a b
	plan p0 ADD kill-parent-effect; killed add b; free b; plan; drop b
	sweep; reserved 1
	drop a; del b; reserved 0`)
}

// TestPortOfNewGeneration: portmap's rules are keyed by the container ID. The retry of an old DEL
// must not remove the port of the container that has the ID now: neither in the ADD of a pod that
// would settle it, nor in that of one that has its old address, if it were dead.
func TestPortOfNewGeneration(t *testing.T) {
	stories(t, `
	chain static | portmap
	add a; breaks portmap; fails del a
	drop a; again a b; add b; works portmap
	sweep
	port $b; del b; clean`)
}
