// Package record writes entries and events to the journal.
package record

import (
	"context"
	"errors"
	"syscall"

	"cni-unwind/journal"
)

// Recorder reads and writes the journal for one goroutine of a verb, and tracks whether the journal
// is usable.
type Recorder struct {
	Store *journal.Store
	// Lost is the reason why the verb continues without writing the journal, in which the
	// attachment's record then stays as it is. It is nil if the verb writes.
	Lost error
	// counted is set after the verb was counted as degraded.
	counted bool
	events  []journal.Event // recorded after the next transaction
	last    *Snapshot       // the last reading, or nil
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

// Update runs a transaction, and records the pending events if it succeeds. SIGKILL after the
// transaction loses these events.
func (r *Recorder) Update(ctx context.Context, fn func(*journal.Tx) error) error {
	err := r.Store.Update(ctx, fn)
	if err == nil {
		r.Flush()
	}
	return err
}

// Save writes an entry. The caller holds the lock of the attachment.
func (r *Recorder) Save(ctx context.Context, e *journal.Entry) error {
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

// EventOf returns an event of an attachment, filled from the current entry.
func EventOf(kind journal.EventKind, e *journal.Entry) journal.Event {
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
