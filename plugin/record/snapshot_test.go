package record

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"cni-unwind/journal"
)

// TestSnapshot: a recorder reads the journal once, and again only after Invalidate or Renew. If the
// journal cannot be read, the snapshot contains no attachments, but treats every address as
// claimed.
func TestSnapshot(t *testing.T) {
	t.Parallel()
	store := &journal.Store{Dir: filepath.Join(t.TempDir(), "state"), Logger: slog.New(slog.DiscardHandler)}
	r := &Recorder{Store: store}
	address := netip.MustParseAddr("10.1.0.2")
	put := func(id string) *journal.Record {
		t.Helper()
		e := &journal.Record{Key: journal.Key{Network: "n", ContainerID: id, IfName: "eth0"}, State: journal.Adding,
			Got: journal.Got{Claims: []journal.Claim{{Address: address, Pool: id}}}}
		if err := r.Save(t.Context(), e); err != nil {
			t.Fatal(err)
		}
		return e
	}
	want := func(when string, a, b bool) {
		t.Helper()
		s := r.Snapshot(t.Context())
		others, err := s.Others(journal.Key{}, []netip.Addr{address, address})
		lives := s.AnyLives(func(e *journal.Record) bool { return e.ContainerID == "b" })
		if known, damaged := s.Containers(); damaged != (s.Err != nil) || known["a"] != a || known["b"] != b || lives != b || len(others) != len(known) || err != nil {
			t.Errorf("%s: %v, b lives %t, %d others (%v)", when, known, lives, len(others), err)
		}
	}
	want("without a journal", false, false)
	put("a")
	want("before Invalidate", false, false)
	r.Invalidate()
	want("after Invalidate", true, false)
	first := put("b")
	if r.Fork().Snapshot(t.Context()).Claims("b", address) != true || r.Snapshot(t.Context()).Claims("b", address) {
		t.Error("a fork shares the snapshot of its recorder")
	}
	if err := r.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	want("after Renew", true, true)
	put("b")
	r.Invalidate()
	if again, err := r.Snapshot(t.Context()).AddedAgain(first); len(again) != 1 || again[0].Number <= first.Number || err != nil {
		t.Errorf("another ADD of b: %v (%v)", again, err)
	}
	if err := os.Rename(store.Path(), store.Path()+"-old"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(store.Path(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.Renew(t.Context()); err == nil || !errors.Is(r.Snapshot(t.Context()).Err, err) || !r.Snapshot(t.Context()).Claims("c", address) {
		t.Errorf("a journal that cannot be read: %v", err)
	}
	want("a journal that cannot be read", false, false)
}

// TestTrouble covers causes of journal failures that no other test can produce.
func TestTrouble(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"permission": syscall.EACCES, "full": syscall.EDQUOT, "busy": context.DeadlineExceeded, "other": errors.New("other"),
	} {
		if got := trouble(fmt.Errorf("journal: %w", &os.PathError{Op: "open", Path: "p", Err: err})); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}
