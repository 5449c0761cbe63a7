package journal

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"testing"

	"cni-unwind/plugin/plugintest/sandbox"
)

// TestFlippedKey flips a bit in the first key of a leaf page. Then a store with Trusting set writes
// eight records. Because of the wrong key, bbolt may reference the page twice and reuse it later,
// so that pages form a loop. Each read must still end, with an error or after the last record,
// whether or not the reader verifies the file.
func TestFlippedKey(t *testing.T) {
	const count, writes = 15, 8
	times := sandbox.Rounds(100, 400, 20_000)
	s := newStore(t)
	update(t, s, func(tx *Tx) error { return putAll(tx, bigs(count, 1)...) })
	update(t, s, func(tx *Tx) error { // this leaves free pages in the file
		var err error
		for _, e := range bigs(count, 3) {
			err = errors.Join(err, remove(tx, e.Key))
		}
		return err
	})
	whole, err := os.ReadFile(s.Path())
	check(t, err)
	keys := firstKeys(t, whole)
	random := rand.New(rand.NewPCG(*seedFlag, 0))
	for range times {
		key := keys[random.IntN(len(keys))]
		at, bit := bytes.Index(whole, key)+random.IntN(len(key)), random.IntN(8)
		damaged := bytes.Clone(whole)
		damaged[at] ^= 1 << bit
		check(t, os.WriteFile(s.Path(), damaged, 0o600))
		trusting := &Store{Dir: s.Dir, Trusting: true}
		for i := range writes {
			e := big(random.IntN(count))
			if random.IntN(2) == 0 {
				e.ContainerID += fmt.Sprint("-", i)
			}
			_ = trusting.Update(t.Context(), func(tx *Tx) error {
				if old, _ := tx.Get(e.Key); old != nil {
					e = old
					e.State = Live
				}
				return tx.Put(e)
			})
		}
		for _, s := range []*Store{trusting, s} {
			n, forever := 0, errors.New("the reader does not end")
			err := s.View(t.Context(), func(tx *Tx) error {
				return tx.All(func(*Record, error) error {
					if n++; n > count+writes {
						return forever
					}
					return nil
				})
			})
			if errors.Is(err, forever) {
				t.Errorf("bit %d of byte %d of page %d, trusting: %t: %v (seed %d)", bit, at%page, at/page, s.Trusting, err, *seedFlag)
			}
		}
	}
}

// firstKeys returns the first key of each leaf page of records.
func firstKeys(t *testing.T, data []byte) (keys [][]byte) {
	t.Helper()
	f := &bboltFile{data: data}
	for id := uint64(2); id < uint64(len(data)/pageSize); id++ {
		if p := f.page(id); u64(p) == id && u16(p[8:]) == kindLeaf && u16(p[10:]) > 0 {
			if key := f.elements(t, id)[0].key; bytes.HasPrefix(key, []byte("podnet")) {
				keys = append(keys, key)
			}
		}
	}
	return keys
}

// TestFlippedBit flips one bit anywhere after the meta pages. A reader gets exactly the records
// that were written, or an error.
func TestFlippedBit(t *testing.T) {
	sandbox.SkipRaced(t)
	times := sandbox.Rounds(400, 2_000, 50_000)
	s := newStore(t)
	check(t, populate(s))
	whole, err := os.ReadFile(s.Path())
	check(t, err)
	read := func() (all map[string]string, err error) {
		all = map[string]string{}
		err = s.View(t.Context(), func(tx *Tx) error {
			return tx.scan(nil, func(key, value []byte) error {
				_, err := decodeRecord(key, value)
				_, outlineErr := decodeOutline(key, value)
				all[string(key)] = string(value)
				return errors.Join(err, outlineErr)
			})
		})
		return all, err
	}
	right, err := read()
	check(t, err)
	random, found := rand.New(rand.NewPCG(*seedFlag, 0)), 0
	for range times {
		at, bit := 2*pageSize+random.IntN(len(whole)-2*pageSize), random.IntN(8)
		damaged := bytes.Clone(whole)
		damaged[at] ^= 1 << bit
		check(t, os.WriteFile(s.Path(), damaged, 0o600))
		if got, err := read(); err != nil {
			found++
		} else if !maps.Equal(got, right) {
			t.Errorf("bit %d of byte %d of page %d: wrong records and no error (seed %d)", bit, at%page, at/page, *seedFlag)
		}
	}
	t.Logf("%d of %d flipped bits were detected; the others are in free space", found, times)
}
