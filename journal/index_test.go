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

type id struct {
	Key
	number uint64
}

// model is the expected content of a journal.
type model struct {
	records map[id]Record
	number  uint64 // the highest number assigned so far
}

func (m model) clone() model { return model{maps.Clone(m.records), m.number} }

// newest returns the record of an attachment's newest ADD, ignoring abandoned records.
func (m model) newest(k Key) (newest Record, there bool) {
	for _, e := range m.records {
		if e.Key == k && e.State != Abandoned && e.Number >= newest.Number {
			newest, there = e, true
		}
	}
	return newest, there
}

// operation is a Put or a Delete of one attachment's record.
type operation struct {
	what      string
	key       Key
	state     State
	fresh     bool // a new ADD
	pod       Pod
	addresses []string
	netns     NetNS
	reason    string
}

var (
	samplePods      = []Pod{{}, {"ns", "p", "1"}, {"ns", "p", "2"}, {"ns", "pp", ""}, {"n", "sp", ""}, {"ns", "", ""}}
	sampleNetNS     = []NetNS{{}, {Dev: 4, Ino: 7}, {Dev: 4, Ino: 70}, {Dev: 4, Ino: 7, Cookie: 1}, {Dev: 5, Ino: 7, Cookie: 2}}
	sampleAddresses = []string{"10.0.0.1", "10.0.0.10", "::ffff:10.0.0.1", "fd00::1", "fd00::10", "fe80::1%eth0", "fe80::1"}
)

// operations draws from so few keys, pods and addresses that they often collide.
var operations = rapid.Custom(func(t *rapid.T) operation {
	return operation{
		what:      rapid.SampledFrom([]string{"put", "put", "put", "delete"}).Draw(t, "what"),
		key:       Key{rapid.SampledFrom([]string{"podnet", "storage"}).Draw(t, "network"), rapid.StringMatching(`[ab]{1,2}`).Draw(t, "id"), "eth0"},
		state:     rapid.SampledFrom([]State{Adding, Live, RollingBack, Deleting, Abandoned}).Draw(t, "state"),
		fresh:     rapid.Bool().Draw(t, "fresh"),
		pod:       rapid.SampledFrom(samplePods).Draw(t, "pod"),
		addresses: rapid.SliceOfN(rapid.SampledFrom(sampleAddresses), 0, 3).Draw(t, "addresses"),
		netns:     rapid.SampledFrom(sampleNetNS).Draw(t, "netns"),
		reason:    rapid.StringMatching(`[a-z]{3}`).Draw(t, "reason"),
	}
})

// TestJournalIsAMap runs random transactions, some of which are rolled back, and compares the
// journal with a map after each operation.
func TestJournalIsAMap(t *testing.T) {
	check(t, flag.Set("rapid.nofailfile", "true"))
	dir, n := t.TempDir(), 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		s := &Store{Dir: filepath.Join(dir, fmt.Sprint(n))}
		m := model{map[id]Record{}, 0}
		for range rapid.IntRange(1, 4).Draw(t, "transactions") {
			var err error
			m, err = m.transaction(s, rapid.SliceOfN(operations, 1, 12).Draw(t, "operations"), rapid.Bool().Draw(t, "roll back"))
			if err != nil {
				t.Fatal(err)
			}
		}
	})
}

// transaction applies the same operations to a journal and to its model, and compares the two after
// each operation. It returns the model after the transaction.
func (m model) transaction(s *Store, all []operation, rollBack bool) (model, error) {
	after, rolledBack := m.clone(), errors.New("rolled back")
	var snapshot *Tx
	err := s.Update(context.Background(), func(tx *Tx) (err error) {
		if err := after.compare(tx); err != nil {
			return fmt.Errorf("when it was opened: %w", err)
		}
		for _, o := range all {
			if err := errors.Join(after.do(tx, o), after.compare(tx)); err != nil {
				return fmt.Errorf("%s of %s: %w", o.what, o.key, err)
			}
		}
		if snapshot, err = tx.Snapshot(); err != nil {
			return err
		}
		if rollBack {
			return rolledBack
		}
		return nil
	})
	if snapshot != nil { // a snapshot stays valid after its transaction, even after a rollback
		if err := after.compare(snapshot); err != nil {
			return after, fmt.Errorf("its snapshot: %w", err)
		}
	}
	if errors.Is(err, rolledBack) {
		return m, nil
	}
	return after, err
}

func (m *model) do(tx *Tx, o operation) error {
	old, there := m.newest(o.key)
	if o.what == "delete" {
		old.Key = o.key
		err := tx.Delete(&old)
		if err == nil {
			maps.DeleteFunc(m.records, func(i id, e Record) bool {
				return i.Key == o.key && (e.State == Abandoned || i.number == old.Number)
			})
		}
		return err
	}
	e, from := old, old.State
	if !there || o.fresh {
		e, from = *adding(""), Gone
		e.Key = o.key
	}
	e.State, e.Added.Pod = o.state, o.pod
	e.Got.Claims = adding("", o.addresses...).Got.Claims
	e.Added.NetNS, e.Added.Host.BootID = o.netns, o.reason
	e.Added.NetNS.Path = "/run/netns/" + o.reason
	number, legalNow := e.Number, slices.Contains(legal, [2]State{from, e.State})
	if err := tx.Put(&e); (err == nil) != legalNow {
		return fmt.Errorf("%q over %q: %w", e.State, from, err)
	}
	if !legalNow {
		return nil
	}
	if n := e.Number; number == 0 && n <= m.number || number != 0 && n != number {
		return fmt.Errorf("number %d after %d, it was %d", n, m.number, number)
	}
	if number == 0 {
		maps.DeleteFunc(m.records, func(i id, e Record) bool { return i.Key == o.key && e.State == Abandoned })
	}
	m.number = max(m.number, e.Number)
	m.records[id{o.key, e.Number}] = e
	return nil
}

func (m model) compare(tx *Tx) error {
	pending, wantPending := map[id]Record{}, map[id]Record{}
	outlines, wantOutlines := map[id]Outline{}, map[id]Outline{}
	var all error
	for i, e := range m.records {
		if e.State != Abandoned {
			wantPending[i], wantOutlines[i] = e, Outline{e.Key, e.Number, e.State, e.Added.Host.BootID, e.Added.NetNS}
		}
		records, err := tx.Records(i.Key)
		at := slices.IndexFunc(records, func(r *Record) bool { return r.Number == i.number })
		if at < 0 {
			return fmt.Errorf("%v is not among its %d records (%w)", i, len(records), err)
		}
		all = errors.Join(all, err, differ("record", &e, records[at]))
		newest, there := m.newest(i.Key)
		got, err := tx.Get(i.Key)
		if (got != nil) != there || got != nil && got.Number != newest.Number {
			all = errors.Join(all, fmt.Errorf("newest of %v: %+v", i, got))
		}
		all = errors.Join(all, err)
	}
	err := tx.All(func(e *Record, err error) error {
		if err == nil {
			pending[id{e.Key, e.Number}] = *e
		}
		return err
	})
	outlineErr := tx.Outlines(func(o Outline, err error) error {
		outlines[id{o.Key, o.Number}] = o
		return err
	})
	return errors.Join(all, err, outlineErr, differ("records", wantPending, pending),
		differ("outlines", wantOutlines, outlines),
		differ("number of records", len(m.records), numberOfRecords(tx)), m.lookUp(tx))
}

// lookUp looks up every sample pod, network namespace and address, and checks that the journal
// finds exactly the model's records.
func (m model) lookUp(tx *Tx) error {
	var all error
	finds := func(what any, same func(Record) bool) func([]*Record, error) {
		return func(records []*Record, err error) {
			want, got := map[string]bool{}, map[string]bool{}
			for _, e := range m.records {
				if e.State != Abandoned && same(e) {
					want[fmt.Sprint(e.Key, e.Number)] = true
				}
			}
			for _, e := range records {
				got[fmt.Sprint(e.Key, e.Number)] = true
			}
			all = errors.Join(all, err, differ(fmt.Sprint("by ", what), want, got))
		}
	}
	for _, p := range samplePods {
		finds(p, func(e Record) bool {
			return p.Name != "" && e.Added.Pod.Namespace == p.Namespace && e.Added.Pod.Name == p.Name
		})(tx.ByPod(p))
	}
	for _, n := range sampleNetNS {
		finds(n, func(e Record) bool { return e.Added.NetNS.Same(n) })(tx.ByNetNS(n))
	}
	for _, text := range append(sampleAddresses, "10.0.0.2") {
		a := netip.MustParseAddr(text)
		finds(a, func(e Record) bool {
			return slices.ContainsFunc(e.Addresses(), func(b netip.Addr) bool { return a.Unmap() == b.Unmap() })
		})(tx.ByAddress(a))
	}
	return all
}

// TestLookupsDecodeNoOther: a lookup in a snapshot decodes only the matching records.
func TestLookupsDecodeNoOther(t *testing.T) {
	s := newStore(t)
	var all []*Record
	for i := range 100 {
		e := adding(fmt.Sprintf("c%03d", i), fmt.Sprintf("10.0.1.%d", i))
		e.Added.Pod = Pod{Namespace: "default", Name: fmt.Sprintf("pod%03d", i)}
		e.Added.NetNS = NetNS{Path: "/run/netns/x", Dev: 4, Ino: uint64(4026532000 + i)}
		all = append(all, e)
	}
	update(t, s, func(tx *Tx) error { return putAll(tx, all...) })
	for _, i := range []int{0, 42} { // 0: no record matches; 42: one record matches
		pod, netns, address := Pod{}, NetNS{Dev: 4, Ino: 1}, netip.MustParseAddr("10.0.0.1")
		if i > 0 {
			pod, netns, address = all[i].Added.Pod, all[i].Added.NetNS, all[i].Addresses()[0]
		}
		for name, look := range map[string]func(*Tx) ([]*Record, error){
			"ByPod":     func(tx *Tx) ([]*Record, error) { return tx.ByPod(pod) },
			"ByNetNS":   func(tx *Tx) ([]*Record, error) { return tx.ByNetNS(netns) },
			"ByAddress": func(tx *Tx) ([]*Record, error) { return tx.ByAddress(address) },
		} {
			check(t, s.View(t.Context(), func(tx *Tx) error {
				snapshot, err := tx.Snapshot()
				check(t, err)
				found, err := look(snapshot)
				check(t, err)
				if want := min(i, 1); len(found) != want || len(snapshot.decoded) != want {
					t.Errorf("%s: found %d and decoded %d, want %d", name, len(found), len(snapshot.decoded), want)
				}
				return nil
			}))
		}
	}
}

func numberOfRecords(tx *Tx) (n int) {
	_ = tx.scan(nil, func(_, _ []byte) error { n++; return nil })
	return n
}

func differ(what string, want, got any) error {
	if d := cmp.Diff(want, got, byMeaning); d != "" {
		return fmt.Errorf("%s (-want +got):\n%s", what, d)
	}
	return nil
}
