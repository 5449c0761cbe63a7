package record

import (
	"context"
	"net/netip"
	"slices"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
)

// Snapshot is a copy of the records in the journal, from one reading, for all decisions of a verb.
// It returns the same record each time, so a caller that changes one clones it first.
type Snapshot struct {
	*journal.Tx
	// Err is the reason why the journal could not be read. The snapshot is then empty: unwind keeps
	// every ADD that it would undo by itself, but the runtime's own DEL and a rollback continue, and
	// assume that no address has another owner.
	Err error
}

// Look makes the records of a transaction the recorder's snapshot.
func (r *Recorder) Look(tx *journal.Tx) error {
	records, err := tx.Snapshot()
	if err == nil {
		r.last = &Snapshot{Tx: records}
	}
	return err
}

// Renew reads the journal again: under a lock that was taken since, and before each late DEL.
func (r *Recorder) Renew(ctx context.Context) error {
	err := r.Store.View(ctx, r.Look)
	if err != nil {
		r.last = &Snapshot{&journal.Tx{}, err}
	}
	return err
}

// Forget drops the snapshot, so that the next call of Snapshot reads the journal again.
func (r *Recorder) Forget() { r.last = nil }

// Snapshot returns the last reading of the journal. It reads the journal if there is none.
func (r *Recorder) Snapshot(ctx context.Context) *Snapshot {
	if r.last == nil && r.Renew(context.WithoutCancel(ctx)) != nil {
		r.Store.Logger.Warn("cannot read the journal", "err", r.last.Err)
	}
	return r.last
}

// AnyLives reports whether any record that is live or being added matches, or is damaged.
func (s *Snapshot) AnyLives(is func(*journal.Entry) bool) (lives bool) {
	err := s.All(func(e *journal.Entry, err error) error {
		if err == nil {
			lives = lives || decide.KeepsContainer(e.Undo.State) && is(e)
		}
		return err
	})
	return lives || err != nil
}

// AddedAgain returns the records of an attachment's other ADDs, given the record of one.
func (s *Snapshot) AddedAgain(e *journal.Entry) ([]*journal.Entry, error) {
	records, err := s.Pending(e.Key)
	return slices.DeleteFunc(records,
		func(o *journal.Entry) bool { return o.Number == e.Number }), err
}

// Others returns the records of other attachments that claim one of the addresses.
func (s *Snapshot) Others(
	key journal.Key, addresses []netip.Addr,
) (others []*journal.Entry, err error) {
	for _, address := range addresses {
		entries, err := s.ByAddress(address)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			known := func(o *journal.Entry) bool { return o.Key == e.Key && o.Number == e.Number }
			if e.Key != key && !slices.ContainsFunc(others, known) {
				others = append(others, e)
			}
		}
	}
	return others, nil
}

// Claims reports whether a record claims an address of a pool. It returns true if the records
// cannot be read.
func (s *Snapshot) Claims(pool string, address netip.Addr) bool {
	records, err := s.ByAddress(address)
	return s.Err != nil || err != nil || slices.ContainsFunc(records, func(e *journal.Entry) bool {
		return slices.ContainsFunc(e.Got.Claims,
			func(c journal.Claim) bool { return c.Pool == pool && c.Address == address })
	})
}

// Containers returns the container IDs of all attachments. damaged is set if a record cannot be
// read: its key may be damaged too, so it may be any container's.
func (s *Snapshot) Containers() (known map[string]bool, damaged bool) {
	known, damaged = map[string]bool{}, s.Err != nil
	_ = s.Outlines(func(o journal.Outline, err error) error { // fn never fails
		known[o.ContainerID], damaged = true, damaged || err != nil
		return nil
	})
	return known, damaged
}
