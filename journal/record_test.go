package journal

import (
	"bytes"
	"encoding/json"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// byMeaning makes cmp compare raw JSON by its decoded content (but numbers as they are written),
// and addresses by value.
var byMeaning = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}),
	cmpopts.IgnoreUnexported(Record{}),
	cmp.Transformer("JSON", func(m json.RawMessage) (v any) {
		d := json.NewDecoder(bytes.NewReader(m))
		d.UseNumber()
		if len(m) > 0 && d.Decode(&v) != nil {
			return string(m)
		}
		return v
	}),
}

func want(t testing.TB, what string, got, want any) {
	t.Helper()
	if diff := cmp.Diff(want, got, byMeaning); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// everything returns a record in which no field is empty.
func everything() *Record {
	return &Record{
		Key: Key{"podnet", "c0ffee", "eth0"}, Number: 7, State: RollingBack, Steps: []Step{{
			Index: 1, Type: "bridge",
			Config: json.RawMessage(`{"type":"bridge", "big":9007199254740993, "e":1.10, "s":"<&>\u0000 \\/"}`),
			ADD:    AddUnknown, MayAllocate: true, Tries: 3, Failures: 2, Absent: 1, Last: "exit status 1", Code: 999, Next: Next{ForRules, 1 << 62}, Started: true,
		}}, Guarded: true, Cause: "failed-add", Reason: "delegate portmap: ADD: \"no\"", Added: Added{Pod: Pod{"ns", "pod", "1234-uid"}, NetNS: NetNS{Path: "/var/run/netns/a b", Dev: 4, Ino: 4026532281, Cookie: 1<<64 - 1}, Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=pod;X=\"<&>\\\t\u2028é", Path: "/opt/cni/bin:/usr/lib/cni", CNIVersion: "1.1.0", Plugins: []string{"bridge", "portmap"}, RuntimeConfig: json.RawMessage(`{"portMappings":[{"hostPort":8080}]}`), Host: Host{"b007", "4c4c4544", "mnt:[4026531841]", "pid:[4026531836]", "net:[4026531840]", "time:[4026531834]"}, At: Time{Boot: 123456789, Wall: time.Date(2026, 2, 3, 4, 5, 6, 7e6, time.UTC)}, GracePeriod: 10 * time.Minute, Env: map[string]string{"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": "", "XTABLES_LIBDIR": "/usr/lib/xtables"}, Observed: true, Occupant: "5 0a:00:00:00:00:01"}, Got: Got{Result: json.RawMessage(`{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.7/24"}]}`), Claims: []Claim{
			{netip.MustParseAddr("10.0.0.7"), 0, "host-local:/var/lib/cni/networks/podnet"},
			{netip.MustParseAddr("::ffff:10.0.0.8"), 1, ""},
			{netip.MustParseAddr("fe80::1%eth0"), 1, ""},
		}, HostLinks: []HostLink{{"veth0a1b2c3d", "02:42:ac:11:00:02"}}},
	}
}

// visit calls tell() for each exported field of v's structs: with its name and whether it is zero.
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
	whole := everything()
	first := whole.Clone()
	first.State = Adding
	put(t, s, adding("another"), first, whole)
	filled := map[string]bool{}
	visit(reflect.ValueOf(whole), func(field string, zero bool) { filled[field] = filled[field] || !zero })
	for field, ok := range filled {
		if !ok {
			t.Errorf("set %s in everything(); if a tombstone needs it, also in Record.Abandon", field)
		}
	}
	want(t, "record read back", get(t, s, whole.Key), whole)
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
	g := Record{Steps: []Step{{Index: 0}, {Index: 2}}}
	for _, tt := range []struct {
		step  int
		freed bool
	}{{0, false}, {1, true}, {2, false}} {
		c := Claim{Step: tt.step}
		if got := g.Freed(c); got != tt.freed {
			t.Errorf("address of step %d: freed is %t, want %t", tt.step, got, tt.freed)
		}
	}
}

// TestSince: Updated is the time of a record's last write. Since is the time at which the record
// entered its state, however often it is written again in that state.
func TestSince(t *testing.T) {
	t.Parallel()
	s := newStore(t)
	e, before := adding("a"), Now()
	put(t, s, e)
	began, after := get(t, s, e.Key), Now()
	if u := began.Updated; u.Boot < before.Boot || u.Boot > after.Boot || u.Wall.Before(before.Wall) || u.Wall.After(after.Wall) {
		t.Errorf("updated %v, want between %v and %v", u, before, after)
	}
	if began.Since != began.Updated || began.Since == (Time{}) {
		t.Errorf("since %v, updated %v", began.Since, began.Updated)
	}
	time.Sleep(2 * time.Millisecond)
	put(t, s, began)
	again := get(t, s, e.Key)
	if again.Since.Boot != began.Since.Boot || again.Updated.Boot == again.Since.Boot {
		t.Errorf("written again: since %v, updated %v", again.Since, again.Updated)
	}
	again.State = Live
	put(t, s, again)
	live := get(t, s, e.Key)
	if live.Since.Boot != live.Updated.Boot || live.Since.Boot == began.Since.Boot {
		t.Errorf("another state: since %v, updated %v", live.Since, live.Updated)
	}
	live.State = Deleting
	put(t, s, live)
	put(t, s, adding("a"))
	if got := get(t, s, e.Key); got.Since.Boot <= live.Since.Boot || got.Number <= live.Number {
		t.Errorf("another ADD: since %v, number %d", got.Since, got.Number)
	}
}

var states = []State{Gone, Adding, Live, RollingBack, Deleting, Abandoned}

// legal lists the allowed changes of state. Usually, a record goes adding → live → deleting → gone.
// If the ADD fails, its record goes from adding or live to rolling-back, and then to gone. A record
// may also be written without a change of state. A DEL may create the record of an unknown
// attachment, and an ADD may write its record again after the journal has lost it. Any state may
// become abandoned.
var legal = [][2]State{
	{Gone, Adding}, {Gone, Live}, {Gone, RollingBack}, {Gone, Deleting}, {Gone, Abandoned},
	{Adding, Adding}, {Adding, Live}, {Adding, RollingBack}, {Adding, Deleting}, {Adding, Abandoned}, {Adding, Gone},
	{Live, Live}, {Live, RollingBack}, {Live, Deleting}, {Live, Abandoned}, {Live, Gone},
	{RollingBack, RollingBack}, {RollingBack, Abandoned}, {RollingBack, Gone},
	{Deleting, Deleting}, {Deleting, Abandoned}, {Deleting, Gone},
	{Abandoned, Abandoned}, {Abandoned, Gone},
}

// TestLostRecord: the journal file disappears during an ADD. The ADD writes its record unchanged
// into a new file, and a later ADD gets a higher number.
func TestLostRecord(t *testing.T) {
	for _, state := range []State{Live, RollingBack} {
		s, e := newStore(t), adding("a", "10.0.0.1")
		put(t, s, adding("first"), e)
		check(t, os.Remove(s.Path()))
		e.State = state
		put(t, s, e)
		later := adding("b")
		put(t, s, later)
		want(t, string(state), get(t, s, e.Key), e)
		if e.Number != 2 || later.Number != 3 {
			t.Errorf("%s: numbers %d and %d", state, e.Number, later.Number)
		}
	}
}

// TestEdges: CheckEdge allows exactly the changes in legal. So it rejects a state that only a newer
// release knows. TestJournalIsAMap covers transactions that try an illegal change.
func TestEdges(t *testing.T) {
	s, unknown := newStore(t), State("unheard-of")
	for _, from := range append(states, unknown) {
		for _, to := range append(states, unknown) {
			allowed := slices.Contains(legal, [2]State{from, to})
			if got := CheckEdge(from, to) == nil; got != allowed {
				t.Errorf("from %q to %q: legal is %t, want %t", from, to, got, allowed)
			}
		}
	}
	e := adding("a", "10.0.0.1")
	put(t, s, e)
	e.State = unknown
	_, value, err := encodeRecord(e)
	check(t, err)
	damage(t, s, e.Key, func(uint64) string { return string(value) })
	for name, change := range map[string]func(*Tx) error{
		"Put": func(tx *Tx) error {
			live := e.Clone()
			live.State = Live
			return tx.Put(live)
		},
		"Delete": func(tx *Tx) error { return tx.Delete(e) },
	} {
		if err := s.Update(t.Context(), change); err == nil {
			t.Errorf("%s of a record of an unknown state: no error", name)
		}
		want(t, "after "+name, get(t, s, e.Key), e)
	}
}
