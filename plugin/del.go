package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// deleting is one run of DEL.
type deleting struct {
	*op
	records   []*journal.Record // the ADDs to undo, newest first
	abandoned []*journal.Record // ADDs that an operator dropped with unwindctl forget
	netns     journal.NetNS     // from CNI_NETNS, else from prevResult; Path is "" if both lack a path
	// claimed contains the records to which find added claims from host-local's files. find reads
	// these files for all records before any DEL runs, because the DEL of one record may release an
	// address that another record should claim.
	claimed map[*journal.Record]bool
}

// del runs a DEL.
//
//  1. Acquire the attachment's lock. If an ADD of the attachment still runs, end that ADD (see
//     watched): the runtime that started the ADD is dead or has abandoned it.
//  2. Find the records to undo, or create one from the runtime's input if none is for this DEL's
//     ADD. If an operator dropped that ADD, and no other is recorded, there is nothing to do.
//  3. Undo the records (see undo.Worker.Undo), and write the DELs that are still pending.
//
// A failing journal does not stop a pod's DEL. An invalid configuration can stop it only if the
// journal contains no record of the attachment. After a crash of unwind, the journal still contains
// every DEL that may be needed.
func (o *op) del(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), o.Env.Budgets.Undo)
	defer cancel()
	if o.bad != nil {
		o.log.Warn("ignoring invalid configuration keys; their defaults apply", "err", o.bad)
	}
	d := &deleting{op: o}
	err := d.takeLock(ctx, journal.Patience{EndADD: true},
		func(err error) error { d.Degrade("DEL", err); return nil })
	if err != nil {
		return err
	}
	defer d.lock.Release()
	if err := d.find(ctx); err != nil || len(d.records) == 0 {
		_ = d.lock.Remove() // no record needs the lock file
		return err
	}
	failures, durable := d.undo(ctx)
	if d.Node.Journal.Lost != nil && !slices.ContainsFunc(d.records,
		func(e *journal.Record) bool { return len(e.Steps) > 0 }) {
		_ = d.lock.Remove() // Finish has not removed it, and no DEL is pending
	}
	return d.report(failures, durable)
}

// find sets d.records to the records to undo: the attachment's records in the journal, and a new
// record if none of these is for this DEL's ADD. If there is nothing to undo, d.records is empty.
func (d *deleting) find(ctx context.Context) error {
	d.readJournal(ctx)
	sandbox := netconf.SandboxOf(d.Verb.Conf.PrevResult, d.Verb.Key.IfName)
	named, _ := facts.InterfaceAt(cmp.Or(d.args.Netns, sandbox), "")
	d.netns = named.Netns
	switch {
	case slices.ContainsFunc(d.records, d.isOf):
	case len(d.records) == 0 && slices.ContainsFunc(d.abandoned, d.isOf):
		d.noteIdle("dropped from the journal with unwindctl forget", nil)
	default:
		if err := d.addUnrecorded(ctx); err != nil {
			return err
		}
	}
	d.claimed = map[*journal.Record]bool{}
	for _, e := range d.records {
		d.claimed[e] = d.ClaimHeld(e)
		if e.Got.Result == nil && d.isOf(e) && d.mayHaveResult(e) {
			d.takePrevResult(e)
		}
	}
	return nil
}

// mayHaveResult reports whether the runtime's prevResult may be the result of a record's ADD. The
// record must have no result yet, so its claims come only from host-local's files. If prevResult
// contains none of the claimed addresses, it is the result of a different ADD.
func (d *deleting) mayHaveResult(e *journal.Record) bool {
	return len(e.Got.Claims) == 0 ||
		slices.ContainsFunc(netconf.AddressesOf(d.Verb.Conf.PrevResult), e.ClaimsAddress)
}

// readJournal reads the attachment's records, and takes the snapshot for all later decisions.
func (d *deleting) readJournal(ctx context.Context) {
	err := d.Node.Journal.Renew(ctx)
	if errors.Is(err, journal.ErrDamaged) {
		err = d.Node.Journal.Store.Update(ctx, d.Node.Journal.TakeSnapshot) // starts a new journal
	}
	if err != nil {
		d.Degrade("DEL", err)
	}
	all, _ := d.Node.Journal.Snapshot(ctx).Records(d.Verb.Key) // Finish deletes damaged ones
	for _, e := range all {
		if e = e.Clone(); e.State == journal.Abandoned {
			d.abandoned = append(d.abandoned, e)
		} else {
			d.records = append(d.records, e)
		}
	}
}

// isOf reports whether the runtime's DEL is for a record's ADD: the DEL or the record has no path,
// both have the same path, or the DEL's path leads to the record's namespace.
func (d *deleting) isOf(e *journal.Record) bool {
	recorded := e.Added.NetNS.Path
	return d.netns.Path == "" || recorded == "" || facts.SamePath(recorded, d.netns.Path) ||
		d.Node.IsAt(e, d.netns)
}

// addUnrecorded adds a record for this DEL's ADD, which the journal does not contain. Such an ADD
// ran before unwind was installed, while unwind was off, or while the journal could not be written.
// If no delegate can have allocated anything, the DEL succeeds without a record. If the chain
// cannot be read, and the attachment has no other record, the DEL succeeds only if the runtime has
// no ADD result, or if a retry could not help.
func (d *deleting) addUnrecorded(ctx context.Context) error {
	e, err := d.reconstruct(ctx)
	switch {
	case e != nil:
		if len(d.records) > 0 {
			d.log.Warn("a later ADD, which is not in the journal, added the attachment again; undoing " +
				"both ADDs")
		}
		d.records = slices.Insert(d.records, 0, e)
	case len(d.records) > 0:
		if err != nil {
			d.log.Warn("the journal does not contain the ADD of this DEL, and the chain cannot be read",
				"err", err)
		}
	case err == nil:
		d.noteIdle("no plugin of the chain is in CNI_PATH, and the runtime has no ADD result", nil)
	case d.Verb.Conf.NeverAdded():
		d.noteIdle("the journal has no record, and the runtime has no ADD result", err)
	case errors.Is(err, netconf.ErrNoChain) && d.bad == nil && d.Node.Journal.Lost == nil:
		// multus up to 4.3 removes unwind's keys from a clusterNetwork, so a retry could not help
		d.noteIdle("the journal in "+d.Verb.Conf.StateDir+" does not contain the attachment, "+
			"and the runtime's configuration contains no chain", err)
	default:
		return badConfig(fmt.Errorf("%s is not in the journal, and the chain cannot be read: %w",
			d.Verb.Key, err))
	}
	return nil
}

// reconstruct creates a record, from the runtime's input, for an ADD that the journal does not
// contain. It returns nil if no delegate can have allocated anything, and an error if the chain
// cannot be read.
func (d *deleting) reconstruct(ctx context.Context) (*journal.Record, error) {
	chain, err := d.Verb.Chain()
	if err != nil {
		return nil, err
	}
	e := d.newRecord(journal.Deleting, chain)
	e.Added.NetNS.Path = d.netns.Path
	hosts := d.Node.IsHost(d.netns) && !d.overridesNetNS()
	// only CNI_NETNS identifies the namespace; a path in prevResult may lead elsewhere by now
	if d.args.Netns != "" && !hosts && !d.Node.Anothers(ctx, e, d.netns) {
		e.Added.NetNS = d.netns
	}
	if d.Verb.Conf.NeverAdded() {
		undo.Interrupted(e.Steps)
		missing := func(s journal.Step) bool {
			binary, err := netconf.FindPlugin(s.Type, e.Added.Path)
			return err != nil || unix.Access(binary, unix.X_OK) != nil
		}
		// Missing plugins have allocated nothing, unless host-local's files prove that the chain ran.
		if slices.ContainsFunc(e.Steps, missing) && !d.ClaimHeld(e) {
			e.Steps = slices.DeleteFunc(e.Steps, missing)
		}
	}
	if len(e.Steps) == 0 {
		return nil, nil
	}
	if err := d.checkText(); err != nil {
		d.Degrade("DEL", err)
	}
	return e, nil
}

// takePrevResult stores the runtime's prevResult as the result of a record's ADD. It adds claims on
// the result's addresses, for the first delegate with an IPAM plugin, or else for the first one.
func (d *deleting) takePrevResult(e *journal.Record) {
	if d.Verb.Conf.PrevResult == nil || len(e.Steps) == 0 {
		return
	}
	by := e.Steps[max(0, slices.IndexFunc(e.Steps,
		func(s journal.Step) bool { return known.IPAMOf(s.Config).Name != "" }))]
	raw, err := netconf.ConvertResult(d.Verb.Conf.PrevResult, e.Added.CNIVersion)
	var claims []journal.Claim
	if err == nil {
		claims, err = setResult(e, raw, by, known.IPAMOf(by.Config).Name)
	}
	e.Got.Claims = append(e.Got.Claims, claims...)
	if err != nil {
		d.log.Warn("ignoring the runtime's prevResult, which is invalid", "err", err)
	}
}

// undo undoes the records, newest first, and writes the DELs that are still pending. durable
// reports whether the journal contains all pending DELs.
func (d *deleting) undo(ctx context.Context) (failures []*delegate.Failure, durable bool) {
	ran, later := 0, 0
	for _, e := range d.records {
		later += len(e.Steps)
	}
	durable = true
	for _, e := range d.records {
		later -= len(e.Steps)
		request := undo.Request{Record: e, Mode: undo.Requested, Lock: d.lock, Later: later,
			Changed: d.claimed[e]}
		if d.isOf(e) {
			request.Netns = d.args.Netns
		}
		reason := decide.Requested
		if e != d.records[0] || e.State == journal.RollingBack {
			reason = decide.Recorded(e.Cause, e.Reason)
		}
		failed, n, err := d.Undo(ctx, request, reason)
		failures, ran = append(failures, failed...), ran+n
		if err != nil {
			d.Node.Journal.Degraded("DEL", err)
			d.log.Error("cannot record a DEL, so it may run again later", "err", err)
		}
		durable = durable && err == nil && d.Node.Journal.Lost == nil
	}
	if pending := undo.PendingSteps(d.records[0]); ran+len(failures) == 0 && len(pending) > 0 {
		d.noteIdle("pending: "+strings.Join(pending, ", "), nil)
	}
	return failures, durable
}

// noteIdle logs, and records in the history, that the DEL ran no plugin, and why. err, if not nil,
// is the reason why the chain cannot be read.
func (d *deleting) noteIdle(why string, err error) {
	level, attrs := slog.LevelInfo, []any{"reason", why}
	if err != nil {
		level, attrs = slog.LevelWarn, append(attrs, "err", err)
	}
	d.log.Log(context.Background(), level, "DEL ran no plugin", attrs...)
	d.Node.Journal.Event(journal.Event{
		Key: d.Verb.Key, Kind: journal.NoOp, Pod: netconf.PodOf(d.args.Args), Reason: why,
	})
}

// report returns the error for the runtime. It omits the failure of a plugin that the runtime would
// not call without unwind.
//
// go-cni ignores an error that contains "not found", so report omits a delegate's message with that
// text. The log contains the message, and so does the journal if it could be written.
func (d *deleting) report(failures []*delegate.Failure, durable bool) error {
	names, code := []string{}, uint(0)
	for _, f := range failures {
		if f.Unreported {
			d.log.Warn("a DEL failed; the runtime gets no error, because the plugin has "+
				"left the chain", "plugin", f.Plugin, "code", f.Code)
			continue
		}
		said := fmt.Sprintf("%s (code %d)", f.Plugin, f.Code)
		if text := netconf.Shorten(f.Said(), 500); !strings.Contains(text, "not found") {
			said += ": " + text
		}
		if code = cmp.Or(code, f.Code); !slices.Contains(names, said) {
			names = append(names, said)
		}
	}
	if len(names) == 0 || d.Verb.Conf.OnDelFailure == "defer" && durable {
		return nil
	}
	list := strings.Join(names, ", ")
	if !durable {
		return ownError(code, "DEL incomplete; the journal cannot be written (see unwind's log), so "+
			"unwind may not retry it: %s", list)
	}
	return ownError(code, "DEL incomplete; it will be retried: %s; see unwindctl show %s", list,
		d.Verb.Key)
}
