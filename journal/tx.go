package journal

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	bolt "go.etcd.io/bbolt"
)

// Tx is one transaction on the journal. It ends when the function that got it returns.
type Tx struct {
	btx  *bolt.Tx    // nil: there is no journal yet, and everything is empty
	file os.FileInfo // of the bbolt file
	// changed says that the transaction has something to commit.
	changed bool
	digest  digest // of the content, as the transaction has changed it
}

// get returns a value of a bucket, or nil.
func (tx *Tx) get(bucket, key []byte) []byte {
	if tx.btx == nil {
		return nil
	}
	return tx.btx.Bucket(bucket).Get(key)
}

// each calls fn for every key of a bucket, in their order.
func (tx *Tx) each(bucket []byte, fn func(key, value []byte) error) error {
	if tx.btx == nil {
		return nil
	}
	return tx.btx.Bucket(bucket).ForEach(fn)
}

// put writes a value of a bucket.
func (tx *Tx) put(bucket, key, value []byte) error {
	b := tx.btx.Bucket(bucket)
	if old := b.Get(key); old != nil {
		tx.digest.remove(bucket, key, old)
	}
	tx.digest.add(bucket, key, value)
	tx.changed = true
	return b.Put(key, append([]byte{}, value...)) // not nil, which Get returns for a missing key
}

// delete removes a key of a bucket, if it has it.
func (tx *Tx) delete(bucket, key []byte) error {
	b := tx.btx.Bucket(bucket)
	old := b.Get(key)
	if old == nil {
		return nil
	}
	tx.digest.remove(bucket, key, old)
	tx.changed = true
	return b.Delete(key)
}

// next returns the next number of a bucket, from 1 on.
func (tx *Tx) next(bucket []byte) (uint64, error) {
	n, err := tx.btx.Bucket(bucket).NextSequence()
	if n > 1 {
		tx.digest.remove(bucket, nil, sequence(n-1))
	}
	tx.digest.addSequence(bucket, n)
	tx.changed = true
	return n, err
}

// Get returns the entry of an attachment, or nil if there is none.
func (tx *Tx) Get(k Key) (*Entry, error) {
	value := tx.get(bucketEntries, encodeKey(k))
	if value == nil {
		return nil, nil
	}
	return decodeEntry(encodeKey(k), value)
}

// Put writes an entry and its indexes, and removes the attachment's tombstone. It refuses an
// illegal change of state. If the newest generation has no number, Put gives it the next one.
func (tx *Tx) Put(e *Entry) error {
	old, from, err := tx.replaced(e.Key)
	if err != nil {
		return err
	}
	if err := CheckEdge(from, e.State); err != nil {
		return fmt.Errorf("%w (%s)", err, e.Key)
	}
	if err := checkSteps(old, e); err != nil {
		return err
	}
	newest := e.Newest()
	if newest == nil {
		return fmt.Errorf("journal: entry %s has no generation", e.Key)
	}
	if newest.Number == 0 {
		if newest.Number, err = tx.next(bucketEntries); err != nil {
			return err
		}
	}
	if e.Updated = Now(); from != e.State || e.Since == (Time{}) {
		e.Since = e.Updated
	}
	value, err := encodeEntry(e)
	if err != nil {
		return fmt.Errorf("journal: entry %s: %w", e.Key, err)
	}
	if err := tx.reindex(old, e); err != nil {
		return err
	}
	if err := tx.deleteTombstone(e.Key); err != nil {
		return err
	}
	tx.btx.OnCommit(func() { e.file = tx.file })
	return tx.put(bucketEntries, encodeKey(e.Key), value)
}

// Delete removes the entry of an attachment and its indexes. A missing entry is no error.
func (tx *Tx) Delete(k Key) error {
	old, from, err := tx.replaced(k)
	if err != nil {
		return err
	}
	if old != nil {
		if err := CheckEdge(from, Gone); err != nil {
			return fmt.Errorf("%w (%s)", err, k)
		}
	}
	if err := tx.reindex(old, nil); err != nil {
		return err
	}
	return tx.delete(bucketEntries, encodeKey(k))
}

// replaced returns the entry that is about to be replaced, or nil, and its state.
func (tx *Tx) replaced(k Key) (old *Entry, from State, err error) {
	old, err = intact(tx.Get(k))
	if old == nil || err != nil {
		return nil, Gone, err
	}
	return old, old.State, nil
}

// intact returns nil for an entry that cannot be read. The indexes of a damaged entry stay. They
// lead to nothing, or to an entry written over it; ByPod and ByAddress skip both.
func intact(e *Entry, err error) (*Entry, error) {
	var damaged *DamagedError
	if errors.As(err, &damaged) {
		return nil, nil
	}
	return e, err
}

func (tx *Tx) reindex(old, entry *Entry) error {
	oldPods, oldAddresses := indexKeys(old)
	newPods, newAddresses := indexKeys(entry)
	if err := tx.exchange(bucketPods, oldPods, newPods); err != nil {
		return err
	}
	return tx.exchange(bucketAddresses, oldAddresses, newAddresses)
}

// exchange replaces the keys before of a bucket by the keys after, and touches only the
// differences.
func (tx *Tx) exchange(bucket []byte, before, after [][]byte) error {
	for _, k := range before {
		if contains(after, k) {
			continue
		}
		if err := tx.delete(bucket, k); err != nil {
			return err
		}
	}
	for _, k := range after {
		if contains(before, k) {
			continue
		}
		if err := tx.put(bucket, k, nil); err != nil {
			return err
		}
	}
	return nil
}

func contains(keys [][]byte, key []byte) bool {
	return slices.ContainsFunc(keys, func(k []byte) bool { return bytes.Equal(k, key) })
}

// ByPod returns the entries of a pod, by namespace and name, over all networks.
func (tx *Tx) ByPod(p Pod) ([]*Entry, error) {
	if p.Name == "" {
		return nil, nil
	}
	return tx.byIndex(bucketPods, podKey(p))
}

// ByAddress returns the entries that claim an address, over all networks.
func (tx *Tx) ByAddress(a netip.Addr) ([]*Entry, error) {
	return tx.byIndex(bucketAddresses, addressKey(a))
}

func (tx *Tx) byIndex(bucket, prefix []byte) ([]*Entry, error) {
	if tx.btx == nil {
		return nil, nil
	}
	var entries []*Entry
	c := tx.btx.Bucket(bucket).Cursor()
	for k, _ := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, _ = c.Next() {
		key, err := decodeKey(k[len(prefix):])
		if err != nil {
			continue
		}
		e, err := intact(tx.Get(key))
		if err != nil {
			return nil, err
		}
		if pods, addresses := indexKeys(e); contains(pods, k) || contains(addresses, k) {
			entries = append(entries, e)
		}
	}
	return entries, nil
}

// All calls fn for every entry in key order. For a damaged entry fn gets a DamagedError.
func (tx *Tx) All(fn func(*Entry, error) error) error {
	return tx.each(bucketEntries, func(k, v []byte) error { return fn(decodeEntry(k, v)) })
}

// Check runs bbolt's own check over the whole file and decodes every entry.
func (tx *Tx) Check() error {
	if tx.btx == nil {
		return nil
	}
	var errs []error
	for err := range tx.btx.Check() {
		errs = append(errs, err)
	}
	err := tx.All(func(_ *Entry, err error) error {
		errs = append(errs, err)
		return nil
	})
	return errors.Join(append(errs, err)...)
}

// Outlines calls fn for the outline of every entry, as All does, at a fraction of the cost.
func (tx *Tx) Outlines(fn func(Outline, error) error) error {
	return tx.each(bucketEntries, func(k, v []byte) error { return fn(decodeOutline(k, v)) })
}
