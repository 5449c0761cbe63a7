package delegate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// process is a delegate's process. It has its environment and the lock, but no configuration until
// feed: a plugin that reads its configuration before it does anything has done nothing until then.
//
// It does not use os/exec, which blocks a thread for each process. Everything here waits in the
// poller of the Go runtime, so unwind needs only one thread.
type process struct {
	binary string
	env    []string
	lock   *os.File

	pid            int
	pidfd          *os.File // readable once the process has ended; nil before Linux 5.2
	stdin          *os.File
	stdout, stderr output
	outputs        []*os.File
	readers        sync.WaitGroup

	mu     sync.Mutex // between kill and wait: the ID may be another process's after wait
	reaped bool

	expires *time.Timer // drops a process that waits for its turn
	dropped sync.Once
}

// noFile is a descriptor that a new process does not get.
const noFile = ^uintptr(0)

// startProcess starts a binary in a process group of its own.
func startProcess(binary string, env []string, lock *os.File) (*process, error) {
	var ours [3]*os.File // the ends of standard input, output and error
	var files []uintptr  // the other ends
	defer func() {
		for _, fd := range files[:min(len(files), len(ours))] {
			_ = syscall.Close(int(fd))
		}
	}()
	for i := range ours {
		end, theirs, err := pipe(i == 0)
		if err != nil {
			closeAll(ours[:])
			return nil, err
		}
		ours[i], files = end, append(files, theirs)
	}
	if lock != nil {
		for len(files) < LockFD {
			files = append(files, noFile)
		}
		files = append(files, lock.Fd())
	}
	pidfd := -1
	pid, err := syscall.ForkExec(binary, []string{binary}, &syscall.ProcAttr{
		Env: env, Files: files, Sys: &syscall.SysProcAttr{Setpgid: true, PidFD: &pidfd},
	})
	if err != nil {
		closeAll(ours[:])
		return nil, &os.PathError{Op: "fork/exec", Path: binary, Err: err}
	}
	p := &process{
		binary: binary, env: env, lock: lock, pid: pid, stdin: ours[0], outputs: ours[1:],
	}
	if pidfd >= 0 {
		_ = unix.SetNonblock(pidfd, true) // for the poller
		p.pidfd = os.NewFile(uintptr(pidfd), "pidfd")
	}
	p.readers.Go(func() { p.stdout.readAll(ours[1], maxStdout) })
	p.readers.Go(func() { p.stderr.readAll(ours[2], maxStderr) })
	return p, nil
}

// pipe makes a pipe. Our end, to write to or to read from, waits in the poller; os.Pipe would put
// the other end there, too, and a delegate's own would have to be taken out again.
func pipe(write bool) (ours *os.File, theirs uintptr, err error) {
	var ends [2]int // to read from, to write to
	if err := unix.Pipe2(ends[:], unix.O_CLOEXEC); err != nil {
		return nil, 0, os.NewSyscallError("pipe2", err)
	}
	if write {
		ends[0], ends[1] = ends[1], ends[0]
	}
	_ = unix.SetNonblock(ends[0], true)
	return os.NewFile(uintptr(ends[0]), "pipe"), uintptr(ends[1]), nil
}

// closeAll closes files, some of which may be nil.
func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// isFor says whether the process is the one that a call of this binary needs.
func (p *process) isFor(binary string, c *Call) bool {
	return p.binary == binary && p.lock == c.Lock && slices.Equal(p.env, c.environ())
}

// feed writes the configuration and closes standard input. It returns false if the process exited
// or closed its standard input before the first byte. A pipe holds 64 KiB; a process that does not
// read the rest is killed when ctx ends. A child in another session may still hold the pipe.
func (p *process) feed(ctx context.Context, config []byte) bool {
	defer context.AfterFunc(ctx, func() {
		p.kill()
		_ = p.stdin.SetWriteDeadline(time.Now())
	})()
	n, err := p.stdin.Write(config)
	_ = p.stdin.Close()
	return n > 0 || !errors.Is(err, syscall.EPIPE)
}

// finish waits for the process to exit, and kills its group if ctx ends first. Then it waits up to
// pipeDelay for the remaining output.
func (p *process) finish(ctx context.Context) syscall.WaitStatus {
	defer context.AfterFunc(ctx, p.kill)()
	status := p.wait()
	if ctx.Err() != nil {
		p.reap() // it would count as one of the group
		awaitGroup(p.pid)
	}
	p.release(pipeDelay)
	return status
}

// drop ends a process that got no configuration, and returns once it has exited. The process reads
// an empty configuration, as if unwind had died, and can remove a lock file that it created before.
// It is killed if it does not exit by itself.
func (p *process) drop() {
	p.dropped.Do(func() {
		_ = p.stdin.Close()
		defer time.AfterFunc(endDelay, p.kill).Stop()
		p.wait()
		p.release(0)
	})
}

// release closes the files of a process that has ended, once its output has ended or the delay is
// over: a daemon that it left may hold the pipes.
func (p *process) release(delay time.Duration) {
	end := time.Now().Add(delay)
	for _, f := range p.outputs {
		_ = f.SetReadDeadline(end)
	}
	p.readers.Wait()
	closeAll(append(p.outputs, p.stdin, p.pidfd))
}

func (p *process) kill() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		_ = syscall.Kill(-p.pid, syscall.SIGKILL)
	}
}

// wait waits for the end of the process, and has it reaped later: see reapDelay.
func (p *process) wait() (status syscall.WaitStatus) {
	ended := false
	look := func(flags int) bool {
		status, ended = exitOf(p.pid, flags)
		return ended
	}
	if p.pidfd != nil {
		if conn, err := p.pidfd.SyscallConn(); err == nil {
			_ = conn.Read(func(uintptr) bool { return look(unix.WNOHANG) })
		}
	}
	for !ended {
		look(0) // without a pidfd: this takes a thread
	}
	unreaped.Lock()
	defer unreaped.Unlock()
	unreaped.processes[p] = time.AfterFunc(reapDelay, p.reap)
	return status
}

// exitOf returns how a child ended, if it has, and does not reap it. If somebody else reaped it, it
// counts as failed.
func exitOf(pid, flags int) (status syscall.WaitStatus, ended bool) {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT|flags, nil)
	if errors.Is(err, syscall.ECHILD) {
		return syscall.WaitStatus(1 << 8), true
	}
	child := (*childInfo)(unsafe.Pointer(&info))
	if err != nil || child.fields.pid != int32(pid) {
		return 0, false
	}
	if child.code == exited {
		return syscall.WaitStatus(child.fields.status << 8), true
	}
	return syscall.WaitStatus(child.fields.status), true // of the signal
}

// exited is CLD_EXITED of sigaction(2).
const exited = 1

// childInfo is siginfo_t as waitid fills it (sigaction(2)).
type childInfo struct {
	_, _, code int32
	fields     struct {
		_         [0]uintptr // aligns the union
		pid       int32
		_, status int32
	}
}

// reapDelay is how long a process that has ended stays unreaped. When it ends, its last thread
// still removes its entries in /proc. Until then, the kernel keeps whoever reaps the process busy
// (shrink_dcache_parent), and if that thread waits for the same processor, for up to a time slice.
// Without the delay, this was half of unwind's processor time on a busy node.
const reapDelay = 5 * time.Millisecond

// unreaped has the processes that have ended and are not reaped, each with the timer that reaps it.
var unreaped = struct {
	sync.Mutex
	processes map[*process]*time.Timer
}{processes: map[*process]*time.Timer{}}

// reap reaps a process that has ended.
func (p *process) reap() {
	unreaped.Lock()
	defer unreaped.Unlock()
	if timer := unreaped.processes[p]; timer != nil {
		timer.Stop()
		delete(unreaped.processes, p)
		p.mu.Lock()
		defer p.mu.Unlock()
		_, _ = syscall.Wait4(p.pid, nil, 0, nil)
		p.reaped = true
	}
}

// Reap reaps the processes that have ended. A program calls it last.
func Reap() {
	unreaped.Lock()
	ended := slices.Collect(maps.Keys(unreaped.processes))
	unreaped.Unlock()
	for _, p := range ended {
		p.reap()
	}
}

// ending describes how a process ended, in Go's words.
func ending(status syscall.WaitStatus) string {
	if status.Signaled() {
		return "signal: " + status.Signal().String()
	}
	return fmt.Sprintf("exit status %d", status.ExitStatus())
}

// output is the beginning of what a process prints.
type output struct {
	kept    bytes.Buffer
	dropped bool // there was more
}

// readAll reads a file to its end, and keeps at most that many bytes.
func (o *output) readAll(f *os.File, most int64) {
	if n, _ := o.kept.ReadFrom(io.LimitReader(f, most)); n == most {
		rest, _ := io.Copy(io.Discard, f)
		o.dropped = rest > 0
	}
}
