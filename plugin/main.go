// Package plugin carries out the CNI verbs of unwind: it runs the plugins of a chain as its delegates, writes each step
// into the journal before it takes it, and undoes what was done.
package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/journal"
)

// Plugin is what the verbs need from the process they run in.
type Plugin struct {
	Stdout  io.Writer
	Stderr  io.Writer
	Budgets Budgets
	// Point is called with the name of each place where a crash would leave another state behind. Tests set it.
	Point func(name string)
}

// Budgets bound what a verb takes. containerd and CRI-O give 60 s to a whole tear-down.
type Budgets struct {
	Undo     time.Duration // DEL, and the rollback of an ADD
	GC       time.Duration // a GC in all
	Status   time.Duration // a STATUS in all
	Settle   time.Duration // other attachments, during an ADD
	Step     time.Duration // the least that one DEL is given
	LateDel  time.Duration // one DEL whose address may have a new owner; less than Settle, see undoing.late
	Lock     time.Duration // waiting for another unwind that works on the attachment
	HostLink time.Duration // waiting for the host's end of an interface to go after its namespace
	Orphans  time.Duration // waiting for delegates whose unwind has died, before they are ended; less than Settle
}

// DefaultBudgets are those of a real node.
var DefaultBudgets = Budgets{
	Undo:     45 * time.Second,
	GC:       25 * time.Second,
	Status:   2 * time.Second,
	Settle:   5 * time.Second,
	Step:     500 * time.Millisecond,
	LateDel:  4 * time.Second,
	Lock:     30 * time.Second,
	HostLink: time.Second,
	Orphans:  2 * time.Second,
}

// Main carries out the verb that the environment names (SPEC 1.1 §2) and prints its result or error. It returns the
// exit code.
func (p *Plugin) Main(ctx context.Context, about string) int {
	// A runtime that has died must not kill us by a write to its pipe: what it was not told of is undone.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
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

// op is one verb, on one attachment or on all.
type op struct {
	*Plugin
	ctx     context.Context
	args    *skel.CmdArgs
	conf    *Conf
	bad     error       // what is wrong with the configuration
	key     journal.Key // of the attachment that the verb is about; zero for GC and STATUS
	host    journal.Host
	store   *journal.Store
	log     *slog.Logger
	invoked bool         // by a runtime, see sees
	list    *List        // what the runtime says is attached, or nil
	deaf    bool         // the journal could not be read: it is not waited for again
	notes   []note       // for the next transaction
	alone   bool         // the verb goes on without the journal, and was counted
	fresh   []netip.Addr // what our ADD has just got and no delegate of ours was told of yet, see claim
}

// verb makes a function for skel out of a verb: it never panics.
func (p *Plugin) verb(ctx context.Context, do func(*op) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		conf, bad := ParseConf(args.StdinData)
		o, closeLog := p.newOp(ctx, args, conf)
		o.bad, o.invoked = bad, true
		defer closeLog()
		defer o.lastNotes()
		return o.safely(func() error { return do(o) })
	}
}

// safely makes an error of a panic.
func (o *op) safely(do func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			o.log.Error("panic", "err", r, "stack", string(debug.Stack()))
			err = cniError(types.ErrInternal, fmt.Sprintf("unwind: internal error: %v", r), "")
		}
	}()
	return do()
}

func (p *Plugin) newOp(ctx context.Context, args *skel.CmdArgs, conf *Conf) (*op, func()) {
	o := &op{
		Plugin: p, ctx: ctx, args: args, conf: conf, host: thisHost(),
		key: journal.Key{Network: conf.Name, ContainerID: args.ContainerID, IfName: args.IfName},
	}
	out, closeLog := p.logWriter(conf)
	o.log = slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: conf.LogLevel}))
	o.store = &journal.Store{Dir: conf.StateDir, Logger: o.log, Point: p.Point}
	for _, w := range conf.warnings {
		o.log.Warn(w, "network", conf.Name)
	}
	return o, closeLog
}

// logWriter opens logFile. A log that cannot be written stops no pod: it goes to stderr.
func (p *Plugin) logWriter(conf *Conf) (io.Writer, func()) {
	if conf.LogFile == "" {
		return p.Stderr, func() {}
	}
	f, err := os.OpenFile(conf.LogFile, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		conf.warn("key \"logFile\": %v; logging to stderr", err)
		return p.Stderr, func() {}
	}
	return f, func() { _ = f.Close() }
}

// at marks a place where a crash can be tried.
func (p *Plugin) at(point string) {
	if p.Point != nil {
		p.Point(point)
	}
}

// read runs a read-only transaction. Without a journal, or with one that cannot be read, nothing is found.
func (o *op) read(ctx context.Context, fn func(*journal.Tx) error) {
	if o.deaf {
		return
	}
	reached := false
	err := o.store.View(ctx, func(tx *journal.Tx) error {
		reached = true
		return fn(tx)
	})
	if err != nil {
		o.log.Warn("the journal cannot be read", "err", err)
		o.deaf = !reached
	}
}

// lock takes the lock of an attachment. If another unwind works on it, it waits as long as ctx has time. If only
// delegates hold the lock, which outlived an unwind that was killed, it waits for them for a while and then ends them;
// killed says so.
func (o *op) lock(ctx context.Context, key journal.Key) (lock *journal.Lock, killed bool, err error) {
	patience := time.Now().Add(o.Budgets.Orphans)
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline)/2 < o.Budgets.Orphans {
		patience = time.Now().Add(time.Until(deadline) / 2)
	}
	for {
		slice, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		lock, err = o.store.Acquire(slice, key)
		if errors.Is(err, journal.ErrBusy) {
			<-slice.Done() // that another worker of this process has it is said at once
		}
		cancel()
		if !errors.Is(err, journal.ErrBusy) || ctx.Err() != nil {
			return lock, killed, err
		}
		if time.Now().Before(patience) {
			continue
		}
		pid, err := o.store.Owner(key)
		if err != nil {
			return nil, killed, err
		}
		if pid == 0 {
			killed = o.endOrphans(key) || killed
		}
	}
}

// lockOurs takes the lock of the attachment that the verb is about.
func (o *op) lockOurs(ctx context.Context) (lock *journal.Lock, killed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.Lock)
	defer cancel()
	lock, killed, err = o.lock(ctx, o.key)
	if errors.Is(err, journal.ErrBusy) {
		err = cniError(types.ErrTryAgainLater, fmt.Sprintf("unwind: %s is being worked on by another unwind, "+
			"which did not end in %s", o.key, o.Budgets.Lock), "")
	}
	return lock, killed, err
}

// endOrphans kills the processes that hold an attachment's lock, none of which is an unwind.
func (o *op) endOrphans(key journal.Key) (killed bool) {
	f, err := os.OpenFile(o.store.LockPath(key), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	pids, err := delegatesOf(f)
	if err != nil {
		o.log.Warn("looking for delegates that outlived their unwind", "attachment", key.String(), "err", err)
	}
	for _, pid := range pids {
		o.log.Warn("ending a delegate that outlived its unwind", "attachment", key.String(), "pid", pid)
		killed = syscall.Kill(pid, syscall.SIGKILL) == nil || killed
	}
	return killed
}
