// Command unwind is the plugin under test: the program cmd/unwind with crash points, short budgets
// and a cache of libcni's for each node. Tests start it some thousand times. It is not the test
// binary, which takes twice as long to start.
package main

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/unwind/env"
)

func main() {
	ctx, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	p := &plugin.Plugin{
		Stdout: plugin.Unbroken(syscall.Stdout), Stderr: plugin.Unbroken(syscall.Stderr),
		Budgets: budgets(), CacheDir: os.Getenv(env.Cache), Point: points(),
	}
	if os.Getenv(env.NoProc) != "" {
		if err := unix.Unmount("/proc", unix.MNT_DETACH); err != nil {
			panic(err)
		}
	}
	if uid, err := strconv.Atoi(os.Getenv(env.UID)); err == nil {
		if err := errors.Join(syscall.Setgroups(nil), syscall.Setgid(uid), syscall.Setuid(uid)); err != nil {
			panic(err)
		}
	}
	os.Exit(p.Main(ctx, "unwind under test"))
}

func budgets() undo.Budgets {
	b := undo.DefaultBudgets
	if os.Getenv(env.Hasty) != "" {
		b = env.HastyBudgets
	}
	if os.Getenv(env.Patient) != "" {
		b.Status, b.Release = time.Minute, time.Minute
	}
	return b
}

// points returns what kills this process at the point that env.KillAt names, and has a commit fail
// at that of env.FailAt.
func points() func(point string) {
	kill := at(os.Getenv(env.KillAt), func() {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	})
	fail := at(os.Getenv(env.FailAt), func() { panic(syscall.EIO) })
	return func(point string) {
		kill(point)
		fail(point)
	}
}

// at returns what calls do at the n-th point of a name, or of any name: "commit 2", "2".
func at(where string, do func()) func(point string) {
	space := strings.LastIndex(where, " ")
	name := where[:max(0, space)]
	n, _ := strconv.Atoi(where[space+1:])
	return func(point string) {
		if name != "" && point != name {
			return
		}
		if n--; n == 0 {
			do()
		}
	}
}
