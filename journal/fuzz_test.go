package journal

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	bolt "go.etcd.io/bbolt"
)

// FuzzDecodeRecord decodes arbitrary bytes as a record. Their checksum is correct, as if a newer
// release had written them. The result is a usable record or an error; a DamagedError names the
// attachment. Encoding the record and decoding it again gives the same record. If one bit changes,
// decoding fails.
func FuzzDecodeRecord(f *testing.F) {
	key, whole, err := encodeRecord(everything())
	check(f, err)
	whole = whole[sumSize:]
	f.Add(key, whole, uint16(0))
	f.Add(key, whole[:len(whole)/2], uint16(300))
	f.Add(key, []byte(`{"network":"podnet","containerID":"c0ffee","ifname":"eth0","claims":[{"address":""}],"steps":[{}]}`), uint16(1))
	f.Add([]byte("a\x00b\x00\x0012345678"), []byte(`{"state":"?"}`), uint16(9))
	f.Add([]byte("a\x00b\x00"), []byte(`{"state":"live"}`), uint16(0))
	f.Add([]byte("a\x00b"), []byte(`null`), uint16(0))
	f.Fuzz(func(t *testing.T, key, data []byte, flip uint16) {
		value := Seal(key, data)
		damagedKey, damagedValue := bytes.Clone(key), bytes.Clone(value)
		if bit := int(flip) % (8 * (len(key) + len(value))); bit < 8*len(key) {
			damagedKey[bit/8] ^= 1 << (bit % 8)
		} else {
			damagedValue[bit/8-len(key)] ^= 1 << (bit % 8)
		}
		if e, err := decodeRecord(damagedKey, damagedValue); err == nil {
			t.Errorf("decodeRecord accepts a changed bit: %+v", e)
		}
		if o, err := decodeOutline(damagedKey, damagedValue); err == nil {
			t.Errorf("decodeOutline accepts a changed bit: %+v", o)
		}
		k, number, err := decodeKey(key)
		if err == nil && string(recordKey(k, number)) != string(key) {
			t.Errorf("key %q is %q", key, recordKey(k, number))
		}
		_, _ = decodeOutline(key, value)
		e, err := decodeRecord(key, value)
		if err != nil {
			var damaged *DamagedError
			if e != nil || errors.As(err, &damaged) && damaged.Key != k {
				t.Errorf("%+v, %v, want a DamagedError of %q", e, err, k)
			}
			return
		}
		if e == nil || e.Key != k || e.Number != number {
			t.Fatalf("%+v under the key %q", e, key)
		}
		_, again, err := encodeRecord(e)
		if err != nil {
			return // the key is not valid UTF-8
		}
		o, err := decodeOutline(key, again)
		if err != nil || o.Key != k || o.State != e.State || o.BootID != e.Added.Host.BootID || o.NetNS.Path != e.Added.NetNS.Path {
			t.Fatalf("the outline is %+v, %v", o, err)
		}
		back, err := decodeRecord(key, again)
		if err != nil {
			t.Fatalf("decoding the record that was encoded again: %v", err)
		}
		if _, twice, err := encodeRecord(back); err != nil || !bytes.Equal(again, twice) {
			t.Errorf("encoded once: %q,\ntwice: %q (%v)", again, twice, err)
		}
	})
}

// FuzzRecords puts an arbitrary key and value into one of the two buckets. The argument bucket
// selects the bucket, and determines whether the value gets a correct checksum. Then FuzzRecords
// reads everything, and writes a record of the key's attachment. Nothing may panic, the lookups
// must find all intact records, and the write must replace a damaged record.
func FuzzRecords(f *testing.F) {
	s := newStore(f)
	beside := adding("beside", "10.0.0.2")
	beside.Added.Pod = Pod{Namespace: "ns", Name: "pod"}
	update(f, s, func(tx *Tx) error {
		return errors.Join(tx.Put(beside), buryIn(tx, keyOf("buried"), "", ""))
	})
	entryKey, whole, err := encodeRecord(everything())
	check(f, err)
	key := recordKey(keyOf("a"), 9)
	f.Add(uint8(2), []byte("format"), []byte(`{"writer": 1, "oldestReader": 99}`))
	f.Add(uint8(2), []byte("format"), []byte(`[]`))
	f.Add(uint8(0), []byte("format"), []byte(`{}`))
	f.Add(uint8(1), entryKey, whole)
	f.Add(uint8(3), key, []byte(`{"state":"live","netns":{"ino":-1}}`+"\n{}"))
	f.Add(uint8(3), key, []byte(`{"state":"live","bootID":"b"}`+"\n{"))
	f.Add(uint8(1), []byte("\x00\x00\x00\x00"), []byte{})
	f.Add(uint8(1), []byte("\xb6\x00podnet\x00"), []byte("{}"))
	f.Fuzz(func(t *testing.T, bucket uint8, key, value []byte) {
		name := buckets[int(bucket)%len(buckets)]
		if len(key) == 0 || len(key) > bolt.MaxKeySize {
			t.Skip()
		}
		if int(bucket)/len(buckets)%2 == 1 {
			value = Seal(key, value)
		}
		k, _, keyErr := decodeKey(key)
		err := s.Update(context.Background(), func(tx *Tx) error {
			if err := tx.btx.Bucket(name).Put(key, value); err != nil {
				return err
			}
			if err := s.checkFormat(tx.btx.Bucket(bucketMeta).Get(keyFormat)); err != nil {
				if !errors.Is(err, ErrDamaged) && !errors.Is(err, ErrNewer) {
					t.Errorf("format: %v", err)
				}
				return errUndo
			}
			readAll(t, tx, k)
			if keyErr == nil && k.ContainerID != "" && !strings.Contains(string(key), "beside") {
				rewrite(t, tx, k)
			}
			findBeside(t, tx, beside, name, key)
			return errUndo
		})
		if !errors.Is(err, errUndo) {
			t.Error(err)
		}
	})
}

// errUndo is the error with which a test rolls a transaction back.
var errUndo = errors.New("undo")

// readAll reads all records in a transaction. For each damaged record, it expects a DamagedError.
func readAll(t *testing.T, tx *Tx, k Key) {
	t.Helper()
	known := func(err error) {
		var damaged *DamagedError
		if err != nil && !errors.As(err, &damaged) {
			t.Errorf("%v, want a DamagedError", err)
		}
	}
	known(tx.All(func(e *Record, err error) error {
		known(err)
		if (e == nil) == (err == nil) {
			t.Errorf("%+v, %v", e, err)
		}
		return nil
	}))
	known(tx.Outlines(func(_ Outline, err error) error { known(err); return nil }))
	_, err := tx.Get(k)
	known(err)
	_ = tx.Check()
}

// rewrite adds an attachment, deletes it, and puts an abandoned record of it. All three must work,
// whatever bytes the journal contains for the attachment.
func rewrite(t *testing.T, tx *Tx, k Key) {
	t.Helper()
	e := adding("a", "10.0.0.3")
	e.Key = k
	if err := tx.Put(e); err != nil {
		if utf8.Valid(encodeKey(k)) {
			t.Errorf("ADD: %v", err)
		}
		return
	}
	key := recordKey(k, e.Number)
	if back, err := decodeRecord(key, tx.btx.Bucket(bucketRecords).Get(key)); err != nil || back.State != Adding {
		t.Errorf("%+v, %v", back, err)
	}
	if found, err := tx.ByAddress(netip.MustParseAddr("10.0.0.3")); err != nil || len(found) != 1 {
		t.Errorf("by address: %d, %v", len(found), err)
	}
	if err := errors.Join(tx.Delete(e), tx.Put(&Record{Key: k, State: Abandoned})); err != nil {
		t.Errorf("DEL: %v", err)
		return
	}
	if one, err := undoneOf(tx, k); err != nil || one == nil {
		t.Errorf("undone: %+v, %v", one, err)
	}
}

// findBeside looks up an intact record by key, pod and address. Each lookup must find the record,
// unless the fuzzed key overwrote it.
func findBeside(t *testing.T, tx *Tx, beside *Record, bucket, key []byte) {
	t.Helper()
	if string(bucket) == string(bucketRecords) && strings.HasPrefix(string(key), string(encodeKey(beside.Key))) {
		return
	}
	e, err := tx.Get(beside.Key)
	pods, podErr := tx.ByPod(beside.Added.Pod)
	addresses, addressErr := tx.ByAddress(beside.Addresses()[0])
	if err := errors.Join(err, podErr, addressErr); err != nil || e == nil {
		t.Errorf("%+v, %v", e, err)
	}
	for name, found := range map[string][]*Record{"pod": pods, "address": addresses} {
		if !slices.ContainsFunc(found, func(e *Record) bool { return e.Key == beside.Key }) {
			t.Errorf("the lookup by %s finds %d records, but not this one", name, len(found))
		}
	}
}
