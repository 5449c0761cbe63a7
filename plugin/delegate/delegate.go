// Package delegate runs one plugin of a chain.
//
// It does not use libcni's invoke.Exec, for three reasons. First, a delegate runs in its own
// process group, so its children are killed with it at the deadline; otherwise a child could
// continue an ADD that is being undone. Second, a delegate dies with its unwind process, and
// inherits the attachment's lock. If unwind is killed, the next verb waits for the delegate's
// children to end (journal.Patience). Third, a delegate's output is limited, so it cannot exhaust
// memory.
package delegate

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/plugin/netconf"
)

const (
	// LockFD is the file descriptor through which a delegate inherits the attachment's lock. The
	// number does not conflict with shell scripts: scripts use 3 to 9, and a shell itself uses only
	// free numbers, from 10 up.
	LockFD = 20
	// maxStdout and maxStderr limit the stored output of a delegate, in bytes. unwind reads and drops
	// the rest, so that the delegate does not block.
	maxStdout = 4 << 20
	maxStderr = 64 << 10
	// pipeDelay limits the wait for the output of a delegate that has exited. A daemon that the
	// delegate started may keep the pipe open.
	pipeDelay = 500 * time.Millisecond
	// GroupDelay limits the wait for the processes of a killed delegate to end.
	GroupDelay = time.Second
	// watchDelay is the time between two calls of Call.Watch.
	watchDelay = 100 * time.Millisecond
	// slowAfter is the time after which Processes.Slow is called. Most delegates finish earlier.
	slowAfter = 500 * time.Millisecond
	// busyDelay limits how long a start is retried while the binary is being written ("text file
	// busy") or the process limit is reached.
	busyDelay = 2 * time.Second
)

// Call is one execution of a delegate.
type Call struct {
	Command     string
	Plugin      string // the plugin's type
	Path        string // CNI_PATH
	ContainerID string
	Netns       string
	Ifname      string
	Args        string // CNI_ARGS
	Stdin       []byte
	Lock        *os.File // inherited as LockFD; nil without a journal
	// Watch, if set, is called every watchDelay while the delegate runs. It may end the call's
	// context.
	Watch func()
	// Env contains variables that replace unwind's own. The value "" removes a variable.
	Env map[string]string
}

// Failure is a failed call. Code, Msg and Details are the delegate's own if it printed a CNI error.
type Failure struct {
	Plugin  string
	Command string
	Code    uint
	Msg     string
	Details string
	// Killed is set if the delegate did not end by itself: unwind killed it, or another signal ended
	// it. An agent that the delegate called may still be working on the request.
	Killed bool
	// Unstarted is set if the delegate never ran, so it has neither allocated nor released
	// anything.
	Unstarted bool
	// Unreported is set for a DEL whose plugin has left the network's chain. Without unwind, this DEL
	// would not have run, so the runtime gets no error for it.
	Unreported bool
}

// Said returns the delegate's message, with the details of its error.
func (f *Failure) Said() string {
	msg := cmp.Or(strings.TrimSpace(f.Msg), f.Msg) // iptables' messages end in a newline
	if f.Details == "" {
		return msg
	}
	return msg + "; " + f.Details
}

func (f *Failure) Error() string {
	verb := map[string]string{"ADD": "add", "DEL": "delete", "CHECK": "check", "STATUS": "status",
		"GC": "gc"}[f.Command]
	return fmt.Sprintf("plugin type=%q failed (%s): %s", f.Plugin, verb, f.Msg) // libcni's message
}

// environ returns unwind's own environment with the variables of this call. No variable occurs
// twice.
func (c *Call) environ() []string {
	own := []string{"CNI_COMMAND=" + c.Command, "CNI_CONTAINERID=" + c.ContainerID,
		"CNI_NETNS=" + c.Netns, "CNI_IFNAME=" + c.Ifname, "CNI_ARGS=" + c.Args, "CNI_PATH=" + c.Path}
	replaced := map[string]bool{}
	for _, variable := range own {
		name, _, _ := strings.Cut(variable, "=")
		replaced[name] = true
	}
	for name, value := range c.Env {
		if !replaced[name] && value != "" {
			own = append(own, name+"="+value)
		}
		replaced[name] = true
	}
	inherited := slices.DeleteFunc(os.Environ(), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return replaced[name]
	})
	return append(inherited, own...)
}

// explain returns the Failure of a delegate that did not succeed. If unwind killed the delegate,
// the message says why. Otherwise, the message is the delegate's own or, without one, libcni's.
func (c *Call) explain(
	ctx context.Context, status syscall.WaitStatus, stdout, stderr []byte,
) *Failure {
	f := c.Failed(types.ErrInternal, "")
	f.Killed = ctx.Err() != nil || !status.Exited()
	state := describe(status)
	var said types.Error
	parseErr := json.Unmarshal(stdout, &said)
	wordless := fmt.Sprintf("netplugin failed with no error message: %s", state)
	switch {
	case ctx.Err() != nil:
		f.Msg = "timed out and was killed"
		switch cause := context.Cause(ctx); {
		case !errors.Is(cause, ctx.Err()):
			f.Msg = "killed: " + cause.Error()
		case errors.Is(cause, context.Canceled):
			f.Msg = "killed because unwind was told to stop"
		}
	case len(bytes.TrimSpace(stdout)) == 0 && len(stderr) == 0:
		f.Msg = wordless
	case len(bytes.TrimSpace(stdout)) == 0:
		f.Msg = fmt.Sprintf("netplugin failed: %q: %s", netconf.Shorten(string(stderr), 500),
			state)
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
