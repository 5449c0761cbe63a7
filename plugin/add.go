package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// add runs an ADD.
//
//  1. Read the configuration and find every binary. If that fails, nothing has been allocated.
//  2. Take the attachment's lock.
//  3. Release what earlier ADDs of this attachment and of its pod have left. Write the intent: the
//     entry in state adding, with the whole chain.
//  4. Run each delegate. If its result differs from the previous one, write the entry in state
//     live, with the result and claims on the new addresses. If a dead attachment claims one of
//     these addresses, release that attachment before the next delegate runs.
//  5. Print the result.
//  6. If step 4 or 5 fails, undo the ADD. This needs no journal.
//
// If the intent cannot be written, the ADD continues without the journal, or fails (see
// journalFailed). Every later write that fails makes the ADD fail. So if an entry is in state
// adding and its lock is free, unwind never printed success, and the attachment is dead.
//
// A crash before the first result is written leaves such an entry. After a crash between the first
// result and the print, the attachment looks live until the runtime sends its DEL or its network
// namespace is gone. In both cases every delegate of the chain gets a DEL, because the journal does
// not record which ones were started. libcni does the same after a failed ADD.
func (o *op) add(ctx context.Context) error {
	a := &adding{op: o}
	if err := a.prepare(ctx); err != nil {
		return err
	}
	killed, err := a.takeLock(ctx, undo.Wait, a.journalFailed)
	if err != nil {
		return err
	}
	defer a.lock.Release()
	if err := a.open(ctx, killed); err != nil {
		return err
	}
	printed, f := a.carryOut(ctx)
	if f == nil {
		f = a.printResult(printed)
	}
	if f != nil {
		return a.rollBack(ctx, f)
	}
	return nil
}

// prepare validates the input before any delegate starts.
func (a *adding) prepare(ctx context.Context) error {
	if a.bad != nil {
		return badConfig(a.bad)
	}
	if a.Conf.PrevResult != nil {
		return badConfig(errors.New("prevResult is set, but unwind must be the first plugin of the " +
			`list; move the plugins before it into "chain"`))
	}
	if err := checkText(a.args); err != nil {
		return ownError(types.ErrInvalidEnvironmentVariables, "%v", err)
	}
	chain, err := a.loadChain(ctx)
	if err != nil {
		return a.refuse(badConfig(err))
	}
	a.chain = chain
	if lost := chain.LostCapabilities(a.Conf); len(lost) > 0 {
		a.log.Warn("plugins need capabilities that unwind's entry does not declare, so the runtime "+
			"drops their arguments; declare them in the entry", "lost", strings.Join(lost, ", "), "declare",
			fmt.Sprintf(`"capabilities": {"%s": true}`,
				strings.Join(chain.EntryCapabilities(), `": true, "`)))
	}
	if missing := chain.Missing(a.args.Path); len(missing) > 0 {
		_, err := netconf.FindPlugin(missing[0], a.args.Path)
		msg := fmt.Sprintf("plugin type=%q failed (add): %v; unwind: no plugin was started", missing[0],
			err)
		return a.refuse(cniError(types.ErrPluginNotAvailable, msg,
			"missing: "+strings.Join(missing, ", ")), missing...)
	}
	return a.checkNetNS()
}

// refuse records in the history that an ADD could not start its chain, and returns the error.
func (a *adding) refuse(err *types.Error, plugins ...string) error {
	a.Journal.Event(journal.Event{Key: a.Key, Kind: journal.RolledBack, Reason: err.Msg,
		Pod: netconf.PodOf(a.args.Args), Plugins: plugins})
	a.Journal.Flush()
	return err
}

// checkNetNS validates CNI_NETNS before the ADD. skel validates CNI_NETNS only after the ADD, when
// the result is already printed.
func (a *adding) checkNetNS() error {
	ours, err := a.namesHostNetNS()
	if err != nil {
		return ownError(types.ErrInvalidNetNS, "%v; check that /proc is mounted", err)
	}
	if ours {
		return ownError(types.ErrInvalidNetNS, "CNI_NETNS is the runtime's own network namespace; "+
			"set it to the container's")
	}
	return nil
}

// carryOut runs the delegates and returns the result to print.
func (a *adding) carryOut(ctx context.Context) (printed json.RawMessage, f *delegate.Failure) {
	last := len(a.chain.Delegates) - 1
	for i := range a.chain.Delegates {
		stdout, f := a.runDelegate(ctx, i)
		if f != nil {
			return nil, f
		}
		claims, changed, err := a.accept(i, stdout)
		if err == nil && i == last {
			printed, err = a.printable()
		}
		if err != nil {
			return nil, a.callOf(i).Failed(types.ErrDecodingFailure, err.Error())
		}
		if !changed {
			continue
		}
		if f := a.commit(ctx, i, claims); f != nil {
			return nil, f
		}
	}
	return printed, nil
}

// printable returns the result in the CNI version of unwind's own configuration. If the chain has
// the same version, printable does not convert the last delegate's result, because libcni would not
// either.
func (a *adding) printable() (json.RawMessage, error) {
	if netconf.SameVersion(a.Conf.CNIVersion, a.chain.CNIVersion) {
		return a.entry.Got.Result, nil
	}
	return netconf.ConvertResult(a.entry.Got.Result, a.Conf.CNIVersion)
}

func (a *adding) runDelegate(ctx context.Context, i int) ([]byte, *delegate.Failure) {
	step := &a.entry.Undo.Steps[i]
	a.started = i + 1
	c := a.callOf(i)
	c.Stdin = netconf.WithPrevResult(step.Config, a.entry.Got.Result)
	if a.Conf.DelegateTimeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, a.Conf.DelegateTimeout)
		defer cancel()
	}
	stdout, f := a.Runner.Run(ctx, c, a.Stderr)
	if f != nil {
		a.Failed(a.entry, step, f)
		if f.Unstarted {
			a.started = i
		}
	}
	a.At("added")
	return stdout, f
}

// accept stores a delegate's result as the current one, and reports whether it differs from the
// previous one. It returns claims on the addresses that are new in it.
func (a *adding) accept(i int, stdout []byte) (claims []journal.Claim, changed bool, err error) {
	raw, err := netconf.ReadResult(stdout, a.chain.CNIVersion)
	if err != nil || bytes.Equal(raw, a.entry.Got.Result) {
		return nil, false, err
	}
	r, err := netconf.ParseResult(raw)
	if err != nil {
		return nil, false, err
	}
	a.entry.Got.Result, a.entry.Got.HostLinks = raw, facts.HostLinks(r)
	return newClaims(a.entry, r, a.entry.Undo.Steps[i]), true, nil
}

// newClaims returns claims, for the delegate of a step, on those addresses of a result that the ADD
// does not claim yet.
func newClaims(
	e *journal.Entry, r *netconf.Result, by journal.Step,
) (claims []journal.Claim) {
	pool := ipam.Pool(by.Config, e.Network)
	for _, address := range r.Addresses() {
		if !e.ClaimsAddress(address) {
			claims = append(claims, journal.Claim{Address: address, Step: by.Index, Pool: pool})
		}
	}
	return claims
}

func (a *adding) printResult(printed json.RawMessage) *delegate.Failure {
	a.At("print")
	if _, err := a.plugin.Stdout.Write(append(bytes.TrimSpace(printed), '\n')); err != nil {
		return a.callOf(len(a.chain.Delegates)-1).Failed(types.ErrIOFailure,
			"unwind: cannot print the result: "+err.Error())
	}
	return nil
}
