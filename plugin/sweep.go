package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/tristate"
	"cni-unwind/plugin/internal/verdict"
	"cni-unwind/plugin/netconf"
)

// Sweep is a search of the journal for dead attachments, and their release.
type Sweep struct {
	Network    string       // only this network; "" for all
	Attachment *journal.Key // only this attachment; nil for all
	List       *List        // the runtime's list of attachments; nil if there is none
	Pools      []Pool       // pools of host-local to compare with the journal
	DryRun     bool         // decide, but release nothing
	Force      bool         // release also what the guard keeps, see MassReleaseError
	Periodic   bool         // neither the runtime nor a person asked: keep the pauses between DELs
	// Progress, if set, is called after each attachment that was tried, by one goroutine at a time.
	Progress func(done, of int)
}

// MassReleaseError says that the mass-release guard kept attachments that seem dead, because they
// are too many: more than 10, and more than 30 % of the live attachments of this boot. A mistake of
// the sweep is likelier than the death of most of a node's pods at once.
type MassReleaseError struct{ Dead, Live int }

func (e *MassReleaseError) Error() string {
	return fmt.Sprintf("%d of the %d live attachments of this boot seem dead, too many to be believed; they are kept. "+
		"If they are dead: unwindctl sweep --force", e.Dead, e.Live)
}

// ErrNotTried means that the sweep was interrupted, or its time was over, before it came to an
// attachment.
var ErrNotTried = errors.New("no time was left for it")

// Sweep searches the journal in a state directory. It returns a finding for every attachment, and
// an error if the journal could not be read or the mass-release guard kept something. It judges by
// what this process sees in the namespaces of the ADDs: from other namespaces an attachment is
// Unknown, and kept.
func (p *Plugin) Sweep(ctx context.Context, stateDir string, s Sweep) ([]Finding, error) {
	sweeping, closeLog := p.sweeping(stateDir, s)
	defer closeLog()
	return sweeping.run(ctx)
}

func (p *Plugin) sweeping(stateDir string, s Sweep) (_ *sweeping, closeLog func()) {
	conf := netconf.DefaultConf()
	conf.StateDir, conf.LogLevel = stateDir, slog.LevelWarn
	o, closeLog := p.newOp(&skel.CmdArgs{}, conf)
	return &sweeping{op: o, Sweep: s, ignoreBackoff: !s.Periodic, thorough: true}, closeLog
}

// sweeping is one running sweep.
//
//  1. Read the journal and judge every entry, without taking locks.
//  2. Keep the entries if too many live ones would go: see MassReleaseError.
//  3. Release the dead ones, those longest untouched first, some in parallel. Each is released
//     under its lock, without waiting for it, and judged again by what the journal says then.
//  4. Release those whose DELs were parked for an attachment that is released now.
//  5. Compare the pools of host-local with what the journal says after that.
type sweeping struct {
	*op
	Sweep
	last          uint64 // end of the last sweep of all networks, in Unix seconds
	ignoreBackoff bool   // the runtime or a person asked for it: retry failed DELs now
	thorough      bool   // it has the time for all pools and lock files, unlike one in a STATUS
}

func (s *sweeping) run(ctx context.Context) ([]Finding, error) {
	s.list = s.List
	findings, err := s.plan(ctx)
	var brake *MassReleaseError
	if err != nil && !errors.As(err, &brake) {
		return findings, err
	}
	if !s.DryRun {
		s.releaseAll(ctx, findings)
		if s.thorough || s.stale() {
			err = errors.Join(err, s.store.RemoveStrayLocks(ctx))
		}
	}
	if brake != nil {
		s.list = nil // the list is not to be trusted
	}
	for _, pool := range s.Pools {
		if !s.thorough && !pool.full(s.log) {
			continue
		}
		more, poolErr := s.reconcile(ctx, pool, s.DryRun)
		findings, err = append(findings, more...), errors.Join(err, poolErr)
	}
	if err == nil && (len(findings) == 0 || slices.ContainsFunc(findings, func(f Finding) bool { return f.Fate != verdict.Unknown })) {
		s.noteEnd(ctx) // a sweep that can tell nothing, as from a container, does not count
	}
	s.flushEvents(ctx)
	return findings, err
}

// releaseAll releases the dead attachments that are ready to retry. If a plugin works again, it
// also releases the others with a pending DEL of that plugin.
func (s *sweeping) releaseAll(ctx context.Context, findings []Finding) {
	var due []*Finding
	for i := range findings {
		if f := &findings[i]; f.Releasable() && !f.Deferred && f.Err == nil {
			due = append(due, f)
		}
	}
	pace := newPace(s.ignoreBackoff)
	s.releaseEach(ctx, due, pace)
	if due = pace.ready(findings); len(due) > 0 {
		s.releaseEach(ctx, due, pace)
	}
	s.unpark(ctx, findings)
}

// releaseEach releases attachments in parallel.
func (s *sweeping) releaseEach(ctx context.Context, due []*Finding, pace *pace) {
	work := make(chan *Finding)
	var workers sync.WaitGroup
	progress := s.progress(len(due))
	for range min(8, 2*runtime.NumCPU()) {
		worker := s.worker()
		workers.Go(func() {
			for f := range work {
				pace.try(f, func() {
					if err := worker.safely(func() error { return worker.releaseFinding(ctx, f) }); err != nil {
						f.Err = err
					}
				})
				if !errors.Is(f.Err, ErrNotTried) {
					progress()
				}
			}
		})
	}
	for _, f := range due {
		work <- f
	}
	close(work)
	workers.Wait()
}

// progress returns a function that counts one more attachment as tried.
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

// unpark releases attachments whose DELs were parked for an address whose owner the sweep has
// released.
func (s *sweeping) unpark(ctx context.Context, findings []Finding) {
	if !slices.ContainsFunc(findings, func(f Finding) bool { return f.Released }) {
		return
	}
	for i := range findings {
		f := &findings[i]
		if !f.Releasable() || f.Released || f.paced || f.Err != nil {
			continue
		}
		var e *journal.Entry
		s.read(ctx, func(tx *journal.Tx) (err error) {
			e, err = tx.Get(f.Key)
			return err
		})
		if e == nil || !hasParked(e) || !s.readyToRetry(ctx, e, s.ignoreBackoff) { // begins a transaction of its own
			continue
		}
		f.Deferred = false
		if err := s.safely(func() error { return s.releaseFinding(ctx, f) }); err != nil {
			f.Err = err
		}
	}
}

func hasParked(e *journal.Entry) bool {
	return slices.ContainsFunc(e.Generations, func(g journal.Generation) bool {
		return slices.ContainsFunc(g.Steps, func(step journal.Step) bool { return step.Parked })
	})
}

// plan returns what the sweep would do with every attachment.
func (s *sweeping) plan(ctx context.Context) ([]Finding, error) {
	findings, keys, err := s.skipLive(ctx)
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
	return findings, s.guardMassRelease(findings)
}

// skipLive skips the attachments that plainly live: added in this boot, with the network namespace
// at its path, and no list that could speak against them. It returns the keys of the others. Here
// the inode identifies a namespace; only unwindctl sweep, which skips none, tells a namespace that
// is gone from another one with its path and inode.
func (s *sweeping) skipLive(ctx context.Context) (findings []Finding, look []journal.Key, err error) {
	var outlines []journal.Outline
	err = s.store.View(ctx, func(tx *journal.Tx) error {
		outlines, s.last = nil, tx.Counter(LastSweep)
		return tx.Outlines(func(o journal.Outline, _ error) error { // a damaged entry is neither live nor of this boot
			if s.covers(o.Key) {
				outlines = append(outlines, o)
			}
			return nil
		})
	})
	findings = make([]Finding, 0, len(outlines))
	for _, o := range outlines {
		var st unix.Stat_t
		if o.State != journal.Live || o.BootID != s.host.BootID || s.Attachment != nil || s.List != nil && !s.List.names(o.Key) ||
			!s.invoked || unix.Stat(o.NetNS.Path, &st) != nil || st.Ino != o.NetNS.Ino || st.Dev != o.NetNS.Dev {
			look = append(look, o.Key)
			continue
		}
		findings = append(findings, Finding{Key: o.Key, State: o.State, Fate: verdict.NetNSThere.Fate, Reason: verdict.NetNSThere.Reason, thisBoot: true})
	}
	return findings, look, err
}

// finding judges an attachment. It does not examine one that only waits for its next try, unless
// someone asks: that takes a look at every process.
func (s *sweeping) finding(ctx context.Context, e *journal.Entry) Finding {
	if failing := failingPlugins(e); len(failing) > 0 && e.State != journal.Live && !s.ignoreBackoff && !s.DryRun && !s.readyToRetry(ctx, e, false) {
		return Finding{
			Key: e.Key, Pod: e.Pod, State: e.State, Fate: verdict.Dead, Reason: verdict.Recorded(e.Cause, e.Reason), Pending: pendingSteps(e), Deferred: true,
			thisBoot: s.sameBoot(e.Newest()) == tristate.Yes, failing: failing,
		}
	}
	ev := s.gather(ctx, e, nil)
	seen := ev
	orphaned := ev.Locked == tristate.Yes && s.orphaned(e)
	if orphaned {
		ev.Locked = tristate.No
		s.lookForLater(ctx, e, &ev)
	}
	v := verdict.Decide(ev)
	if v.Warn && s.thorough { // not at each STATUS
		s.log.Warn(v.Reason.Text, "attachment", e.Key.String())
	}
	f := Finding{
		Key: e.Key, Pod: e.Pod, State: e.State, Fate: v.Fate, Reason: v.Reason, Evidence: seen,
		thisBoot: ev.SameBoot == tristate.Yes, orphaned: orphaned, Busy: v.Reason == verdict.Locked.Reason,
		listed: s.list != nil, identified: e.Newest().NetNS.Known(),
	}
	if v.Releasable() {
		f.passed = e.State == journal.Live && s.delHasPassed(e)
		f.Pending, f.failing = pendingSteps(e), failingPlugins(e)
		f.Deferred = !s.readyToRetry(ctx, e, s.ignoreBackoff)
	}
	return f
}

func unreadable(k journal.Key, err error) Finding {
	return Finding{Key: k, Fate: verdict.Unknown, Reason: verdict.Reason{Text: "its entry cannot be read"}, Err: err}
}

func (s *sweeping) covers(k journal.Key) bool {
	return (s.Network == "" || k.Network == s.Network) && (s.Attachment == nil || k == *s.Attachment)
}

// orphaned says whether delegates alone have held an attachment's lock for longer than unwind waits
// for them.
func (s *sweeping) orphaned(e *journal.Entry) bool {
	g := e.Newest()
	if s.sameBoot(g) != tristate.Yes || s.sameNamespaces(g) != tristate.Yes ||
		journal.BootNanos()-e.Updated.Boot < int64(s.Budgets.Orphans) {
		return false
	}
	owner, err := s.store.Owner(e.Key)
	return owner == 0 && err == nil
}

// guardMassRelease keeps the live attachments of this boot if too many of them seem dead.
// Attachments whose DELs passed while the journal could not be written do not count, and go.
func (s *sweeping) guardMassRelease(findings []Finding) error {
	live, dead := 0, []*Finding{}
	for i := range findings {
		f := &findings[i]
		if f.State != journal.Live || !f.thisBoot || f.passed {
			continue
		}
		live++
		if f.Fate == verdict.Dead {
			dead = append(dead, f)
		}
	}
	if s.Force || len(dead) <= 10 || len(dead)*10 <= live*3 {
		return nil
	}
	err := &MassReleaseError{len(dead), live}
	for _, f := range dead {
		f.Err = err
	}
	return err
}

// releaseFinding releases one attachment, if its lock is free and there is time. A signal does not
// cut it off: a killed DEL would be pending again.
func (o *op) releaseFinding(ctx context.Context, f *Finding) error {
	if ctx.Err() != nil {
		return ErrNotTried
	}
	end := time.Now().Add(o.Budgets.Undo)
	if deadline, ok := ctx.Deadline(); ok && deadline.Before(end) {
		end = deadline
	}
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), end)
	defer cancel()
	lock, killed, err := o.tryLock(ctx, f)
	if errors.Is(err, journal.ErrBusy) && !f.orphaned { // another unwind has begun to work on it
		f.Fate, f.Reason, f.Busy = verdict.Locked.Fate, verdict.Locked.Reason, true
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Release()
	o.releaseLocked(ctx, lock, killed, f)
	return nil
}

// tryLock takes the lock of a dead attachment. The lock is free, or held by delegates whose time is
// up, or by those of a CHECK.
func (o *op) tryLock(ctx context.Context, f *Finding) (lock *journal.Lock, killed []string, err error) {
	lock, err = o.store.TryAcquire(f.Key)
	if !errors.Is(err, journal.ErrBusy) || !f.orphaned && !o.checked(f.Key) {
		return lock, nil, err
	}
	if owner, ownerErr := o.store.Owner(f.Key); owner != 0 || ownerErr != nil {
		return nil, nil, err
	}
	killed = o.endOrphans(f.Key)
	ctx, cancel := context.WithTimeout(ctx, delegate.GroupDelay)
	defer cancel()
	lock, err = o.store.Acquire(ctx, f.Key)
	return lock, killed, err
}

// stale says whether this sweep covers all networks and the last such one ended a minute ago or
// more.
func (s *sweeping) stale() bool {
	now := uint64(time.Now().Unix())
	lately := s.last <= now && now-s.last < 60 // a later s.last is of a clock that was wrong then
	return s.Network == "" && s.Attachment == nil && !lately
}

// noteEnd stores the end of a sweep of all networks, at most once a minute: a STATUS comes every
// few seconds.
func (s *sweeping) noteEnd(ctx context.Context) {
	if s.DryRun || !s.stale() || ctx.Err() != nil {
		return
	}
	if _, err := os.Lstat(s.store.Path()); err != nil { // do not create a journal for this
		return
	}
	if err := s.update(ctx, func(tx *journal.Tx) error { return tx.SetCounter(uint64(time.Now().Unix()), LastSweep) }); err != nil {
		s.log.Debug("the time of the sweep cannot be written", "err", err)
	}
}
