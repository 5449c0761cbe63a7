package plugin

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"cni-unwind/journal"
)

// recorder reads and writes the journal for a verb, and knows whether it can.
type recorder struct {
	store *journal.Store
	log   *slog.Logger
	trace string // of the runtime's call, see traceparent
	// unreadable is set if the journal could not be opened: the verb does not wait for it again.
	unreadable bool
	// unwritable is set if the verb goes on without writing: the attachment's entry stays as it is.
	unwritable bool
	// counted is set once the verb is counted as one that goes on without the journal.
	counted bool
	events  []pendingEvent // for the next transaction
}

// readable returns nil for a damaged entry: the ADD writes over it.
func readable(e *journal.Entry, err error) (*journal.Entry, error) {
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

// recordEvent adds an event, and its counter, to the pending events.
func (r *recorder) recordEvent(event journal.Event, counter ...string) {
	event.Trace = r.trace
	r.events = append(r.events, pendingEvent{event: &event, counter: counter})
}

func (r *recorder) count(counter ...string) {
	r.events = append(r.events, pendingEvent{counter: counter})
}

// update runs a transaction that also writes the pending events.
func (r *recorder) update(ctx context.Context, fn func(*journal.Tx) error) error {
	err := r.store.Update(ctx, func(tx *journal.Tx) error {
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

// save writes an entry whose lock the verb holds.
func (r *recorder) save(ctx context.Context, e *journal.Entry) error {
	return r.update(ctx, func(tx *journal.Tx) error { return tx.Put(e) })
}

// flushEvents writes the events that no later transaction wrote: a journal that failed may work
// again. Events that it cannot write are lost.
func (r *recorder) flushEvents(ctx context.Context) {
	if len(r.events) == 0 {
		return
	}
	defer func() { r.events = nil }()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 300*time.Millisecond)
	defer cancel()
	if err := r.update(ctx, func(*journal.Tx) error { return nil }); err != nil {
		r.log.Debug("the history cannot be written", "err", err)
	}
}

// degraded counts a verb that goes on without the journal, once, with the first reason.
func (r *recorder) degraded(verb string, err error) {
	if !r.counted {
		r.counted = true
		r.count(CountDegraded, verb, trouble(err))
	}
}

// read runs a read-only transaction. If the journal is missing or cannot be read, fn finds nothing.
func (r *recorder) read(ctx context.Context, fn func(*journal.Tx) error) {
	if r.unreadable {
		return
	}
	reached := false
	err := r.store.View(ctx, func(tx *journal.Tx) error {
		reached = true
		return fn(tx)
	})
	if err != nil {
		r.log.Warn("the journal cannot be read", "err", err)
		r.unreadable = !reached
	}
}
