package journal

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var states = []State{Gone, Adding, Live, Unwinding, Removing}

// legal lists the allowed changes of state: adding → live → removing → gone, live or adding → unwinding →
// gone, a step within each state that has them, a DEL of an attachment that the journal does not
// know, a new generation over an old one.
var legal = [][2]State{
	{Gone, Adding}, {Gone, Removing},
	{Adding, Adding}, {Adding, Live}, {Adding, Unwinding}, {Adding, Removing}, {Adding, Gone},
	{Live, Live}, {Live, Unwinding}, {Live, Removing}, {Live, Gone},
	{Unwinding, Unwinding}, {Unwinding, Gone}, {Unwinding, Adding},
	{Removing, Removing}, {Removing, Gone}, {Removing, Adding},
}

// TestDeleteOfAnUnknownState: Delete refuses an entry in a state that only a newer release knows.
func TestDeleteOfAnUnknownState(t *testing.T) {
	s := newStore(t)
	e := adding("a")
	put(t, s, e)
	e.State = "unheard-of"
	value, err := json.Marshal(e)
	check(t, err)
	damage(t, s, e.Key, string(value))
	if err := s.Update(t.Context(), func(tx *Tx) error { return tx.Delete(e.Key) }); err == nil {
		t.Error("no error")
	}
	if e := get(t, s, e.Key); e == nil || e.State != "unheard-of" {
		t.Errorf("the entry is %+v afterwards", e)
	}
}

// ways lists how an attachment gets from Gone to a state.
var ways = map[State][]State{
	Gone: nil, Adding: {Adding}, Live: {Adding, Live}, Unwinding: {Adding, Unwinding}, Removing: {Removing},
}

func TestCheckEdge(t *testing.T) {
	for _, from := range append(states, "unheard-of") {
		for _, to := range append(states, "unheard-of") {
			want := slices.Contains(legal, [2]State{from, to})
			if got := CheckEdge(from, to) == nil; got != want {
				t.Errorf("from %q to %q: legal is %t, want %t", from, to, got, want)
			}
		}
	}
}

// TestIllegalChange: a transaction refuses an illegal change and leaves the entry as it was.
func TestIllegalChange(t *testing.T) {
	s := newStore(t)
	for _, from := range states {
		for _, to := range states {
			if from == Gone && to == Gone {
				continue // Delete of no entry is no change
			}
			t.Run(string(from)+" to "+string(to), func(t *testing.T) {
				e := adding(string(from)+"-"+string(to), "10.0.0.1")
				update(t, s, func(tx *Tx) error {
					for _, e.State = range ways[from] {
						if err := tx.Put(e); err != nil {
							return err
						}
					}
					return nil
				})
				before := get(t, s, e.Key)
				err := s.Update(t.Context(), func(tx *Tx) error {
					if to == Gone {
						return tx.Delete(e.Key)
					}
					e.State = to
					return tx.Put(e)
				})
				want := before
				switch {
				case slices.Contains(legal, [2]State{from, to}):
					check(t, err)
					if want = e; to == Gone {
						want = nil
					}
				case err == nil:
					t.Error("no error")
				}
				if diff := cmp.Diff(want, get(t, s, e.Key), byMeaning); diff != "" {
					t.Errorf("entry afterwards (-want +got):\n%s", diff)
				}
			})
		}
	}
}
