// Package record writes entries, events and counters to the journal.
package record

import (
	"context"
	"errors"
	"log/slog"
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
	events  []pendingEvent // for the next transaction
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

// pendingEvent is an event or a count that the next transaction also writes.
type pendingEvent struct {
	event   *journal.Event
	counter []string // name and labels
}

// Event adds an event, and its counter, to the pending events.
func (r *Recorder) Event(event journal.Event, counter ...string) {
	event.Trace = r.Trace
	r.events = append(r.events, pendingEvent{event: &event, counter: counter})
}

// Count adds a count to the pending events.
func (r *Recorder) Count(counter ...string) {
	r.events = append(r.events, pendingEvent{counter: counter})
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
		if err := fn(tx); err != nil {
			return err
		}
		for _, n := range r.events {
			if n.event != nil {
				if err := tx.Record(*n.event); err != nil {
					return err
				}
			}
			if len(n.counter) > 0 {
				if err := tx.Count(n.counter[0], n.counter[1:]...); err != nil {
					return err
				}
			}
		}
		return nil
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
