package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	cnins "github.com/containernetworking/cni/pkg/ns"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/ipam"
	"cni-unwind/journal"
)

// adding is one ADD under way.
//
//  1. Read the configuration, resolve every binary: what is wrong here takes nothing.
//  2. Take the attachment's lock.
//  3. Settle what is left of earlier ADDs of this attachment and of its pod.
//  4. Write the intent: the entry in state adding, with the first delegate as started.
//  5. Run each delegate. In one transaction: its addresses are claimed, the next one is started. Whoever else claims one
//     of these addresses and is dead is settled before the next delegate runs.
//  6. With the last delegate: the entry is live.
//  7. Print the result.
//
// Whatever fails from 4 on is undone. A crash from 4 to 6 leaves the state adding with a free lock: success was never
// printed, so the attachment is dead. With chain length k this is k+1 transactions.
type adding struct {
	*op
	chain   *Chain
	lock    *journal.Lock
	entry   *journal.Entry
	gen     *journal.Generation
	prior   *journal.Entry // an earlier ADD of the attachment, as it is on record
	noWrite bool           // the journal failed: go on with what is in memory
	durable bool           // the journal says live
}

func (o *op) add() error {
	a := &adding{op: o}
	if err := a.prepare(); err != nil {
		return err
	}
	lock, killed, err := o.lockOurs(o.ctx)
	var busy *types.Error
	if errors.As(err, &busy) {
		return busy
	}
	if err != nil {
		if err := a.journalFailed(err); err != nil {
			return err
		}
	} else {
		a.lock = lock
		defer lock.Release()
	}
	if err := a.open(killed); err != nil {
		return err
	}
	printed, f := a.carryOut()
	if f == nil {
		f = a.answer(printed)
	}
	if f != nil {
		return a.rollBack(f)
	}
	return nil
}

// prepare checks all that can be checked before anything is taken.
func (a *adding) prepare() error {
	if a.bad != nil {
		return badConfig(a.bad)
	}
	if a.conf.PrevResult != nil {
		return badConfig(errors.New("the ADD has a prevResult: unwind must be the first plugin of the list; " +
			`put those before it into its "chain"`))
	}
	if err := checkText(a.args); err != nil {
		return cniError(types.ErrInvalidEnvironmentVariables, "unwind: "+err.Error(), "")
	}
	chain, err := a.conf.LoadChain()
	if err != nil {
		return badConfig(err)
	}
	a.chain = chain
	if lost := chain.LostCapabilities(a.conf); len(lost) > 0 {
		a.log.Warn("delegates declare capabilities that unwind's own entry does not, so the runtime does not pass them on",
			"write", fmt.Sprintf(`"capabilities": {"%s": true}`, strings.Join(lost, `": true, "`)))
	}
	if missing := chain.Missing(a.args.Path); len(missing) > 0 {
		_, err := findPlugin(missing[0], a.args.Path)
		msg := fmt.Sprintf("plugin type=%q failed (add): %v; unwind: nothing was started", missing[0], err)
		return cniError(types.ErrPluginNotAvailable, msg, strings.Join(missing, ", "))
	}
	return a.checkNetNS()
}

// checkNetNS does before the ADD what skel does after it: an error then would come after the result.
func (a *adding) checkNetNS() error {
	if override := a.args.NetnsOverride; strings.EqualFold(override, "TRUE") || override == "1" {
		return nil
	}
	ours, err := cnins.CheckNetNS(a.args.Netns)
	if err != nil {
		return cniError(err.Code, "unwind: "+err.Msg+"; /proc must be mounted, and RLIMIT_NOFILE leave room for it", "")
	}
	if ours {
		return cniError(types.ErrInvalidNetNS, "unwind: CNI_NETNS is the network namespace of the runtime itself", "")
	}
	return nil
}

// checkText refuses what an entry of the journal, which is JSON, would change.
func checkText(args *skel.CmdArgs) error {
	for _, v := range []struct{ name, value string }{
		{"CNI_IFNAME", args.IfName}, {"CNI_ARGS", args.Args}, {"CNI_NETNS", args.Netns}, {"CNI_PATH", args.Path},
	} {
		if !utf8.ValidString(v.value) {
			return fmt.Errorf("%s is not valid UTF-8: the journal could not give it back for the DEL", v.name)
		}
	}
	return nil
}

// journalFailed decides what a broken journal means for this ADD: it goes on without one, or fails. It fails, too, if an
// earlier ADD of the attachment is on record: the DEL of this one would undo what is left of that one, and no more.
func (a *adding) journalFailed(err error) error {
	if a.conf.OnJournalFailure == "fail" {
		return cniError(types.ErrTryAgainLater, "unwind: "+err.Error()+` (onJournalFailure is "fail")`, "")
	}
	if a.prior == nil {
		ctx, cancel := context.WithTimeout(a.ctx, time.Second)
		defer cancel()
		a.read(ctx, a.findPrior)
	}
	if a.prior != nil {
		return cniError(types.ErrTryAgainLater, fmt.Sprintf("unwind: %v; an earlier ADD of %s is not undone", err, a.key), "")
	}
	a.degraded("ADD", err)
	a.log.Error("the journal failed; going on without it: a crash from here on, or a DEL that fails, leaks", "err", err)
	a.noWrite = true
	return nil
}

// open settles what is left of earlier ADDs and writes the intent. killed says that delegates of an earlier ADD of this
// attachment had to be ended.
func (a *adding) open(killed bool) error {
	a.newEntry()
	if a.noWrite {
		return nil
	}
	var kin []*journal.Entry
	errLeft := errors.New("something is left")
	err := a.update(a.ctx, func(tx *journal.Tx) (err error) {
		if err := a.findPrior(tx); err != nil {
			return err
		}
		if kin, err = a.kin(tx); err != nil {
			return err
		}
		if a.prior != nil || len(kin) > 0 {
			return errLeft
		}
		return tx.Put(a.entry)
	})
	if errors.Is(err, errLeft) {
		a.settleKin(kin)
		if err := a.supersede(killed); err != nil {
			return err
		}
		if err = a.update(a.ctx, func(tx *journal.Tx) error { return tx.Put(a.entry) }); err != nil {
			a.notes = nil // of the earlier ADD all is as it was
		}
	}
	if err != nil {
		return a.journalFailed(err)
	}
	return nil
}

// findPrior looks for an earlier ADD of the attachment.
func (a *adding) findPrior(tx *journal.Tx) (err error) {
	a.prior, err = readable(tx.Get(a.key))
	return err
}

// readable passes over an entry that is damaged: the ADD writes over it.
func readable(e *journal.Entry, err error) (*journal.Entry, error) {
	var damaged *journal.DamagedError
	if errors.As(err, &damaged) {
		return nil, nil
	}
	return e, err
}

// newEntry makes the entry of this ADD, with the first delegate as started.
func (a *adding) newEntry() {
	netns, err := identify(a.args.Netns)
	if err != nil {
		a.log.Warn("the network namespace cannot be identified", "netns", a.args.Netns, "err", err)
	}
	gen := journal.Generation{
		NetNS: netns, Args: a.args.Args, Path: a.args.Path, CNIVersion: a.chain.CNIVersion,
		Host: a.host, Created: journal.Now(), GracePeriod: max(1, a.conf.GracePeriod), // 0 is not known
	}
	if len(a.conf.RuntimeConfig) > 0 {
		gen.RuntimeConfig = marshal(a.conf.RuntimeConfig)
	}
	a.entry = &journal.Entry{
		Key: a.key, State: journal.Adding, Pod: podOf(a.args.Args), Generations: []journal.Generation{gen},
	}
	a.gen = a.entry.Newest()
	a.startStep(0)
}

// startStep notes in memory that a delegate is about to be started.
func (a *adding) startStep(i int) {
	a.gen.Steps = append(a.gen.Steps, journal.Step{
		Index: i, Type: a.chain.Delegates[i].Type, Config: a.chain.Config(i, a.conf),
	})
}

// kin returns the other attachments of the same pod that may be dead: a new sandbox frees first what
// the old one left (Azure CNS #4350). Those of the same container, in other networks, are not among them while they live.
func (a *adding) kin(tx *journal.Tx) ([]*journal.Entry, error) {
	entries, err := tx.ByPod(a.entry.Pod)
	return slices.DeleteFunc(entries, func(e *journal.Entry) bool {
		return e.Key == a.key || e.State == journal.Live && e.ContainerID == a.key.ContainerID
	}), err
}

// settleKin divides its time over the attachments, but not into parts in which a delegate that is well would be killed:
// rather it leaves the rest for later.
func (a *adding) settleKin(kin []*journal.Entry) {
	if a.conf.observes() {
		return
	}
	ctx, cancel := context.WithTimeout(a.ctx, a.Budgets.Settle)
	defer cancel()
	kin = slices.DeleteFunc(kin, func(e *journal.Entry) bool { return !a.due(ctx, e, false) })
	deadline, _ := ctx.Deadline()
	for i, e := range kin {
		left := time.Until(deadline)
		if left < a.Budgets.Settle/5 {
			a.log.Debug("left for later: no time", "attachments", len(kin)-i)
			return
		}
		one, cancelOne := context.WithTimeout(ctx, max(left/time.Duration(len(kin)-i), a.Budgets.Settle/5))
		if err := a.settle(one, e.Key); err != nil {
			a.log.Debug("left for later", "attachment", e.Key.String(), "err", err)
		}
		cancelOne()
	}
}

// supersede undoes the earlier ADDs of this attachment. What of them cannot be undone now becomes part of the new entry
// and runs at its DEL: what such a DEL removes may be keyed by the container ID, which is about to be used again.
func (a *adding) supersede(killed bool) error {
	prior := a.prior
	if prior == nil {
		return nil
	}
	if prior.State == journal.Live || prior.State == journal.Adding && a.lock.Made() {
		if err := a.refuseLive(prior); err != nil {
			if a.lock.Made() {
				_ = a.lock.Forget() // as it was
			}
			return err
		}
	}
	ctx, cancel := context.WithTimeout(a.ctx, a.Budgets.Settle)
	defer cancel()
	if v := decide(a.gather(prior, a.lock)); v.fate == Foreign {
		if err := a.purge(ctx, nil, prior, v.reason); err != nil { // without the lock: its file stays, it is ours now
			return a.journalFailed(err)
		}
		return nil
	}
	if killed {
		markKilled(prior, a.conf.GracePeriod)
	}
	if err := a.begin(ctx, prior, "superseded by another ADD of the same container ID"); err != nil {
		return a.journalFailed(err)
	}
	event := eventOf(journal.Superseded, prior)
	a.undo(ctx, a.lock, prior, "")
	event.Reason, event.Plugins = prior.Reason, pendingSteps(prior)
	a.tell(event)
	a.entry.Generations = append(prior.Generations, *a.gen)
	a.gen = a.entry.Newest()
	return nil
}

// refuseLive returns an error if an attachment that was added is still in use: SPEC 1.1 §2 forbids an ADD over it.
func (a *adding) refuseLive(prior *journal.Entry) error {
	old := prior.Newest()
	why := ""
	switch {
	case a.sameBoot(old) == no:
	case old.NetNS.Same(a.gen.NetNS), !old.NetNS.Known() && old.NetNS.Path == a.args.Netns:
		why = "in the same network namespace"
	default:
		if pid, err := processIn(old.NetNS); pid != 0 || err != nil {
			why = "in a network namespace that a process is in"
		}
	}
	if why == "" {
		return nil
	}
	return cniError(types.ErrInternal, fmt.Sprintf("unwind: %s is added already, %s; DEL it first", a.key, why), "")
}

// markKilled notes that the last started delegate of an entry was ended by force.
func markKilled(e *journal.Entry, grace time.Duration) {
	if g := e.Newest(); len(g.Steps) > 0 {
		g.Steps[len(g.Steps)-1].RepeatAt = journal.BootNanos() + int64(grace)
	}
}

// carryOut runs the delegates and returns what is to be printed.
func (a *adding) carryOut() (printed json.RawMessage, f *failure) {
	last := len(a.chain.Delegates) - 1
	for i, d := range a.chain.Delegates {
		stdout, f := a.runDelegate(d)
		if f != nil {
			if f.unstarted {
				a.gen.Steps = a.gen.Steps[:i]
			}
			return nil, f
		}
		claims, err := a.accept(i, stdout)
		if err == nil && i == last {
			printed, err = convertResult(a.gen.Result, a.conf.CNIVersion)
		}
		if err != nil {
			return nil, &failure{plugin: d.Type, command: "ADD", code: types.ErrDecodingFailure, msg: err.Error()}
		}
		if i < last {
			a.startStep(i + 1)
		}
		if f := a.commit(d, claims, i == last); f != nil {
			a.gen.Steps = a.gen.Steps[:i+1] // the next delegate was not started after all
			return nil, f
		}
	}
	return printed, nil
}

// runDelegate runs the delegate that was started last.
func (a *adding) runDelegate(d Delegate) ([]byte, *failure) {
	step := &a.gen.Steps[len(a.gen.Steps)-1]
	c := &call{
		command: "ADD", plugin: d.Type, path: a.args.Path, containerID: a.args.ContainerID, netns: a.args.Netns,
		ifname: a.args.IfName, args: a.args.Args, stdin: withPrevResult(step.Config, a.gen.Result),
	}
	if a.lock != nil {
		c.lock = a.lock.File()
	}
	ctx, cancel := a.ctx, context.CancelFunc(func() {})
	if a.conf.DelegateTimeout > 0 {
		ctx, cancel = context.WithTimeout(a.ctx, a.conf.DelegateTimeout)
	}
	defer cancel()
	stdout, f := c.run(ctx, a.Stderr)
	if f != nil && f.killed {
		step.RepeatAt = journal.BootNanos() + int64(a.conf.GracePeriod)
	}
	a.at("added")
	return stdout, f
}

// accept takes a delegate's result as the best known one and returns the claims on the addresses that are new in it.
func (a *adding) accept(i int, stdout []byte) ([]journal.Claim, error) {
	raw, err := readResult(stdout, a.chain.CNIVersion)
	if err != nil {
		return nil, err
	}
	r, err := parseResult(raw)
	if err != nil {
		return nil, err
	}
	a.gen.Result = raw
	a.gen.HostLinks = hostLinks(r)
	pool := ipam.Pool(a.gen.Steps[len(a.gen.Steps)-1].Config, a.key.Network)
	var claims []journal.Claim
	for _, address := range r.addresses() {
		if !slices.ContainsFunc(a.gen.Claims, func(c journal.Claim) bool { return c.Address == address }) {
			claims = append(claims, journal.Claim{Address: address, Step: i, Pool: pool})
		}
	}
	return claims, nil
}

// commit writes what carryOut has done, and sees to others that claim one of the new addresses.
func (a *adding) commit(d Delegate, claims []journal.Claim, last bool) *failure {
	a.gen.Claims = append(a.gen.Claims, claims...)
	if a.noWrite {
		return nil
	}
	others, err := a.record(claims, last)
	if err == nil && len(others) > 0 {
		if f := a.claim(d, claims, others); f != nil {
			return f
		}
		if last {
			_, err = a.record(nil, true)
		}
	}
	if err != nil && a.conf.OnJournalFailure == "fail" {
		return &failure{plugin: d.Type, command: "ADD", code: types.ErrTryAgainLater, msg: err.Error()}
	}
	if err != nil {
		a.degraded("ADD", err)
		a.log.Error("the journal cannot be written", "err", err)
	}
	return nil
}

// record writes the entry and returns the other entries that hold one of the claims. It is live if it is the last time
// and there are no such others.
func (a *adding) record(claims []journal.Claim, last bool) (others []*journal.Entry, err error) {
	err = a.update(a.ctx, func(tx *journal.Tx) error {
		others = nil
		for _, c := range claims {
			entries, err := tx.ByAddress(c.Address)
			if err != nil {
				return err
			}
			for _, e := range entries {
				if e.Key != a.key {
					others = append(others, e)
				}
			}
		}
		a.entry.State = journal.Adding
		if last && len(others) == 0 {
			a.entry.State = journal.Live
		}
		return tx.Put(a.entry)
	})
	a.durable = err == nil && a.entry.State == journal.Live
	return others, err
}

// answer prints the result. If the journal does not say that the attachment is live, it must not say either that it is
// dead: without its lock file an entry in state adding is judged by its network namespace, as a live one is.
func (a *adding) answer(printed json.RawMessage) *failure {
	lastDelegate := a.chain.Delegates[len(a.chain.Delegates)-1].Type
	if !a.durable && a.lock != nil {
		if err := a.lock.Forget(); err != nil && !errors.Is(err, fs.ErrNotExist) && !a.noWrite {
			return &failure{plugin: lastDelegate, command: "ADD", code: types.ErrIOFailure, msg: "unwind: " + err.Error()}
		}
	}
	a.at("print")
	if _, err := a.Stdout.Write(append(bytes.TrimSpace(printed), '\n')); err != nil {
		return &failure{plugin: lastDelegate, command: "ADD", code: types.ErrIOFailure, msg: "unwind: printing the result: " + err.Error()}
	}
	return nil
}

// rollBack undoes the ADD and returns the error for the runtime.
func (a *adding) rollBack(f *failure) error {
	a.log.Warn("ADD failed, undoing it", "attachment", a.key.String(), "plugin", f.plugin, "code", f.code,
		"err", shorten(f.said(), 500))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(a.ctx), a.Budgets.Undo)
	defer cancel()
	a.entry.State = journal.Unwinding
	if a.durable {
		a.entry.State = journal.Removing
	}
	a.entry.Reason = shorten(reasonFailed+": "+f.words(), 500)
	tomb := a.tombstone(a.entry)
	if a.claimHeld(a.entry) && !a.noWrite {
		if err := a.update(ctx, func(tx *journal.Tx) error { return tx.Put(a.entry) }); err != nil {
			a.log.Error("the journal cannot be written after a failed ADD", "attachment", a.key.String(), "err", err)
		}
	}
	event, result := eventOf(journal.RolledBack, a.entry), "complete"
	a.undo(ctx, a.lock, a.entry, a.args.Netns)
	if a.entry.Pending() > 0 {
		result = "pending"
	}
	event.Reason, event.Plugins = a.entry.Reason, []string{f.plugin}
	a.tell(event, CountRollbacks, f.plugin, result)
	switch {
	case !a.noWrite:
		if err := a.finish(ctx, a.lock, a.entry, tomb); err != nil {
			a.log.Error("the journal cannot be written after a failed ADD", "attachment", a.key.String(), "err", err)
		}
	case a.entry.Pending() > 0:
		a.log.Error("DELs are owed that no journal holds; they are lost", "attachment", a.key.String(),
			"plugins", strings.Join(pendingSteps(a.entry), ", "))
	}
	err := addError(f, a.entry)
	a.makeRoom()
	return err
}

// makeRoom releases what is dead in the network, after an ADD that failed: the runtime's next try finds room in a pool that
// was full.
func (a *adding) makeRoom() {
	if a.conf.observes() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(a.ctx), a.Budgets.Settle)
	defer cancel()
	s := &sweeping{op: a.op, Sweep: Sweep{Network: a.key.Network, Pools: a.chain.Pools(a.conf)}}
	if _, err := s.run(ctx); err != nil {
		a.log.Warn("looking for dead attachments after a failed ADD", "network", a.key.Network, "err", err)
	}
}
