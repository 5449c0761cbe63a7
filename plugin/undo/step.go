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
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
)

// try runs the DEL of a step if it is due, stores the outcome in the step, and reports whether the
// step is done.
func (u *undoing) try(ctx context.Context, s *journal.Step) (done bool, f *delegate.Failure) {
	if !u.Mode.ofVerb() && decide.Needless(s, u.state == gone) {
		return true, nil
	}
	p := u.pass(ctx, true)
	before := *s
	if s.Next = decide.Due(s, p); s.Next.Why != journal.RunNow {
		if s.Next.Why == journal.ForRules && before.Next.Why != journal.ForRules {
			const why = "rules or host ports for its address may remain until a later plugin's DEL succeeds"
			u.Log.Warn("the DEL waits: "+why, "plugin", s.Type)
			u.record(journal.Waiting, s, why)
		}
		return false, nil
	}
	if f := u.markStarted(ctx, s); f != nil {
		return false, f
	}
	marked := u.markSlow(ctx, s)
	f = u.del(ctx, s)
	marked()
	if f == nil || !f.Unstarted {
		u.ran++
	} else {
		s.Started = before.Started
	}
	o := decide.Outcome{Jitter: rand.Float64()}
	if f != nil {
		o.Failed, o.Code, o.Words = true, f.Code, wordsOf(f)
		o.Left = u.HasLeft(u.Record, s)
		o.Early = before.Next.Why == journal.ForBackoff && decide.Left(before.Next, p) > 0
		o.NetNSGone = u.state == gone
		o.MayHold = decide.MayHold(s, u.held())
	}
	*s, done = decide.After(*s, o, p.Now)
	u.report(&before, s, f, done)
	return done, f
}

// report logs a failed or dropped DEL, and records a dropped one in the history. If the plugin has
// left the chain, the DEL is not counted, because nobody needs to act.
func (u *undoing) report(before, after *journal.Step, f *delegate.Failure, done bool) {
	switch {
	case f != nil && done:
		u.Log.Warn("DEL dropped: it failed too often", "plugin", after.Type, "tries", after.Tries,
			"err", after.Last)
		var counter []string
		if u.HasLeft(u.Record, after) != decide.True {
			counter = []string{record.CountDropped, after.Type}
		}
		u.record(journal.Dropped, after, fmt.Sprintf("its DEL failed %d times: %s", after.Tries,
			after.Last), counter...)
	case f != nil && (before.Code != after.Code || before.Next.Why.Blocked()):
		msg := "DEL failed and is pending"
		if u.Mode == Reconstructed {
			msg = "DEL failed; this sweep may still release the container's addresses"
		}
		u.Log.Warn(msg, "plugin", after.Type, "code", f.Code, "err", after.Last)
	}
}

func (u *undoing) record(
	kind journal.EventKind, s *journal.Step, reason string, counter ...string,
) {
	event := record.EventOf(kind, u.Record)
	event.Reason, event.Plugins = reason, []string{s.Type}
	u.Node.Journal.Event(event, counter...)
}

// markStarted marks a step as started. It writes the record before the DEL if both hold: the DEL
// releases an address of an IPAM plugin other than host-local, and a different step may remove
// rules by address. After a crash, only this mark shows the next pass that the address may be free
// (see decide.Gets). The written record also contains the outcomes of this pass so far.
func (u *undoing) markStarted(ctx context.Context, s *journal.Step) *delegate.Failure {
	was := s.Started
	s.Started = true
	frees := slices.ContainsFunc(u.Record.Got.Claims,
		func(c journal.Claim) bool { return c.Step == s.Index && c.Pool == "" })
	others := slices.ContainsFunc(u.byAddress, func(index int) bool { return index != s.Index })
	if was || !frees || !others || !u.recorded() {
		return nil
	}
	err := u.Node.Journal.Save(context.WithoutCancel(ctx), u.Record)
	switch {
	case err == nil:
		return nil
	case u.Mode.ofVerb():
		u.Degrade("DEL", err)
		return nil
	}
	s.Started = false
	return &delegate.Failure{Plugin: s.Type, Command: "DEL", Unstarted: true,
		Code: types.ErrTryAgainLater, Msg: "cannot record that its DEL starts: " + err.Error()}
}

// markAfter is the time after which a running DEL is recorded as tried. Most DELs are faster, and
// need no separate transaction.
const markAfter = 500 * time.Millisecond

// markSlow writes the record, with the step marked as tried, if the step's DEL takes longer than
// markAfter. If unwind is killed during that DEL, the next pass tries the other steps first.
func (u *undoing) markSlow(ctx context.Context, s *journal.Step) (stop func()) {
	if !u.recorded() {
		return func() {}
	}
	marked, done := u.Record.Clone(), make(chan struct{})
	for i := range marked.Steps {
		if m := &marked.Steps[i]; m.Index == s.Index {
			m.Tries++
			m.Last, m.Code = "the DEL is running, or unwind was killed", types.ErrTryAgainLater
		}
	}
	timer := time.AfterFunc(markAfter, func() {
		defer close(done)
		err := u.Node.Journal.Store.Update(context.WithoutCancel(ctx),
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

// del runs the DEL of one step. If it fails, del retries it with the configurations that
// decide.Retries returns, such as the one that the runtime would send now, and with the runtime's
// present CNI_ARGS, if any. Such a configuration may name a new host-local pool. So after a
// success, Run releases the addresses in the recorded pool.
//
// If the recorded configuration names a server that no longer responds, the DEL hangs. So if the
// present configuration differs, and there is time for it, the DEL with the recorded one is killed
// after Budgets.Recorded. During the runtime's DEL, the DEL of a plugin that has left the chain is
// also killed after that time.
func (u *undoing) del(ctx context.Context, s *journal.Step) *delegate.Failure {
	recorded := u.Record.Added.Args
	f, cut := u.delRecorded(ctx, s)
	if f == nil {
		return nil
	}
	f.Unreported = u.HasLeft(u.Record, s) == decide.True
	args := recorded
	if u.Mode == Requested && u.Verb.Args != "" { // a Superseding ADD's Args may name another pod
		args = u.Verb.Args
	}
	for _, retry := range decide.Retries(s, f.Code) {
		config := u.Present(u.Record, s, retry, u.sent())
		same := bytes.Equal(config, s.Config) && sameArgs(args, recorded)
		if f.Killed && !cut || f.Unstarted || config == nil || same {
			continue
		}
		cut = false
		again := u.delWith(ctx, s, config, args)
		if again == nil {
			u.Log.Info("DEL succeeded with the chain's current configuration", "plugin", s.Type, "before",
				netconf.Shorten(f.Msg, 200))
			return nil
		}
		f.Killed = again.Killed
	}
	return f
}

// sent returns the runtime arguments that came with the runtime's DEL of this attachment, or nil in
// a mode other than Requested: the runtime's verb is then not a DEL of the recorded ADD, or the
// record already contains its arguments.
func (u *undoing) sent() map[string]json.RawMessage {
	if u.Mode != Requested {
		return nil
	}
	return u.Verb.Conf.RuntimeConfig
}

// sameArgs reports whether two CNI_ARGS contain the same pairs. go-cni sends them in random order.
func sameArgs(one, other string) bool {
	pairs, others := strings.Split(one, ";"), strings.Split(other, ";")
	slices.Sort(pairs)
	slices.Sort(others)
	return slices.Equal(pairs, others)
}

// delRecorded runs a step's DEL with its recorded configuration. It kills the DEL after
// Budgets.Recorded if the runtime would not run this DEL now. cut reports whether it killed the DEL
// and a DEL with the present configuration may follow. delRecorded reads the chain only during a
// slow DEL. If the read hangs, for example on a lost mount, it does not delay the DEL.
func (u *undoing) delRecorded(
	ctx context.Context, s *journal.Step,
) (f *delegate.Failure, cut bool) {
	b := u.Env.Budgets
	if end, bounded := ctx.Deadline(); bounded && time.Until(end) < b.Recorded+b.Step {
		return u.delWith(ctx, s, s.Config, u.Record.Added.Args), false
	}
	changed := fmt.Errorf("it took longer than %s, and its configuration has changed", b.Recorded)
	left := fmt.Errorf("it took longer than %s, and the plugin has left the chain", b.Recorded)
	recorded, kill := context.WithCancelCause(ctx)
	defer kill(nil)
	e, step := u.Record.Clone(), *s // the pass may change the originals meanwhile
	timer := time.AfterFunc(b.Recorded, func() {
		present := u.Present(e, &step, decide.Present, u.sent())
		switch {
		case present != nil && !bytes.Equal(present, step.Config):
			kill(changed)
		case u.Mode == Requested && u.HasLeft(e, &step) == decide.True:
			kill(left)
		}
	})
	defer timer.Stop()
	f = u.delWith(recorded, s, s.Config, u.Record.Added.Args)
	return f, f != nil && f.Killed && errors.Is(context.Cause(recorded), changed)
}

func (u *undoing) delWith(
	ctx context.Context, s *journal.Step, config json.RawMessage, args string,
) *delegate.Failure {
	e := u.Record
	c := &delegate.Call{
		Command: "DEL", Plugin: s.Type, Path: u.path(), ContainerID: e.ContainerID, Ifname: e.IfName,
		Args: args, Stdin: config, Lock: u.Request.Lock.File(), Env: u.env, Watch: u.Verb.Watch,
	}
	prevResult, err := u.prevResult(ctx, s, config)
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
	stderr := u.Env.Stderr
	if decide.Failing(s) {
		stderr = io.Discard // the log already contains the failure
	}
	_, f := u.Env.Runner.Run(ctx, c, stderr)
	if f != nil && shown == decide.ShowScratch {
		f = u.leaveScratch(ctx, s, c, stderr, f)
	}
	return f
}

// path returns the CNI_PATH of a DEL. If the runtime's plugin directories have changed since the
// ADD, the DEL gets the old and the new ones. In a verb that names the attachment, the new ones
// come first, as without unwind. Otherwise, the old ones come first, because the new ones may be
// those of another runtime.
func (u *undoing) path() string {
	paths := []string{u.Record.Added.Path, u.Verb.Path}
	if u.Mode.ofVerb() {
		slices.Reverse(paths)
	}
	paths = slices.DeleteFunc(slices.Compact(paths), func(path string) bool { return path == "" })
	return strings.Join(paths, string(os.PathListSeparator))
}

// leaveScratch returns the outcome of a DEL that has failed with f in a scratch namespace. It
// retries the DEL there, unless the step's previous try failed with the same message. After two
// failures with the same message, it gives the DEL no namespace, as without unwind, and accepts a
// success. For example, if bridge's DEL gets a namespace, it also removes its iptables chain, which
// fails while a leaked rule refers to that chain.
func (u *undoing) leaveScratch(
	ctx context.Context, s *journal.Step, c *delegate.Call, stderr io.Writer, f *delegate.Failure,
) *delegate.Failure {
	if words := wordsOf(f); !f.Killed && s.Last != words {
		_, again := u.Env.Runner.Run(ctx, c, stderr)
		if again == nil {
			return nil
		}
		if again.Unstarted = false; again.Killed || wordsOf(again) != words {
			return again
		}
	}
	if f.Killed {
		return f
	}
	c.Netns = ""
	_, without := u.Env.Runner.Run(ctx, c, stderr)
	if without == nil {
		return nil
	}
	f.Killed = without.Killed
	return f
}

// prevResult returns the prevResult for a step's DEL: the ADD's final or last known result, in the
// CNI version of the DEL's config, without the addresses that are withheld from the step. Like
// libcni, it returns nil for a version before 0.4.0.
func (u *undoing) prevResult(
	ctx context.Context, s *journal.Step, config json.RawMessage,
) (json.RawMessage, error) {
	if u.Record.Got.Result == nil {
		return nil, nil
	}
	conf := types.PluginConf{CNIVersion: u.Record.Added.CNIVersion}
	_ = json.Unmarshal(config, &conf)
	if has, err := version.GreaterThanOrEqualTo(conf.CNIVersion, "0.4.0"); err != nil || !has {
		return nil, err
	}
	result, err := netconf.ConvertResult(u.Record.Got.Result, conf.CNIVersion)
	withheld := u.withheldFrom(ctx, s)
	if err != nil || len(withheld) == 0 {
		return result, err
	}
	u.Log.Debug("running the DEL without the addresses that may have a new owner", "plugin", s.Type,
		"addresses", withheld)
	return netconf.WithoutAddresses(result, withheld)
}

// pass returns the facts about the record for the decisions on its steps.
func (u *undoing) pass(ctx context.Context, ignorePause bool) decide.Pass {
	e := u.Record
	return decide.Pass{
		Now: journal.BootNanos(), SameBoot: u.Node.SameBoot(e) == decide.True,
		IgnorePause: ignorePause, Steps: e.Steps, Claims: e.Got.Claims,
		PodLives: slices.ContainsFunc(e.Steps, decide.FreesByPod) &&
			u.Node.Journal.Snapshot(ctx).AnyLives(func(o *journal.Record) bool {
				pod, own := o.Added.Pod, e.Added.Pod
				return o.ContainerID != e.ContainerID && pod.Name != "" && pod.Name == own.Name &&
					pod.Namespace == own.Namespace
			}),
	}
}

// withheldFrom returns the claimed addresses that a step's DEL does not get (see decide.Gets). It
// reads host-local's files, so delWith calls it right before the DEL. The result stays valid,
// because only the attachment's own DELs, which need its lock, release its addresses.
func (u *undoing) withheldFrom(ctx context.Context, s *journal.Step) (addresses []netip.Addr) {
	if !decide.ByAddress(s) {
		return nil
	}
	for _, c := range u.Record.Got.Claims {
		if !decide.Gets(s, c, u.ownerOf(ctx, c)) {
			addresses = append(addresses, c.Address)
		}
	}
	return addresses
}

// ownerOf returns the facts about a claimed address that a plugin may have rules for. host-local's
// file names the owner only within its own pool. So in a sweep, which no runtime asked for, ownerOf
// also looks for an owner that got the address elsewhere: from another pool after the network was
// renamed or its dataDir changed, or while unwind was off. A sweep may undo two dead owners in
// parallel. So ownerOf reads the journal again: the later one must see that the other is dead, and
// remove their rules.
func (u *undoing) ownerOf(ctx context.Context, c journal.Claim) (o decide.Owner) {
	sweeping := !u.Mode.ofVerb()
	if c.Pool != "" {
		owner, given, err := ipam.OwnerOf(c.Pool, c.Address)
		o.InFile = err == nil && given && owner.Is(u.Record.ContainerID, u.Record.IfName)
		if !o.InFile || !sweeping {
			return o
		}
	}
	o.Freed = u.Record.Freed(c) && c.Step >= 0 || slices.ContainsFunc(u.Record.Steps,
		func(s journal.Step) bool { return s.Index == c.Step && s.Started })
	elsewhere := func(other journal.Claim) bool {
		return other.Address.Unmap() == c.Address.Unmap() && (c.Pool == "" || other.Pool != c.Pool)
	}
	hasRules := func(s journal.Step) bool { return decide.ByAddress(&s) }
	if sweeping && u.Node.Journal.Refresh(ctx) != nil {
		o.Others = true
		return o
	}
	claimants, err := u.Node.Journal.Snapshot(ctx).Others(u.Record.Key, []netip.Addr{c.Address})
	o.Others = err != nil || slices.ContainsFunc(claimants, func(e *journal.Record) bool {
		return decide.KeepsContainer(e.State) && slices.ContainsFunc(e.Got.Claims, elsewhere) &&
			slices.ContainsFunc(e.Steps, hasRules)
	})
	if c.Pool == "" && sweeping && u.state != there && !o.Others {
		used, err := u.Node.View.Uses([]netip.Addr{c.Address})
		o.Others = used || err != nil
	}
	return o
}

func ownerOf(k journal.Key) ipam.Owner {
	return ipam.Owner{ContainerID: k.ContainerID, IfName: k.IfName}
}

// held returns the claims on addresses that the attachment may still have. For an address from
// host-local, its file decides; a file that cannot be read counts as the attachment's. Any other
// address is free once the DEL of the delegate that allocated it is done. If a reconstructed record
// does not name that delegate, the address counts as held.
func (u *undoing) held() []journal.Claim {
	return slices.DeleteFunc(slices.Clone(u.Record.Got.Claims), func(c journal.Claim) bool {
		if c.Pool == "" {
			return c.Step >= 0 && u.Record.Freed(c)
		}
		there, err := ipam.HasFileOf(c.Pool, ownerOf(u.Record.Key), c.Address)
		return !there && err == nil
	})
}

// recorded reports whether the record is in the journal, where other processes find it.
func (u *undoing) recorded() bool {
	return u.Node.Journal.Lost == nil && u.Record.Number != 0
}
