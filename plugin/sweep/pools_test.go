package sweep

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"cni-unwind/ipam"
	"cni-unwind/journal"
)

// TestDropHeld: what a DEL holds stays while it runs, and goes once it was killed. What is not
// held stays, and so does no lock's file.
func TestDropHeld(t *testing.T) {
	t.Parallel()
	pool, store := t.TempDir(), &journal.Store{Dir: filepath.Join(t.TempDir(), "state")}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	check(os.WriteFile(filepath.Join(pool, "10.1.0.3"), []byte("a\r\neth0"), 0o600))
	owner, address := ipam.Owner{ContainerID: "a", IfName: "eth0"}, netip.MustParseAddr("10.1.0.2")
	_, err := ipam.Hold(t.Context(), pool, owner, address)
	check(err)
	drop := func() []ipam.Reservation {
		t.Helper()
		found, err := ipam.Scan(pool)
		check(err)
		dropped, err := DropHeld(t.Context(), store, "podnet", found)
		check(err)
		return dropped
	}
	check(os.Mkdir(store.Dir, 0o700))
	lock, err := store.TryAcquire(journal.Key{Network: "podnet", ContainerID: "a", IfName: "eth0"})
	check(err)
	if dropped := drop(); len(dropped) > 0 {
		t.Errorf("while the DEL runs: %+v", dropped)
	}
	check(lock.Remove())
	lock.Release()
	if dropped := drop(); len(dropped) != 1 || dropped[0].Address != address {
		t.Errorf("after the DEL was killed: %+v", dropped)
	}
	if left, err := ipam.Scan(pool); len(left) != 1 || left[0].Owner != owner || err != nil {
		t.Errorf("left %+v, %v", left, err)
	}
	if locks, err := os.ReadDir(filepath.Join(store.Dir, "locks")); len(locks) > 0 || err != nil {
		t.Errorf("lock files: %v, %v", locks, err)
	}
}
