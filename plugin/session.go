package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	cnins "github.com/containernetworking/cni/pkg/ns"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"
)

// op is one run of a verb, on one attachment or on all.
type op struct {
	*Plugin
	args *skel.CmdArgs
	conf *netconf.Conf
	bad  error       // the error of the configuration, or nil
	key  journal.Key // of the verb's attachment; zero for GC and STATUS
	log  *slog.Logger
	rec  *record.Recorder
	node *alive.Node
	w    *undo.Worker
}

// newOp returns an op, and a function that closes its log.
func (p *Plugin) newOp(args *skel.CmdArgs, conf *netconf.Conf) (*op, func()) {
	out, closeLog := p.logWriter(conf)
	var handler slog.Handler = slog.NewTextHandler(out, &slog.HandlerOptions{Level: conf.LogLevel})
	if conf.LogFormat == "json" {
		handler = slog.NewJSONHandler(out, &slog.HandlerOptions{Level: conf.LogLevel})
	}
	log := slog.New(handler)
	trace := traceparent()
	if trace != "" {
		log = log.With("traceparent", trace)
	}
	key := journal.Key{Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName}
	rec := &record.Recorder{
		Store: &journal.Store{Dir: conf.StateDir, Logger: log, Point: p.Point}, Log: log, Trace: trace,
	}
	node := &alive.Node{
		Journal: rec, Log: log, Host: host.This(), Network: conf.Name,
		GracePeriod: conf.GracePeriod, CacheDir: p.CacheDir,
		View: &host.View{}, Pools: &alive.Pools{},
	}
	worker := &undo.Worker{
		Node: node, Journal: rec, Log: log, Budgets: p.Budgets,
		Runner: p.newRunner(), NewRunner: p.newRunner,
		Probes: p.probes(), Stderr: p.Stderr, At: p.Point,
		Verb: undo.Verb{
			Key: key, Netns: args.Netns, Path: args.Path, Conf: conf, Chain: sync.OnceValues(conf.LoadChain),
		},
	}
	for _, w := range conf.Warnings {
		log.Warn(w, "network", conf.Name)
	}
	return &op{Plugin: p, args: args, conf: conf, key: key, log: log, rec: rec, node: node, w: worker},
		closeLog
}

// safely turns a panic into an error.
func (o *op) safely(do func() error) error {
	err := o.w.Safely(do)
	var panicked *undo.PanicError
	if errors.As(err, &panicked) {
		return cniError(types.ErrInternal, "unwind: "+panicked.Error(), "")
	}
	return err
}

// traceparent returns the trace that the runtime's call belongs to (W3C Trace Context; libcni
// passes it in the environment, cni#1173), or "". Delegates inherit it.
func traceparent() string {
	text := os.Getenv("TRACEPARENT")
	if len(text) != len("00-0123456789abcdef0123456789abcdef-0123456789abcdef-01") ||
		strings.Trim(text, "-0123456789abcdef") != "" {
		return ""
	}
	return text
}

// logWriter opens logFile. If that fails, the log goes to stderr: no pod fails because of a log.
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

// exchange is how long unwind waits for a provider to finish replacing a configuration file or a
// plugin.
const exchange = time.Second

// loadChain is LoadChain with retries for a missing or invalid chainFile, which its owner may be
// rewriting. It does not retry an error in unwind's own configuration, which is permanent.
func (o *op) loadChain(ctx context.Context) (*netconf.Chain, error) {
	for end := time.Now().Add(exchange); ; time.Sleep(50 * time.Millisecond) {
		chain, err := o.conf.LoadChain()
		fromFile := o.conf.Chain == nil && o.conf.ChainFile != ""
		if err == nil || !fromFile || time.Now().After(end) || ctx.Err() != nil {
			return chain, err
		}
	}
}

// namesHostNetNS says whether CNI_NETNS is the runtime's own network namespace, and the
// runtime did not set CNI_NETNS_OVERRIDE.
func (o *op) namesHostNetNS() (bool, *types.Error) {
	if override := o.args.NetnsOverride; strings.EqualFold(override, "TRUE") || override == "1" {
		return false, nil
	}
	return cnins.CheckNetNS(o.args.Netns)
}

// lockOurs takes the lock of the verb's own attachment.
func (o *op) lockOurs(ctx context.Context) (lock *journal.Lock, killed []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.Undo)
	defer cancel()
	lock, killed, err = o.w.Lock(ctx, o.key)
	if errors.Is(err, journal.ErrBusy) {
		err = cniError(types.ErrTryAgainLater, fmt.Sprintf("unwind: %s is locked by another unwind, "+
			"which did not finish within %s", o.key, o.Budgets.Undo), "")
	}
	return lock, killed, err
}

// adding is one running ADD.
type adding struct {
	*op
	chain   *netconf.Chain
	lock    *journal.Lock // nil without a journal
	entry   *journal.Entry
	gen     *journal.Generation
	prior   *journal.Entry // an earlier ADD of the attachment, as the journal has it
	started int            // delegates that were started
	durable bool           // the journal says live, with all that is known
}

// journalFailed decides whether this ADD continues without a journal, or fails. It also fails if
// the journal has an earlier ADD of the attachment that is not over, because the DEL of this ADD
// would undo only the earlier one.
func (a *adding) journalFailed(ctx context.Context, err error) error {
	if a.conf.OnJournalFailure == "fail" {
		return cniError(types.ErrTryAgainLater, "unwind: "+err.Error()+` (onJournalFailure is "fail")`,
			"")
	}
	if a.prior == nil {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		a.rec.Read(ctx, a.findPrior)
	}
	if a.prior != nil && !a.isOver(a.prior) {
		return cniError(types.ErrTryAgainLater,
			fmt.Sprintf("unwind: %v; an earlier ADD of %s is not undone", err, a.key), "")
	}
	a.rec.Degraded("ADD", err)
	a.log.Error("the journal failed; continuing without it: a crash or a failed DEL now leaks",
		"err", err)
	a.rec.Unwritable = true
	return nil
}

// newEntry makes the entry of this ADD.
func (a *adding) newEntry() {
	seen, err := host.Look(a.args.Netns, a.args.IfName)
	if err != nil {
		a.log.Warn("cannot identify the network namespace", "netns", a.args.Netns, "err", err)
	}
	gen := journal.Generation{
		NetNS: seen.Netns, Occupant: seen.Occupant(), Args: a.args.Args,
		Path: a.args.Path, CNIVersion: a.chain.CNIVersion,
		// 0 is not known
		Host: a.node.Host, Created: journal.Now(), GracePeriod: max(1, a.conf.GracePeriod),
		Stores: a.conf.Stores, Steps: a.chain.Steps(a.conf),
	}
	if len(a.conf.RuntimeConfig) > 0 {
		gen.RuntimeConfig = netconf.Marshal(a.conf.RuntimeConfig)
	}
	a.entry = &journal.Entry{
		Key: a.key, State: journal.Adding,
		Pod: netconf.PodOf(a.args.Args), Generations: []journal.Generation{gen},
	}
	a.gen = a.entry.Newest()
}

// findPrior reads the entry of an earlier ADD of the attachment.
func (a *adding) findPrior(tx *journal.Tx) (err error) {
	a.prior, err = record.Readable(tx.Get(a.key))
	return err
}

// isOver reports whether an earlier ADD of the attachment is over although the journal has it as
// live: libcni's cache has no result of it, host-local no longer has its reservation, and its
// interface is neither in its own namespace nor in the namespace of this ADD. The entry must have
// no other pending DEL.
func (a *adding) isOver(prior *journal.Entry) bool {
	if prior.State != journal.Live || len(prior.Generations) != 1 ||
		a.node.IsCached(prior.Key) != tristate.No {
		return false
	}
	old := prior.Newest()
	owned := alive.OwnsClaim(prior)
	hadInterface := netconf.InterfaceOf(old.Result, a.key.IfName).MAC != ""
	if owned == tristate.Yes || owned == tristate.Unknown && !hadInterface {
		return false
	}
	paths := []string{a.args.Netns}
	if id, err := host.Identify(old.NetNS.Path); old.NetNS.Same(id) ||
		err != nil && !host.IsNoNetNS(err) {
		paths = append(paths, old.NetNS.Path)
	}
	return !slices.ContainsFunc(paths, func(path string) bool {
		seen, err := host.Look(path, a.key.IfName)
		return seen.There() || err != nil
	})
}

// deleting is one running DEL.
type deleting struct {
	*op
	lock   *journal.Lock // nil without a journal
	entry  *journal.Entry
	others []*journal.Entry // that claim one of its addresses, read with it; nil if it was not read
}

func (d *deleting) journalFailed(err error) {
	d.rec.Degraded("DEL", err)
	d.log.Error("the journal failed; the DEL continues without it", "attachment", d.key.String(),
		"err", err)
	d.rec.Unwritable = true
}

// checkText rejects text that a journal entry, which is JSON, would change.
func checkText(args *skel.CmdArgs) error {
	for _, v := range []struct{ name, value string }{
		{"CNI_IFNAME", args.IfName}, {"CNI_ARGS", args.Args}, {"CNI_NETNS", args.Netns},
		{"CNI_PATH", args.Path},
	} {
		if !utf8.ValidString(v.value) {
			return fmt.Errorf("%s is not valid UTF-8, so the journal cannot keep it for the DEL", v.name)
		}
	}
	return nil
}
