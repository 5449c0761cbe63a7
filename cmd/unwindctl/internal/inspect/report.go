package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
	"cni-unwind/plugin"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// Report is the state of a node at one moment: its attachments, its reserved addresses, and a
// sweep's verdict on each. Commands print parts of it, so they don't contradict each other.
type Report struct {
	Scope
	Attachments []Attachment    // in the journal, sorted by their keys
	Damaged     []error         // one for each damaged record, which Attachments leaves out
	Findings    []sweep.Finding // on attachments and addresses, also those outside the journal
	Pools       []*Pool
	Events      []journal.Event
	Counters    Counters // counted from the events
	LastSweep   time.Time
	Guard       *sweep.MassReleaseError // not nil if so many seem dead that a sweep keeps them

	List      *facts.List // the runtime's list; nil without one
	ListErr   error       // why the runtime returned no list
	NoRuntime bool        // --cri auto found no runtime

	Unwritable error // why unwind's plugin cannot write to the journal
	JournalErr error // why the journal cannot be read; Findings is then nil
	HistoryErr error
	SweepErr   error // why a sweep leaves out conflists, pools or libcni's cache
	PoolErr    error // of pools that cannot be read completely

	pods map[string]journal.Pod // by container ID, from the findings and libcni's cache
}

// NewReport judges every attachment in the scope as a sweep would, and reads the pools. It is
// read-only. It returns a UsageError if the flags, or the list that they name, cannot be used.
func NewReport(ctx context.Context, from term.Streams, of Scope) (*Report, error) {
	return Sweep(ctx, Plugin(from.Err), from.In, of, sweep.Options{DryRun: true, Cache: true})
}

// Sweep runs a sweep of the scope, and returns its findings in a report of the node. NewReport
// calls it with opts.DryRun.
func Sweep(ctx context.Context, p *plugin.Plugin, stdin io.Reader, of Scope, opts sweep.Options) (
	*Report, error,
) {
	r := &Report{Scope: of, Unwritable: Unwritable(of.StateDir), Attachments: []Attachment{},
		Pools: []*Pool{}}
	if of.Earlier != nil {
		r.List, r.ListErr, r.NoRuntime = of.Earlier.List, of.Earlier.ListErr, of.Earlier.NoRuntime
	} else {
		r.List, r.ListErr = of.List(ctx, stdin)
	}
	var usage term.UsageError
	switch {
	case errors.As(r.ListErr, &usage):
		return nil, r.ListErr
	case errors.Is(r.ListErr, node.ErrNoRuntime):
		r.ListErr, r.NoRuntime = nil, true
	}
	found, networks, poolErr := of.Pools()
	opts.Network, opts.Networks, opts.List, opts.Force = of.Network, networks, r.List, of.Force
	if opts.Attachment == nil {
		opts.Pools = found
	}
	findings, err := p.Sweep(ctx, of.StateDir, opts)
	if errors.As(err, &r.Guard) { // the findings report it
		err = nil
	}
	r.take(findings)
	if findings == nil {
		r.JournalErr, err = err, nil
	}
	r.SweepErr, r.PoolErr = errors.Join(poolErr, err), r.readPools(found)
	store := &journal.Store{Dir: of.StateDir}
	events, err := store.History()
	r.HistoryErr, r.LastSweep = err, store.LastSweep()
	r.Counters.Add(events)
	r.Events = Told(events)
	return r, nil
}

// take adds a sweep's findings to the report, and the records of the journal that they contain.
func (r *Report) take(findings []sweep.Finding) {
	slices.SortStableFunc(findings,
		func(a, b sweep.Finding) int { return cmp.Compare(a.Key.String(), b.Key.String()) })
	r.Findings, r.pods = findings, map[string]journal.Pod{}
	for i := range findings {
		f := &findings[i]
		r.pods[f.ContainerID] = f.Pod
		f.Reason.Text = strings.Replace(f.Reason.Text, "unwindctl sweep --force",
			"unwindctl sweep"+r.ListFlags()+" --force", 1)
		var damaged *journal.DamagedError
		if errors.As(f.Err, &damaged) {
			r.Damaged = append(r.Damaged, f.Err)
		}
		for i, record := range f.Records {
			of := f
			if i > 0 {
				of = &f.Older[i-1]
			}
			r.Attachments = append(r.Attachments, judged(record, of))
		}
	}
	if r.List == nil { // with a list, the findings name the pods
		cached, _ := new(facts.Node).Cache()
		for _, c := range cached {
			r.pods[c.ContainerID] = c.Pod()
		}
	}
}

// Duplicates describes each address that two live attachments have on their interfaces, if both got
// it from one pool, or from pools of one bridge (see netconf.SharedAddresses).
func (r *Report) Duplicates() (all []string) {
	owners := map[netip.Addr][]*Attachment{}
	for i := range r.Attachments {
		a := &r.Attachments[i]
		for _, address := range a.Addresses {
			for _, other := range owners[address] {
				if other.Key != a.Key && slices.Contains(netconf.SharedAddresses(a.of, other.of), address) &&
					a.uses(address) && other.uses(address) {
					all = append(all, fmt.Sprintf("%s to %s and %s", address, other.Key, a.Key))
				}
			}
			owners[address] = append(owners[address], a)
		}
	}
	return all
}

func (a *Attachment) uses(address netip.Addr) bool {
	has, _ := facts.AddressesOf(a.of) // none if the namespace cannot be found
	return a.Verdict == decide.Live && slices.Contains(has, address)
}

// Err returns why the journal, or a part of it, cannot be read.
func (r *Report) Err() error { return errors.Join(errors.Join(r.Damaged...), r.JournalErr) }

// Warn prints a warning if the runtime returned no list, or if unwind cannot write to its journal.
func (r *Report) Warn(stderr io.Writer) {
	if r.ListErr != nil {
		_ = term.Print(stderr, fmt.Sprintf("warning: %v\n", r.ListErr))
	}
	if r.Unwritable != nil {
		_ = term.Print(stderr,
			fmt.Sprintf("warning: the journal cannot be written, so ADDs run without it or fail: %v\n",
				r.Unwritable))
	}
}

// Plugin returns unwind's plugin for commands that judge, sweep or forget attachments. It does not
// log, because the command prints the findings.
func Plugin(stderr io.Writer) *plugin.Plugin {
	return &plugin.Plugin{Log: slog.New(slog.DiscardHandler), Env: undo.Env{
		Stderr: stderr, Budgets: undo.DefaultBudgets, Runner: &delegate.Processes{},
	}}
}

// Counters are counters for metrics. Events in the history increment them.
type Counters []Counter

type Counter struct {
	Name   string
	Labels []string
	Value  uint64
	Last   time.Time // when an event last incremented it
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
		(*c)[i].Last = e.At.Wall
	}
}

// Told returns the events to show, with Count cleared. It omits events that only increment a
// counter.
func Told(events []journal.Event) (told []journal.Event) {
	for _, e := range events {
		e.Count = nil
		if e.Kind != "" {
			told = append(told, e)
		}
	}
	return told
}

// ReadJournal returns the journal's records without verdicts. It leaves out damaged ones; the error
// names them.
func ReadJournal(ctx context.Context, store *journal.Store) (all []Attachment, err error) {
	var damaged []error
	err = store.View(ctx, func(tx *journal.Tx) error {
		all, damaged = nil, nil
		return tx.All(func(e *journal.Record, err error) error {
			if err != nil {
				damaged = append(damaged, err)
			} else {
				all = append(all, describe(e))
			}
			return nil
		})
	})
	return all, errors.Join(append(damaged, err)...)
}

func HintFor(err error) string {
	var damaged *journal.DamagedError
	switch hint := term.HintOf(err); {
	case hint != "":
		return hint
	case errors.Is(err, fs.ErrPermission):
		return "run this as root"
	case errors.Is(err, journal.ErrDamaged):
		return "wait for the next ADD or DEL through unwind, which renames the file and starts a " +
			"new journal; if unwind is off, rename the file yourself. Running pods are not affected, " +
			"but pending DELs are lost"
	case errors.Is(err, journal.ErrNewer):
		return "install that release or a later one"
	case errors.Is(err, journal.ErrBusy):
		return "another process is using the journal; try again"
	case errors.As(err, &damaged) && damaged.Key.Malformed():
		return "no ADD or DEL replaces this record; to drop it, run unwindctl forget " +
			damaged.Key.String()
	case errors.As(err, &damaged):
		return "the attachment's next ADD or DEL replaces the record. If its container no longer " +
			"exists, run unwindctl forget " + damaged.Key.String()
	}
	return ""
}
