// Package record writes entries, events and counters to the journal.
package record

import (
	"context"
	"errors"
	"log/slog"
	"syscall"
	"time"

	"cni-unwind/journal"
)

// Recorder reads and writes the journal for one goroutine of a verb, and tracks whether it can.
type Recorder struct {
	Store *journal.Store
	Log   *slog.Logger
	Trace string // of the runtime's call (W3C Trace Context), or ""
	// Unreadable is set after the journal could not be opened, so that the verb does not wait again.
	Unreadable bool
	// Unwritable is set if the verb continues without writing; the attachment's entry stays as it is.
	Unwritable bool
	// counted is set once the verb is counted as degraded.
	counted bool
	events  []func(*journal.Tx) error // to be written by the next transaction
}

// Fork returns a recorder for another goroutine, with its own pending events.
func (r *Recorder) Fork() *Recorder { return &Recorder{Store: r.Store, Log: r.Log, Trace: r.Trace} }

// Readable returns nil for a damaged entry, which the next ADD overwrites.
func Readable(e *journal.Entry, err error) (*journal.Entry, error) {
	var damaged *journal.DamagedError
	if errors.As(err, &damaged) {
		return nil, nil
	}
	return e, err
}

// Event adds an event, and its counter, to the pending events.
func (r *Recorder) Event(event journal.Event, counter ...string) {
	event.Trace = r.Trace
	r.events = append(r.events, func(tx *journal.Tx) error { return tx.Record(event) })
	if len(counter) > 0 {
		r.Count(counter...)
	}
}

// Count adds a count to the pending events: the name of a counter, and its labels.
func (r *Recorder) Count(counter ...string) {
	r.events = append(r.events,
		func(tx *journal.Tx) error { return tx.Count(counter[0], counter[1:]...) })
}

// Undoable returns a function that drops the events added since, for a transaction that failed or
// runs twice.
func (r *Recorder) Undoable() (drop func()) {
	n := len(r.events)
	return func() { r.events = r.events[:min(n, len(r.events))] }
}

// Update runs a transaction that also writes the pending events.
func (r *Recorder) Update(ctx context.Context, fn func(*journal.Tx) error) error {
	err := r.Store.Update(ctx, func(tx *journal.Tx) error {
		err := fn(tx)
		for i := 0; err == nil && i < len(r.events); i++ {
			err = r.events[i](tx)
		}
		return err
	})
	if err == nil {
		r.events = nil
	}
	return err
}

// Save writes an entry whose lock the verb holds.
func (r *Recorder) Save(ctx context.Context, e *journal.Entry) error {
	return r.Update(ctx, func(tx *journal.Tx) error { return tx.Put(e) })
}

// Flush writes the events that no later transaction wrote: a journal that failed may work again.
// Events that it cannot write are lost.
func (r *Recorder) Flush(ctx context.Context) {
	if len(r.events) == 0 {
		return
	}
	defer func() { r.events = nil }()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 300*time.Millisecond)
	defer cancel()
	if err := r.Update(ctx, func(*journal.Tx) error { return nil }); err != nil {
		r.Log.Debug("cannot write the history", "err", err)
	}
}

// Degraded counts a verb that continues without the journal, once, with the first reason.
func (r *Recorder) Degraded(verb string, err error) {
	if !r.counted {
		r.counted = true
		r.Count(CountDegraded, verb, trouble(err))
	}
}

// Read runs a read-only transaction. If the journal is missing or cannot be read, fn finds nothing.
func (r *Recorder) Read(ctx context.Context, fn func(*journal.Tx) error) {
	if r.Unreadable {
		return
	}
	reached := false
	err := r.Store.View(ctx, func(tx *journal.Tx) error {
		reached = true
		return fn(tx)
	})
	if err != nil {
		r.Log.Warn("cannot read the journal", "err", err)
		r.Unreadable = !reached
	}
}

// EventOf begins an event of an attachment from the entry as it is now.
func EventOf(kind journal.EventKind, e *journal.Entry) journal.Event {
	return journal.Event{Key: e.Key, Kind: kind, Pod: e.Pod, Addresses: e.Addresses()}
}

// The counters in the journal, with their labels. Counters and history are for people and
// monitoring; unwind's decisions do not depend on them.
const (
	CountRollbacks  = "rollbacks"           // plugin: the one that failed; result: complete, pending
	CountSwept      = "swept"               // reason, see alive.Reason
	CountDuplicates = "duplicate_addresses" //
	CountDegraded   = "degraded"            // verb; reason, see trouble
	// end of the last complete sweep of all networks, Unix time
	LastSweep = "last_sweep"
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
