// Package record writes records and events to the journal.
package record

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"syscall"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
)

// Recorder reads and writes the journal for one goroutine of a verb, and tracks whether the journal
// is usable.
type Recorder struct {
	Store *journal.Store
	// Lost is the reason why the verb no longer writes to the journal, or nil while it does. If Lost
	// is set, the attachment's record stays as it is.
	Lost error
	// counted is set after the verb was counted as degraded.
	counted bool
	events  []journal.Event // recorded after the next transaction
	last    *Snapshot       // the last snapshot, or nil
}

// Fork returns a new recorder of the same journal for another goroutine. It has its own pending
// events, and no snapshot.
func (r *Recorder) Fork() *Recorder { return &Recorder{Store: r.Store} }

// Event adds an event to the pending ones. counter is the name of the counter that the event
// increments, followed by its labels.
func (r *Recorder) Event(event journal.Event, counter ...string) {
	event.Count = counter
	r.events = append(r.events, event)
}

// Count adds an event that only increments a counter.
func (r *Recorder) Count(counter ...string) { r.Event(journal.Event{}, counter...) }

// Update runs a transaction, and records the pending events if it succeeds. A SIGKILL right after
// the transaction loses these events.
func (r *Recorder) Update(ctx context.Context, fn func(*journal.Tx) error) error {
	err := r.Store.Update(ctx, fn)
	if err == nil {
		r.Flush()
	}
	return err
}

// Save writes a record. The caller holds the lock of the attachment.
func (r *Recorder) Save(ctx context.Context, e *journal.Record) error {
	return r.Update(ctx, func(tx *journal.Tx) error { return tx.Put(e) })
}

// Flush records the pending events. It drops those that it cannot record.
func (r *Recorder) Flush() {
	if len(r.events) == 0 {
		return
	}
	if err := r.Store.Record(r.events...); err != nil {
		r.Store.Logger.Debug("cannot write the history", "err", err)
	}
	r.events = nil
}

// Degraded counts that the verb continues without the journal. It counts a verb once, with the
// first reason.
func (r *Recorder) Degraded(verb string, err error) {
	if !r.counted {
		r.counted = true
		r.Count(CountDegraded, verb, trouble(err))
	}
}

// EventOf returns an event of an attachment, filled from its record.
func EventOf(kind journal.EventKind, e *journal.Record) journal.Event {
	return journal.Event{Key: e.Key, Kind: kind, Pod: e.Added.Pod, Addresses: e.Addresses()}
}

// The counters, with their labels. Counters and history are for people and monitoring; unwind's
// decisions do not depend on them.
const (
	CountRollbacks  = "rollbacks"           // the plugin that failed; the result: complete, pending
	CountSwept      = "swept"               // reason (see decide.Reason)
	CountDuplicates = "duplicate_addresses" // no labels
	CountDropped    = "dropped_deletes"     // the plugin whose DEL was dropped
	CountDegraded   = "degraded"            // verb; reason (see trouble)
)

// trouble returns one word for the cause of a journal failure.
func trouble(err error) string {
	for _, t := range []struct {
		word string
		err  error
	}{
		{"busy", journal.ErrBusy}, {"busy", context.DeadlineExceeded},
		{"full", syscall.ENOSPC}, {"full", syscall.EDQUOT}, {"read-only", syscall.EROFS},
		{"permission", syscall.EACCES}, {"permission", syscall.EPERM}, {"newer", journal.ErrNewer},
	} {
		if errors.Is(err, t.err) {
			return t.word
		}
	}
	return "other"
}

// Snapshot is a copy of the records in the journal, from one reading, for the decisions of a verb.
// All callers get the same *journal.Record, so a caller must clone a record before it changes it.
type Snapshot struct {
	*journal.Tx
	// Err is the reason why the journal could not be read, or nil. After an error, the snapshot is
	// empty, and unwind undoes no ADD on its own. The runtime's DEL and a rollback continue, and
	// assume that no address has another owner.
	Err error
}

// TakeSnapshot copies the records of a transaction into a new snapshot of the recorder.
func (r *Recorder) TakeSnapshot(tx *journal.Tx) error {
	records, err := tx.Snapshot()
	if err == nil {
		r.last = &Snapshot{Tx: records}
	}
	return err
}

// Renew reads the journal again. A verb that has just acquired a lock needs this, because another
// process may have changed the records before.
func (r *Recorder) Renew(ctx context.Context) error {
	err := r.Refresh(ctx)
	if err != nil {
		r.last = &Snapshot{&journal.Tx{}, err}
	}
	return err
}

// Refresh is like Renew, but keeps the last snapshot after an error.
func (r *Recorder) Refresh(ctx context.Context) error { return r.Store.View(ctx, r.TakeSnapshot) }

// Invalidate drops the snapshot, so that the next call of Snapshot reads the journal again.
func (r *Recorder) Invalidate() { r.last = nil }

// Snapshot returns the last snapshot of the journal. If there is none, it reads the journal.
func (r *Recorder) Snapshot(ctx context.Context) *Snapshot {
	if r.last == nil && r.Renew(context.WithoutCancel(ctx)) != nil {
		r.Store.Logger.Warn("cannot read the journal", "err", r.last.Err)
	}
	return r.last
}

// AnyLives reports whether any record that is live or being added meets a condition. It also
// returns true if a record is damaged.
func (s *Snapshot) AnyLives(is func(*journal.Record) bool) (lives bool) {
	err := s.All(func(e *journal.Record, err error) error {
		if err == nil {
			lives = lives || decide.KeepsContainer(e.State) && is(e)
		}
		return err
	})
	return lives || err != nil
}

// AddedAgain returns the records of other ADDs of e's attachment, except abandoned records.
func (s *Snapshot) AddedAgain(e *journal.Record) ([]*journal.Record, error) {
	records, err := s.Pending(e.Key)
	return slices.DeleteFunc(records,
		func(o *journal.Record) bool { return o.Number == e.Number }), err
}

// Others returns the records of other attachments that claim one of the addresses.
func (s *Snapshot) Others(
	key journal.Key, addresses []netip.Addr,
) (others []*journal.Record, err error) {
	for _, address := range addresses {
		records, err := s.ByAddress(address)
		if err != nil {
			return nil, err
		}
		for _, e := range records {
			known := func(o *journal.Record) bool { return o.Key == e.Key && o.Number == e.Number }
			if e.Key != key && !slices.ContainsFunc(others, known) {
				others = append(others, e)
			}
		}
	}
	return others, nil
}

// Claims reports whether a record claims an address of a pool. It also returns true if the records
// cannot be read.
func (s *Snapshot) Claims(pool string, address netip.Addr) bool {
	records, err := s.ByAddress(address)
	return s.Err != nil || err != nil || slices.ContainsFunc(records, func(e *journal.Record) bool {
		return slices.ContainsFunc(e.Got.Claims,
			func(c journal.Claim) bool { return c.Pool == pool && c.Address == address })
	})
}

// Containers returns the container IDs of all attachments. damaged is set if the journal or a
// record cannot be read. Such a record may belong to any container, as its key may be damaged too.
func (s *Snapshot) Containers() (known map[string]bool, damaged bool) {
	known, damaged = map[string]bool{}, s.Err != nil
	_ = s.Outlines(func(o journal.Outline, err error) error { // the function returns no error
		known[o.ContainerID], damaged = true, damaged || err != nil
		return nil
	})
	return known, damaged
}
