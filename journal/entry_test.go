package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	bolt "go.etcd.io/bbolt"
)

// byMeaning compares entries: JSON by its meaning, with numbers as written; addresses by value.
var byMeaning = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}),
	cmpopts.IgnoreUnexported(Entry{}),
	cmp.Transformer("JSON", func(m json.RawMessage) (v any) {
		d := json.NewDecoder(bytes.NewReader(m))
		d.UseNumber()
		if len(m) > 0 && d.Decode(&v) != nil {
			return string(m)
		}
		return v
	}),
}

// everything returns an entry in which no field is empty.
func everything() *Entry {
	generation := func(n int) Generation {
		return Generation{
			NetNS:         NetNS{Path: "/var/run/netns/a b", Dev: 4, Ino: 4026532281, Cookie: 1<<64 - 1, NetDev: 4026532287},
			Args:          "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod;X=\"<&>\\\t\u2028é",
			Path:          "/opt/cni/bin:/usr/lib/cni",
			CNIVersion:    "1.1.0",
			RuntimeConfig: json.RawMessage(`{"portMappings":[{"hostPort":8080}]}`),
			Result:        json.RawMessage(`{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.7/24"}]}`),
			Claims: []Claim{
				{netip.MustParseAddr("10.0.0.7"), 0, "host-local:/var/lib/cni/networks/podnet"},
				{netip.MustParseAddr("::ffff:10.0.0.8"), 1, ""},
				{netip.MustParseAddr("fe80::1%eth0"), 1, ""},
			},
			HostLinks:   []HostLink{{"veth0a1b2c3d", "02:42:ac:11:00:02"}},
			Host:        Host{"b007", "4c4c4544", "mnt:[4026531841]", "pid:[4026531836]", "net:[4026531840]", "time:[4026531834]"},
			Created:     Time{Boot: 123456789, Wall: time.Date(2026, 2, 3, 4, 5, 6, 7e6, time.UTC)},
			GracePeriod: 10 * time.Minute, AWSCheckpoint: "/ipam.json",
			Steps: []Step{{
				Index: n, Type: "bridge",
				Config:   json.RawMessage(`{"type":"bridge", "big":9007199254740993, "e":1.10, "s":"<&>\u0000 \\/"}`),
				Attempts: 3, LastError: "exit status 1", LastCode: 999, Parked: true, Unproven: "its address is not free", RepeatAt: 1 << 62, ConfirmAt: 1 << 60, RetryAt: 1 << 61,
				Replaced: true, MayHaveRun: true, ADD: AddCutOff,
			}},
			Begun: true, Occupant: "5 0a:00:00:00:00:01",
		}
	}
	return &Entry{
		Key:         Key{"podnet", "c0ffee", "eth0"},
		State:       Unwinding,
		Pod:         Pod{"ns", "pod", "1234-uid"},
		Generations: []Generation{generation(1), generation(2)},
		Undone:      []Interface{{MAC: "02:00:00:00:00:07", Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.9")}}},
		Cause:       "failed-add",
		Reason:      "delegate portmap: ADD: \"no\"",
	}
}

// visit calls tell for every field of every struct in v, with whether it is zero.
func visit(v reflect.Value, tell func(field string, zero bool)) {
	switch v.Kind() {
	case reflect.Pointer:
		visit(v.Elem(), tell)
	case reflect.Slice:
		for i := range v.Len() {
			visit(v.Index(i), tell)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() {
				tell(v.Type().Name()+"."+f.Name, v.Field(i).IsZero())
				visit(v.Field(i), tell)
			}
		}
	}
}

func TestRoundTrip(t *testing.T) {
	s := newStore(t)
	want := everything()
	put(t, s, adding("another"), &Entry{Key: want.Key, State: Adding, Generations: want.Generations[:1]}, want)
	filled := map[string]bool{}
	visit(reflect.ValueOf(want), func(field string, zero bool) { filled[field] = filled[field] || !zero })
	for field, ok := range filled {
		if !ok {
			t.Errorf("%s is zero in the entry that is to hold everything", field)
		}
	}
	if diff := cmp.Diff(want, get(t, s, want.Key), byMeaning); diff != "" {
		t.Errorf("entry read back (-want +got):\n%s", diff)
	}
	view(t, s, func(tx *Tx) error {
		return tx.All(func(e *Entry, err error) error {
			if diff := cmp.Diff(want, e, byMeaning); diff != "" && e.Key == want.Key {
				t.Errorf("entry in All (-want +got):\n%s", diff)
			}
			return err
		})
	})
}

func TestUpdated(t *testing.T) {
	s := newStore(t)
	before := Now()
	put(t, s, adding("a"))
	got := get(t, s, keyOf("a")).Updated
	after := Now()
	if got.Boot < before.Boot || got.Boot > after.Boot || got.Wall.Before(before.Wall) || got.Wall.After(after.Wall) {
		t.Errorf("updated %v, want between %v and %v", got, before, after)
	}
}

func TestEntryWithoutGenerations(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	e := get(t, s, keyOf("a"))
	e.Generations = nil
	err := s.Update(t.Context(), func(tx *Tx) error { return tx.Put(e) })
	if err == nil || strings.Contains(err.Error(), "panic") {
		t.Errorf("got error %v, want one that says what is wrong", err)
	}
	if e := get(t, s, keyOf("a")); e == nil || len(e.Generations) != 1 {
		t.Errorf("the entry is %+v afterwards", e)
	}
}

// TestGenerationNumbers: numbers grow with every ADD: over entries, generations of one entry,
// deletions and openings of the file.
func TestGenerationNumbers(t *testing.T) {
	s := newStore(t)
	a, b := adding("a"), adding("b")
	put(t, s, a, b)
	a.State = Unwinding
	put(t, s, a) // no ADD, so no new number
	first := a.Newest().Number
	update(t, s, func(tx *Tx) error { return tx.Delete(b.Key) })
	s = &Store{Dir: s.Dir}
	a.State = Adding
	a.Generations = append(a.Generations, adding("a").Generations...)
	c := adding("c")
	put(t, s, a, c)
	got := []uint64{first, b.Newest().Number, a.Newest().Number, c.Newest().Number}
	if a.Generations[0].Number != first {
		t.Errorf("the first generation of a became number %d, it was %d", a.Generations[0].Number, first)
	}
	if first == 0 || !slices.IsSorted(got) || len(slices.Compact(got)) != 4 {
		t.Errorf("numbers in the order of their ADDs: %v, want them to grow", got)
	}
	if n := get(t, s, c.Key).Newest().Number; n != c.Newest().Number {
		t.Errorf("number %d is on the disk, %d was told", n, c.Newest().Number)
	}
}

func TestSameNetNS(t *testing.T) {
	for _, tt := range []struct {
		name string
		a, b NetNS
		want bool
	}{
		{"unknown", NetNS{Path: "/p"}, NetNS{Path: "/p"}, false},
		{"one unknown", NetNS{Ino: 1}, NetNS{}, false},
		{"inode", NetNS{Path: "/p", Dev: 4, Ino: 1}, NetNS{Path: "/q", Dev: 4, Ino: 1}, true},
		{"other device", NetNS{Dev: 4, Ino: 1}, NetNS{Dev: 5, Ino: 1}, false},
		{"inode used again", NetNS{Dev: 4, Ino: 1, Cookie: 7}, NetNS{Dev: 4, Ino: 1, Cookie: 8}, false},
		{"cookie", NetNS{Dev: 4, Ino: 1, Cookie: 7}, NetNS{Dev: 5, Ino: 1, Cookie: 7}, true},
		{"one cookie", NetNS{Dev: 4, Ino: 1, Cookie: 7}, NetNS{Dev: 4, Ino: 1}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.a.Same(tt.b) != tt.want || tt.b.Same(tt.a) != tt.want {
				t.Errorf("want %t", tt.want)
			}
		})
	}
}

func TestClaim(t *testing.T) {
	g := Generation{Steps: []Step{{Index: 0}, {Index: 2}}}
	for _, tt := range []struct {
		step      int
		freed     bool
		receivers []bool // by index
	}{
		{0, false, []bool{false, true, true}},
		{1, true, []bool{false, false, true}},
		{2, false, []bool{false, false, false}},
	} {
		c := Claim{Step: tt.step}
		if got := g.Freed(c); got != tt.freed {
			t.Errorf("address of step %d: freed is %t, want %t", tt.step, got, tt.freed)
		}
		for i, want := range tt.receivers {
			if got := c.Receives(i); got != want {
				t.Errorf("address of step %d: step %d receives it: %t, want %t", tt.step, i, got, want)
			}
		}
	}
}

// damage replaces the bytes of an entry.
func damage(t *testing.T, s *Store, k Key, value string) {
	t.Helper()
	raw(t, s, func(btx *bolt.Tx) error { return btx.Bucket(bucketEntries).Put(encodeKey(k), []byte(value)) })
}

func TestDamagedEntry(t *testing.T) {
	for _, tt := range []struct{ name, value string }{
		{"garbage", "\x00\xff"},
		{"nothing", ""},
		{"cut", `{"network":"podnet","containerID":"b","ifname":"eth0","state":"live","generations":[{"number":1`},
		{"another's", `{"network":"podnet","containerID":"z","ifname":"eth0","state":"live","generations":[{"number":1}]}`},
		{"no generation", `{"network":"podnet","containerID":"b","ifname":"eth0","state":"live","generations":[]}`},
		{"bad address", `{"network":"podnet","containerID":"b","ifname":"eth0","state":"live","generations":[{"claims":[{"address":"10.0.0"}]}]}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStore(t)
			pod := Pod{Namespace: "ns", Name: "pod"}
			shared := netip.MustParseAddr("10.0.0.1")
			a, b, c := adding("a", "10.0.0.1"), adding("b", "10.0.0.1", "10.0.0.2"), adding("c", "10.0.0.1")
			a.Pod, b.Pod, c.Pod = pod, pod, pod
			put(t, s, a, b, c)
			damage(t, s, b.Key, tt.value)

			view(t, s, func(tx *Tx) error {
				e, err := tx.Get(b.Key)
				var damaged *DamagedError
				if e != nil || !errors.As(err, &damaged) || damaged.Key != b.Key {
					t.Errorf("Get: %+v, %v, want a DamagedError of %s", e, err, b.Key)
				}
				var seen []string
				err = tx.All(func(e *Entry, err error) error {
					if errors.As(err, &damaged) {
						seen = append(seen, "damaged "+damaged.Key.ContainerID)
						return nil
					}
					seen = append(seen, e.ContainerID)
					return err
				})
				if diff := cmp.Diff([]string{"a", "damaged b", "c"}, seen); diff != "" || err != nil {
					t.Errorf("All: %v, %s", err, diff)
				}
				wantIDs(t, "ByPod", []string{"a", "c"})(tx.ByPod(pod))
				wantIDs(t, "ByAddress", []string{"a", "c"})(tx.ByAddress(shared))
				return nil
			})

			again := adding("b", "10.0.0.3")
			put(t, s, again)
			if diff := cmp.Diff(again, get(t, s, b.Key), byMeaning); diff != "" {
				t.Errorf("after Put (-want +got):\n%s", diff)
			}
			view(t, s, func(tx *Tx) error {
				wantIDs(t, "ByPod after Put", []string{"a", "c"})(tx.ByPod(pod))
				wantIDs(t, "ByAddress after Put, an address it had", []string{"a", "c"})(tx.ByAddress(shared))
				wantIDs(t, "ByAddress after Put", []string{"b"})(tx.ByAddress(netip.MustParseAddr("10.0.0.3")))
				return nil
			})
		})
	}
}

func TestDeleteOfDamagedEntry(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"), adding("b"))
	damage(t, s, keyOf("a"), "?")
	update(t, s, func(tx *Tx) error { return tx.Delete(keyOf("a")) })
	if diff := cmp.Diff([]string{"b"}, idsOf(t, s)); diff != "" {
		t.Error(diff)
	}
}

// TestDamagedIndex: an index key that cannot be read leads nowhere, and does not hide the others.
func TestDamagedIndex(t *testing.T) {
	s := newStore(t)
	a, pod := adding("a", "10.0.0.1"), Pod{Namespace: "ns", Name: "pod"}
	a.Pod = pod
	put(t, s, a)
	raw(t, s, func(btx *bolt.Tx) error {
		return errors.Join(
			btx.Bucket(bucketPods).Put(append(podKey(pod), '?'), nil),
			btx.Bucket(bucketAddresses).Put(append(addressKey(a.Addresses()[0]), '?'), nil))
	})
	view(t, s, func(tx *Tx) error {
		wantIDs(t, "ByPod", []string{"a"})(tx.ByPod(pod))
		wantIDs(t, "ByAddress", []string{"a"})(tx.ByAddress(a.Addresses()[0]))
		return nil
	})
}

// wantIDs returns a function that checks the results of ByPod and ByAddress.
func wantIDs(t *testing.T, what string, want []string) func([]*Entry, error) {
	t.Helper()
	return func(entries []*Entry, err error) {
		t.Helper()
		var got []string
		for _, e := range entries {
			got = append(got, e.ContainerID)
		}
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", what, err, diff)
		}
	}
}
