package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

// A STATUS has too little time for a slow DEL. So if a sweep would release
// something, the STATUS starts this program again. The new process runs the sweep, and may outlive
// the STATUS. It gets:
//
//	arguments       the program's path, and sweepWord
//	stdin           the configuration of the STATUS, in a sealed memfd. The seal proves to the
//	                function sweepBehind that a STATUS started the process. Every user could read an
//	                argument
//	stdout, stderr  /dev/null, because the runtime waits until nobody has its pipes open
//	descriptors     no others
//	environment     the environment of the STATUS, without CNI_COMMAND
//	session         its own, so that no signal to the runtime's process group ends it

const (
	sweepWord = "sweep"
	seals     = unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	// stopTime is how long a sweep may take to end its delegates after a signal.
	stopTime = 900 * time.Millisecond
)

// StartSweep starts this program again, to run a sweep with the configuration of a STATUS. Once the
// new process has exited, ended receives its error, or nil. If this process ends first, the sweep
// continues.
func StartSweep(conf []byte) (ended <-chan error, err error) {
	stdin, err := seal(conf)
	if err != nil {
		return nil, err
	}
	defer stdin.Close()
	// unwind's own descriptors close on exec, but those that the runtime left open do not
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, err
	}
	for _, entry := range fds {
		if fd, err := strconv.Atoi(entry.Name()); err == nil && fd > unix.Stderr {
			unix.CloseOnExec(fd)
		}
	}
	cmd := &exec.Cmd{Path: "/proc/self/exe", Args: []string{os.Args[0], sweepWord}, Stdin: stdin,
		SysProcAttr: &syscall.SysProcAttr{Setsid: true}}
	cmd.Env = slices.DeleteFunc(os.Environ(),
		func(v string) bool { return strings.HasPrefix(v, "CNI_COMMAND=") })
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	return done, nil
}

// seal returns a file in memory that contains data and cannot be changed.
func seal(data []byte) (*os.File, error) {
	const flags = unix.MFD_CLOEXEC | unix.MFD_ALLOW_SEALING
	fd, err := unix.MemfdCreate("unwind", flags|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) { // before Linux 6.3
		fd, err = unix.MemfdCreate("unwind", flags)
	}
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "memfd:unwind")
	_, writeErr := f.Write(data)
	_, sealErr := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals)
	_, seekErr := f.Seek(0, io.SeekStart)
	if err := errors.Join(writeErr, sealErr, seekErr); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("cannot store the configuration for the sweep: %w", err)
	}
	return f, nil
}

// IsSweep reports whether the program was started with the arguments of a sweep.
func IsSweep() bool { return len(os.Args) > 1 && os.Args[1] == sweepWord }

// MainSweep runs the sweep that a STATUS has started, and returns the exit code. When ctx ends,
// MainSweep kills the running delegates, and the process exits within a second.
func (p *Plugin) MainSweep(ctx context.Context) int {
	context.AfterFunc(ctx, func() { time.AfterFunc(stopTime, func() { os.Exit(1) }) })
	if err := p.sweepBehind(ctx); err != nil {
		fmt.Fprintf(p.Stderr, "unwind: %v\n", err)
		return 1
	}
	return 0
}

func (p *Plugin) sweepBehind(ctx context.Context) error {
	sealed, err := unix.FcntlInt(os.Stdin.Fd(), unix.F_GET_SEALS, 0)
	if err != nil || sealed&seals != seals || os.Getenv("CNI_COMMAND") != "" {
		return errors.New("only a STATUS of unwind starts `unwind sweep`; run unwindctl sweep instead")
	}
	stdin, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	conf, err := netconf.ParseConf(stdin)
	if err != nil {
		return err
	}
	o, closeLog := p.newOp(&skel.CmdArgs{Path: os.Getenv("CNI_PATH"), StdinData: stdin}, conf)
	defer closeLog()
	o.Node.Invoked = true // a STATUS started this process, in the runtime's namespaces
	// otherwise, ps would show the name "exe"
	_ = os.WriteFile("/proc/self/comm", []byte(netconf.Name), 0)
	lock, err := o.Node.Journal.Store.LockSweep()
	if errors.Is(err, journal.ErrBusy) {
		return nil
	}
	if err != nil {
		return err
	}
	defer lock.Release()
	opts := sweep.Options{Stops: true}
	chain, chainErr := o.Verb.Chain()
	if chainErr == nil {
		opts.Pools = sweep.PoolsOf(chain, conf)
	}
	return o.sweepBriefly(opts, func(s *sweep.Sweep) error {
		_, err := s.Run(ctx)
		return errors.Join(chainErr, err)
	})
}
