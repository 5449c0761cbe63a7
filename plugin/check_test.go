package plugin

import "testing"

// warnedUnknown is logged by a CHECK without an entry.
const warnedUnknown = "the attachment is not in the journal"

// TestCheck: CHECK asks every delegate in the order of the chain, with the configuration of its ADD
// and the final result, even if the conflist has changed.
func TestCheck(t *testing.T) {
	stories(t, `
	chain p0 | p1, "key": "as added" | p2, "address": "192.0.2.7/24"
	add a; forgets
	either same conflist:
	or another conflist: chain p9 | p1, "key": "changed"
	or a chain that cannot be read: chain {}
	check a
	stdin p1 key "as added"; previous 192.0.2.7; shown a a a; calls CHECK p0, CHECK p1, CHECK p2
	logged '`+warnedUnknown+`' 0
	del a`)
}

// TestCheckBesideOthers: a CHECK waits for nobody, and nobody for it, even after its unwind was killed.
// It makes no lock file.
func TestCheckBesideOthers(t *testing.T) {
	stories(t, `
	hasty; chain p0; add a; let held $dir/faulty/held/CHECK.a.p0
	lock a; check a; unlock
	either it lasts: plan p0 CHECK hold; start check a; appears $held
	or its unwind was killed: plan p0 CHECK kill-parent; killed check a
	plan; check a
	sandbox a b; add b; del b
	del a; past add a; check a; locks 0; del a
	if lasts: lose $held; fails wait check a`)
}

// TestCheckFails: the runtime gets the error of the delegate that fails, with its code and words,
// and the delegates after it are not asked.
func TestCheckFails(t *testing.T) {
	stories(t, `
	chain p0 | p1, "code": 117 | p2
	add a; forgets; plan p1 CHECK fail
	fails check a code=117 'plugin type="faulty" failed (check): faulty: p1 CHECK refused'
	calls CHECK p0, CHECK p1
	plan; check a
	del a`)
}

// TestCheckWithoutEntry: without an entry the delegates decide; the missing entry is a warning.
func TestCheckWithoutEntry(t *testing.T) {
	stories(t, `
	chain p0 | p1, "address": "192.0.2.7/24"
	past add a; forgets
	either they agree: check a; logged '`+warnedUnknown+`'
	or one refuses: plan p1 CHECK fail; fails check a
	previous 192.0.2.7; shown a a; calls CHECK p0, CHECK p1
	del a`)
}
