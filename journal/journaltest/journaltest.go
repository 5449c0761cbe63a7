// Package journaltest writes intact and damaged journals for tests of other packages.
package journaltest

import (
	"bytes"
	"errors"
	"strings"

	bolt "go.etcd.io/bbolt"

	"cni-unwind/journal"
)

// PutIn puts a record in any state. The journal allows only certain changes of state, so PutIn puts
// the record as adding first. If e.Since is set, PutIn keeps it, except in state live.
func PutIn(tx *journal.Tx, e *journal.Record) error {
	want, since := e.State, e.Since
	e.State = journal.Adding
	err := tx.Put(e)
	if want != journal.Adding && err == nil {
		e.State = want
		err = tx.Put(e)
	}
	if since != (journal.Time{}) && err == nil && want != journal.Live {
		e.Since = since
		err = tx.Put(e)
	}
	return err
}

// KeyOf parses NETWORK/CONTAINER/IFNAME.
func KeyOf(text string) journal.Key {
	part := strings.Split(text, "/")
	return journal.Key{Network: part[0], ContainerID: part[1], IfName: part[2]}
}

// MakeNewer changes the format record of a journal so that only newer releases can read the
// journal.
func MakeNewer(s *journal.Store) error {
	return InFile(s, "meta", "format", func(key, _ []byte) []byte {
		return journal.Seal(key, []byte(`{"writer":99,"oldestReader":99}`))
	})
}

// Become returns a change for InFile that replaces each value with the given one.
func Become(value string) func(_, _ []byte) []byte {
	return func(_, _ []byte) []byte { return []byte(value) }
}

// InFile finds all keys in a bucket that begin with the given key, and changes their values. It
// uses bbolt directly and bypasses package journal.
func InFile(s *journal.Store, bucket, key string, change func(key, value []byte) []byte) error {
	db, err := bolt.Open(s.Path(), 0o600, nil)
	if err != nil {
		return err
	}
	return errors.Join(db.Update(func(tx *bolt.Tx) (err error) {
		b, changed := tx.Bucket([]byte(bucket)), map[string][]byte{}
		c := b.Cursor()
		for k, v := c.Seek([]byte(key)); bytes.HasPrefix(k, []byte(key)) && k != nil; k, v = c.Next() {
			changed[string(k)] = change(k, bytes.Clone(v))
		}
		for k, v := range changed {
			err = errors.Join(err, b.Put([]byte(k), v))
		}
		return err
	}), db.Close())
}
