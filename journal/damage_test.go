package journal

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"runtime/pprof"
	"strings"
	"testing"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"cni-unwind/plugin/plugintest/sandbox"
)

var (
	seedFlag  = flag.Uint64("seed", 1, "seed for the random damage and disks")
	flipsFlag = flag.Int("flips", sandbox.Rounds(40, 200, 200), "number of journals in which random bytes are flipped")
)

// populated is the number of records that remain after populate, besides one abandoned record.
const populated = 40

// big returns the i-th of a series of records that take more than half a kilobyte each.
func big(i int) *Record {
	e := adding(fmt.Sprintf("%05d", i), fmt.Sprintf("10.0.%d.%d", i/250, i%250), fmt.Sprintf("fd00::%x", i))
	e.Added.Pod = Pod{Namespace: "ns", Name: fmt.Sprintf("pod-%d", i/2), UID: fmt.Sprint(i)}
	e.Steps[0].Config = json.RawMessage(`"` + strings.Repeat("x", 300) + `"`)
	return e
}

// spread is a step for bigs. It is so large that each returned record is on a different page.
const spread = 13

// bigs returns every step-th of the first n big records.
func bigs(n, step int) (all []*Record) {
	for i := 0; i < n; i += step {
		all = append(all, big(i))
	}
	return all
}

// populate creates a journal of many pages, some of them free.
func populate(s *Store) error {
	return errors.Join(s.Update(context.Background(), func(tx *Tx) error {
		for i := range 2 * populated {
			if err := tx.Put(big(i)); err != nil {
				return err
			}
		}
		return buryIn(tx, keyOf("buried"), "", "")
	}), s.Update(context.Background(), func(tx *Tx) error {
		for i := range populated {
			if err := remove(tx, big(i).Key); err != nil {
				return err
			}
		}
		return nil
	}))
}

// variant is the content of a journal file after one kind of damage.
type variant struct {
	name string
	data []byte
}

// damages returns variants of a journal file. Each has damage of the given kind, at a different
// place in the pages that the journal uses.
func damages(kind string, data []byte, seed uint64, flips int) (all []variant) {
	m, _ := newestMeta(data)
	page, end := pageSize, int(m.pages*pageSize)
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
			add(overwrite(data, at+16, noise[16:]), "page %d except its header overwritten with noise", at/page)
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
				if random.IntN(2) == 0 { // hit the page header and the first elements
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

// helpDamage is a helper process. It opens and uses the journal with each variant of one kind of
// damage (see damages and suffer). Before each variant, it prints the variant's name, so that the
// test knows which variant killed the helper.
func helpDamage(s *Store, args []string) error {
	var seed uint64
	var flips int
	if _, err := fmt.Sscan(strings.Join(args[1:], " "), &seed, &flips); err != nil {
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
		case <-time.After(sandbox.Patience):
			_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 2)
			return fmt.Errorf("%s: reading or writing the journal hangs", v.name)
		}
	}
	return nil
}

// suffer creates a journal from damaged data, reads it, and writes to it twice. The first View and
// Update may fail. The second Update must succeed, in the same file or in a new one, unless the
// file claims to be from a newer release.
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
		return fmt.Errorf("a View changed the file: %w", err)
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
			return fmt.Errorf("the file that was set aside differs from the damaged one: %w", err)
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
			err = errors.Join(err, errors.New("the record just written is missing"))
		}
		return err
	})
}

// TestDamage damages the journal file in hundreds of ways. No damage may crash or hang a process
// that reads the file. The journal must be usable again after at most one failed Update.
func TestDamage(t *testing.T) {
	if testing.Short() {
		t.Skip("it damages a journal in hundreds of ways: make test")
	}
	for _, kind := range []string{"truncate", "overwrite", "swap", "flip"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			s := newStore(t)
			check(t, populate(s))
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
				t.Errorf("the helper died at %q: %v", last, err)
			}
			t.Logf("%d journals were damaged", n)
		})
	}
}

// wantAside checks how many damaged files were set aside, and returns their paths.
func wantAside(t testing.TB, s *Store, want int) []string {
	t.Helper()
	aside, err := filepath.Glob(s.Path() + ".damaged-*")
	if err != nil || len(aside) != want {
		t.Fatalf("set aside: %v, %v, want %d", aside, err, want)
	}
	return aside
}

// otherVersion returns a function that increments bbolt's format version in both meta pages. If
// sealed is true, the function also updates the checksums of the pages.
func otherVersion(sealed bool) func(t *testing.T, s *Store) {
	return func(t *testing.T, s *Store) {
		data, err := os.ReadFile(s.Path())
		check(t, err)
		for _, page := range []int{0, pageSize} {
			m := data[page+pageHeader:]
			m[4]++ // the version follows the 4-byte magic number
			if sum := fnv.New64a(); sealed {
				_, _ = sum.Write(m[:56])
				binary.NativeEndian.PutUint64(m[56:], sum.Sum64())
			}
		}
		check(t, os.WriteFile(s.Path(), data, 0o600))
	}
}

// TestDamagedFile covers files that bbolt or unwind cannot use, and a few that they can. A View
// never changes the file. An Update sets a damaged file aside, unchanged, and starts a new one. A
// file that a newer release wrote remains in place.
func TestDamagedFile(t *testing.T) {
	newer := fmt.Sprint(Version + 1)
	format := func(value string) func(t *testing.T, s *Store) {
		return func(t *testing.T, s *Store) {
			raw(t, s, func(btx *bolt.Tx) error { return btx.Bucket(bucketMeta).Put(keyFormat, Seal(keyFormat, []byte(value))) })
		}
	}
	type row struct {
		name   string
		damage func(t *testing.T, s *Store)
		want   error
	}
	rows := []row{
		{"empty", func(t *testing.T, s *Store) { check(t, os.Truncate(s.Path(), 0)) }, ErrDamaged},
		{"our format", format(`{"writer":` + fmt.Sprint(Version) + `,"oldestReader":1}`), nil},
		{"newer, but we can read it", format(`{"writer":` + newer + `,"oldestReader":` + fmt.Sprint(Version) + `,"more":[]}`), nil},
		{"newer", format(`{"writer":` + newer + `,"oldestReader":` + newer + `}`), ErrNewer},
		{"no format", format(`[]`), ErrDamaged},
		{"from before the first release", func(t *testing.T, s *Store) {
			raw(t, s, func(btx *bolt.Tx) error {
				return btx.Bucket(bucketMeta).Put(keyFormat, []byte(`{"writer":2,"oldestReader":1}`))
			})
		}, ErrDamaged},
		{"a newer bbolt's", otherVersion(true), ErrNewer},
		{"the version bytes of both meta pages", otherVersion(false), ErrDamaged},
	}
	for _, name := range buckets {
		rows = append(rows, row{"without " + string(name), func(t *testing.T, s *Store) {
			raw(t, s, func(btx *bolt.Tx) error { return btx.DeleteBucket(name) })
		}, ErrDamaged})
	}
	for _, tt := range rows {
		t.Run(tt.name, func(t *testing.T) {
			s := newStore(t)
			put(t, s, adding("a"))
			tt.damage(t, s)
			data, err := os.ReadFile(s.Path())
			check(t, err)
			err = s.View(t.Context(), look)
			if !errors.Is(err, tt.want) {
				t.Errorf("View: %v, want %v", err, tt.want)
			}
			if text := s.Path() + " was written by a newer release of unwind ("; errors.Is(tt.want, ErrNewer) && !strings.HasPrefix(fmt.Sprint(err), text) {
				t.Errorf("View: %v, want %s…", err, text)
			}
			if now, err := os.ReadFile(s.Path()); err != nil || !bytes.Equal(now, data) {
				t.Errorf("View changed the file (%v)", err)
			}
			changed := untouched(t, s.Dir)
			err = s.Update(t.Context(), func(tx *Tx) error { return tx.Put(adding("b")) })
			switch {
			case tt.want == nil:
				check(t, err)
				wantRecords(t, s, "a", "b")
				raw(t, s, func(btx *bolt.Tx) error {
					if got := btx.Bucket(bucketMeta).Get(keyFormat); !bytes.Contains(data, got) {
						t.Errorf("the format record changed to %s", got)
					}
					return nil
				})
			case errors.Is(tt.want, ErrNewer):
				if !errors.Is(err, ErrNewer) {
					t.Errorf("Update: %v", err)
				}
				changed()
			default:
				check(t, err)
				wantRecords(t, s, "b")
				aside := wantAside(t, s, 1)[0]
				kept, err := os.ReadFile(aside)
				if info, errInfo := os.Lstat(aside); err != nil || errInfo != nil || !bytes.Equal(kept, data) || info.Mode() != 0o600 {
					t.Errorf("the file that was set aside changed: %v, %v", err, info)
				}
				if _, err := os.Lstat(s.Path() + ".new"); err == nil {
					t.Error("journal.db.new was not removed")
				}
			}
		})
	}
}

// TestReportedDamage covers trusting stores, which do not verify a file whose last commit succeeded
// in this boot. A trusting reader does not hang if damaged pages form a loop. A reader that finds
// damage reports it in the queue file. The next writer, even a trusting one, then sets the journal
// file aside. A reader that cannot write to the queue file changes nothing.
func TestReportedDamage(t *testing.T) {
	twice := func(f *bboltFile) { native.PutUint64(f.element(f.branch, 1)[8:], f.branchElements[0].child) }
	keyOfBranch := func(f *bboltFile) { f.branchElements[1].key[8]-- }
	for _, tt := range []struct {
		name     string
		damage   func(f *bboltFile)
		trusting bool // the reader trusts the file
		readOnly bool // the queue file is read-only
		found    bool // the reader finds the damage
		want     int  // files that are set aside
	}{
		{"a verifying reader", keyOfBranch, false, false, true, 1},
		{"a trusting reader misses the damage", keyOfBranch, true, false, false, 0},
		{"a trusting reader meets a loop of pages", twice, true, false, true, 1},
		{"the queue file is read-only", keyOfBranch, false, true, true, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f, s := newFile(t), newStore(t)
			s.Trusting = true
			put(t, s)
			tt.damage(f)
			check(t, os.WriteFile(s.Path(), f.data, 0o600))
			queue := filepath.Join(s.Dir, queueName)
			if tt.readOnly {
				needRoot(t)
				check(t, unix.Mount(queue, queue, "", unix.MS_BIND, ""))
				check(t, unix.Mount("", queue, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
			}
			err := (&Store{Dir: s.Dir, Trusting: tt.trusting}).View(t.Context(), look)
			if errors.Is(err, ErrDamaged) != tt.found {
				t.Errorf("View: %v", err)
			}
			if tt.readOnly {
				check(t, unix.Unmount(queue, unix.MNT_DETACH))
			}
			put(t, s, adding("new"))
			wantAside(t, s, tt.want)
		})
	}
}

// damage replaces a stored record with the string value(n), where n is the record's number.
func damage(t *testing.T, s *Store, k Key, value func(number uint64) string) {
	t.Helper()
	raw(t, s, func(btx *bolt.Tx) error {
		number := numberOf(btx, k)
		return btx.Bucket(bucketRecords).Put(recordKey(k, number), []byte(value(number)))
	})
}

// TestDeleteMalformed: if the key of a record is truncated, Delete removes only that record.
// Records whose keys begin with the truncated key remain.
func TestDeleteMalformed(t *testing.T) {
	s, k := newStore(t), Key{Network: "n"}
	update(t, s, func(tx *Tx) error { return tx.Put(&Record{Key: Key{"n", "id", "eth0"}, State: Abandoned}) })
	raw(t, s, func(btx *bolt.Tx) error { return btx.Bucket(bucketRecords).Put([]byte(k.Network), []byte("x")) })
	view(t, s, func(tx *Tx) error {
		if all, err := tx.Records(k); len(all) > 0 || err == nil {
			t.Errorf("%d records (%v) of a malformed key", len(all), err)
		}
		return nil
	})
	update(t, s, func(tx *Tx) error { return tx.Delete(&Record{Key: k}) })
	if undone(t, s, Key{"n", "id", "eth0"}) == nil {
		t.Error("the tombstone of another attachment in the network was deleted")
	}
}

// numberOf returns the number of an attachment's only record.
func numberOf(btx *bolt.Tx, k Key) uint64 {
	key, _ := btx.Bucket(bucketRecords).Cursor().Seek(encodeKey(k))
	_, number, _ := decodeKey(key)
	return number
}

// told returns the container IDs that a journal reports for all records, for the records of one
// pod, and for the records of two addresses. The list for all records marks damaged ones.
func told(t *testing.T, s *Store) (text string) {
	t.Helper()
	view(t, s, func(tx *Tx) error {
		err := tx.All(func(e *Record, err error) error {
			var damaged *DamagedError
			if errors.As(err, &damaged) {
				one, err := tx.Get(damaged.Key)
				if again := new(DamagedError); one != nil || !errors.As(err, &again) || again.Key != damaged.Key {
					t.Errorf("Get: %+v, %v, want a DamagedError of %s", one, err, damaged.Key)
				}
				if again := new(DamagedError); !errors.As(tx.Check(), &again) || again.Key != damaged.Key {
					t.Errorf("Check: %v", tx.Check())
				}
				text += "damaged " + damaged.Key.ContainerID + " "
				return nil
			}
			text += e.ContainerID + " "
			return err
		})
		check(t, err)
		find := func(what string, records []*Record, err error) {
			text += what
			for _, e := range records {
				text += " " + e.ContainerID
			}
			check(t, err)
		}
		pod, err := tx.ByPod(Pod{Namespace: "ns", Name: "pod"})
		find("/ pod", pod, err)
		for i, address := range []string{"10.0.0.1", "10.0.0.3"} {
			records, err := tx.ByAddress(netip.MustParseAddr(address))
			find([]string{" / .1", " / .3"}[i], records, err)
		}
		return nil
	})
	return text
}

func wantTold(t *testing.T, s *Store, when, want string) {
	t.Helper()
	if got := told(t, s); got != want {
		t.Errorf("%s: %s\nwant %s", when, got, want)
	}
}

// ofPod returns a record of the pod ns/pod, whose records told() lists.
func ofPod(id string, addresses ...string) *Record {
	e := adding(id, addresses...)
	e.Added.Pod = Pod{Namespace: "ns", Name: "pod"}
	return e
}

// TestDamagedRecord: a damaged record hides no other record. Check finds the damaged record. Put
// replaces it, and Delete removes it, like any other record.
func TestDamagedRecord(t *testing.T) {
	_, anothers, err := encodeRecord(ofPod("z", "10.0.0.1"))
	check(t, err)
	_, itsOwn, err := encodeRecord(ofPod("b", "10.0.0.1"))
	check(t, err)
	const outline = `{"state":"live"}` + "\n"
	sealed := func(number uint64, data string) string {
		return string(Seal(recordKey(keyOf("b"), number), []byte(data)))
	}
	for name, value := range map[string]func(number uint64) string{
		"garbage":        func(uint64) string { return "\x00\xff" },
		"nothing":        func(uint64) string { return "" },
		"cut":            func(uint64) string { return string(itsOwn[:len(itsOwn)/2]) },
		"another's":      func(uint64) string { return string(anothers) },
		"another number": func(number uint64) string { return sealed(number+1, outline+`{}`) },
		"no JSON":        func(number uint64) string { return sealed(number, outline+`{"steps":`) },
		"bad address":    func(number uint64) string { return sealed(number, outline+`{"got":{"claims":[{"address":"10.0.0"}]}}`) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			put(t, s, ofPod("a", "10.0.0.1"), ofPod("b", "10.0.0.1", "10.0.0.2"), ofPod("c", "10.0.0.1"))
			damage(t, s, keyOf("b"), value)
			wantTold(t, s, "damaged", "a damaged b c / pod a c / .1 a c / .3")
			update(t, s, func(tx *Tx) error { return remove(tx, keyOf("b")) })
			wantTold(t, s, "deleted", "a c / pod a c / .1 a c / .3")
			put(t, s, adding("b", "10.0.0.1", "10.0.0.2"))
			check(t, s.View(t.Context(), (*Tx).Check))
			damage(t, s, keyOf("b"), value)
			again := adding("b", "10.0.0.3")
			put(t, s, again)
			wantTold(t, s, "written over", "a b c / pod a c / .1 a c / .3 b")
			want(t, "after Put", get(t, s, again.Key), again)
		})
	}
}
