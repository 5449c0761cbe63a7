package delegate

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// reapDelay is the time between two checks of a process that has no pidfd: before Linux 5.3, or if
	// seccomp forbids pidfds.
	reapDelay = time.Millisecond
	// forever is longer than any delegate runs.
	forever = 24 * time.Hour
	// none stands for a closed descriptor in syscall.ProcAttr.Files.
	none = ^uintptr(0)
)

// The indexes of process.fds. The first three are also the delegate's descriptor numbers.
const (
	stdin  = iota // the writing end of a pipe
	stdout        // the reading end of a pipe
	stderr        // the reading end of a pipe
	pidfd
)

// process is a delegate's process. The goroutine that starts it also writes its input, reads its
// output and waits for its exit, all in one poll loop. os/exec uses a goroutine for each of these
// tasks, and waking a goroutine takes time.
type process struct {
	fds         [4]unix.PollFd // polled together; poll ignores -1, a closed descriptor
	config      []byte         // the part of stdin that is not written yet
	result      output         // from stdout
	diagnostics output         // from stderr
	buffer      [32 << 10]byte
	pid         int
	watched     time.Time // when Call.Watch was last called; at first, the creation time
	status      syscall.WaitStatus

	mu     sync.Mutex
	reaped bool // if set, the kernel may reuse pid
}

func newProcess(config []byte) *process {
	p := &process{config: config, result: output{most: maxStdout},
		diagnostics: output{most: maxStderr}, watched: time.Now()}
	for i := range p.fds {
		p.fds[i] = unix.PollFd{Fd: -1, Events: unix.POLLIN}
	}
	p.fds[stdin].Events = unix.POLLOUT
	return p
}

// start writes the configuration to the pipe, or as much of it as fits, and starts the process. It
// retries for busyDelay while the binary is being written or the process limit is reached. If
// RLIMIT_NOFILE does not allow LockFD, the process runs without the lock: if unwind is then killed,
// no later verb waits for the process's children.
func (p *process) start(ctx context.Context, c *Call, binary string) error {
	files, err := p.openPipes()
	defer func() {
		for _, fd := range files {
			_ = unix.Close(int(fd))
		}
	}()
	if err != nil {
		return err
	}
	p.writeConfig()
	attr := &syscall.ProcAttr{Env: c.environ(), Files: files,
		Sys: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}}
	if c.Lock != nil {
		attr.Files = append(slices.Repeat([]uintptr{none}, LockFD), c.Lock.Fd())
		copy(attr.Files, files)
	}
	for giveUp := time.Now().Add(busyDelay); ; time.Sleep(50 * time.Millisecond) {
		if ctx.Err() != nil {
			cause := context.Cause(ctx)
			if errors.Is(cause, ctx.Err()) {
				cause = errors.New("unwind was told to stop, or ran out of time")
			}
			return fmt.Errorf("not started: %w", cause)
		}
		p.pid, err = syscall.ForkExec(binary, []string{binary}, attr)
		if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.EBADF) {
			attr.Files = files
			p.pid, err = syscall.ForkExec(binary, []string{binary}, attr)
		}
		if err == nil {
			break
		}
		passes := errors.Is(err, syscall.ETXTBSY) || errors.Is(err, syscall.EAGAIN)
		if !passes || time.Now().After(giveUp) {
			return &os.PathError{Op: "fork/exec", Path: binary, Err: err}
		}
	}
	if fd, err := unix.PidfdOpen(p.pid, 0); err == nil {
		p.fds[pidfd].Fd = int32(fd)
	}
	return nil
}

// openPipes opens the pipes and returns the delegate's ends of them.
func (p *process) openPipes() (files []uintptr, err error) {
	for i := range pidfd {
		var ends [2]int
		if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
			return files, os.NewSyscallError("pipe2", err)
		}
		ours, theirs := ends[0], ends[1]
		if i == stdin {
			ours, theirs = theirs, ours
		}
		p.fds[i].Fd, files = int32(ours), append(files, uintptr(theirs))
	}
	return files, unix.SetNonblock(int(p.fds[stdin].Fd), true)
}

// wait returns once the process has exited and its output has ended, but at most pipeDelay after
// the exit, because a daemon may keep the pipes open. If ctx ends first, wait kills the process
// group. An error means that something else has reaped the process.
func (p *process) wait(ctx context.Context, r *Processes, watch func()) (err error) {
	defer context.AfterFunc(ctx, p.kill)()
	if p.fds[stdin].Fd < 0 {
		r.at("fed")
	}
	exited, limit := false, time.Now().Add(slowAfter)
	for !exited || p.fds[stdout].Fd >= 0 || p.fds[stderr].Fd >= 0 {
		left := time.Until(limit)
		if left <= 0 && exited {
			return err
		}
		if left <= 0 {
			r.slow()
			left, limit = forever, limit.Add(forever)
		}
		if !exited && p.fds[pidfd].Fd < 0 {
			left = min(left, reapDelay)
		}
		left = min(left, p.watch(watch))
		if _, err := unix.Poll(p.fds[:], int(left/time.Millisecond)+1); err != nil {
			continue // EINTR
		}
		if p.ready(stdin) && p.writeConfig() {
			r.at("fed")
		}
		p.readInto(&p.result, stdout)
		p.readInto(&p.diagnostics, stderr)
		if !exited && (p.fds[pidfd].Fd < 0 || p.ready(pidfd)) {
			if exited, err = p.reap(); exited {
				limit = time.Now().Add(pipeDelay)
			}
		}
	}
	return err
}

// watch calls a function if watchDelay has passed since the last call, and returns the time until
// the next call.
func (p *process) watch(do func()) (left time.Duration) {
	if do == nil {
		return forever
	}
	if left = time.Until(p.watched.Add(watchDelay)); left > 0 {
		return left
	}
	do()
	p.watched = time.Now()
	return watchDelay
}

// ready reports whether the last poll returned an event for a descriptor that is still open.
func (p *process) ready(i int) bool { return p.fds[i].Fd >= 0 && p.fds[i].Revents != 0 }

// writeConfig writes as much as fits in the pipe. After the last byte, it closes the pipe and
// returns true.
func (p *process) writeConfig() (all bool) {
	for len(p.config) > 0 {
		n, err := unix.Write(int(p.fds[stdin].Fd), p.config)
		if errors.Is(err, unix.EAGAIN) {
			return false
		}
		if err != nil { // EPIPE: nobody reads the rest
			p.close(stdin)
			return false
		}
		p.config = p.config[n:]
	}
	p.close(stdin)
	return true
}

// readInto reads once from a pipe if the last poll returned an event for it, so the read does not
// block. At the end of the output, it closes the pipe.
func (p *process) readInto(o *output, i int) {
	if !p.ready(i) {
		return
	}
	n, err := unix.Read(int(p.fds[i].Fd), p.buffer[:])
	if n <= 0 || err != nil {
		p.close(i)
		return
	}
	o.write(p.buffer[:n])
}

// reap reports whether the process has exited, and if so, sets its status. While a debugger delays
// the status, reap returns false although the pidfd is ready, and wait continues without the pidfd.
func (p *process) reap() (exited bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.close(pidfd)
	pid, err := syscall.Wait4(p.pid, &p.status, syscall.WNOHANG, nil)
	p.reaped = pid != 0
	return p.reaped, os.NewSyscallError("wait4", err)
}

// kill kills the process group, unless the process has been reaped.
func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		_ = syscall.Kill(-p.pid, syscall.SIGKILL)
	}
}

// close closes one of p.fds, unless it is closed already.
func (p *process) close(i int) {
	if p.fds[i].Fd >= 0 {
		_ = unix.Close(int(p.fds[i].Fd))
		p.fds[i].Fd = -1
	}
}

// closeAll closes all descriptors that are still open, such as pipes that a daemon keeps open.
func (p *process) closeAll() {
	for i := range p.fds {
		p.close(i)
	}
}
