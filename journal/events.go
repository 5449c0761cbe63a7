package journal

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"time"
)

// EventKind says what happened.
type EventKind string

// The kinds of events.
const (
	RolledBack EventKind = "rolled-back" // an ADD failed and was undone, as far as it could be
	Swept      EventKind = "swept"       // released without the runtime's DEL
	Released   EventKind = "released"    // a host-local address of no attachment on record
	Parked     EventKind = "parked"      // a DEL waits, since another attachment has the address
	Superseded EventKind = "superseded"  // another ADD of the same container ID came before the DEL
	Forgotten  EventKind = "forgotten"   // given up by an operator, with pending DELs
	Unproven   EventKind = "unproven"    // a DEL passed, and its address is not known to be free
	Untaken    EventKind = "untaken"     // a failing DEL has nothing to undo: the ADD took nothing
	NoOp       EventKind = "no-op"       // the runtime's DEL succeeded and ran no delegate
)

// Event is something out of the ordinary that happened to an attachment, kept for people.
type Event struct {
	Key
	Kind      EventKind    `json:"kind"`
	Pod       Pod          `json:"pod,omitzero"`
	Reason    string       `json:"reason"`
	Addresses []netip.Addr `json:"addresses,omitempty"`
	Plugins   []string     `json:"plugins,omitempty"` // the one that failed, or those pending
	At        Time         `json:"at"`
	// Trace is the traceparent of the runtime's call (W3C Trace Context), if it gave one.
	Trace string `json:"trace,omitempty"`
}

// maxHistory bounds the number of events that are kept, the newest ones.
const maxHistory = 1000

// Record adds an event to the history and drops the oldest beyond maxHistory.
func (tx *Tx) Record(e Event) error {
	n, err := tx.next(bucketHistory)
	if err != nil {
		return err
	}
	e.At = Now()
	data, err := json.Marshal(e)
	if err != nil {
		return err
	}
	var old [][]byte
	c := tx.btx.Bucket(bucketHistory).Cursor()
	for k, _ := c.First(); k != nil && n >= maxHistory &&
		bytes.Compare(k, sequence(n-maxHistory)) <= 0; k, _ = c.Next() {
		old = append(old, bytes.Clone(k))
	}
	for _, k := range old {
		if err := tx.delete(bucketHistory, k); err != nil {
			return err
		}
	}
	return tx.put(bucketHistory, sequence(n), data)
}

// History calls fn for every event, the oldest first. It skips damaged ones.
func (tx *Tx) History(fn func(Event) error) error {
	return tx.each(bucketHistory, func(_, value []byte) error {
		var e Event
		if json.Unmarshal(value, &e) != nil {
			return nil //nolint:nilerr // what is past and cannot be read stops nobody
		}
		return fn(e)
	})
}

// Count adds one to a counter. Neither its name nor a label may have a zero byte.
func (tx *Tx) Count(name string, labels ...string) error {
	return tx.SetCounter(tx.Counter(name, labels...)+1, name, labels...)
}

// SetCounter sets a counter to a value.
func (tx *Tx) SetCounter(n uint64, name string, labels ...string) error {
	for _, text := range append(labels, name) {
		if strings.ContainsRune(text, 0) {
			return fmt.Errorf("journal: counter %q contains a zero byte", text)
		}
	}
	return tx.put(bucketCounters, counterKey(name, labels), sequence(n))
}

// Counter returns the value of a counter, or 0 if there is none.
func (tx *Tx) Counter(name string, labels ...string) uint64 {
	return counterOf(tx.get(bucketCounters, counterKey(name, labels)))
}

// Counters calls fn for every counter.
func (tx *Tx) Counters(fn func(name string, labels []string, n uint64) error) error {
	return tx.each(bucketCounters, func(k, v []byte) error {
		parts := strings.Split(string(k), "\x00")
		return fn(parts[0], parts[1:], counterOf(v))
	})
}

func counterKey(name string, labels []string) []byte {
	return []byte(strings.Join(append([]string{name}, labels...), "\x00"))
}

func counterOf(value []byte) uint64 {
	if len(value) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(value)
}

// Tombstone replaces an entry that was released without the runtime's own DEL. If that DEL comes
// later, it runs nothing, because its addresses may have another owner by then.
type Tombstone struct {
	Key
	NetNS   NetNS  `json:"netns"` // of the newest generation
	Reason  string `json:"reason"`
	BootID  string `json:"bootID"`
	Written Time   `json:"written"`
	// Interfaces are those in the results of the ADDs that were undone. The tombstone does not apply
	// to a DEL with the result of another ADD.
	Interfaces []Interface `json:"interfaces,omitempty"`
	// NoResult is set if the ADD failed, so that the runtime has no result of it.
	NoResult bool `json:"noResult,omitempty"`
	// Abandoned is set if an operator gave up the pending DELs. They did not run, and the runtime's
	// DEL succeeds nevertheless.
	Abandoned bool `json:"abandoned,omitempty"`
}

// The journal keeps the last maxTombstones tombstones, and of this boot those younger than
// maxTombstoneAge.
const (
	maxTombstones   = 4096
	maxTombstoneAge = 24 * time.Hour
)

// Tombstone returns the tombstone of an attachment, or nil.
func (tx *Tx) Tombstone(k Key) (*Tombstone, error) {
	value := tx.get(bucketTombstones, encodeKey(k))
	if len(value) < 8 {
		return nil, nil
	}
	t := &Tombstone{}
	if err := json.Unmarshal(value[8:], t); err != nil {
		return nil, &DamagedError{k, err}
	}
	return t, nil
}

// PutTombstone writes a tombstone and drops those that are too many or too old.
func (tx *Tx) PutTombstone(t Tombstone) error {
	if err := tx.deleteTombstone(t.Key); err != nil {
		return err
	}
	t.Written = Now()
	data, err := json.Marshal(t)
	if err != nil {
		return err
	}
	n, err := tx.next(bucketExpiry)
	if err != nil {
		return err
	}
	if err := tx.put(bucketExpiry, sequence(n), encodeKey(t.Key)); err != nil {
		return err
	}
	if err := tx.put(bucketTombstones, encodeKey(t.Key), append(sequence(n), data...)); err != nil {
		return err
	}
	return tx.prune(n, t)
}

// prune drops tombstones that are out of bounds or cannot be read. newest is the one just written,
// as number n. The oldest come first, so prune stops at the first one of this boot that stays. The
// age of one of another boot is unknown.
func (tx *Tx) prune(n uint64, newest Tombstone) error {
	var drop [][2][]byte
	c := tx.btx.Bucket(bucketExpiry).Cursor()
	for order, key := c.First(); order != nil; order, key = c.Next() {
		var t *Tombstone
		if k, err := decodeKey(key); err == nil {
			t, _ = tx.Tombstone(k)
		}
		thisBoot := t != nil && t.BootID == newest.BootID
		tooOld := thisBoot && newest.Written.Boot-t.Written.Boot > int64(maxTombstoneAge)
		tooMany := bytes.Compare(order, sequence(n-min(n, maxTombstones))) <= 0
		if t == nil || tooOld || tooMany {
			drop = append(drop, [2][]byte{bytes.Clone(order), bytes.Clone(key)})
		} else if thisBoot {
			break
		}
	}
	for _, d := range drop {
		if err := tx.delete(bucketExpiry, d[0]); err != nil {
			return err
		}
		if err := tx.delete(bucketTombstones, d[1]); err != nil {
			return err
		}
	}
	return nil
}

// deleteTombstone removes the tombstone of an attachment, if there is one.
func (tx *Tx) deleteTombstone(k Key) error {
	value := tx.btx.Bucket(bucketTombstones).Get(encodeKey(k))
	if len(value) < 8 {
		return nil
	}
	if err := tx.delete(bucketExpiry, bytes.Clone(value[:8])); err != nil {
		return err
	}
	return tx.delete(bucketTombstones, encodeKey(k))
}
