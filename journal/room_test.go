package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	bolt "go.etcd.io/bbolt"

	"cni-unwind/plugin/plugintest/sandbox"
)

// sized returns a record of an ADD whose plugin has a configuration of the given size.
func sized(id string, bytes int) *Record {
	e := adding(id, "10.0.0."+fmt.Sprint(len(id)))
	e.Steps[0].Config = json.RawMessage(`"` + strings.Repeat("x", bytes) + `"`)
	return e
}

// TestRoom: whatever the size and number of records, no commit adds more pages than makeRoom
// allocated for it. In each subtest, all records have about the same size, as in a real network.
func TestRoom(t *testing.T) {
	sandbox.SkipRaced(t)
	const verbs = 300
	for _, bytes := range []int{10, 1_000, 1_400, 2_500, 5_000, 20_000, 60_000} {
		t.Run(fmt.Sprint(bytes), func(t *testing.T) {
			t.Parallel()
			s, random := newStore(t), rand.New(rand.NewPCG(*seedFlag, uint64(bytes)))
			var live []*Record
			for range verbs {
				var allowed, before, after int64
				update(t, s, func(tx *Tx) (err error) {
					before = tx.btx.Size()
					switch n := random.IntN(20); {
					case n < 10 && len(live) < 40:
						e := sized(fmt.Sprint("container", random.Uint64()), bytes+random.IntN(bytes/4+1))
						live = append(live, e)
						err = tx.Put(e)
					case n < 14 && len(live) > 0:
						e := live[random.IntN(len(live))]
						e.State, e.Got.Result = Live, json.RawMessage(`"`+strings.Repeat("y", bytes/4)+`"`)
						err = tx.Put(e)
					case len(live) > 0:
						i := random.IntN(len(live))
						err = tx.Delete(live[i])
						live = slices.Delete(live, i, i+1)
					}
					allowed = tx.pages()
					tx.btx.OnCommit(func() { after = sizeOf(t, s) })
					return err
				})
				if after > 0 && after > before+allowed*pageSize {
					t.Errorf("a commit with %d records used %d more pages, allowed: %d", len(live), (after-before)/pageSize, allowed)
				}
			}
		})
	}
}

// sizeOf returns the size of the pages in use, in bytes.
func sizeOf(t *testing.T, s *Store) int64 {
	t.Helper()
	data, err := os.ReadFile(s.Path())
	check(t, err)
	m, _ := newestMeta(data)
	return int64(m.pages) * pageSize
}

// TestReserved: an intent reserves space for the commits that follow it, so these succeed even if
// the disk is full by then. An intent for which there is no space fails before its commit begins.
// If the commit failed instead, the next writer would have to copy the file.
func TestReserved(t *testing.T) {
	for _, bytes := range []int{100, 3_000, 12_000} {
		t.Run(fmt.Sprint(bytes), func(t *testing.T) {
			disk := smallDisk(t)
			s := &Store{Dir: filepath.Join(disk, "state")}
			intent := func(e *Record) func(*Tx) error {
				return func(tx *Tx) error { return tx.Put(e) }
			}
			e := sized("a", bytes)
			update(t, s, intent(e))
			if err := os.WriteFile(filepath.Join(disk, "ballast"), make([]byte, 2<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
				t.Fatal(err)
			}
			e.State, e.Got.Result = Live, json.RawMessage(`{"ips": []}`)
			put(t, s, e)
			e.State = RollingBack
			put(t, s, e)
			inode := inodeOf(t, s.Path())
			for i := range 100 {
				err := s.Update(t.Context(), intent(sized(fmt.Sprint("b", i), bytes)))
				if err == nil {
					continue
				}
				if !errors.Is(err, syscall.ENOSPC) {
					t.Fatal(err)
				}
				check(t, s.View(t.Context(), look))
				update(t, s, func(tx *Tx) error { return tx.Delete(e) })
				if inodeOf(t, s.Path()) != inode {
					t.Error("the file was copied")
				}
				return
			}
			t.Error("100 intents succeeded on a full disk")
		})
	}
}

func inodeOf(t *testing.T, path string) uint64 {
	t.Helper()
	info, err := os.Stat(path)
	check(t, err)
	return info.Sys().(*syscall.Stat_t).Ino
}

// TestSparse: the file has been extended without disk blocks, as bbolt extends it. The next intent
// allocates the blocks.
func TestSparse(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	check(t, os.Truncate(s.Path(), 1<<20))
	put(t, s, adding("b"))
	info, err := os.Stat(s.Path())
	check(t, err)
	if blocks := info.Sys().(*syscall.Stat_t).Blocks; blocks*512 < 30*pageSize {
		t.Errorf("only %d blocks of 512 bytes are allocated", blocks)
	}
	db, err := bolt.Open(s.Path(), 0o600, nil)
	check(t, errors.Join(err, db.Close()))
}
