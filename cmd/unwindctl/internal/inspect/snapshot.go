package inspect

import (
	"context"
	"errors"
	"io/fs"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
)

type Snapshot struct {
	Attachments []Attachment
	Damaged     []error // of the entries that are left out
	Events      []journal.Event
	Counters    []Counter
}

type Counter struct {
	Name   string
	Labels []string
	Value  uint64
}

func (s *Snapshot) Sum(name string) (n uint64) {
	for _, c := range s.Counters {
		if c.Name == name {
			n += c.Value
		}
	}
	return n
}

// ReadSnapshot reads the journal in one transaction, in which it also calls check, if there is one.
func ReadSnapshot(
	ctx context.Context, store *journal.Store, check func(*journal.Tx) error,
) (*Snapshot, error) {
	s := &Snapshot{}
	err := store.View(ctx, func(tx *journal.Tx) error {
		*s = Snapshot{}
		var checkErr error
		if check != nil {
			checkErr = check(tx)
		}
		s.Attachments = []Attachment{}
		err := tx.All(func(e *journal.Entry, err error) error {
			if err != nil {
				s.Damaged = append(s.Damaged, err)
				return nil
			}
			s.Attachments = append(s.Attachments, describe(e))
			return nil
		})
		historyErr := tx.History(func(e journal.Event) error {
			s.Events = append(s.Events, e)
			return nil
		})
		countersErr := tx.Counters(func(name string, labels []string, n uint64) error {
			s.Counters = append(s.Counters, Counter{name, labels, n})
			return nil
		})
		return errors.Join(checkErr, err, historyErr, countersErr)
	})
	return s, err
}

// ReadJournal returns the entries of the journal but damaged ones, which the error names.
func ReadJournal(ctx context.Context, store *journal.Store) ([]Attachment, error) {
	s, err := ReadSnapshot(ctx, store, nil)
	return s.Attachments, errors.Join(append(s.Damaged, err)...)
}

func HintFor(err error) string {
	var damaged *journal.DamagedError
	switch hint := term.HintOf(err); {
	case hint != "":
		return hint
	case errors.Is(err, fs.ErrPermission):
		return "only root can read the journal; run this as root"
	case errors.Is(err, journal.ErrDamaged):
		return "the next ADD, DEL or sweep sets the file aside and starts a new one; running pods are " +
			"not affected"
	case errors.Is(err, journal.ErrBusy):
		return "another process holds the journal; try again"
	case errors.As(err, &damaged):
		return "its next ADD or DEL replaces it; the DEL uses what the runtime sends"
	}
	return ""
}
