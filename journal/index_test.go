package journal

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// model is the content of a journal, in maps.
type model struct {
	entries    map[Key]Entry
	tombstones map[Key]Tombstone
	number     uint64
}

func (m model) clone() model {
	return model{maps.Clone(m.entries), maps.Clone(m.tombstones), m.number}
}

// operation is one operation on an attachment.
type operation struct {
	what      string
	key       Key
	state     State
	fresh     bool // a new generation
	pod       Pod
	addresses []string
	reason    string
}

var (
	samplePods      = []Pod{{}, {"ns", "p", "1"}, {"ns", "p", "2"}, {"ns", "pp", ""}, {"n", "sp", ""}, {"ns", "", ""}}
	sampleAddresses = []string{"10.0.0.1", "10.0.0.10", "::ffff:10.0.0.1", "fd00::1", "fd00::10", "fe80::1%eth0", "fe80::1"}
)

// operations draws from few keys, pods and addresses, so that they collide often.
var operations = rapid.Custom(func(t *rapid.T) operation {
	return operation{
		what:      rapid.SampledFrom([]string{"put", "put", "put", "delete", "bury"}).Draw(t, "what"),
		key:       Key{rapid.SampledFrom([]string{"podnet", "storage"}).Draw(t, "network"), rapid.StringMatching(`[ab]{1,2}`).Draw(t, "id"), "eth0"},
		state:     rapid.SampledFrom([]State{Adding, Live, Unwinding, Removing}).Draw(t, "state"),
		fresh:     rapid.Bool().Draw(t, "fresh"),
		pod:       rapid.SampledFrom(samplePods).Draw(t, "pod"),
		addresses: rapid.SliceOfN(rapid.SampledFrom(sampleAddresses), 0, 3).Draw(t, "addresses"),
		reason:    rapid.StringMatching(`[a-z]{3}`).Draw(t, "reason"),
	}
})

// TestJournalIsAMap: the journal behaves like a map, whatever the operations and transactions, also
// those that are rolled back.
func TestJournalIsAMap(t *testing.T) {
	check(t, flag.Set("rapid.nofailfile", "true"))
	dir, n := t.TempDir(), 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		s := &Store{Dir: filepath.Join(dir, fmt.Sprint(n))}
		m := model{map[Key]Entry{}, map[Key]Tombstone{}, 0}
		for range rapid.IntRange(1, 4).Draw(t, "transactions") {
			var err error
			m, err = m.transaction(s, rapid.SliceOfN(operations, 1, 12).Draw(t, "operations"), rapid.Bool().Draw(t, "roll back"))
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

// transaction applies the same operations to a journal and to its model, compares the two after
// each one, and returns the model.
func (m model) transaction(s *Store, all []operation, rollBack bool) (model, error) {
	after, rolledBack := m.clone(), errors.New("rolled back")
	err := s.Update(context.Background(), func(tx *Tx) error {
		if err := after.compare(tx); err != nil {
			return fmt.Errorf("when it was opened: %w", err)
		}
		for _, o := range all {
			if err := errors.Join(after.do(tx, o), after.compare(tx)); err != nil {
				return fmt.Errorf("%s of %s: %w", o.what, o.key, err)
			}
		}
		if rollBack {
			return rolledBack
		}
		return nil
	})
	if errors.Is(err, rolledBack) {
		return m, nil
	}
	return after, err
}

func (m *model) do(tx *Tx, o operation) error {
	old, there := m.entries[o.key]
	switch o.what {
	case "put":
		e := old
		if !there || o.fresh {
			e = *adding("")
			e.Key = o.key
			e.Generations = append(slices.Clone(old.Generations), e.Generations...)
		}
		return m.put(tx, old, e, o)
	case "delete":
		legalNow := !there || slices.Contains(legal, [2]State{old.State, Gone})
		if err := tx.Delete(o.key); (err == nil) != legalNow {
			return fmt.Errorf("from %q: %w", old.State, err)
		}
		if legalNow {
			delete(m.entries, o.key)
		}
		return nil
	}
	tomb := Tombstone{Key: o.key, NetNS: NetNS{"/run/netns/" + o.reason, 4, 5, 6, 7}, Reason: o.reason, BootID: "b007",
		Interfaces: []Interface{{MAC: o.reason, Addresses: adding("", o.addresses...).Addresses()}}, NoResult: o.fresh, Abandoned: !o.fresh}
	m.tombstones[o.key] = tomb
	return tx.PutTombstone(tomb)
}

func (m *model) put(tx *Tx, old, e Entry, o operation) error {
	e.State, e.Pod = o.state, o.pod
	e.Generations = slices.Clone(e.Generations[max(0, len(e.Generations)-2):])
	e.Newest().Claims = adding("", o.addresses...).Newest().Claims
	e.Newest().NetNS, e.Newest().Host.BootID = NetNS{Path: "/run/netns/" + o.reason, Dev: 4, Ino: 7}, o.reason
	number, legalNow := e.Newest().Number, slices.Contains(legal, [2]State{old.State, e.State})
	if err := tx.Put(&e); (err == nil) != legalNow {
		return fmt.Errorf("%q over %q: %w", e.State, old.State, err)
	}
	if !legalNow {
		return nil
	}
	if n := e.Newest().Number; number == 0 && n <= m.number || number != 0 && n != number {
		return fmt.Errorf("generation number %d after %d, it was %d", n, m.number, number)
	}
	m.number = max(m.number, e.Newest().Number)
	m.entries[o.key] = e
	delete(m.tombstones, o.key)
	return nil
}

// compare compares a journal with its model, and its indexes with those that follow from its
// entries.
func (m model) compare(tx *Tx) error {
	entries, tombstones := map[Key]Entry{}, map[Key]Tombstone{}
	pods, addresses, buried := map[string]bool{}, map[string]bool{}, map[string]bool{}
	err := tx.All(func(e *Entry, err error) error {
		if err != nil {
			return err
		}
		entries[e.Key] = *e
		byPod, byAddress := indexKeys(e)
		for _, k := range byPod {
			pods[string(k)] = true
		}
		for _, k := range byAddress {
			addresses[string(k)] = true
		}
		return nil
	})
	for k, v := range bucketOf(tx, bucketTombstones) {
		key, _ := decodeKey([]byte(k))
		if tomb, err := tx.Tombstone(key); err != nil {
			return err
		} else if tomb != nil {
			tomb.Written = Time{}
			tombstones[key] = *tomb
		}
		buried[v[:8]+k] = true
	}
	outlines, wantOutlines := map[Key]Outline{}, map[Key]Outline{}
	err = errors.Join(err, tx.Outlines(func(o Outline, err error) error {
		outlines[o.Key] = o
		return err
	}))
	for k, e := range m.entries {
		wantOutlines[k] = Outline{k, e.State, e.Newest().Host.BootID, e.Newest().NetNS}
	}
	order := map[string]bool{}
	for k, v := range bucketOf(tx, bucketExpiry) {
		order[k+v] = true
	}
	return errors.Join(err,
		differ("entries", m.entries, entries),
		differ("outlines", wantOutlines, outlines),
		differ("tombstones", m.tombstones, tombstones),
		differ("index by pod", pods, keysIn(bucketOf(tx, bucketPods))),
		differ("index by address", addresses, keysIn(bucketOf(tx, bucketAddresses))),
		differ("order of burials", buried, order),
		m.lookUp(tx))
}

// lookUp looks up every pod and address, and checks that it finds exactly the model's entries.
func (m model) lookUp(tx *Tx) error {
	var all error
	finds := func(what any, same func(Entry) bool) func([]*Entry, error) {
		return func(entries []*Entry, err error) {
			want, got := map[Key]bool{}, map[Key]bool{}
			for k, e := range m.entries {
				if same(e) {
					want[k] = true
				}
			}
			for _, e := range entries {
				got[e.Key] = true
			}
			all = errors.Join(all, err, differ(fmt.Sprint("by ", what), want, got))
		}
	}
	for _, p := range samplePods {
		finds(p, func(e Entry) bool {
			return p.Name != "" && e.Pod.Namespace == p.Namespace && e.Pod.Name == p.Name
		})(tx.ByPod(p))
	}
	for _, text := range append(sampleAddresses, "10.0.0.2") {
		a := netip.MustParseAddr(text)
		finds(a, func(e Entry) bool {
			return slices.ContainsFunc(e.Addresses(), func(b netip.Addr) bool { return a.Unmap() == b.Unmap() })
		})(tx.ByAddress(a))
	}
	return all
}

func bucketOf(tx *Tx, name []byte) map[string]string {
	all := map[string]string{}
	_ = tx.btx.Bucket(name).ForEach(func(k, v []byte) error {
		all[string(k)] = string(v)
		return nil
	})
	return all
}

func keysIn(m map[string]string) map[string]bool {
	keys := map[string]bool{}
	for k := range m {
		keys[k] = true
	}
	return keys
}

func differ(what string, want, got any) error {
	if d := cmp.Diff(want, got, byMeaning); d != "" {
		return fmt.Errorf("%s (-want +got):\n%s", what, d)
	}
	return nil
}
