package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/undo"
)

// op is one run of a verb, on one attachment or on all.
type op struct {
	*undo.Worker
	plugin *Plugin
	args   *skel.CmdArgs
	bad    error         // the configuration's error, or nil
	lock   *journal.Lock // the lock of the verb's attachment; nil without a journal
	log    *slog.Logger  // Log, with the verb's attachment in each line
	lost   error         // why the journal does not contain what the verb leaves, or nil
}

func (p *Plugin) newOp(args *skel.CmdArgs, conf *netconf.Conf) (*op, func()) {
	out, closeLog := p.logWriter(conf)
	var handler slog.Handler = slog.NewTextHandler(out, &slog.HandlerOptions{Level: conf.LogLevel})
	if conf.LogFormat == "json" {
		handler = slog.NewJSONHandler(out, &slog.HandlerOptions{Level: conf.LogLevel})
	}
	log := slog.New(handler)
	store := &journal.Store{Dir: conf.StateDir, Logger: log, Point: p.Point}
	worker := &undo.Worker{
		Env: &p.Env,
		Node: &facts.Node{
			Journal: &record.Recorder{Store: store}, Log: log, Host: facts.This(), Network: conf.Name,
			GracePeriod: conf.GracePeriod, CacheDir: p.CacheDir, View: &facts.View{},
		},
		Verb: undo.Verb{
			Key:   journal.Key{Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName},
			Netns: args.Netns, Path: args.Path, Conf: conf,
			Chain: sync.OnceValues(func() (*netconf.Chain, error) { return readChain(args, conf, log) }),
		},
	}
	for _, w := range conf.Warnings {
		log.Warn(w, "network", conf.Name)
	}
	if args.ContainerID != "" {
		log = log.With("attachment", worker.Key.String())
	}
	return &op{Worker: worker, plugin: p, args: args, log: log}, closeLog
}

// logWriter opens logFile. If that fails, the log goes to stderr, because a missing log must not
// make a pod fail.
func (p *Plugin) logWriter(conf *netconf.Conf) (io.Writer, func()) {
	if conf.LogFile == "" {
		return p.Stderr, func() {}
	}
	f, err := os.OpenFile(conf.LogFile,
		os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		conf.Warn("key \"logFile\": %v; logging to stderr", err)
		return p.Stderr, func() {}
	}
	return f, func() { _ = f.Close() }
}

// awaitExchange calls look until look returns true, or until Budgets.Exchange has passed. A
// provider may be replacing a configuration file or a plugin.
func (o *op) awaitExchange(ctx context.Context, look func() bool) {
	end := time.Now().Add(o.Budgets.Exchange)
	for !look() && time.Now().Before(end) && ctx.Err() == nil {
		time.Sleep(50 * time.Millisecond)
	}
}

// readChain calls LoadChain, and logs a warning if the chain is not the one that the configuration
// names. The first delegate gets static addresses that no delegate declares, except those of a pod:
// Multus sends them too, but only to plugins that declare them.
func readChain(
	args *skel.CmdArgs, conf *netconf.Conf, log *slog.Logger,
) (*netconf.Chain, error) {
	chain, err := conf.LoadChain()
	if err != nil {
		return nil, err
	}
	if chain.Warning != "" {
		log.Warn(chain.Warning, "network", conf.Name)
	}
	if netconf.PodOf(args.Args).Namespace == "" {
		chain.AdoptIPs(conf)
	}
	return chain, nil
}

// loadChain calls readChain. If the chainFile is missing or invalid, it retries, because the owner
// of that file may be rewriting it. It does not retry after an error in unwind's own configuration.
func (o *op) loadChain(ctx context.Context) (chain *netconf.Chain, err error) {
	o.awaitExchange(ctx, func() bool {
		chain, err = readChain(o.args, o.Conf, o.log)
		return err == nil || o.Conf.Chain != nil || o.Conf.ChainFile == ""
	})
	return chain, err
}

// namesHostNetNS reports whether CNI_NETNS is the runtime's own network namespace, and
// CNI_NETNS_OVERRIDE is not set.
func (o *op) namesHostNetNS() (bool, error) {
	if o.overridesNetNS() {
		return false, nil
	}
	return facts.IsOwnNetNS(o.args.Netns)
}

// overridesNetNS reports whether CNI_NETNS_OVERRIDE is set.
func (o *op) overridesNetNS() bool {
	override := o.args.NetnsOverride
	return strings.EqualFold(override, "TRUE") || override == "1"
}

// takeLock takes the lock of the verb's own attachment. If the journal fails, the given function
// decides whether the verb continues without the lock. killed names the delegates that unwind had
// to kill first.
func (o *op) takeLock(
	ctx context.Context, without func(error) error,
) (killed []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.Undo)
	defer cancel()
	o.lock, killed, err = o.Lock(ctx, o.Key)
	switch {
	case errors.Is(err, journal.ErrBusy):
		err = ownError(types.ErrTryAgainLater, "%s is locked by another unwind, which did not finish "+
			"within %s; retry later", o.Key, o.Budgets.Undo)
	case err != nil:
		err = without(err)
	}
	return killed, err
}

// degrade makes the verb continue without writing the journal.
func (o *op) degrade(verb string, err error) {
	o.Journal.Degraded(verb, err)
	o.log.Error("the journal failed; continuing without it: a crash or a failed DEL now leaks "+
		"addresses", "err", err)
	o.Journal.Unwritable, o.lost = true, err
}

// call prepares a call to a delegate with the verb's environment. The caller adds the
// configuration.
func (o *op) call(command, plugin string) *delegate.Call {
	return &delegate.Call{
		Command: command, Plugin: plugin, Path: o.args.Path, ContainerID: o.args.ContainerID,
		Netns: o.args.Netns, Ifname: o.args.IfName, Args: o.args.Args, Lock: o.lock.File(),
	}
}

// newEntry returns a record of an ADD of the whole chain, created from the runtime's input.
func (o *op) newEntry(state journal.State, chain *netconf.Chain) *journal.Entry {
	e := &journal.Entry{
		Key:  o.Key,
		Undo: journal.Undo{State: state, Steps: chain.Steps(o.Conf)},
		Added: journal.Added{
			Pod: netconf.PodOf(o.args.Args), NetNS: journal.NetNS{Path: o.args.Netns},
			Args: o.args.Args, Path: o.args.Path, Env: facts.SearchPaths(),
			CNIVersion: chain.CNIVersion, Host: o.Host, At: journal.Now(),
			GracePeriod: max(1, o.Conf.GracePeriod), // 0 would mean unknown
		},
	}
	if len(o.Conf.RuntimeConfig) > 0 {
		e.Added.RuntimeConfig = netconf.Marshal(o.Conf.RuntimeConfig)
	}
	return e
}

type adding struct {
	*op
	chain   *netconf.Chain
	entry   *journal.Entry
	prior   []*journal.Entry // earlier ADDs of the attachment in the journal, newest first
	started int              // number of delegates that were started
}

// callOf returns the ADD call of a delegate, without its configuration.
func (a *adding) callOf(i int) *delegate.Call {
	return a.call("ADD", a.chain.Delegates[i].Type)
}

// journalFailed decides whether an ADD whose intent is not in the journal continues or fails.
func (a *adding) journalFailed(err error) error {
	if a.Conf.OnJournalFailure == "fail" {
		return ownError(types.ErrTryAgainLater, `%v (onJournalFailure is "fail")`, err)
	}
	a.degrade("ADD", err)
	return nil
}

// writeIntent runs a transaction that writes the intent. A commit that failed may have happened, so
// writeIntent reads the journal once more: an intent that is there counts as written. If that is
// unknown, the ADD fails, because an entry in state adding must not belong to an ADD that succeeds.
// Otherwise journalFailed decides.
func (a *adding) writeIntent(ctx context.Context, write func(*journal.Tx) error) error {
	a.entry.Number = 0
	err := a.Journal.Update(ctx, write)
	if err == nil {
		return nil
	}
	if a.entry.Number != 0 { // otherwise, nothing was handed to the commit
		var stored *journal.Entry
		unread := a.Journal.Store.View(ctx, func(tx *journal.Tx) (err error) {
			stored, err = tx.Get(a.Key)
			return journal.IgnoreDamaged(err)
		})
		switch {
		case unread != nil && !errors.Is(unread, journal.ErrDamaged):
			return ownError(types.ErrTryAgainLater, "%v; it is unknown whether the journal contains "+
				"the ADD: %v; retry later", err, unread)
		case stored != nil && stored.Number == a.entry.Number:
			a.log.Warn("the journal reported an error, but it contains the ADD", "err", err)
			return nil
		}
	}
	return a.journalFailed(err)
}

func (a *adding) putIntent(tx *journal.Tx) error {
	a.entry.Number = 0 // the transaction may run twice
	return tx.Put(a.entry)
}

// findPrior finds the earlier ADDs of the attachment that are not undone.
func (a *adding) findPrior(tx *journal.Tx) (err error) {
	a.prior, err = tx.Pending(a.Key)
	return journal.IgnoreDamaged(err) // the intent replaces a damaged record
}

type deleting struct {
	*op
	entry  *journal.Entry   // the newest ADD to undo
	older  []*journal.Entry // other ADDs to undo, newest first
	undone []*journal.Entry // ADDs that are undone, newest first
	others []*journal.Entry // entries that claim an address of entry; nil if not read

	netns   journal.NetNS      // the namespace that the DEL names; without a path if it names none
	named   func() facts.Named // what is there, if it can be the namespace of this attachment's ADD
	sandbox string             // the path of the namespace in prevResult, or ""
	result  func() facts.Named // what is there, in the same way
}

// checkText returns an error if one of the CNI variables is not valid UTF-8. The journal stores
// them as JSON, which would change such a text.
func checkText(args *skel.CmdArgs) error {
	for _, v := range []struct{ name, value string }{
		{"CNI_IFNAME", args.IfName}, {"CNI_ARGS", args.Args}, {"CNI_NETNS", args.Netns},
		{"CNI_PATH", args.Path},
	} {
		if !utf8.ValidString(v.value) {
			return fmt.Errorf("%s is not valid UTF-8, so the journal cannot store it for the DEL", v.name)
		}
	}
	return nil
}
