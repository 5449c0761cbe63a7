package delegate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/plugin/netconf"
)

// Runner runs delegates. Several goroutines may use it at the same time. In tests, a Runner starts
// no process.
type Runner interface {
	// Run runs a delegate and returns its standard output. A nil Failure means that the delegate
	// ran and succeeded.
	Run(ctx context.Context, c *Call, stderr io.Writer) ([]byte, *Failure)
}

// Processes runs each delegate as a process.
type Processes struct {
	Point func(name string) // called where a crash would leave a different state; nil outside tests
	Slow  func()            // called when a delegate takes longer than slowAfter; may be nil
}

// Run executes a delegate in its own process group and returns its standard output. It returns once
// the process has exited. If ctx ends first, Run kills the whole group, and waits for its end (see
// awaitGroup). A nil Failure means that the process ran and exited 0.
func (r *Processes) Run(ctx context.Context, c *Call, stderr io.Writer) ([]byte, *Failure) {
	binary, err := netconf.FindPlugin(c.Plugin, c.Path)
	if err != nil {
		return nil, c.notStarted(types.ErrPluginNotAvailable, err)
	}
	out, said := &output{most: maxStdout}, &output{most: maxStderr}
	cmd, err := start(ctx, func(lock *os.File) *exec.Cmd {
		cmd := c.command(ctx, binary, lock)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = &input{bytes.NewReader(c.Stdin), r.Point}, out, said
		return cmd
	}, c.Lock)
	if err != nil && ctx.Err() != nil {
		err = errors.New("not started: unwind was told to stop, or ran out of time")
	}
	if err != nil {
		return nil, c.notStarted(types.ErrInternal, err)
	}
	if r.Slow != nil {
		defer time.AfterFunc(slowAfter, r.Slow).Stop()
	}
	err = cmd.Wait() // a daemon that still holds the pipes is not a failure
	if ctx.Err() != nil {
		awaitGroup(cmd.Process.Pid)
	}
	_, _ = stderr.Write(said.kept.Bytes())
	if cmd.ProcessState == nil { // something else reaped the process
		return nil, c.Failed(types.ErrInternal, err.Error())
	}
	switch {
	case !cmd.ProcessState.Success() || ctx.Err() != nil:
		return nil, c.explain(ctx, cmd.ProcessState, out.kept.Bytes(), said.kept.Bytes())
	case out.dropped:
		return nil, c.Failed(types.ErrDecodingFailure,
			fmt.Sprintf("printed more than %d bytes", maxStdout))
	}
	return out.kept.Bytes(), nil
}

// command returns the command that runs a call, without its pipes. The process inherits lock as
// LockFD, unless lock is nil.
func (c *Call) command(ctx context.Context, binary string, lock *os.File) *exec.Cmd {
	cmd := exec.CommandContext(ctx, binary)
	cmd.Env = c.environ()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = pipeDelay
	if lock != nil {
		cmd.ExtraFiles = append(make([]*os.File, LockFD-3), lock)
	}
	return cmd
}

// start creates a command and starts it. It tries again, for busyDelay, if the binary is being
// written or the process limit is reached. If RLIMIT_NOFILE does not allow LockFD, start runs the
// delegate without the lock. If that delegate is orphaned, no later verb waits for it.
func start(
	ctx context.Context, command func(lock *os.File) *exec.Cmd, lock *os.File,
) (*exec.Cmd, error) {
	for giveUp := time.Now().Add(busyDelay); ; time.Sleep(50 * time.Millisecond) {
		cmd := command(lock)
		err := cmd.Start()
		if lock != nil && (errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.EBADF)) {
			cmd = command(nil)
			err = cmd.Start()
		}
		passes := errors.Is(err, syscall.ETXTBSY) || errors.Is(err, syscall.EAGAIN)
		if !passes || time.Now().After(giveUp) || ctx.Err() != nil {
			return cmd, err
		}
	}
}

// awaitGroup kills a process group and waits, up to GroupDelay, until the group is empty. Otherwise
// a delegate's child could finish an ADD during the next DEL.
func awaitGroup(pgid int) {
	for end := time.Now().Add(GroupDelay); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if errors.Is(syscall.Kill(-pgid, syscall.SIGKILL), syscall.ESRCH) {
			return
		}
	}
}

// input is a delegate's configuration. When Read returns io.EOF, the process's pipe contains all of
// it.
type input struct {
	config *bytes.Reader
	at     func(point string)
}

func (i *input) Read(p []byte) (int, error) {
	n, err := i.config.Read(p)
	if err == io.EOF && i.at != nil {
		i.at("fed")
	}
	return n, err
}

// output keeps the beginning of a process's output.
type output struct {
	kept    bytes.Buffer
	most    int  // the limit, in bytes
	dropped bool // the process printed more
}

func (o *output) Write(p []byte) (int, error) {
	n := min(len(p), o.most-o.kept.Len())
	o.dropped = o.dropped || n < len(p)
	_, _ = o.kept.Write(p[:n])
	return len(p), nil
}
