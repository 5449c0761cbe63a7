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

	cnins "github.com/containernetworking/cni/pkg/ns"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
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

// newOp returns an op, and what closes its log.
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
		Journal: rec, Log: log, Host: host.This(), Network: conf.Name, GracePeriod: conf.GracePeriod, CacheDir: p.CacheDir,
		View: &host.View{}, Pools: &alive.Pools{},
	}
	worker := &undo.Worker{
		Node: node, Journal: rec, Log: log, Budgets: p.Budgets, Runner: p.newRunner(), NewRunner: p.newRunner,
		Probes: p.probes(), Stderr: p.Stderr, At: p.Point,
		Verb: undo.Verb{
			Key: key, Netns: args.Netns, Path: args.Path, Conf: conf, Chain: sync.OnceValues(conf.LoadChain),
		},
	}
	for _, w := range conf.Warnings() {
		log.Warn(w, "network", conf.Name)
	}
	return &op{Plugin: p, args: args, conf: conf, key: key, log: log, rec: rec, node: node, w: worker}, closeLog
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

// traceparent returns the trace that the runtime's call belongs to (W3C Trace Context; libcni passes
// it in the environment, cni#1173), or "". Delegates inherit it.
func traceparent() string {
	text := os.Getenv("TRACEPARENT")
	if len(text) != len("00-0123456789abcdef0123456789abcdef-0123456789abcdef-01") ||
		strings.Trim(text, "-0123456789abcdef") != "" {
		return ""
	}
	return text
}

// logWriter opens logFile. A log that cannot be written stops no pod: it goes to stderr.
func (p *Plugin) logWriter(conf *netconf.Conf) (io.Writer, func()) {
	if conf.LogFile == "" {
		return p.Stderr, func() {}
	}
	f, err := os.OpenFile(conf.LogFile, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		conf.Warn("key \"logFile\": %v; logging to stderr", err)
		return p.Stderr, func() {}
	}
	return f, func() { _ = f.Close() }
}

// exchange is the time that unwind gives a provider to finish exchanging a configuration file or a
// plugin.
const exchange = time.Second

// loadChain is LoadChain, but reads a missing or wrong chainFile again for a while: its owner may
// be rewriting it. It does not wait for an error in unwind's own configuration, which is permanent.
func (o *op) loadChain(ctx context.Context) (*netconf.Chain, error) {
	for end := time.Now().Add(exchange); ; time.Sleep(50 * time.Millisecond) {
		chain, err := o.conf.LoadChain()
		fromFile := o.conf.Chain == nil && o.conf.ChainFile != ""
		if err == nil || !fromFile || time.Now().After(end) || ctx.Err() != nil {
			return chain, err
		}
	}
}

// namesHostNetNS says whether CNI_NETNS is the network namespace of the runtime itself, and the
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
		err = cniError(types.ErrTryAgainLater, fmt.Sprintf("unwind: %s is being worked on by another unwind, "+
			"which did not end in %s", o.key, o.Budgets.Undo), "")
	}
	return lock, killed, err
}
