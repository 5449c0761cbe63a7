package inspect

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"slices"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/sweep"
)

// Report is the result of a sweep's dry run on this node, with the node's pools.
type Report struct {
	Findings []sweep.Finding
	SweepErr error                   // Findings may be set nevertheless
	Guard    *sweep.MassReleaseError // not nil if so many seem dead that a sweep would keep them
	Pools    []*Pool
	PoolErr  error                  // of pools that could not be read, and of the list of pods
	asked    bool                   // the flags select a list of pods
	sweep    string                 // the command for a sweep with the same list
	pods     map[string]journal.Pod // by container ID, from the findings and libcni's cache
}

// Look judges every attachment as a sweep would, and reads the pools. It is read-only.
func Look(ctx context.Context, from term.Streams, of Scope) *Report {
	list, listErr := of.List(ctx, from.In)
	found, err := of.Pools()
	n := &Report{Pools: []*Pool{}, asked: of.asks()}
	n.Findings, n.SweepErr = Plugin(from.Err).Sweep(ctx, of.StateDir,
		sweep.Job{Network: of.Network, List: list, Pools: found, Cache: true, DryRun: true})
	of.GiveList(n.Findings)
	n.sweep = "unwindctl sweep" + of.ListFlags()
	if errors.As(n.SweepErr, &n.Guard) { // each finding reports it
		n.SweepErr = nil
	}
	n.pods = map[string]journal.Pod{}
	if cached, _ := new(facts.Node).Cache(); list == nil { // with a list, the findings name these pods
		for _, c := range cached {
			n.pods[c.ContainerID] = c.Pod()
		}
	}
	for _, f := range n.Findings {
		n.pods[f.ContainerID] = f.Pod
	}
	errs := []error{err}
	for _, one := range found {
		p, err := readPool(one, n)
		errs = append(errs, err)
		if p != nil {
			n.Pools = append(n.Pools, p)
		}
	}
	n.PoolErr = errors.Join(append(errs, listErr)...)
	return n
}

// ReadPools reads every pool, and judges the owners of its addresses as a sweep would. The error
// names the pools that cannot be read; ReadPools still returns the others. Without permission to
// read the journal it returns no pools, because all owners would be unknown.
func ReadPools(ctx context.Context, from term.Streams, of Scope) ([]*Pool, error) {
	n := Look(ctx, from, of)
	if n.Findings == nil && errors.Is(n.SweepErr, fs.ErrPermission) {
		n.Pools = nil
	}
	return n.Pools, errors.Join(n.PoolErr, n.SweepErr)
}

type Snapshot struct {
	Attachments []Attachment
	Damaged     []error // one for each damaged entry, which Attachments leaves out
	Events      []journal.Event
	Counters    Counters // counted from the events
	LastSweep   time.Time
}

// Counters are counters for metrics. Events in the history increment them.
type Counters []Counter

type Counter struct {
	Name   string
	Labels []string
	Value  uint64
}

// Add increments the counters that the events name.
func (c *Counters) Add(events []journal.Event) {
	for _, e := range events {
		if len(e.Count) == 0 {
			continue
		}
		i := slices.IndexFunc(*c, func(is Counter) bool {
			return is.Name == e.Count[0] && slices.Equal(is.Labels, e.Count[1:])
		})
		if i < 0 {
			i = len(*c)
			*c = append(*c, Counter{Name: e.Count[0], Labels: e.Count[1:]})
		}
		(*c)[i].Value++
	}
}

func (c Counters) Sum(name string) (n uint64) {
	for _, is := range c {
		if is.Name == name {
			n += is.Value
		}
	}
	return n
}

// ReadSnapshot reads the history and, in one transaction, the journal. It calls check in the same
// transaction, unless check is nil.
func ReadSnapshot(
	ctx context.Context, store *journal.Store, check func(*journal.Tx) error,
) (*Snapshot, error) {
	s := &Snapshot{LastSweep: store.LastSweep()}
	events, historyErr := store.History()
	s.Counters.Add(events)
	s.Events = Told(events)
	return s, cmp.Or(s.read(ctx, store, check), historyErr)
}

func (s *Snapshot) read(
	ctx context.Context, store *journal.Store, check func(*journal.Tx) error,
) error {
	return store.View(ctx, func(tx *journal.Tx) error {
		var checkErr error
		if check != nil {
			checkErr = check(tx)
		}
		s.Attachments, s.Damaged = []Attachment{}, nil
		if errors.Is(checkErr, journal.ErrDamaged) {
			return checkErr
		}
		return errors.Join(checkErr, tx.All(func(e *journal.Entry, err error) error {
			if err != nil {
				s.Damaged = append(s.Damaged, err)
				return nil
			}
			s.Attachments = append(s.Attachments, describe(e))
			return nil
		}))
	})
}

// Told returns the events to show, with Count cleared. It omits events that only increment a
// counter.
func Told(events []journal.Event) (told []journal.Event) {
	for _, e := range events {
		if e.Count = nil; e.Kind != "" {
			told = append(told, e)
		}
	}
	return told
}

// ReadJournal returns the journal's entries. It leaves out damaged entries; the error names them.
func ReadJournal(ctx context.Context, store *journal.Store) ([]Attachment, error) {
	s := &Snapshot{}
	err := s.read(ctx, store, nil)
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
		return "the next ADD or DEL through unwind sets the file aside and starts a new journal; " +
			"running pods are not affected. If unwind is off, rename the file yourself"
	case errors.Is(err, journal.ErrBusy):
		return "another process is using the journal; try again"
	case errors.As(err, &damaged):
		return "the attachment's next ADD or DEL replaces the entry; the DEL uses the runtime's " +
			"configuration"
	}
	return ""
}
