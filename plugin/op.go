// Package plugin implements unwind's CNI verbs. An ADD records all plugins of the chain in the
// journal, and runs them as its delegates. If the ADD fails, unwind undoes it.
package plugin

import (
	"cmp"
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
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/undo"
)

// Plugin carries out CNI verbs in one process.
type Plugin struct {
	undo.Env
	Stdout io.Writer
	Log    *slog.Logger // nil: log as configured
	// CacheDir is the directory of libcni's cache of results; "" means the default one.
	CacheDir string
	// Unread reports whether nobody can read Stdout any more. nil means that somebody always can.
	Unread func() bool
	// Behind runs a STATUS's sweep in the background, in a new process of this program (see
	// StartSweep). If Behind is nil, a STATUS starts no sweep.
	Behind func(conf []byte) (ended <-chan error, err error)
}

// Main carries out the verb that the environment names (SPEC 1.1 §2), prints its result or error,
// and returns the exit code.
func (p *Plugin) Main(ctx context.Context, about string) int {
	funcs := skel.CNIFuncs{
		Add:    p.verb(ctx, (*op).add),
		Del:    p.verb(ctx, (*op).del),
		Check:  p.verb(ctx, (*op).check),
		GC:     p.verb(ctx, (*op).gc),
		Status: p.verb(ctx, (*op).status),
	}
	if err := skel.PluginMainFuncsWithError(funcs, version.All, about); err != nil {
		_ = err.Print()
		return 1
	}
	return 0
}

// verb returns the function with which skel runs a verb. The function turns a panic into an error.
func (p *Plugin) verb(
	ctx context.Context, do func(*op, context.Context) error,
) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		conf, bad := netconf.ParseConf(args.StdinData)
		o, closeLog := p.newOp(args, conf)
		o.bad, o.Node.Invoked, o.Node.Journal.Store.Trusting = bad, true, true
		defer closeLog()
		defer o.Node.Journal.Flush()
		// Without this override, skel would return an error after the verb if CNI_NETNS is the host's
		// namespace. That is too late for an ADD (see prepare), and wrong for a DEL that has succeeded.
		defer func() { args.NetnsOverride = "1" }()
		err := o.Safely(func() error { return do(o, ctx) })
		var panicked *undo.PanicError
		if errors.As(err, &panicked) {
			return ownError(types.ErrInternal, "%v", panicked)
		}
		return err
	}
}

// Unbroken is the descriptor of standard output or standard error. If the runtime is dead, a write
// to its pipe returns an error, so unwind can undo the ADD. With os.Stdout, SIGPIPE would end the
// process.
type Unbroken int

func (fd Unbroken) Write(p []byte) (n int, err error) {
	for n < len(p) {
		written, err := unix.Write(int(fd), p[n:])
		switch {
		case errors.Is(err, unix.EAGAIN):
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, -1)
		case err != nil && !errors.Is(err, unix.EINTR):
			return n, err
		}
		n += max(written, 0)
	}
	return n, nil
}

// Unread reports whether nobody has the other end of the pipe open.
func (fd Unbroken) Unread() bool {
	fds := []unix.PollFd{{Fd: int32(fd)}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0 && fds[0].Revents&unix.POLLERR != 0
}

// op is one run of a verb, for one attachment or for all.
type op struct {
	*undo.Worker
	plugin *Plugin
	args   *skel.CmdArgs
	bad    error         // the configuration's error, or nil
	lock   *journal.Lock // the lock of the verb's attachment; nil if it was not acquired
	log    *slog.Logger  // the log, with the verb's attachment in each line
}

func (p *Plugin) newOp(args *skel.CmdArgs, conf *netconf.Conf) (*op, func()) {
	out, closeLog := p.logWriter(conf)
	var handler slog.Handler = slog.NewTextHandler(out, &slog.HandlerOptions{Level: conf.LogLevel})
	if conf.LogFormat == "json" {
		handler = slog.NewJSONHandler(out, &slog.HandlerOptions{Level: conf.LogLevel})
	}
	log := cmp.Or(p.Log, slog.New(handler))
	store := &journal.Store{Dir: conf.StateDir, Logger: log, Point: p.Point}
	o := &op{plugin: p, args: args, log: log}
	o.Worker = &undo.Worker{
		Env: &p.Env,
		Node: &facts.Node{
			Journal: &record.Recorder{Store: store}, Log: log, Host: facts.This(), Network: conf.Name,
			GracePeriod: conf.GracePeriod, CacheDir: p.CacheDir, View: &facts.View{},
		},
		Verb: undo.Verb{
			Key:   journal.Key{Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName},
			Netns: args.Netns, Path: args.Path, Args: args.Args, Conf: conf,
			Chain: sync.OnceValues(o.readChain),
		},
	}
	for _, w := range conf.Warnings {
		log.Warn(w, "network", conf.Name)
	}
	if args.ContainerID != "" {
		o.log = log.With("attachment", o.Verb.Key.String())
	}
	return o, closeLog
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

// readChain reads the chain, and logs a warning if it is not the one that the configuration names.
// If no delegate declares the capability "ips", podman's static addresses go to the first delegate
// (see AdoptIPs). Other runtimes send static addresses only to plugins that declare the capability.
// Only podman sets the pod's name in CNI_ARGS without setting its namespace.
func (o *op) readChain() (*netconf.Chain, error) {
	chain, err := o.Verb.Conf.LoadChain()
	if err != nil {
		return nil, err
	}
	if chain.Warning != "" {
		o.log.Warn(chain.Warning, "network", o.Verb.Conf.Name)
	}
	if pod := netconf.PodOf(o.args.Args); pod.Name != "" && pod.Namespace == "" {
		chain.AdoptIPs(o.Verb.Conf)
	}
	return chain, nil
}

// awaitChain calls readChain, and retries if the chainFile is missing or invalid (see
// awaitExchange). It does not retry after an error in unwind's own configuration.
func (o *op) awaitChain(ctx context.Context) (chain *netconf.Chain, err error) {
	o.awaitExchange(ctx, func() bool {
		chain, err = o.readChain()
		return err == nil || o.Verb.Conf.Chain != nil || o.Verb.Conf.ChainFile == ""
	})
	return chain, err
}

// awaitExchange calls look until look returns true, or until Budgets.Exchange has passed. A
// provider may be replacing a configuration file or a plugin's binary at this moment.
func (o *op) awaitExchange(ctx context.Context, look func() bool) {
	end := time.Now().Add(o.Env.Budgets.Exchange)
	for !look() && time.Now().Before(end) && ctx.Err() == nil {
		time.Sleep(50 * time.Millisecond)
	}
}

// overridesNetNS reports whether CNI_NETNS_OVERRIDE is true. If it is, CNI_NETNS may be the
// runtime's own network namespace.
func (o *op) overridesNetNS() bool {
	override := o.args.NetnsOverride
	return strings.EqualFold(override, "TRUE") || override == "1"
}

// takeLock acquires the lock of the verb's own attachment. If the journal fails, takeLock returns
// the result of without(err). If that result is nil, the verb continues without the lock.
func (o *op) takeLock(
	ctx context.Context, p journal.Patience, without func(error) error,
) (err error) {
	ctx, cancel := context.WithTimeout(ctx, o.Env.Budgets.Undo)
	defer cancel()
	p.Children = o.Env.Budgets.Children
	o.lock, err = o.Node.Journal.Store.Acquire(ctx, o.Verb.Key, p)
	switch {
	case errors.Is(err, journal.ErrBusy):
		err = ownError(types.ErrTryAgainLater, "%s is still locked by another process after %s; "+
			"retry later", o.Verb.Key, o.Env.Budgets.Undo)
	case err != nil:
		err = without(err)
	}
	return err
}

// call returns a call of a delegate, with the verb's environment. The caller adds Stdin.
func (o *op) call(command, plugin string) *delegate.Call {
	return &delegate.Call{
		Command: command, Plugin: plugin, Path: o.args.Path, ContainerID: o.args.ContainerID,
		Netns: o.args.Netns, Ifname: o.args.IfName, Args: o.args.Args, Lock: o.lock.File(),
		Watch: o.Verb.Watch,
	}
}

// newRecord returns a record of an ADD of the whole chain, created from the runtime's input.
func (o *op) newRecord(state journal.State, chain *netconf.Chain) *journal.Record {
	e := &journal.Record{
		Key:   o.Verb.Key,
		State: state, Steps: chain.Steps(o.Verb.Conf),
		Added: journal.Added{
			Pod: netconf.PodOf(o.args.Args), NetNS: journal.NetNS{Path: o.args.Netns},
			Args: o.args.Args, Path: o.args.Path, Env: facts.SearchPaths(),
			CNIVersion: chain.CNIVersion, Host: o.Node.Host, At: journal.Now(),
			GracePeriod: max(1, o.Verb.Conf.GracePeriod), // 0 would mean unknown
			Observed:    o.Verb.Conf.Observes(),
		},
	}
	for _, s := range e.Steps {
		e.Added.Plugins = append(e.Added.Plugins, s.Type)
	}
	if len(o.Verb.Conf.RuntimeConfig) > 0 {
		e.Added.RuntimeConfig = netconf.Marshal(o.Verb.Conf.RuntimeConfig)
	}
	return e
}

// checkText returns an error if one of the CNI variables is not valid UTF-8. The journal stores
// them as JSON, which would change such a value.
func (o *op) checkText() error {
	for _, v := range [][2]string{{"CNI_IFNAME", o.args.IfName}, {"CNI_ARGS", o.args.Args},
		{"CNI_NETNS", o.args.Netns}, {"CNI_PATH", o.args.Path}} {
		if !utf8.ValidString(v[1]) {
			return fmt.Errorf("%s is not valid UTF-8, so the journal cannot store it for the DEL", v[0])
		}
	}
	return nil
}

// maxMessage limits the length of an error for the runtime, in bytes, because events and logs
// repeat the error at each retry.
const maxMessage = 1000

// cniError returns an error for the runtime. It shortens the message and the details, so that they
// have at most maxMessage bytes together. Code 0 becomes ErrInternal.
func cniError(code uint, msg, details string) *types.Error {
	msg = netconf.Shorten(strings.ToValidUTF8(msg, "�"), maxMessage)
	details = netconf.Shorten(strings.ToValidUTF8(details, "�"), max(0, maxMessage-len("; ")-len(msg)))
	if code == 0 {
		code = types.ErrInternal
	}
	return types.NewError(code, msg, details)
}

// ownError returns one of unwind's own errors, on one line.
func ownError(code uint, format string, args ...any) *types.Error {
	msg := fmt.Sprintf("unwind: "+format, args...)
	return cniError(code, strings.ReplaceAll(msg, "\n", "; "), "")
}

func badConfig(err error) *types.Error {
	return ownError(types.ErrInvalidNetworkConfig, "%v", err)
}
