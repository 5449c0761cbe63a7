package undo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
)

// try runs the DEL of a step if it is due, stores the outcome in the step, and reports whether the
// step is done.
func (u *undoing) try(ctx context.Context, s *journal.Step) (done bool, f *delegate.Failure) {
	p := u.pass(ctx, true)
	if decide.NeedsNoRepeat(s, p) {
		return true, nil
	}
	before := *s
	if s.Next = decide.Due(s, p); s.Next.Why != journal.RunNow {
		if s.Next.Why == journal.ForPort && before.Next.Why != journal.ForPort {
			const why = "a host port may forward to its address until the DEL of a later plugin succeeds"
			u.Log.Warn("the DEL waits: "+why, "plugin", s.Type)
			u.record(journal.Waiting, s, why)
		}
		return false, nil
	}
	bounded, cancel := u.late(ctx, s)
	marked := u.markSlow(ctx, s)
	f = u.del(bounded, s)
	timedOut := errors.Is(context.Cause(bounded), errLate)
	cancel()
	marked()
	if f == nil || !f.Unstarted {
		u.ran++
	}
	o := decide.Outcome{Jitter: rand.Float64(), Withheld: f == nil && u.withheldFrom(s).IsValid()}
	if f != nil {
		o.Failed, o.Code, o.Words, o.Killed = true, f.Code, wordsOf(f), f.Killed
		o.LateKilled, o.NotInChain = f.Killed && timedOut, u.HasLeft(u.Entry, s)
		o.Early = before.Next.Why == journal.ForBackoff && decide.Left(before.Next, p) > 0
		o.NetNSGone, o.MayHold = u.state == gone, decide.MayHold(s, u.Entry.Got.Claims, u.isFree)
	}
	*s, done = decide.After(*s, o, p)
	u.report(&before, s, f, done)
	return done, f
}

// report logs and records the changes in a step.
func (u *undoing) report(before, after *journal.Step, f *delegate.Failure, done bool) {
	switch {
	case f != nil && done:
		u.Log.Warn("DEL dropped: it failed too often", "plugin", after.Type, "tries", after.Tries,
			"err", after.Last)
		u.record(journal.Dropped, after, fmt.Sprintf("its DEL failed %d times: %s", after.Tries,
			after.Last), record.CountDropped, after.Type)
	case f != nil && (before.Code != after.Code || before.Next.Why.Blocked()):
		msg := "DEL failed and is pending"
		if u.Mode == Reconstructed {
			msg = "DEL failed; the addresses are released anyway"
		}
		u.Log.Warn(msg, "plugin", after.Type, "code", f.Code, "err", after.Last)
	case after.Next.Why == journal.ForOwner && before.Next.Why != journal.ForOwner:
		address := u.withheldFrom(after)
		u.Log.Info("DEL waits: its address has another owner", "plugin", after.Type,
			"address", address)
		u.record(journal.Waiting, after, fmt.Sprintf("%s has another owner", address))
	}
}

func (u *undoing) record(
	kind journal.EventKind, s *journal.Step, reason string, counter ...string,
) {
	event := record.EventOf(kind, u.Entry)
	event.Reason, event.Plugins = reason, []string{s.Type}
	u.Journal.Event(event, counter...)
}

// markAfter is the time after which a running DEL is recorded as tried. Most DELs are faster, and
// need no separate transaction.
const markAfter = 500 * time.Millisecond

// markSlow writes the record, with the step as tried, if the step's DEL takes longer than
// markAfter. If unwind is killed during that DEL, the next pass begins with another step.
func (u *undoing) markSlow(ctx context.Context, s *journal.Step) (stop func()) {
	if !u.recorded() {
		return func() {}
	}
	marked, done := u.Entry.Clone(), make(chan struct{})
	for i := range marked.Undo.Steps {
		if m := &marked.Undo.Steps[i]; m.Index == s.Index {
			m.Tries++
			m.MayHaveRun = true
			m.Last, m.Code = "unwind was killed while the DEL ran", types.ErrTryAgainLater
		}
	}
	timer := time.AfterFunc(markAfter, func() {
		defer close(done)
		err := u.Journal.Store.Update(context.WithoutCancel(ctx),
			func(tx *journal.Tx) error { return tx.Put(marked) })
		if err != nil {
			u.Log.Debug("cannot record the start of a DEL", "err", err)
		}
	})
	return func() {
		if !timer.Stop() {
			<-done
		}
	}
}

// del runs the DEL of one step. If it fails, del also tries what the runtime would send now: the
// plugin's present configuration in the chain (see decide.Retries). Then Run releases host-local's
// addresses in the recorded pool.
func (u *undoing) del(ctx context.Context, s *journal.Step) *delegate.Failure {
	f := u.delWith(ctx, s, s.Config)
	if f == nil {
		return nil
	}
	f.Unreported = u.HasLeft(u.Entry, s)
	for _, retry := range decide.Retries(s, f.Code) {
		config := u.Present(u.Entry, s, retry)
		if f.Killed || f.Unstarted || config == nil || bytes.Equal(config, s.Config) {
			continue
		}
		again := u.delWith(ctx, s, config)
		if again == nil {
			u.Log.Info("DEL succeeded with the chain's current configuration", "plugin", s.Type, "before",
				netconf.Shorten(f.Msg, 200))
			s.Config = config
			return nil
		}
		f.Killed = again.Killed
	}
	return f
}

// delWith runs the DEL of one step with a configuration.
func (u *undoing) delWith(
	ctx context.Context, s *journal.Step, config json.RawMessage,
) *delegate.Failure {
	e := u.Entry
	c := &delegate.Call{
		Command: "DEL", Plugin: s.Type, Path: e.Added.Path, ContainerID: e.ContainerID, Ifname: e.IfName,
		Args: e.Added.Args, Stdin: config, Lock: u.Job.Lock.File(), Env: u.env, Watch: u.Watch,
	}
	if _, err := netconf.FindPlugin(s.Type, c.Path); err != nil {
		c.Path = u.Verb.Path // the runtime's plugin directory may have moved
	}
	prevResult, err := u.prevResult(s, config)
	if err != nil {
		return c.Failed(0, "prevResult: "+err.Error())
	}
	if prevResult != nil {
		c.Stdin = netconf.WithPrevResult(config, prevResult)
	}
	shown := decide.Show(s, u.netns(ctx, s))
	var remove func()
	c.Netns, remove = u.show(s, shown)
	defer remove()
	stderr := u.Stderr
	if decide.Failing(s) {
		stderr = io.Discard // the log already contains the failure
	}
	_, f := u.Runner.Run(ctx, c, stderr)
	if f != nil && shown == decide.ShowScratch {
		f = u.leaveScratch(ctx, s, c, stderr, f)
	}
	if to := decide.LeftTo(s, u.state == gone); f != nil && !f.Killed && to != "" {
		u.Log.Info("DEL cannot succeed, because the network namespace is gone; "+to+" cleans up instead",
			"code", f.Code, "err", netconf.Shorten(f.Said(), 500))
		return nil
	}
	return f
}

// leaveScratch returns the outcome of a DEL that failed in a scratch namespace with f. If it fails
// there twice in the same words, it runs without a namespace, as without unwind, and success
// counts. bridge, for example, removes its chain in a namespace, and fails while a rule that leaked
// earlier still names that chain.
func (u *undoing) leaveScratch(
	ctx context.Context, s *journal.Step, c *delegate.Call, stderr io.Writer, f *delegate.Failure,
) *delegate.Failure {
	if words := wordsOf(f); !f.Killed && s.Last != words {
		_, again := u.Runner.Run(ctx, c, stderr)
		if again == nil || again.Killed || wordsOf(again) != words {
			return again
		}
	}
	if f.Killed {
		return f
	}
	c.Netns = ""
	_, without := u.Runner.Run(ctx, c, stderr)
	if without == nil {
		return nil
	}
	f.Killed = without.Killed
	return f
}

// prevResult returns the prevResult for a DEL with a configuration. It is the final result of the
// ADD, or the last known one, in the configuration's CNI version and without the addresses that are
// withheld or dropped. Like libcni, prevResult returns nil before version 0.4.0. A second DEL of a
// plugin that removes rules by address gets none: the first DEL has removed the attachment's own
// rules, so the second could only remove those of the address's next owner.
func (u *undoing) prevResult(s *journal.Step, config json.RawMessage) (json.RawMessage, error) {
	if u.Entry.Got.Result == nil || known.Of(s.Type).RemovesByAddress && decide.Repeats(s) {
		return nil, nil
	}
	conf := types.PluginConf{CNIVersion: u.Entry.Added.CNIVersion}
	_ = json.Unmarshal(config, &conf)
	if has, err := version.GreaterThanOrEqualTo(conf.CNIVersion, "0.4.0"); err != nil || !has {
		return nil, err
	}
	withheld := slices.Concat(u.withheld, u.dropped)
	if known.Of(s.Type).RemovesByAddress {
		withheld = slices.Concat(withheld, u.Assigned)
	}
	result, err := netconf.ConvertResult(u.Entry.Got.Result, conf.CNIVersion)
	if err != nil || len(withheld) == 0 {
		return result, err
	}
	return netconf.WithoutAddresses(result, withheld)
}

// withheldFrom returns an address that is withheld from a step because another attachment owns it,
// or the zero Addr.
func (u *undoing) withheldFrom(s *journal.Step) (address netip.Addr) {
	for _, c := range u.Entry.Got.Claims {
		if c.Receives(s.Index) && slices.Contains(u.withheld, c.Address) {
			return c.Address
		}
	}
	return address
}

// pass returns the facts about the record for the decisions on its steps.
func (u *undoing) pass(ctx context.Context, ignorePause bool) decide.Pass {
	e := u.Entry
	return decide.Pass{
		Now: journal.BootNanos(), SameBoot: u.Node.SameBoot(e) == decide.True, Since: e.Undo.Since.Boot,
		GracePeriod: u.Node.GraceOf(e), Asked: u.Mode.ofVerb(), IgnorePause: ignorePause,
		NoNetNS: u.place.Path == "" && isMissing(e.Added.NetNS.Path),
		ContainerLives: func() bool {
			return u.Journal.Snapshot(ctx).AnyLives(func(o *journal.Entry) bool {
				return o.Key != e.Key && o.ContainerID == e.ContainerID
			})
		},
		PodLives: func() bool {
			return u.Journal.Snapshot(ctx).AnyLives(func(o *journal.Entry) bool {
				pod, own := o.Added.Pod, e.Added.Pod
				return o.ContainerID != e.ContainerID && pod.Name != "" && pod.Name == own.Name &&
					pod.Namespace == own.Namespace
			})
		},
		Withheld: func(s *journal.Step) bool {
			if u.withheld == nil {
				u.withheld = u.addressesOfOthers(ctx)
			}
			return u.withheldFrom(s).IsValid()
		},
		Reassigned: u.reassigned,
		Steps:      e.Undo.Steps, Claims: e.Got.Claims,
	}
}
