package sweep

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/plugin/facts"
)

// TestMade: an owner is as young as the youngest of its files.
func TestMade(t *testing.T) {
	t.Parallel()
	pool := t.TempDir()
	at := time.Now().Add(-time.Hour).Truncate(time.Second)
	for name, age := range map[string]time.Duration{"10.1.0.2": time.Minute, "10.1.0.3": 0, "10.1.0.4": 2 * time.Minute} {
		path := filepath.Join(pool, name)
		if err := errors.Join(os.WriteFile(path, []byte("a\r\neth0"), 0o600), os.Chtimes(path, at, at.Add(-age))); err != nil {
			t.Fatal(err)
		}
	}
	held, err := ipam.Scan(pool)
	if len(held) != 3 || err != nil {
		t.Fatal(held, err)
	}
	want := func(o owner, want time.Time) {
		t.Helper()
		if got := o.made(); !got.Equal(want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	want(owner{held: held}, at)
	want(owner{}, time.Unix(0, 0))
	want(owner{held: held, cached: &facts.Cached{Written: at.Add(time.Minute)}}, at.Add(time.Minute))
	want(owner{held: held, cached: &facts.Cached{Written: at.Add(-time.Minute)}}, at)
}
