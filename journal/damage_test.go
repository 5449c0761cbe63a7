package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"runtime/pprof"
	"strconv"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
)

var (
	seedFlag  = flag.Uint64("seed", 1, "seed of the damage done to journals")
	flipsFlag = flag.Int("flips", 200, "number of journals in which random bytes are flipped")
)

// populated is the number of entries that populate makes.
const populated = 40

// big returns an entry of more than half a kilobyte.
func big(i int) *Entry {
	e := adding(fmt.Sprintf("%05d", i), fmt.Sprintf("10.0.%d.%d", i/250, i%250), fmt.Sprintf("fd00::%x", i))
	e.Pod = Pod{Namespace: "ns", Name: fmt.Sprintf("pod-%d", i/2), UID: fmt.Sprint(i)}
	e.Generations[0].Steps[0].Config = json.RawMessage(`"` + strings.Repeat("x", 300) + `"`)
	return e
}

// populate makes a journal of many pages, some of them free.
func populate(t testing.TB, s *Store) {
	t.Helper()
	update(t, s, func(tx *Tx) error {
		for i := range 2 * populated {
			if err := tx.Put(big(i)); err != nil {
				return err
			}
		}
		return tx.PutTombstone(Tombstone{Key: keyOf("buried")})
	})
	update(t, s, func(tx *Tx) error {
		for i := range populated {
			if err := tx.Delete(big(i).Key); err != nil {
				return err
			}
		}
		return nil
	})
}

// variant is a journal that is damaged in one way.
type variant struct {
	name string
	data []byte
}

// damages returns the ways in which one kind of damage can hit the pages that a journal uses.
func damages(kind string, data []byte, seed uint64, flips int) (all []variant) {
	m, _ := newestMeta(data)
	page, end := int(m.size), int(m.size*m.pages)
	random := rand.New(rand.NewPCG(seed, 0))
	add := func(data []byte, format string, args ...any) {
		all = append(all, variant{fmt.Sprintf(format, args...), data})
	}
	switch kind {
	case "truncate":
		for at := 0; at < end; at += page {
			for _, size := range []int{at, at + 1, at + 511, at + page - 1} {
				add(data[:size], "cut to %d bytes", size)
			}
		}
	case "overwrite":
		for at := 0; at < end; at += page {
			noise := make([]byte, page)
			for i := range noise {
				noise[i] = byte(random.Uint32())
			}
			for name, with := range map[string][]byte{
				"0x00": make([]byte, page), "0xff": bytes.Repeat([]byte{0xff}, page), "noise": noise,
			} {
				add(overwrite(data, at, with), "page %d overwritten with %s", at/page, name)
			}
			add(overwrite(data, at+16, noise[16:]), "page %d overwritten with noise, but for its header", at/page)
		}
	case "swap":
		for at := 2 * page; at < end; at += page {
			from := 2*page + random.IntN(end/page-2)*page
			add(overwrite(data, at, data[from:from+page]), "page %d overwritten with page %d", at/page, from/page)
		}
	case "flip":
		for range flips {
			damaged, name := bytes.Clone(data), "bytes flipped:"
			for range 1 + random.IntN(4) {
				at := random.IntN(end)
				if random.IntN(2) == 0 { // the beginning of a page says what is on it
					at = at/page*page + random.IntN(64)
				}
				damaged[at] ^= byte(1 + random.IntN(255))
				name += fmt.Sprintf(" %d", at)
			}
			add(damaged, "%s", name)
		}
	}
	return all
}

func overwrite(data []byte, at int, with []byte) []byte {
	return append(append(bytes.Clone(data[:at]), with...), data[at+len(with):]...)
}

// helpDamage applies every damage of a kind to journal.db in the directory. It announces each one
// first, so that the test knows at which one it died.
func helpDamage(s *Store, args []string) error {
	seed, err := strconv.ParseUint(args[1], 10, 64)
	if err != nil {
		return err
	}
	flips, err := strconv.Atoi(args[2])
	if err != nil {
		return err
	}
	data, err := os.ReadFile(s.Path())
	if err != nil {
		return err
	}
	debug.SetMaxStack(64 << 20)
	for i, v := range damages(args[0], data, seed, flips) {
		tell("try " + v.name)
		done := make(chan error)
		go func() { done <- suffer(filepath.Join(s.Dir, fmt.Sprint(i)), v.data) }()
		select {
		case err := <-done:
			if err != nil {
				tell(strings.ReplaceAll(fmt.Sprintf("fail %s: %v", v.name, err), "\n", "; "))
			}
		case <-time.After(10 * time.Second):
			_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 2)
			return fmt.Errorf("%s: it hangs", v.name)
		}
	}
	return nil
}

// suffer reads a damaged journal and writes to it, twice. Damage may end in an error, but not for
// ever: the second time the file is set aside, or as good as new.
func suffer(dir string, data []byte) error {
	defer os.RemoveAll(dir)
	s := &Store{Dir: dir}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(s.Path(), data, 0o600); err != nil {
		return err
	}
	ctx := context.Background()
	_ = s.View(ctx, look)
	if now, err := os.ReadFile(s.Path()); err != nil || !bytes.Equal(now, data) {
		return fmt.Errorf("a View changed it: %w", err)
	}
	e := adding("new", "10.1.1.1")
	if err := s.Update(ctx, func(tx *Tx) error { return errors.Join(look(tx), tx.Put(e)) }); err == nil {
		if err := found(ctx, s, e.Key); err != nil {
			return fmt.Errorf("after an Update: %w", err)
		}
	}
	aside, _ := filepath.Glob(s.Path() + ".damaged-*")
	for _, path := range aside {
		if kept, err := os.ReadFile(path); err != nil || !bytes.Equal(kept, data) {
			return fmt.Errorf("what was set aside is not what was there: %w", err)
		}
	}
	e = adding("newer", "10.1.1.2")
	if err := s.Update(ctx, func(tx *Tx) error { return tx.Put(e) }); errors.Is(err, ErrNewer) {
		return nil
	} else if err != nil {
		return fmt.Errorf("a second Update: %w", err)
	}
	return found(ctx, s, e.Key)
}

func found(ctx context.Context, s *Store, k Key) error {
	return s.View(ctx, func(tx *Tx) error {
		e, err := tx.Get(k)
		if e == nil {
			err = errors.Join(err, errors.New("what was written is not there"))
		}
		return err
	})
}

// TestDamage: no content of the file kills or hangs a process, and the journal becomes usable
// again.
func TestDamage(t *testing.T) {
	if testing.Short() {
		t.Skip("it damages a journal in hundreds of ways: make test")
	}
	for _, kind := range []string{"truncate", "overwrite", "swap", "flip"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			s := newStore(t)
			populate(t, s)
			t.Logf("seed %d", *seedFlag)
			p := start(t, "damage", s.Dir, kind, fmt.Sprint(*seedFlag), fmt.Sprint(*flipsFlag))
			last, n := "", 0
			for line := range p.lines {
				if name, ok := strings.CutPrefix(line, "try "); ok {
					last, n = name, n+1
				} else {
					t.Error(line)
				}
			}
			if err := p.cmd.Wait(); err != nil || n == 0 {
				t.Errorf("it died of %s: %v", last, err)
			}
			t.Logf("%d journals were damaged", n)
		})
	}
}

// TestMissingBucket: a file that lacks one of unwind's buckets can never be used again, even if
// bbolt accepts it.
func TestMissingBucket(t *testing.T) {
	for _, name := range buckets {
		t.Run(string(name), func(t *testing.T) {
			s := newStore(t)
			put(t, s, adding("a"))
			raw(t, s, func(btx *bolt.Tx) error { return btx.DeleteBucket(name) })
			if err := s.View(t.Context(), look); !errors.Is(err, ErrDamaged) {
				t.Errorf("View: %v", err)
			}
			put(t, s, adding("b"))
			if aside := setAside(t, s); len(aside) != 1 {
				t.Errorf("set aside: %v, want one", aside)
			}
		})
	}
}
