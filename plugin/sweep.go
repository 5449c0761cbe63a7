package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// Sweep is a search through the journal for attachments that are dead, and their release.
type Sweep struct {
	Network    string       // only this network; "" for all
	Attachment *journal.Key // only this attachment; nil for all
	List       *List        // what the runtime says is attached; nil if it has not said
	Pools      []Pool       // of host-local, to be compared with the journal
	DryRun     bool         // decide, and release nothing
	Force      bool         // release also what the brake would keep, see BrakeError
	// Progress, if it is set, is called after each attachment that was tried, by one goroutine at a time.
	Progress func(done, of int)
}

// BrakeError says that a sweep has kept attachments that seem dead because they are too many: more than 10 and more than
// 30 % of those of this boot that the journal has as live. Rather than that most of a node's pods have died at once, the
// sweep is mistaken.
type BrakeError struct{ Dead, Live int }

func (e *BrakeError) Error() string {
	return fmt.Sprintf("%d of the %d live attachments of this boot seem dead, too many to be believed; they are kept. "+
		"If they are dead: unwindctl sweep --force", e.Dead, e.Live)
}

// Sweep searches the journal in a state folder. It returns what it found of every attachment, and an error if the journal
// could not be read or the brake was put on. Attachments are judged by what this process sees where their ADDs ran: from
// elsewhere they are Unknown and nothing is done.
func (p *Plugin) Sweep(ctx context.Context, stateDir string, s Sweep) ([]Finding, error) {
	conf := defaultConf()
	conf.StateDir, conf.LogLevel = stateDir, slog.LevelWarn
	o, closeLog := p.newOp(ctx, &skel.CmdArgs{}, conf)
	defer closeLog()
	return (&sweeping{op: o, Sweep: s, eager: true}).run(ctx)
}

// sweeping is a sweep under way.
//
//  1. Read the journal, judge every entry. The locks are only looked at.
//  2. Put on the brake, if too many live ones would go.
//  3. Settle those that are dead, the ones longest untouched first, some in parallel. Each under its lock, which is not
//     waited for, and judged again by what the journal says then.
//  4. Settle those whose DELs were parked because of one that is released now.
//  5. Compare the pools of host-local with what the journal says after that.
type sweeping struct {
	*op
	Sweep
	last  uint64 // when the last sweep of all networks ended, in Unix seconds
	eager bool   // the runtime or a person asked for it: what has failed before does not wait for its next try
}

func (s *sweeping) run(ctx context.Context) ([]Finding, error) {
	s.list = s.List
	findings, err := s.plan(ctx)
	var brake *BrakeError
	if err != nil && !errors.As(err, &brake) {
		return findings, err
	}
	if !s.DryRun {
		s.settleAll(ctx, findings)
		if s.eager || s.stale() {
			err = errors.Join(err, s.store.ForgetStray(ctx))
		}
	}
	if brake != nil {
		s.list = nil // it is not to be believed
	}
	for _, pool := range s.Pools {
		if !s.eager && !pool.full(s.op) {
			continue
		}
		more, poolErr := s.reconcile(ctx, pool)
		findings, err = append(findings, more...), errors.Join(err, poolErr)
	}
	if err == nil && (len(findings) == 0 || slices.ContainsFunc(findings, func(f Finding) bool { return f.Fate != Unknown })) {
		s.noteEnd(ctx) // one that can tell nothing, as from a container, does not count
	}
	s.lastNotes()
	return findings, err
}

// settleAll settles what is dead, different attachments in parallel.
func (s *sweeping) settleAll(ctx context.Context, findings []Finding) {
	var due []*Finding
	for i := range findings {
		if f := &findings[i]; f.Ends() && !f.Waits && f.Err == nil {
			due = append(due, f)
		}
	}
	work := make(chan *Finding)
	var workers sync.WaitGroup
	progress := s.progress(len(due))
	for range min(8, 2*runtime.NumCPU()) {
		worker := *s.op
		worker.notes = nil
		workers.Go(func() {
			for f := range work {
				if err := worker.safely(func() error { return worker.release(ctx, f) }); err != nil {
					f.Err = err
				}
				progress()
			}
		})
	}
	for _, f := range due {
		work <- f
	}
	close(work)
	workers.Wait()
	s.unpark(ctx, findings)
}

// progress returns a function that counts one more of those that are tried.
func (s *sweeping) progress(of int) func() {
	var mu sync.Mutex
	done := 0
	return func() {
		mu.Lock()
		defer mu.Unlock()
		if done++; s.Progress != nil {
			s.Progress(done, of)
		}
	}
}

// unpark settles those whose DELs were parked, where the sweep has released the owner of the address.
func (s *sweeping) unpark(ctx context.Context, findings []Finding) {
	if !slices.ContainsFunc(findings, func(f Finding) bool { return f.Released }) {
		return
	}
	for i := range findings {
		f := &findings[i]
		if !f.Ends() || f.Released || f.Err != nil {
			continue
		}
		var e *journal.Entry
		s.read(ctx, func(tx *journal.Tx) (err error) {
			e, err = tx.Get(f.Key)
			return err
		})
		if e == nil || !s.due(ctx, e, s.eager) { // asked outside of the transaction: it begins its own
			continue
		}
		f.Waits = false
		if err := s.safely(func() error { return s.release(ctx, f) }); err != nil {
			f.Err = err
		}
	}
}

// plan says what the sweep would do with every attachment.
func (s *sweeping) plan(ctx context.Context) ([]Finding, error) {
	findings, keys, err := s.overlook(ctx)
	if err != nil {
		return nil, err
	}
	entries := make([]*journal.Entry, 0, len(keys))
	err = s.store.View(ctx, func(tx *journal.Tx) error {
		for _, k := range keys {
			e, err := tx.Get(k)
			switch {
			case err != nil:
				findings = append(findings, unreadable(k, err))
			case e != nil:
				entries = append(entries, e)
			}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(entries, func(a, b *journal.Entry) int { return a.Updated.Wall.Compare(b.Updated.Wall) })
	for _, e := range entries {
		findings = append(findings, s.finding(ctx, e))
	}
	return findings, s.brake(findings)
}

// overlook passes over those that plainly live: added in this boot, with the network namespace at its path, and no list
// that could speak against them. It returns the others to be looked at. A namespace is known by its inode here; one that is
// gone, and has left path and inode to another, is told from it by unwindctl sweep, which passes over none.
func (s *sweeping) overlook(ctx context.Context) (findings []Finding, look []journal.Key, err error) {
	var outlines []journal.Outline
	err = s.store.View(ctx, func(tx *journal.Tx) error {
		outlines, s.last = nil, tx.Counter(LastSweep)
		return tx.Outlines(func(o journal.Outline, _ error) error { // what is damaged is neither live nor of this boot
			if s.covers(o.Key) {
				outlines = append(outlines, o)
			}
			return nil
		})
	})
	for _, o := range outlines {
		var st unix.Stat_t
		if o.State != journal.Live || o.BootID != s.host.BootID || s.Attachment != nil || s.List != nil && !s.List.names(o.Key) ||
			!s.invoked || unix.Stat(o.NetNS.Path, &st) != nil || st.Ino != o.NetNS.Ino || st.Dev != o.NetNS.Dev {
			look = append(look, o.Key)
			continue
		}
		findings = append(findings, Finding{Key: o.Key, State: o.State, Fate: Live, Reason: reasonThere, thisBoot: true})
	}
	return findings, look, err
}

// finding judges an attachment.
func (s *sweeping) finding(ctx context.Context, e *journal.Entry) Finding {
	ev := s.gather(e, nil)
	seen := ev
	orphaned := ev.locked == yes && s.orphaned(e)
	if orphaned {
		ev.locked = no
	}
	v := decide(ev)
	if v.warn {
		s.log.Warn(v.reason, "attachment", e.Key.String())
	}
	f := Finding{
		Key: e.Key, Pod: e.Pod, State: e.State, Fate: v.fate, Reason: v.reason, evidence: seen,
		thisBoot: ev.sameBoot == yes, orphaned: orphaned, Busy: v.reason == reasonLocked,
	}
	if v.ends() {
		f.Pending = pendingSteps(e)
		f.Waits = !s.due(ctx, e, s.eager)
	}
	return f
}

func unreadable(k journal.Key, err error) Finding {
	return Finding{Key: k, Fate: Unknown, Reason: "its entry cannot be read", Err: err}
}

func (s *sweeping) covers(k journal.Key) bool {
	return (s.Network == "" || k.Network == s.Network) && (s.Attachment == nil || k == *s.Attachment)
}

// orphaned says whether an attachment's lock is held by delegates alone, for longer than they are waited for. One that is
// live has no verb under way: who holds its lock is a daemon that a delegate left.
func (s *sweeping) orphaned(e *journal.Entry) bool {
	g := e.Newest()
	if e.State == journal.Live || s.sameBoot(g) != yes || s.sees(g) != yes ||
		journal.BootNanos()-e.Updated.Boot < int64(s.Budgets.Orphans) {
		return false
	}
	owner, err := s.store.Owner(e.Key)
	return owner == 0 && err == nil
}

// brake keeps the live attachments of this boot if too many of them seem dead.
func (s *sweeping) brake(findings []Finding) error {
	live, dead := 0, []*Finding{}
	for i := range findings {
		f := &findings[i]
		if f.State != journal.Live || !f.thisBoot {
			continue
		}
		live++
		if f.Fate == Dead {
			dead = append(dead, f)
		}
	}
	if s.Force || len(dead) <= 10 || len(dead)*10 <= live*3 {
		return nil
	}
	err := &BrakeError{len(dead), live}
	for _, f := range dead {
		f.Err = err
	}
	return err
}

// release settles one attachment, if its lock is free and there is time. A signal that comes meanwhile does not cut it off: a
// DEL that is killed is owed once more.
func (o *op) release(ctx context.Context, f *Finding) error {
	if ctx.Err() != nil {
		return errors.New("no time was left for it")
	}
	end := time.Now().Add(o.Budgets.Undo)
	if deadline, ok := ctx.Deadline(); ok && deadline.Before(end) {
		end = deadline
	}
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), end)
	defer cancel()
	lock, killed, err := o.tryLock(ctx, f)
	if errors.Is(err, journal.ErrBusy) && !f.orphaned { // another unwind has begun to work on it
		f.Fate, f.Reason, f.Busy = Live, reasonLocked, true
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Release()
	o.settleLocked(ctx, lock, killed, f)
	return nil
}

// tryLock takes the lock of an attachment that is dead: it is free, or held by delegates that have had their time.
func (o *op) tryLock(ctx context.Context, f *Finding) (lock *journal.Lock, killed bool, err error) {
	lock, err = o.store.TryAcquire(f.Key)
	if !errors.Is(err, journal.ErrBusy) || !f.orphaned {
		return lock, false, err
	}
	if owner, ownerErr := o.store.Owner(f.Key); owner != 0 || ownerErr != nil {
		return nil, false, err
	}
	killed = o.endOrphans(f.Key)
	ctx, cancel := context.WithTimeout(ctx, groupDelay)
	defer cancel()
	lock, err = o.store.Acquire(ctx, f.Key)
	return lock, killed, err
}
