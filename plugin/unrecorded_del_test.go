package plugin

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
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
		p := &Plugin{Stderr: s.Output(), Budgets: undo.DefaultBudgets, CacheDir: s.cacheDir()}
		_, s.err = p.Sweep(s.Context(), s.stateDir, sweep.Job{})
	}}
}

// TestRestartWithReadOnlyJournal: a container starts again under its ID while the journal is
// read-only. It starts if the earlier DEL has passed. The journal then has an entry of an ended
// ADD, and nothing is left in the end.
func TestRestartWithReadOnlyJournal(t *testing.T) {
	stories(t, `
	chain bridge | p1 | firewall
	add a; break read-only file system
	either its DEL has passed: del a
	or its DEL has passed, the journal is mended: del a
	or no DEL:
	or the DEL has failed: plan p1 DEL fail; fails del a; plan
	again a b
	if has passed: add b
	unless has passed: fails add b code=11
	if mended: mend; del b
	unless mended: del b; mend
	drop a b; sweep`)
}

// TestDELHasPassed: unwind believes that a pod's DEL has passed only if both host-local and
// libcni's cache say so.
func TestDELHasPassed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("a")
	given := address(t, p.mustAdd(n.unwind(n.bridgePlugin(""))))
	o := &alive.Node{CacheDir: n.cacheDir()}
	pool := filepath.Join(n.dataDir(), n.network)
	file, cache := filepath.Join(pool, given), filepath.Join(n.cacheDir(), n.network+"-a-eth0")
	steps := []struct {
		name   string
		do     func()
		passed bool
	}{
		{"live", func() {}, false},
		{"host-local has it alone", func() { n.rename(cache, cache+".away") }, false},
		{"nobody has it", func() { n.rename(file, file+".away") }, true},
		{"libcni has it alone", func() { n.rename(cache+".away", cache) }, false},
		{"another one has the address", func() {
			n.rename(cache, cache+".away")
			n.write(file, "b\r\neth0")
		}, true},
		{"so has another interface", func() { n.write(file, "a\r\neth1") }, true},
		{"no owner", func() { n.write(file, "") }, true},
		{"its file cannot be read", func() {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			n.mkdir(file)
		}, false},
		{"no pool", func() { n.rename(pool, pool+".away") }, false},
		{"the pool is back", func() {
			n.rename(pool+".away", pool)
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}, true},
		{"no cache", func() { n.rename(n.cacheDir(), n.cacheDir()+".away") }, false},
	}
	for _, s := range steps {
		s.do()
		if passed := o.Passed(p.entry()); passed != s.passed {
			t.Errorf("%s: %t", s.name, passed)
		}
	}
	n.rename(n.cacheDir()+".away", n.cacheDir())
	p.edit(func(g *journal.Generation) { g.Claims[0].Pool = "" })
	if o.Passed(p.entry()) {
		t.Error("of an address of another IPAM's nothing is known")
	}
}
