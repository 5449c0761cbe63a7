package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	bolt "go.etcd.io/bbolt"
)

// Tx is either a transaction on the journal or a copy of the records (see Snapshot). A transaction
// ends when the function that received it returns.
type Tx struct {
	btx    *bolt.Tx // nil: a snapshot, or no journal exists yet
	size   int      // the bytes that it writes or deletes; 0: there is nothing to commit
	begins bool     // it writes an intent (see Put)

	copied  [][2][]byte        // a snapshot's keys and values, in key order
	decoded map[string]*Record // a snapshot's decoded records, by key
}

// Snapshot returns a copy of the records that remains readable after the transaction. Only one
// goroutine may use the copy, and nobody may change the records that it returns.
func (tx *Tx) Snapshot() (*Tx, error) {
	const chunk = 256 << 10 // bytes in one allocation; an allocation for each record takes longer
	s, room := &Tx{decoded: map[string]*Record{}}, []byte{}
	return s, tx.scan(nil, func(k, v []byte) error {
		if size := len(k) + len(v); cap(room)-len(room) < size {
			room = make([]byte, 0, max(chunk, size))
		}
		begin, middle := len(room), len(room)+len(k)
		room = append(append(room, k...), v...)
		k, v = room[begin:middle:middle], room[middle:len(room):len(room)]
		s.copied = append(s.copied, [2][]byte{k, v})
		return nil
	})
}

// scan calls fn for every record whose key begins with a prefix, in key order. It returns
// ErrDamaged if the keys do not ascend: in a damaged file, bbolt may return the same keys forever.
func (tx *Tx) scan(prefix []byte, fn func(key, value []byte) error) error {
	if tx.btx == nil {
		at, _ := slices.BinarySearchFunc(tx.copied, prefix,
			func(r [2][]byte, prefix []byte) int { return bytes.Compare(r[0], prefix) })
		for _, r := range tx.copied[at:] {
			if !bytes.HasPrefix(r[0], prefix) {
				break
			}
			if err := fn(r[0], r[1]); err != nil {
				return err
			}
		}
		return nil
	}
	var last []byte
	c := tx.btx.Bucket(bucketRecords).Cursor()
	for k, v := c.Seek(prefix); k != nil && bytes.HasPrefix(k, prefix); k, v = c.Next() {
		if bytes.Compare(k, last) <= 0 {
			return fmt.Errorf("%w: its keys are out of order", ErrDamaged)
		}
		last = k
		if err := fn(k, v); err != nil {
			return err
		}
	}
	return nil
}

// Get returns the record of an attachment's newest ADD, or nil. It ignores abandoned records.
func (tx *Tx) Get(k Key) (*Record, error) {
	all, err := tx.Pending(k)
	if len(all) == 0 || err != nil {
		return nil, err
	}
	return all[0], nil
}

// Pending returns an attachment's records except abandoned ones, newest first.
func (tx *Tx) Pending(k Key) ([]*Record, error) {
	all, err := tx.Records(k)
	return slices.DeleteFunc(all, func(e *Record) bool { return e.State == Abandoned }), err
}

// Records returns all records of an attachment, including abandoned ones, newest first. It omits
// damaged records; the error names them.
func (tx *Tx) Records(k Key) ([]*Record, error) {
	return tx.records(encodeKey(k), k.Malformed())
}

// Check decodes every record, and returns an error that names the damaged ones.
func (tx *Tx) Check() error {
	_, err := tx.records(nil, false)
	return err
}

// records returns the records whose keys begin with a prefix or, if exact is set, equal the prefix.
func (tx *Tx) records(prefix []byte, exact bool) (all []*Record, err error) {
	var errs []error
	err = tx.scan(prefix, func(key, value []byte) error {
		if exact && len(key) > len(prefix) {
			return nil
		}
		e, err := tx.decode(key, value)
		errs = append(errs, err)
		if err == nil {
			all = append(all, e)
		}
		return nil
	})
	slices.Reverse(all)
	return all, errors.Join(append(errs, err)...)
}

// decode decodes a record. A snapshot returns the same *Record each time.
func (tx *Tx) decode(key, value []byte) (*Record, error) {
	if e := tx.decoded[string(key)]; e != nil {
		return e, nil
	}
	e, err := decodeRecord(key, value)
	if err == nil && tx.decoded != nil {
		tx.decoded[string(key)] = e
	}
	return e, err
}

// Put writes a record. It rejects an illegal change of state. For a new ADD, whose record has no
// number, Put deletes the attachment's abandoned and damaged records, and assigns a number.
//
// A record in state Adding is the intent of an ADD, which is written before any delegate runs. Its
// transaction fails, and writes nothing, if the disk lacks space for two more transactions of the
// same size: for the ADD's result, and for the pending DELs if the ADD fails.
func (tx *Tx) Put(e *Record) error {
	from, err := tx.checkChange(e, e.State)
	if err != nil {
		return err
	}
	switch b := tx.btx.Bucket(bucketRecords); {
	case e.Number == 0:
		if err = tx.dropAbandoned(e.Key); err == nil {
			e.Number, err = b.NextSequence()
		}
	case e.Number > b.Sequence(): // the record is from a file that is gone or was set aside
		err = b.SetSequence(e.Number)
	}
	if err != nil {
		return err
	}
	e.Updated = Now()
	if from != e.State || e.Since == (Time{}) {
		e.Since = e.Updated
	}
	tx.begins = tx.begins || e.State == Adding
	return tx.write(e)
}

// Amend writes a record that the caller read in this transaction. Unlike Put, it does not change
// Updated, from which the attachment's age is measured.
func (tx *Tx) Amend(e *Record) error {
	if _, err := tx.checkChange(e, e.State); err != nil {
		return err
	}
	return tx.write(e)
}

func (tx *Tx) write(e *Record) error {
	key, value, err := encodeRecord(e)
	if err != nil {
		return fmt.Errorf("journal: record of %s: %w", e.Key, err)
	}
	tx.size += len(key) + len(value)
	return tx.btx.Bucket(bucketRecords).Put(key, value)
}

// Delete removes a record, which may be missing, and the attachment's abandoned and damaged
// records. If the key is malformed, it removes only the record with that key.
func (tx *Tx) Delete(e *Record) error {
	if e.Key.Malformed() {
		return tx.drop([]byte(e.Key.Network))
	}
	if from, err := tx.checkChange(e, Gone); from != Gone && err != nil {
		return err
	}
	return errors.Join(tx.drop(recordKey(e.Key, e.Number)), tx.dropAbandoned(e.Key))
}

// checkChange returns the stored state of a record, and an error if the change of state is illegal.
func (tx *Tx) checkChange(e *Record, to State) (from State, err error) {
	key := recordKey(e.Key, e.Number)
	if old, _ := decodeRecord(key, tx.btx.Bucket(bucketRecords).Get(key)); old != nil {
		from = old.State
	}
	if err = CheckEdge(from, to); err != nil {
		err = fmt.Errorf("%w (%s)", err, e.Key)
	}
	return from, err
}

// dropAbandoned removes the abandoned and the damaged records of an attachment.
func (tx *Tx) dropAbandoned(k Key) error {
	var keys [][]byte
	err := tx.scan(encodeKey(k), func(key, value []byte) error {
		if e, _ := decodeRecord(key, value); e == nil || e.State == Abandoned {
			keys = append(keys, key)
		}
		return nil
	})
	return errors.Join(err, tx.drop(keys...))
}

// drop removes records. A missing record is not an error.
func (tx *Tx) drop(keys ...[]byte) error {
	b := tx.btx.Bucket(bucketRecords)
	for _, key := range keys {
		if value := b.Get(key); value != nil {
			tx.size += len(key) + len(value)
			if err := b.Delete(key); err != nil {
				return err
			}
		}
	}
	return nil
}

// IgnoreDamaged returns nil for an error that is only about damaged records, or else the error.
func IgnoreDamaged(err error) error {
	var damaged *DamagedError
	if errors.As(err, &damaged) && !errors.Is(err, ErrDamaged) {
		return nil
	}
	return err
}

// ByPod returns a pod's records, of all networks and UIDs, except abandoned and damaged ones.
func (tx *Tx) ByPod(p Pod) ([]*Record, error) {
	if p.Name == "" {
		return nil, nil
	}
	name, _ := json.Marshal(p.Name) // as an encoded record contains it
	return tx.matching(name, func(e *Record) bool {
		return e.Added.Pod.Name == p.Name && e.Added.Pod.Namespace == p.Namespace
	})
}

// ByNetNS finds the records of a network namespace by its inode. Like ByPod, it omits abandoned and
// damaged records. The caller must ignore records of earlier boots, in which another namespace may
// have had the same inode.
func (tx *Tx) ByNetNS(n NetNS) ([]*Record, error) {
	if !n.Known() {
		return nil, nil
	}
	return tx.matching(fmt.Appendf(nil, `"ino":%d`, n.Ino),
		func(e *Record) bool { return e.Added.NetNS.Same(n) })
}

// ByAddress returns the records that claim an address. Like ByPod, it omits abandoned and damaged
// records.
func (tx *Tx) ByAddress(a netip.Addr) ([]*Record, error) {
	a = a.Unmap()
	return tx.matching([]byte(a.String()+`"`), func(e *Record) bool { return e.ClaimsAddress(a) })
}

// matching returns the records for which match returns true, except abandoned and damaged ones. It
// decodes only records that contain text. An index in the journal file would save 40 µs with 110
// records, but a single changed byte in the index would hide a record.
func (tx *Tx) matching(text []byte, match func(*Record) bool) (records []*Record, err error) {
	err = tx.eachPending(func(k, v []byte) error {
		if !bytes.Contains(v, text) {
			return nil
		}
		if e, err := tx.decode(k, v); err == nil && match(e) {
			records = append(records, e)
		}
		return nil
	})
	return records, err
}

// All calls fn for every record except abandoned ones, in key order. For a damaged record, fn gets
// a DamagedError.
func (tx *Tx) All(fn func(*Record, error) error) error {
	return tx.eachPending(func(k, v []byte) error { return fn(tx.decode(k, v)) })
}

// Outlines is like All, but decodes only the outline of each record, at a fraction of the cost.
func (tx *Tx) Outlines(fn func(Outline, error) error) error {
	return tx.eachPending(func(k, v []byte) error { return fn(decodeOutline(k, v)) })
}

func (tx *Tx) eachPending(fn func(key, value []byte) error) error {
	return tx.scan(nil, func(k, v []byte) error {
		if isAbandoned(v) {
			return nil
		}
		return fn(k, v)
	})
}
