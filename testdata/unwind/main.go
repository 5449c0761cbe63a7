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
		Budgets: budgets(), CacheDir: os.Getenv(env.Cache), Point: killer(os.Getenv(env.KillAt)),
		StartSweep: plugin.StartSweep,
	}
	if plugin.IsSweep() {
		os.Exit(p.MainSweep(ctx))
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
	if os.Getenv(env.Prompt) == "" {
		b.Status = time.Minute
	}
	if os.Getenv(env.Hasty) != "" {
		b = env.HastyBudgets
	}
	if os.Getenv(env.Patient) != "" {
		b.Release = time.Minute
	}
	return b
}

// killer returns what kills this process at the point that env.KillAt names, or nil.
func killer(killAt string) func(point string) {
	space := strings.LastIndex(killAt, " ")
	name := killAt[:max(0, space)]
	at, err := strconv.Atoi(killAt[space+1:])
	if err != nil {
		return nil
	}
	return func(point string) {
		if name != "" && point != name {
			return
		}
		if at--; at == 0 {
			_ = os.WriteFile(os.Getenv(env.Killed), nil, 0o600)
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
}
