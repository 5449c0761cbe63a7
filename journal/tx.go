package journal

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	bolt "go.etcd.io/bbolt"
)

// Tx is one transaction on the journal. It ends when the function that received it returns.
type Tx struct {
	btx *bolt.Tx // nil: a snapshot, or no journal exists yet, so every bucket is empty
	// changed is set if the transaction has something to commit.
	changed bool

	copied  map[string][]pair // a snapshot's content: by bucket, in key order
	decoded map[string]*Entry // the snapshot's records that were decoded, by key
}

type pair struct{ key, value []byte }

// Snapshot returns a copy of the records, to be read after the transaction has ended, by one
// goroutine at a time. The caller must not change the records that it returns.
func (tx *Tx) Snapshot() *Tx {
	s := &Tx{copied: map[string][]pair{}, decoded: map[string]*Entry{}}
	for _, bucket := range [][]byte{bucketEntries, bucketIndex} {
		var all []pair
		_ = tx.scan(bucket, nil, func(k, v []byte) error { // fn returns no error
			all = append(all, pair{bytes.Clone(k), bytes.Clone(v)})
			return nil
		})
		s.copied[string(bucket)] = all
	}
	return s
}

// find returns the position of the first key of a snapshot's bucket that is not less than a key.
func (tx *Tx) find(bucket, key []byte) (all []pair, at int) {
	all = tx.copied[string(bucket)]
	at, _ = slices.BinarySearchFunc(all, key,
		func(p pair, key []byte) int { return bytes.Compare(p.key, key) })
	return all, at
}

// scan calls fn for every key of a bucket that begins with a prefix, in key order.
func (tx *Tx) scan(bucket, prefix []byte, fn func(key, value []byte) error) error {
	if tx.btx == nil {
		all, at := tx.find(bucket, prefix)
		for _, p := range all[at:] {
			if !bytes.HasPrefix(p.key, prefix) {
				return nil
			}
			if err := fn(p.key, p.value); err != nil {
				return err
			}
		}
		return nil
	}
	c := tx.btx.Bucket(bucket).Cursor()
	for k, v := c.Seek(prefix); k != nil && bytes.HasPrefix(k, prefix); k, v = c.Next() {
		if err := fn(k, v); err != nil {
			return err
		}
	}
	return nil
}

// put writes a value to a bucket. The value must not be nil, because Get returns nil for a missing
// key.
func (tx *Tx) put(bucket, key, value []byte) error {
	tx.changed = true
	return tx.btx.Bucket(bucket).Put(key, value)
}

// delete removes a key from a bucket. A missing key is not an error.
func (tx *Tx) delete(bucket, key []byte) error {
	b := tx.btx.Bucket(bucket)
	if b.Get(key) == nil {
		return nil
	}
	tx.changed = true
	return b.Delete(key)
}

// Get returns the record of the newest ADD of an attachment, or nil if the attachment has no
// record. It skips undone records.
func (tx *Tx) Get(k Key) (*Entry, error) {
	all, err := tx.Pending(k)
	if len(all) == 0 || err != nil {
		return nil, err
	}
	return all[0], nil
}

// Pending returns all records of an attachment except undone ones, newest first.
func (tx *Tx) Pending(k Key) ([]*Entry, error) {
	all, err := tx.Records(k)
	return slices.DeleteFunc(all, func(e *Entry) bool { return e.State == Undone }), err
}

// Records returns all records of an attachment, including undone ones, newest first. It omits
// damaged records; the error names them.
func (tx *Tx) Records(k Key) (all []*Entry, err error) {
	var errs []error
	err = tx.scan(bucketEntries, encodeKey(k), func(key, value []byte) error {
		e, err := tx.decode(key, value)
		if errs = append(errs, err); err == nil {
			all = append(all, e)
		}
		return nil
	})
	slices.Reverse(all)
	return all, errors.Join(append(errs, err)...)
}

// stored returns the record under a key, or nil if it is missing or cannot be read.
func (tx *Tx) stored(key []byte) (e *Entry) {
	_ = tx.scan(bucketEntries, key, func(k, value []byte) (err error) {
		if bytes.Equal(k, key) {
			e, err = tx.decode(key, value)
		}
		return err
	})
	return e
}

// decode decodes a record. A snapshot decodes each record once.
func (tx *Tx) decode(key, value []byte) (*Entry, error) {
	if e := tx.decoded[string(key)]; e != nil {
		return e, nil
	}
	e, err := decodeEntry(key, value)
	if err == nil && tx.decoded != nil {
		tx.decoded[string(key)] = e
	}
	return e, err
}

// Put writes a record and its index keys. It rejects an illegal change of state. A record without a
// number belongs to a new ADD. For such a record, Put assigns the next number, and deletes the
// attachment's undone and damaged records, because they belong to earlier ADDs.
func (tx *Tx) Put(e *Entry) (err error) {
	from, old := Gone, tx.stored(recordKey(e.Key, e.Number))
	if old != nil {
		from = old.State
	}
	if err := CheckEdge(from, e.State); err != nil {
		return fmt.Errorf("%w (%s)", err, e.Key)
	}
	if b := tx.btx.Bucket(bucketEntries); e.Number == 0 {
		if err := tx.dropAnswered(e.Key); err != nil {
			return err
		}
		if e.Number, err = b.NextSequence(); err != nil {
			return err
		}
	} else if e.Number > b.Sequence() {
		// the record comes from a journal that was set aside: the next ADD must get a higher number
		if err := b.SetSequence(e.Number); err != nil {
			return err
		}
	}
	if e.Updated = Now(); from != e.State || e.Since == (Time{}) {
		e.Since = e.Updated
	}
	value, err := encodeEntry(e)
	if err != nil {
		return fmt.Errorf("journal: record of %s: %w", e.Key, err)
	}
	if err := tx.reindex(old, e); err != nil {
		return err
	}
	if err := tx.put(bucketEntries, recordKey(e.Key, e.Number), value); err != nil {
		return err
	}
	if e.State == Undone && from != Undone {
		return tx.prune()
	}
	return nil
}

// Delete removes the record of an ADD and its index keys. It also removes the attachment's undone
// and damaged records. A missing record is not an error.
func (tx *Tx) Delete(e *Entry) error {
	key := recordKey(e.Key, e.Number)
	if old := tx.stored(key); old != nil {
		if err := CheckEdge(old.State, Gone); err != nil {
			return fmt.Errorf("%w (%s)", err, e.Key)
		}
	}
	return errors.Join(tx.drop(key), tx.dropAnswered(e.Key))
}

// dropAnswered removes the undone and the damaged records of an attachment.
func (tx *Tx) dropAnswered(k Key) error {
	var keys [][]byte
	err := tx.scan(bucketEntries, encodeKey(k), func(key, _ []byte) error {
		if e := tx.stored(key); e == nil || e.State == Undone {
			keys = append(keys, key)
		}
		return nil
	})
	return errors.Join(err, tx.drop(keys...))
}

// maxUndone limits the undone records in the journal. prune removes the oldest.
const maxUndone = 4096

func (tx *Tx) prune() error {
	var keys [][]byte
	err := tx.scan(bucketEntries, nil, func(key, value []byte) error {
		if len(key) > 8 && isUndone(value) {
			keys = append(keys, key)
		}
		return nil
	})
	if len(keys) <= maxUndone {
		return err
	}
	slices.SortFunc(keys, func(a, b []byte) int { // by number
		return bytes.Compare(a[len(a)-8:], b[len(b)-8:])
	})
	return errors.Join(err, tx.drop(keys[:len(keys)-maxUndone]...))
}

// drop removes records and their index keys. The index keys of a damaged record stay, because they
// cannot be derived from it. ByPod and ByAddress skip them.
func (tx *Tx) drop(keys ...[]byte) error {
	for _, key := range keys {
		err := errors.Join(tx.reindex(tx.stored(key), nil), tx.delete(bucketEntries, key))
		if err != nil {
			return err
		}
	}
	return nil
}

// IgnoreDamaged returns nil if an error is only about damaged records, because the attachment's
// next ADD removes them. It returns any other error.
func IgnoreDamaged(err error) error {
	var damaged *DamagedError
	if errors.As(err, &damaged) {
		return nil
	}
	return err
}

func (tx *Tx) reindex(old, entry *Entry) error {
	before, after := indexKeys(old), indexKeys(entry)
	var errs []error
	for _, k := range before {
		if !slices.Contains(after, k) {
			errs = append(errs, tx.delete(bucketIndex, []byte(k)))
		}
	}
	for _, k := range after {
		if !slices.Contains(before, k) {
			errs = append(errs, tx.put(bucketIndex, []byte(k), []byte{}))
		}
	}
	return errors.Join(errs...)
}

// ByPod returns the records of a pod, by namespace and name, in all networks, except undone ones.
func (tx *Tx) ByPod(p Pod) ([]*Entry, error) { return tx.byIndex(podKey(p)) }

// ByAddress returns the records that claim an address, in all networks, except undone ones.
func (tx *Tx) ByAddress(a netip.Addr) ([]*Entry, error) { return tx.byIndex(addressKey(a)) }

func (tx *Tx) byIndex(prefix string) (entries []*Entry, err error) {
	err = tx.scan(bucketIndex, []byte(prefix), func(k, _ []byte) error {
		if e := tx.stored(k[len(prefix):]); slices.Contains(indexKeys(e), string(k)) {
			entries = append(entries, e)
		}
		return nil
	})
	return entries, err
}

// All calls fn for every record except undone ones, in key order. For a damaged record, fn gets a
// DamagedError.
func (tx *Tx) All(fn func(*Entry, error) error) error {
	return tx.eachPending(func(k, v []byte) error { return fn(tx.decode(k, v)) })
}

// Outlines calls fn for the outline of every record, as All does, at a fraction of the cost.
func (tx *Tx) Outlines(fn func(Outline, error) error) error {
	return tx.eachPending(func(k, v []byte) error { return fn(decodeOutline(k, v)) })
}

func (tx *Tx) eachPending(fn func(key, value []byte) error) error {
	return tx.scan(bucketEntries, nil, func(k, v []byte) error {
		if isUndone(v) {
			return nil
		}
		return fn(k, v)
	})
}

// Check verifies the whole file, runs bbolt's own check over it, and decodes every record. If it
// returns ErrDamaged, no other method is safe to call.
func (tx *Tx) Check() error {
	if tx.btx == nil {
		return nil
	}
	if _, err := verify(tx.btx.DB().Path()); err != nil {
		return err // bbolt's check overflows its stack on such a file
	}
	var errs []error
	for err := range tx.btx.Check() {
		errs = append(errs, err)
	}
	err := tx.scan(bucketEntries, nil, func(k, v []byte) error {
		_, err := decodeEntry(k, v)
		errs = append(errs, err)
		return nil
	})
	return errors.Join(append(errs, err)...)
}
