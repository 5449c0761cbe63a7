package sweep

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/undo"
)

// undoOwner releases an attachment that is not in the journal. If the runtime never sends a DEL, or
// if its DEL always fails, addresses, rules and devices leak. Only a DEL removes all of these. So
// undoOwner reconstructs the missing record and undoes it like any other:
//
//  1. Judge the attachment again, under its lock.
//  2. Reconstruct the record, if the attachment gets DELs (see getsDELs).
//  3. Run the chain's DELs in reverse order.
//  4. Release the addresses that host-local still reserves for the attachment, even if DELs failed.
//     Keep them while host ports may forward to them (see decide.PortPending), or if there was no
//     time for a DEL.
//  5. If all DELs succeeded, remove the attachment's file from libcni's cache, as libcni does.
//
// After SIGKILL, the next sweep runs the same steps for the files that remain. No step creates a
// journal.
func (s *Sweep) undoOwner(
	ctx context.Context, w *undo.Worker, f *Finding, lock *journal.Lock,
) error {
	defer func() { _ = lock.Remove() }() // without a record, nothing else would remove the lock file
	o := f.owner
	if _, err := os.Lstat(o.path()); errors.Is(err, fs.ErrNotExist) { // a DEL may have removed it
		f.Released, f.Pending = true, nil
		return nil
	}
	if err := w.Node.Journal.Renew(ctx); err != nil {
		return err
	}
	known, damaged := w.Node.Journal.Snapshot(ctx).Containers()
	f.Judgment = s.judge(o, damaged)
	if f.Verdict != decide.Dead || known[o.ContainerID] {
		return nil
	}
	e, err := s.reconstruct(o)
	if err != nil {
		err = fmt.Errorf("cannot reconstruct its record, so no DEL ran: %w", err)
	}
	err = s.undoRecord(ctx, w, f, e, err)
	if !f.Released {
		return err
	}
	w.Node.Log.Info("released", "attachment", o.Key.String(), "addresses", f.Addresses, "reason",
		f.Reason.Text)
	event := journal.Event{Kind: journal.Released, Key: o.Key, Pod: f.Pod, Plugins: f.Pending,
		Addresses: f.Addresses, Reason: f.Reason.Text}
	if err != nil {
		event.Reason += "; " + err.Error()
	}
	w.Node.Journal.Event(event, record.CountSwept, f.Reason.Label())
	w.Node.Journal.Flush()
	return err
}

// undoRecord runs the DELs of an owner's reconstructed record e, and releases the owner's
// addresses. If the record could not be reconstructed, e is nil, and why contains the error. If
// nothing remains that another sweep would find, undoRecord sets Released, even if a DEL failed.
func (s *Sweep) undoRecord(
	ctx context.Context, w *undo.Worker, f *Finding, e *journal.Record, why error,
) error {
	f.Pending = nil
	if e != nil {
		failures, _ := w.Run(ctx, undo.Request{Record: e, Mode: undo.Reconstructed})
		f.Pending = undo.PendingSteps(e)
		if err := whyReserved(e, failures); err != nil {
			return err
		}
		if len(failures) > 0 {
			why = failures[0]
		}
	}
	if err := freeHeld(ctx, f.owner); err != nil {
		return err
	}
	cached := f.owner.cached
	switch {
	case why != nil && cached != nil:
		return fmt.Errorf("%w; its host-local addresses are released. Fix this and sweep again, or "+
			"remove %s to forget the attachment", why, cached.Path)
	case why != nil: // no file is left from which another sweep could reconstruct the record
		f.Released = true
		return fmt.Errorf("%w; its host-local addresses are released, but rules and devices may remain",
			why)
	case cached != nil && (e == nil || len(e.Steps) > 0):
		return nil
	case cached != nil:
		if err := os.Remove(cached.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	f.Released, f.Pending = true, nil
	return nil
}

// whyReserved returns an error if the addresses of a record must stay reserved: there was no time
// for a DEL, or a host port may still forward to them.
func whyReserved(e *journal.Record, failures []*delegate.Failure) (err error) {
	for _, f := range failures {
		if f.Unstarted && f.Code == types.ErrTryAgainLater {
			return f
		}
	}
	p := decide.Pass{SameBoot: true, Steps: e.Steps}
	if slices.ContainsFunc(e.Got.Claims,
		func(c journal.Claim) bool { return decide.PortPending(c.Step, p) }) {
		err = errors.New("its addresses stay reserved, because a host port may still forward to them")
		if len(failures) > 0 {
			err = fmt.Errorf("%w; %w", failures[0], err)
		}
	}
	return err
}

// freeHeld releases the addresses that host-local still reserves for an owner.
func freeHeld(ctx context.Context, o *owner) (err error) {
	for _, r := range o.held {
		_, freeErr := ipam.Apply(ctx, r.Pool, []ipam.Reservation{r})
		err = errors.Join(err, freeErr)
	}
	return err
}

// portmap's DEL needs a port mapping, but removes rules by container ID, so onePort can be made up.
const (
	portMappings = "portMappings"
	onePort      = `[{"hostPort": 1, "containerPort": 1, "protocol": "tcp"}]`
)

// reconstruct builds a record for an owner's DELs, as if the ADD had run through unwind, in this
// boot and in this process's namespaces. The source is libcni's cache, or else the conflist that
// defines the owner's pool. reconstruct returns nil for an owner that gets no DELs.
func (s *Sweep) reconstruct(o *owner) (*journal.Record, error) {
	if !o.getsDELs() {
		return nil, nil
	}
	now, conf, result := journal.Now(), *o.conf, resultOf(o)
	e := &journal.Record{Key: o.Key, Updated: now,
		State: journal.Deleting, Since: now,
		Added: journal.Added{CNIVersion: o.chain.CNIVersion, Host: s.w.Node.Host, At: now,
			GracePeriod: s.graceOf(o)}}
	if c := o.cached; c != nil {
		result, e.Added.NetNS.Path, e.Added.Args = c.Result, c.NetNS, c.CNIArgs()
	} else if conf.RuntimeConfig = nil; slices.ContainsFunc(o.chain.Delegates,
		func(d netconf.Delegate) bool { return d.Capabilities[portMappings] }) {
		conf.RuntimeConfig = map[string]json.RawMessage{portMappings: json.RawMessage(onePort)}
	}
	e.Steps = o.chain.Steps(&conf)
	if o.cached == nil {
		// No DEL may wait for a later plugin's DEL here: no later sweep runs these DELs, and onePort is
		// no port mapping that exists. A DEL does not wait for a plugin whose ADD failed (see
		// decide.Reserved), so mark each ADD as failed.
		for i := range e.Steps {
			e.Steps[i].ADD = journal.AddFailed
		}
	}
	if len(conf.RuntimeConfig) > 0 {
		e.Added.RuntimeConfig = netconf.Marshal(conf.RuntimeConfig)
	}
	var err error
	if e.Got.Result, err = netconf.ConvertResult(result, e.Added.CNIVersion); err != nil {
		return nil, fmt.Errorf("the ADD's result: %w", err)
	}
	e.Got.Claims, e.Added.Pod = claimsOf(o, e.Steps), netconf.PodOf(e.Added.Args)
	return e, nil
}

// resultOf returns a result with the addresses that host-local reserves for an owner.
func resultOf(o *owner) json.RawMessage {
	var ips []map[string]any
	for _, r := range o.held {
		ips = append(ips, map[string]any{"interface": 0,
			"address": netip.PrefixFrom(r.Address, r.Address.BitLen()).String()})
	}
	return netconf.Marshal(map[string]any{"cniVersion": "1.0.0", "ips": ips,
		"interfaces": []map[string]string{{"name": o.IfName, "sandbox": "/proc/0/ns/net"}}})
}

// claimsOf returns a claim for each address of an owner. Each claim belongs to the first step that
// allocates from host-local. If no step does, the claim's step is -1, which is before all steps.
func claimsOf(o *owner, steps []journal.Step) (claims []journal.Claim) {
	claim := journal.Claim{Step: -1}
	for _, s := range slices.Backward(steps) {
		if pool := ipam.Pool(known.IPAMOf(s.Config).Name, s.Config, o.Network); pool != "" {
			claim = journal.Claim{Step: s.Index, Pool: pool}
		}
	}
	for _, claim.Address = range o.addresses() {
		claims = append(claims, claim)
	}
	return claims
}

// hasJournal reports whether a journal exists. A sweep does not create one.
func (s *Sweep) hasJournal() bool {
	_, err := os.Lstat(s.w.Node.Journal.Store.Path())
	return err == nil
}
