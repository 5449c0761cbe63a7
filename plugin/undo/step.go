package undo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/tristate"
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
		o.LateKilled, o.NotInChain = f.Killed && timedOut, !u.inChain(s, nil)
		o.NetNSGone, o.Reserved = u.state == gone, u.reserved(s)
	}
	*s, done = decide.After(*s, o, p)
	if f != nil {
		f.PutRight = before.Code == s.Code && s.ADD != journal.AddPassed && !u.inChain(s, s.Config)
	}
	u.report(&before, s, f, done, o.NotInChain)
	return done, f
}

// reserved reports whether host-local reserves an address for the attachment in the pool of a step.
func (u *undoing) reserved(s *journal.Step) tristate.Value {
	plugin := known.IPAMOf(s.Config).Name
	pool := ipam.Pool(plugin, s.Config, u.Entry.Network)
	if pool == "" {
		return tristate.Equal(plugin == "", false)
	}
	addresses, err := ipam.HeldBy(pool, u.Entry.ContainerID, u.Entry.IfName)
	return tristate.Of(len(addresses) > 0, err)
}

// report logs and records the changes in a step.
func (u *undoing) report(
	before, after *journal.Step, f *delegate.Failure, done, notInChain bool,
) {
	switch {
	case f != nil && done:
		why := "its ADD and its DELs failed with the same error for over an hour"
		if notInChain {
			why = "its ADD failed too, and its plugin is no longer in the chain"
		}
		u.Log.Info("the pending DEL was dropped", "plugin", after.Type, "why", why, "tries", after.Tries,
			"err", after.Last)
		u.record(journal.Untaken, after, why+": "+after.Last)
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

func (u *undoing) record(kind journal.EventKind, s *journal.Step, reason string) {
	event := record.EventOf(kind, u.Entry)
	event.Reason, event.Plugins = reason, []string{s.Type}
	u.Journal.Event(event)
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

// del runs the DEL of one step. If it fails, del may also try the delegate's current configuration
// in the chain, because a mistake may have been corrected (see decide.TryPresent).
func (u *undoing) del(ctx context.Context, s *journal.Step) *delegate.Failure {
	f := u.delWith(ctx, s, s.Config)
	if f == nil || f.Killed {
		return f
	}
	try, needsProof := decide.TryPresent(s, f.Code)
	present := u.present(s)
	if !try || present == nil || bytes.Equal(present, s.Config) {
		return f
	}
	if again := u.delWith(ctx, s, present); again != nil {
		f.Killed = again.Killed
		return f
	}
	if needsProof && u.reserved(s) != tristate.No {
		return f
	}
	u.Log.Info("DEL succeeded with the chain's current configuration", "plugin", s.Type, "before",
		netconf.Shorten(f.Msg, 200))
	s.Config = present
	return nil
}

// delWith runs the DEL of one step with a configuration.
func (u *undoing) delWith(
	ctx context.Context, s *journal.Step, config json.RawMessage,
) *delegate.Failure {
	e := u.Entry
	c := &delegate.Call{
		Command: "DEL", Plugin: s.Type, Path: e.Added.Path, ContainerID: e.ContainerID, Ifname: e.IfName,
		Args: e.Added.Args, Stdin: config, Lock: u.Job.Lock.File(), Env: u.env,
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
	if f != nil && !f.Killed &&
		decide.RunsWithout(s, shown, wordsOf(f), u.pass(ctx, true).ContainerLives) {
		c.Netns = ""
		if _, again := u.Runner.Run(ctx, c, stderr); again == nil {
			f = nil
		} else {
			f.Killed = again.Killed
		}
	}
	if to := decide.LeftTo(s, u.state == gone); f != nil && !f.Killed && to != "" {
		u.Log.Info("DEL cannot succeed, because the network namespace is gone; "+to+" cleans up instead",
			"code", f.Code, "err", netconf.Shorten(f.Said(), 500))
		return nil
	}
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

// present returns the configuration of a step's delegate in the network's chain, with the ADD's
// runtime arguments. It returns nil if the chain contains no such delegate, or several.
func (u *undoing) present(s *journal.Step) json.RawMessage {
	chain, of := u.chain(), u.Verb.Conf
	if chain == nil && u.ChainOf != nil {
		chain, of = u.ChainOf(u.Entry.Network)
	}
	if chain == nil {
		return nil
	}
	i := chain.Only(s.Type)
	if i < 0 || slices.ContainsFunc(u.Entry.Undo.Steps,
		func(o journal.Step) bool { return o.Type == s.Type && o.Index != s.Index }) {
		return nil
	}
	conf := *of
	conf.RuntimeConfig = netconf.ObjectOf(u.Entry.Added.RuntimeConfig)
	conf.Injected = netconf.ObjectOf(s.Config)
	maps.DeleteFunc(conf.Injected, func(key string, _ json.RawMessage) bool {
		return !slices.Contains(netconf.InjectedKeys, key)
	})
	return chain.Config(i, &conf)
}

// inChain reports whether the verb's chain contains a delegate of a step's plugin, with this
// configuration unless that is nil. If the chain cannot be read, inChain returns true.
func (u *undoing) inChain(s *journal.Step, config json.RawMessage) bool {
	chain := u.chain()
	return chain == nil || slices.ContainsFunc(chain.Steps(u.Verb.Conf), func(now journal.Step) bool {
		return now.Type == s.Type && (config == nil || bytes.Equal(now.Config, config))
	})
}

// chain returns the verb's chain, or nil if it cannot be read or belongs to another network.
func (u *undoing) chain() *netconf.Chain {
	if u.Verb.Conf.Name != u.Entry.Network {
		return nil
	}
	chain, _ := u.Verb.Chain() // nil after an error
	return chain
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
		Now: journal.BootNanos(), SameBoot: u.Node.SameBoot(e) == tristate.Yes, Since: e.Undo.Since.Boot,
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
