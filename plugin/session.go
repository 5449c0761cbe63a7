package plugin

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"time"

	cnins "github.com/containernetworking/cni/pkg/ns"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/netconf"
)

// op is one run of a verb, on one attachment or on all.
type op struct {
	*Plugin
	*recorder
	runner delegate.Runner
	args   *skel.CmdArgs
	conf   *netconf.Conf
	bad    error // the error of the configuration, or nil
	// readChain returns the verb's chain. It reads a chainFile at its first call, and once: the file may
	// hang, and a verb that can do without it never calls readChain.
	readChain    func() (*netconf.Chain, error)
	key          journal.Key // of the verb's attachment; zero for GC and STATUS
	host         journal.Host
	invoked      bool       // by a runtime, see sameNamespaces
	list         *List      // the runtime's list of attachments, or nil
	view         *host.View // of the node, as the verb has seen it
	pools        *poolView
	justAssigned []netip.Addr // addresses of this ADD that no delegate of it knows yet, see claim
}

// safely turns a panic into an error.
func (o *op) safely(do func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			o.log.Error("panic", "err", r, "stack", string(debug.Stack()))
			err = cniError(types.ErrInternal, fmt.Sprintf("unwind: internal error: %v", r), "")
		}
	}()
	return do()
}

func (p *Plugin) newOp(args *skel.CmdArgs, conf *netconf.Conf) (*op, func()) {
	o := &op{
		Plugin: p, runner: p.newRunner(), args: args, conf: conf, readChain: sync.OnceValues(conf.LoadChain),
		host: host.This(), view: &host.View{}, pools: &poolView{},
		key: journal.Key{Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName},
	}
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
	o.recorder = &recorder{store: &journal.Store{Dir: conf.StateDir, Logger: log, Point: p.Point}, log: log, trace: trace}
	for _, w := range conf.Warnings() {
		o.log.Warn(w, "network", conf.Name)
	}
	return o, closeLog
}

// startEarly starts the process of the delegate that comes next, if its plugin is known to read its
// configuration before it does anything.
func (o *op) startEarly(next *delegate.Call) {
	if next = o.early(next); next != nil {
		o.runner.Start(next)
	}
}

// early returns the call, or nil if its process must not be started before its turn.
func (o *op) early(next *delegate.Call) *delegate.Call {
	if next == nil || !o.conf.StartsEarly(next.Plugin) {
		return nil
	}
	return next
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

// worker returns an op with the same view of node and journal as o, and with its own pending
// events and delegates: several workers run at once.
func (o *op) worker() *op {
	return &op{
		Plugin: o.Plugin, recorder: &recorder{store: o.store, log: o.log, trace: o.trace}, runner: o.newRunner(), args: o.args,
		conf: o.conf, bad: o.bad, readChain: o.readChain, key: o.key, host: o.host, invoked: o.invoked, list: o.list, view: o.view, pools: o.pools,
		justAssigned: o.justAssigned,
	}
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
