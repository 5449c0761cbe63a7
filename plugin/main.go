// Package plugin implements unwind's CNI verbs. It runs the plugins of a chain as its delegates,
// writes each step to the journal before running it, and undoes the steps if the ADD fails.
package plugin

import (
	"context"
	"errors"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

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

// verb turns a verb into a function for skel that never panics.
func (p *Plugin) verb(
	ctx context.Context, do func(*op, context.Context) error,
) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		conf, bad := netconf.ParseConf(args.StdinData)
		o, closeLog := p.newOp(args, conf)
		o.bad, o.Invoked, o.Journal.Store.Trusting = bad, true, true
		defer closeLog()
		defer o.Journal.Flush()
		// After the verb, skel returns an error if CNI_NETNS is the host's namespace. That is too
		// late for an ADD (see checkNetNS), and wrong for a DEL that has succeeded.
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
// to its pipe returns an error, so unwind can undo the ADD. With os.Stdout, the write would end the
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
