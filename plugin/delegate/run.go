package delegate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/plugin/netconf"
)

// Runner runs delegates. Several goroutines may use it at the same time. Some tests use a Runner
// that starts no process.
type Runner interface {
	// Run runs a delegate and returns its standard output. A nil Failure means that the delegate
	// ran and succeeded.
	Run(ctx context.Context, c *Call, stderr io.Writer) ([]byte, *Failure)
}

// Processes runs each delegate as a process.
type Processes struct {
	Point func(name string) // called at each crash point (see undo.Env.Point); nil outside tests
	Slow  func()            // called when a delegate takes longer than slowAfter; may be nil
}

// Run executes a delegate in its own process group and returns its standard output:
//
//  1. Find the binary.
//  2. Lock the goroutine to its thread until Run returns. The delegate dies with unwind, because
//     the kernel kills the process when the thread that started it ends (PR_SET_PDEATHSIG). Without
//     LockOSThread, another goroutine could end that thread earlier.
//  3. Open the pipes, write the configuration, and start the process (see process.start).
//  4. Poll until the process has exited and its output has ended. If ctx ends first, kill the whole
//     group (see process.wait).
//  5. If ctx has ended, wait until the group is empty (see awaitGroup).
//
// A nil Failure means that the process ran and exited 0.
func (r *Processes) Run(ctx context.Context, c *Call, stderr io.Writer) ([]byte, *Failure) {
	binary, err := netconf.FindPlugin(c.Plugin, c.Path)
	if err != nil {
		return nil, c.notStarted(types.ErrPluginNotAvailable, err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p := newProcess(c.Stdin)
	defer p.closeAll()
	if err := p.start(ctx, c, binary); err != nil {
		return nil, c.notStarted(types.ErrInternal, err)
	}
	err = p.wait(ctx, r, c.Watch)
	if ctx.Err() != nil {
		awaitGroup(p.pid)
	}
	_, _ = stderr.Write(p.diagnostics.kept.Bytes())
	switch {
	case err != nil: // something else reaped the process
		return nil, c.Failed(types.ErrInternal, err.Error())
	case p.status != 0 || ctx.Err() != nil:
		return nil, c.explain(ctx, p.status, p.result.kept.Bytes(), p.diagnostics.kept.Bytes())
	case p.result.dropped:
		return nil, c.Failed(types.ErrDecodingFailure,
			fmt.Sprintf("printed more than %d bytes", maxStdout))
	}
	return p.result.kept.Bytes(), nil
}

func (r *Processes) at(point string) {
	if r.Point != nil {
		r.Point(point)
	}
}

func (r *Processes) slow() {
	if r.Slow != nil {
		r.Slow()
	}
}

// awaitGroup kills a process group and waits, up to GroupDelay, until the group is empty. A
// delegate's child that is still alive could finish an ADD during the next DEL.
func awaitGroup(pgid int) {
	for end := time.Now().Add(GroupDelay); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if errors.Is(syscall.Kill(-pgid, syscall.SIGKILL), syscall.ESRCH) {
			return
		}
	}
}

// output keeps the beginning of a process's output.
type output struct {
	kept    bytes.Buffer
	most    int  // the limit, in bytes
	dropped bool // the process printed more
}

func (o *output) write(p []byte) {
	n := min(len(p), o.most-o.kept.Len())
	o.dropped = o.dropped || n < len(p)
	_, _ = o.kept.Write(p[:n])
}

// describe says how a process ended, in the words of os.ProcessState.
func describe(status syscall.WaitStatus) string {
	said := fmt.Sprintf("exit status %d", status.ExitStatus())
	if status.Signaled() {
		said = "signal: " + status.Signal().String()
	}
	if status.CoreDump() {
		said += " (core dumped)"
	}
	return said
}
