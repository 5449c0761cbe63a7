package plugin

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"pgregory.net/rapid"

	"cni-unwind/journal"
	"cni-unwind/plugin/undo"
)

// world is a node with three containers, two addresses and a chain of three plugins: p0 gets an
// address from host-local, p1 creates a rule for the address, and p2 allocates something else. p1
// may be the real firewall plugin.
type world struct {
	*node
	try     *rapid.T
	real    bool // p1 is the real firewall plugin
	plugins []string
	list    *libcni.NetworkConfigList
	modes   map[string]map[string]string // the content of plan.json
	killAt  int                          // the crash point at which the next verb is killed; 0: none
	people  []*resident
	past    []string // the operations so far, in short
}

// resident is a container, and the state that the model expects it to have.
type resident struct {
	*pod
	there   bool        // its network namespace is at the path
	process *os.Process // a process in the namespace, or nil
	live    bool        // its ADD succeeded, and nothing has happened since that allows its release
	address string      // the address that its last ADD returned
	earlier []*pod      // the same container with earlier network namespaces, which still exist
}

func newWorld(t *testing.T, try *rapid.T, real bool) *world {
	n := newNode(trial{t, try})
	n.mayDie = true
	w := &world{node: n, try: try, real: real}
	w.plugins = []string{n.pooled("p0", 2, 3), n.faulty("p1", `, "rules": true, "delayMS": 200`), n.faulty("p2", `, "delayMS": 200`)}
	if real {
		w.plugins[1] = `{"type": "firewall"}`
	}
	w.list = n.unwind(w.plugins...)
	for _, id := range []string{"a", "b", "c"} {
		w.people = append(w.people, &resident{pod: n.pod(id), there: true})
	}
	w.people[2].Args = w.people[1].Args // b and c are sandboxes of one pod
	w.heal()
	w.Cleanup(func() {
		if w.Failed() { // rapid prints only its last run, which may have succeeded by chance
			t.Logf("what was done:\n%s\nstderr of successful verbs:\n%s", strings.Join(w.past, "\n"), w.log())
		}
	})
	return w
}

func (w *world) some(try *rapid.T) *resident {
	id := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(try, "container")
	return w.people[slices.IndexFunc(w.people, func(r *resident) bool { return r.ContainerID == id })]
}

// note adds a line that is printed if the test fails.
func (w *world) note(format string, a ...any) { w.past = append(w.past, fmt.Sprintf(format, a...)) }

// healthy reports whether no plugin failure and no kill is set for the next verb.
func (w *world) healthy() bool { return len(w.modes) == 0 && w.killAt == 0 }

// reboot removes what does not survive a reboot: namespaces, processes and rules. It keeps what is
// on disk: the journal, host-local's files and the runtime's cache.
func (w *world) reboot() {
	w.note("reboot")
	w.locksFree()
	for _, r := range w.people {
		r.leave()
	}
	must(w, os.RemoveAll(filepath.Join(w.faultyDir(), "rules")))
	for _, rule := range w.firewallRules() {
		run(w, "iptables", append([]string{"-w", "-D"}, strings.Fields(rule)[1:]...)...)
	}
	err := w.store.Update(context.Background(), func(tx *journal.Tx) error {
		for _, r := range w.people {
			all, err := tx.Records(r.key())
			if err != nil {
				return err
			}
			for _, e := range all {
				e.Added.Host.BootID = earlier
				if err := tx.Put(e); err != nil {
					return err
				}
			}
		}
		return nil
	})
	must(w, err)
}

// leave removes a container's process and network namespaces.
func (r *resident) leave() {
	r.end()
	if r.there {
		r.dropNetNS()
	}
	for _, p := range r.earlier {
		p.dropNetNS()
	}
	r.there, r.live, r.earlier = false, false, nil
}

// locksFree waits until no lock is held, not even by a process that has outlived a killed unwind.
func (w *world) locksFree() {
	w.Helper()
	eventually(w, "the locks are free", func() bool {
		return !slices.ContainsFunc(w.people, func(r *resident) bool {
			lock, err := w.store.LookAtLock(r.key())
			return lock.Held || err != nil
		})
	})
}

// firewallRules returns the firewall plugin's rules for addresses in the node's subnet, in the
// format of iptables-save.
func (w *world) firewallRules() []string {
	w.Helper()
	if !w.real {
		return nil
	}
	return w.rules(strings.TrimSuffix(w.subnet, "0/24"))
}

// addressRules returns p1's rules in the form ADDRESS.p1.
func (w *world) addressRules() []string {
	w.Helper()
	rules := w.node.addressRules()
	for _, rule := range w.firewallRules() {
		for _, field := range strings.Fields(rule) {
			if address, is := strings.CutSuffix(field, "/32"); is && !slices.Contains(rules, address+".p1") {
				rules = append(rules, address+".p1")
			}
		}
	}
	return rules
}

// owners checks that each live container has a live record, and an address that no other container
// has. It returns the container IDs by address.
func (n *node) owners(live []*resident) map[string]string {
	n.Helper()
	owners, reserved := map[string]string{}, n.reserved()
	for _, r := range live {
		if other := owners[r.address]; other != "" {
			n.Errorf("%s and %s both have %s", other, r.ContainerID, r.address)
		}
		owners[r.address] = r.ContainerID
		if got := reserved[r.address]; got != r.ContainerID+" eth0" {
			n.Errorf("%s is live and its address %s is %q's", r.ContainerID, r.address, got)
		}
		if e := r.record(); e == nil || e.State != journal.Live {
			n.Errorf("%s is live and its entry is %+v", r.ContainerID, e)
		}
	}
	return owners
}

// invariants checks what must be true after each operation.
func (w *world) invariants() {
	taken, reserved, rules := w.taken(), w.reserved(), w.addressRules()
	live := slices.DeleteFunc(slices.Clone(w.people), func(r *resident) bool { return !r.live })
	w.owners(live)
	for _, r := range live {
		for _, instance := range w.instances() {
			if !slices.Contains(taken, r.ContainerID+".eth0."+instance) {
				w.Errorf("%s is live and has lost what %s took", r.ContainerID, instance)
			}
		}
		if !slices.Contains(rules, r.address+".p1") {
			w.Errorf("%s is live and has lost the rule of %s", r.ContainerID, r.address)
		}
	}
	owed := w.owed()
	for _, file := range taken {
		if !owed[file] {
			w.Errorf("%s is taken, and the journal owes no DEL for it", file)
		}
	}
	for address, who := range reserved {
		if !owed[strings.ReplaceAll(who, " ", ".")+".p0"] {
			w.Errorf("%s is %s's, and the journal owes no DEL for it", address, who)
		}
	}
	for _, rule := range rules {
		if !owed[rule] {
			w.Errorf("rule %s is there, and the journal owes no DEL for it", rule)
		}
	}
}

// instances returns the chain's instances of the test plugin "faulty". Each creates a file.
func (w *world) instances() []string {
	if w.real {
		return []string{"p0", "p2"}
	}
	return []string{"p0", "p1", "p2"}
}

// owed returns what the DELs in the journal would remove: files as CONTAINER.INTERFACE.INSTANCE,
// and rules as ADDRESS.INSTANCE.
func (w *world) owed() map[string]bool {
	owed := map[string]bool{}
	for _, e := range w.records() {
		for _, s := range e.Steps {
			instance := fmt.Sprintf("p%d", s.Index)
			owed[e.ContainerID+"."+e.IfName+"."+instance] = true
			for _, c := range e.Got.Claims {
				owed[c.Address.String()+"."+instance] = s.Index > c.Step || owed[c.Address.String()+"."+instance]
			}
		}
	}
	return owed
}

// end repairs the plugins, and ends all containers: with DELs or, if forgotten is set, without
// DELs. Two GCs must release the rest. The second is for a DEL that waits in the first, because
// host-local's file names another dead container as the owner of the DEL's address. A rule may stay
// if its DEL failed twice, because unwind has then freed the address (see decide.Reserved).
func (w *world) end(forgotten bool) {
	w.note("end, forgotten %t", forgotten)
	for _, e := range w.records() {
		for _, s := range e.Steps {
			for _, c := range e.Got.Claims {
				if s.Index > c.Step && s.Tries >= 2 && w.reserved()[c.Address.String()] == "" {
					_ = os.Remove(filepath.Join(w.faultyDir(), "rules", fmt.Sprintf("%s.p%d", c.Address, s.Index)))
				}
			}
		}
	}
	w.heal()
	w.killAt = 0
	for _, r := range w.people {
		if forgotten {
			r.leave()
		} else {
			r.mustDel(w.list)
		}
	}
	w.locksFree()
	w.mustAsk("GC", nil)
	w.mustAsk("GC", nil)
	if left := slices.Concat(w.taken(), slices.Sorted(maps.Keys(w.reserved())), w.addressRules()); len(left) > 0 {
		w.Errorf("left: %v", left)
	}
	for _, e := range w.records() {
		w.Errorf("the journal still has %s: %s, %v (%s)", e.Key, e.State, undo.PendingSteps(e), e.Reason)
	}
	for _, r := range w.people {
		r.mustDel(w.list)
	}
	w.nothingLeft()
}

// trial is the testing.TB of a single rapid run, so each run fails and cleans up separately.
type trial struct {
	testing.TB
	try *rapid.T
}

func (t trial) Helper()                   {}
func (t trial) Context() context.Context  { return t.try.Context() }
func (t trial) Cleanup(f func())          { t.try.Cleanup(f) }
func (t trial) Log(a ...any)              { t.try.Log(a...) }
func (t trial) Logf(f string, a ...any)   { t.try.Logf(f, a...) }
func (t trial) Error(a ...any)            { t.try.Error(a...) }
func (t trial) Errorf(f string, a ...any) { t.try.Errorf(f, a...) }
func (t trial) Fatal(a ...any)            { t.try.Fatal(a...) }
func (t trial) Fatalf(f string, a ...any) { t.try.Fatalf(f, a...) }
func (t trial) FailNow()                  { t.try.FailNow() }
func (t trial) Failed() bool              { return t.try.Failed() }

func (t trial) TempDir() string {
	dir, err := os.MkdirTemp("", "model")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}
