package plugin

import (
	"context"
	"errors"
	"os"
	"strings"
	"syscall"
	"time"

	"cni-unwind/journal"
)

// The counters that the journal keeps, with their labels. They and the history are for people and their monitoring: nothing is
// decided by them.
const (
	CountRollbacks  = "rollbacks"           // plugin: the one that failed; result: complete, pending
	CountSwept      = "swept"               // reason, see cause
	CountDuplicates = "duplicate_addresses" //
	CountDegraded   = "degraded"            // verb; reason, see trouble
	LastSweep       = "last_sweep"          // the time of the last sweep of all networks that came to its end, in Unix seconds
)

// note is what the next transaction writes beside its entry.
type note struct {
	event   *journal.Event
	counter []string // name and labels
}

// tell notes an event, and counts it.
func (o *op) tell(event journal.Event, counter ...string) {
	o.notes = append(o.notes, note{event: &event, counter: counter})
}

// eventOf begins an event of an attachment, with what the entry knows now.
func eventOf(kind journal.EventKind, e *journal.Entry) journal.Event {
	return journal.Event{Key: e.Key, Kind: kind, Pod: e.Pod, Addresses: e.Addresses()}
}

func (o *op) count(counter ...string) { o.notes = append(o.notes, note{counter: counter}) }

// update runs a transaction that also writes the notes.
func (o *op) update(ctx context.Context, fn func(*journal.Tx) error) error {
	err := o.store.Update(ctx, func(tx *journal.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		for _, n := range o.notes {
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
		o.notes = nil
	}
	return err
}

// lastNotes writes the notes that no transaction came after: a journal that failed may be there again. Those that cannot be
// written are lost.
func (o *op) lastNotes() {
	if len(o.notes) == 0 {
		return
	}
	defer func() { o.notes = nil }()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(o.ctx), 300*time.Millisecond)
	defer cancel()
	if err := o.update(ctx, func(*journal.Tx) error { return nil }); err != nil {
		o.log.Debug("the history cannot be written", "err", err)
	}
}

// degraded counts a verb that goes on without the journal: once, for the first reason.
func (o *op) degraded(verb string, err error) {
	if !o.alone {
		o.alone = true
		o.count(CountDegraded, verb, trouble(err))
	}
}

// trouble says in a word why the journal failed.
func trouble(err error) string {
	for _, t := range []struct {
		word string
		errs []error
	}{
		{"busy", []error{journal.ErrBusy, context.DeadlineExceeded}},
		{"full", []error{syscall.ENOSPC, syscall.EDQUOT}},
		{"read-only", []error{syscall.EROFS}},
		{"permission", []error{syscall.EACCES, syscall.EPERM}},
		{"newer", []error{journal.ErrNewer}},
	} {
		for _, is := range t.errs {
			if errors.Is(err, is) {
				return t.word
			}
		}
	}
	return "other"
}

// cause says in a word why an attachment was released, of the reason that a verdict gave or that is on record.
func cause(reason string) string {
	switch {
	case reason == reasonForeign:
		return "foreign"
	case strings.HasPrefix(reason, reasonFailed):
		return "failed-add"
	case reason == reasonEarlier:
		return "earlier-boot"
	case reason == reasonCutOff:
		return "cut-off"
	case reason == reasonGone:
		return "netns-gone"
	case reason == reasonUnlisted:
		return "unlisted"
	}
	return "requested" // by the runtime, or with another ADD of the container
}

// stale says whether this is a sweep of all networks, and the last one a minute ago.
func (s *sweeping) stale() bool {
	now := uint64(time.Now().Unix())
	lately := s.last <= now && now-s.last < 60 // else, one of a clock that was wrong then
	return s.Network == "" && s.Attachment == nil && !lately
}

// noteEnd notes that a sweep of all networks came to its end, once a minute: a STATUS comes every few seconds.
func (s *sweeping) noteEnd(ctx context.Context) {
	if s.DryRun || !s.stale() || ctx.Err() != nil {
		return
	}
	if _, err := os.Lstat(s.store.Path()); err != nil { // none is made for this
		return
	}
	if err := s.update(ctx, func(tx *journal.Tx) error { return tx.SetCounter(uint64(time.Now().Unix()), LastSweep) }); err != nil {
		s.log.Debug("the time of the sweep cannot be written", "err", err)
	}
}
