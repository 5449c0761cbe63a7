// Package delegate runs one plugin of a chain.
//
// It does not use libcni's invoke.Exec, for three reasons. A delegate runs in its own process
// group, so that its children are killed with it at the deadline: a child could otherwise continue
// an ADD that is being undone. A delegate inherits the attachment's lock, so that the next verb
// after a killed unwind waits for it. Its output is limited, so that it cannot exhaust memory.
package delegate

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/plugin/netconf"
)

const (
	// LockFD is the delegate's descriptor of the attachment's lock, which it only holds. The number
	// does not conflict with shell scripts, which use 3 to 9 explicitly and 10 and up internally.
	LockFD = 20
	// maxStdout and maxStderr limit the stored output of a delegate, in bytes. unwind reads and drops
	// the rest, so that the delegate does not block.
	maxStdout = 4 << 20
	maxStderr = 64 << 10
	// pipeDelay bounds the wait for the output of a delegate that has exited: a daemon that it left
	// may hold the pipe.
	pipeDelay = 500 * time.Millisecond
	// GroupDelay bounds the wait for the processes of a killed delegate.
	GroupDelay = time.Second
	// slowAfter is the time within which most delegates finish, and the longest that a process may
	// wait for its turn.
	slowAfter = 500 * time.Millisecond
	// busyDelay bounds the retries of a binary that is being written ("text file busy"), and of a
	// process that cannot be made: those that other verbs have waiting are gone by then.
	busyDelay = 2 * time.Second
	// endDelay bounds the wait for a process that got no configuration and is to end by itself.
	endDelay = 100 * time.Millisecond
)

// Call is one execution of a delegate.
type Call struct {
	Command     string
	Plugin      string // type
	Path        string // CNI_PATH
	ContainerID string
	Netns       string
	Ifname      string
	Args        string // CNI_ARGS
	Stdin       []byte
	Lock        *os.File // inherited as LockFD; nil without a journal
}

// Failure is a failed call. Code, Msg and Details are the delegate's own if it printed a CNI error.
type Failure struct {
	Plugin  string
	Command string
	Code    uint
	Msg     string
	Details string
	// Killed is set if the delegate did not end by itself: unwind killed it at the deadline, or a
	// signal ended it. An agent behind the delegate may go on with its work.
	Killed bool
	// Unstarted is set if the delegate never ran: it has taken nothing, and given back nothing.
	Unstarted bool
	// PutRight is set if the runtime needs no error for it, see undoMistake.
	PutRight bool
}

// Said returns the delegate's message, with the details of its error.
func (f *Failure) Said() string {
	if f.Details == "" {
		return f.Msg
	}
	return f.Msg + "; " + f.Details
}

func (f *Failure) Error() string {
	return f.inWords(f.Msg)
}

// Words returns the error with the delegate's details, for people.
func (f *Failure) Words() string { return f.inWords(f.Said()) }

func (f *Failure) inWords(said string) string {
	words := map[string]string{"ADD": "add", "DEL": "delete", "CHECK": "check", "STATUS": "status",
		"GC": "gc"}[f.Command]
	return fmt.Sprintf("plugin type=%q failed (%s): %s", f.Plugin, words, said) // libcni's words
}

// Runner runs delegates, one at a time. The Runner of the tests starts no process.
type Runner interface {
	// Start starts the process of a delegate before its turn. The delegate gets no configuration
	// until Run, so it has to be one that reads its configuration before it does anything.
	Start(c *Call)
	// Run runs a delegate and returns its standard output. A nil Failure means that it ran and
	// succeeded. While it runs, Run calls Start for the next delegate, if there is one.
	Run(ctx context.Context, c, next *Call, stderr io.Writer) ([]byte, *Failure)
	// Drop ends a process that was started early and is not needed.
	Drop()
}

// Processes runs each delegate as a process. If unwind dies, a process that waits for its
// configuration reads an empty one and exits.
//
// A waiting process must never make a verb fail: unwind knows only by the plugin's name that it
// reads first, and any program of that name may hold something that the running delegate waits for.
// So no process waits for longer than slowAfter, and none if the process limit is close. In both
// cases the remaining delegates of the verb start in their turn.
type Processes struct {
	At     func(point string) // called where a crash would leave another state; nil outside of tests
	Slow   func()             // called when a delegate takes longer than slowAfter; may be nil
	early  *process           // started before its turn, or nil
	looked bool               // for room
	inTurn bool               // no process is started before its turn any more
}

// Start starts the process of c, and drops one that was started before. It leaves errors to Run. It
// also leaves scripts to Run, since a script may do something before its plugin reads.
func (r *Processes) Start(c *Call) {
	r.Drop()
	if !r.looked {
		r.looked, r.inTurn = true, !mayWait()
	}
	if r.inTurn {
		return
	}
	binary, err := netconf.FindPlugin(c.Plugin, c.Path)
	if err != nil || strings.HasPrefix(readSmall(binary), "#!") {
		return
	}
	if r.early, err = startProcess(binary, c.environ(), c.Lock); err != nil {
		r.inTurn = true
		return
	}
	r.early.expires = time.AfterFunc(slowAfter, r.early.drop)
	r.at("started early")
}

// Drop ends the process that was started before its turn, if there is one.
func (r *Processes) Drop() {
	if r.early != nil {
		r.early.expires.Stop()
		r.early.drop()
		r.early = nil
	}
}

// take returns the process that was started before its turn, if it is the one of c.
func (r *Processes) take(binary string, c *Call) *process {
	early := r.early
	if early == nil {
		return nil
	}
	r.inTurn = !early.expires.Stop() // it has waited for too long, and is being ended
	if r.inTurn || !early.isFor(binary, c) {
		r.Drop()
		return nil
	}
	r.early = nil
	return early
}

// Run executes a delegate in its own process group and returns its standard output. It returns once
// the process has exited or, if ctx ended it, once its whole group has. A nil Failure means that
// the process ran and exited 0. The time of ctx starts here, even for a process that was started
// early.
func (r *Processes) Run(ctx context.Context, c, next *Call, stderr io.Writer) ([]byte, *Failure) {
	binary, err := netconf.FindPlugin(c.Plugin, c.Path)
	if err != nil {
		r.Drop()
		return nil, c.notStarted(types.ErrPluginNotAvailable, err)
	}
	p := r.take(binary, c)
	if p != nil && !p.feed(ctx, c.Stdin) { // it died early
		p.kill()
		p.drop()
		p = nil
	}
	if p == nil {
		if p, err = c.start(ctx, binary); err != nil {
			return nil, c.notStarted(types.ErrInternal, err)
		}
		p.feed(ctx, c.Stdin)
	}
	r.at("fed")
	if next != nil {
		r.Start(next)
	}
	if r.Slow != nil {
		defer time.AfterFunc(slowAfter, r.Slow).Stop()
	}
	status := p.finish(ctx)
	_, _ = stderr.Write(p.stderr.kept.Bytes())
	stdout := p.stdout.kept.Bytes()
	if status.Exited() && status.ExitStatus() == 0 && ctx.Err() == nil {
		if p.stdout.dropped {
			return nil, c.Failed(types.ErrDecodingFailure,
				fmt.Sprintf("printed more than %d bytes", maxStdout))
		}
		return stdout, nil
	}
	return nil, c.explain(ctx, status, stdout, p.stderr.kept.Bytes())
}

func (r *Processes) at(point string) {
	if r.At != nil {
		r.At(point)
	}
}

// start starts the binary. It retries for a while if the binary is being written or the process
// limit is reached. If RLIMIT_NOFILE has no room for LockFD, it starts the delegate without the
// lock; if that delegate is orphaned, nobody waits for it.
func (c *Call) start(ctx context.Context, binary string) (*process, error) {
	giveUp := time.Now().Add(busyDelay)
	for {
		p, err := startProcess(binary, c.environ(), c.Lock)
		if err == nil {
			return p, nil
		}
		if c.Lock != nil && (errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.EBADF)) {
			c.Lock = nil
			continue
		}
		passes := errors.Is(err, syscall.ETXTBSY) || errors.Is(err, syscall.EAGAIN)
		if !passes || time.Now().After(giveUp) || ctx.Err() != nil {
			return nil, err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// environ returns unwind's own environment, with the CNI variables of this call.
func (c *Call) environ() []string {
	ours := []string{"CNI_COMMAND=" + c.Command, "CNI_CONTAINERID=" + c.ContainerID,
		"CNI_NETNS=" + c.Netns, "CNI_IFNAME=" + c.Ifname, "CNI_ARGS=" + c.Args, "CNI_PATH=" + c.Path}
	return append(slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.ContainsFunc(ours, func(o string) bool { return strings.HasPrefix(o, name+"=") })
	}), ours...)
}

// explain returns the Failure of a delegate that did not succeed, with its own message, or libcni's
// if it printed none.
func (c *Call) explain(
	ctx context.Context, status syscall.WaitStatus, stdout, stderr []byte,
) *Failure {
	f := c.Failed(types.ErrInternal, "")
	f.Killed = ctx.Err() != nil || status.Signaled()
	var said types.Error
	parseErr := json.Unmarshal(stdout, &said)
	wordless := fmt.Sprintf("netplugin failed with no error message: %s", ending(status))
	switch {
	case ctx.Err() != nil:
		f.Msg = "timed out and was killed"
		switch cause := context.Cause(ctx); {
		case !errors.Is(cause, ctx.Err()):
			f.Msg = "killed: " + cause.Error()
		case errors.Is(cause, context.Canceled):
			f.Msg = "killed because unwind was asked to stop"
		}
	case len(bytes.TrimSpace(stdout)) == 0 && len(stderr) == 0:
		f.Msg = wordless
	case len(bytes.TrimSpace(stdout)) == 0:
		f.Msg = fmt.Sprintf("netplugin failed: %q: %s", netconf.Shorten(string(stderr), 500),
			ending(status))
	case parseErr != nil:
		f.Msg = fmt.Sprintf("netplugin failed but error parsing its diagnostic message %q: %v",
			netconf.Shorten(string(stdout), 500), parseErr)
	default:
		f.Code, f.Msg, f.Details = said.Code, cmp.Or(said.Msg, wordless), said.Details
	}
	return f
}

func (c *Call) Failed(code uint, msg string) *Failure {
	return &Failure{Plugin: c.Plugin, Command: c.Command, Code: code, Msg: msg}
}

func (c *Call) notStarted(code uint, err error) *Failure {
	f := c.Failed(code, err.Error())
	f.Unstarted = true
	return f
}

// awaitGroup waits, up to GroupDelay, until no process of a killed group is left: a child of a
// delegate could otherwise finish an ADD during the next DEL.
func awaitGroup(pgid int) {
	for end := time.Now().Add(GroupDelay); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if errors.Is(syscall.Kill(-pgid, syscall.SIGKILL), syscall.ESRCH) {
			return
		}
	}
}
