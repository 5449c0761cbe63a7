// Command unwind is the plugin under test. It is cmd/unwind with additions that environment
// variables control (see package env), such as crash points, time budgets, an early deadline for
// delegates that hang, and the path of libcni's cache. It is a separate program, because tests
// start it thousands of times, and a test binary would take twice as long to start.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/plugintest/env"
	"cni-unwind/plugin/undo"
)

func main() {
	ctx, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	point := points()
	p := &plugin.Plugin{
		Env: undo.Env{Stderr: plugin.Unbroken(syscall.Stderr), Budgets: env.BudgetsOf(os.Getenv(env.Budgets)),
			Runner: &delegate.Processes{Point: point}, Point: point},
		Stdout: plugin.Unbroken(syscall.Stdout), Unread: plugin.Unbroken(syscall.Stdout).Unread,
		CacheDir: os.Getenv(env.Cache), Behind: plugin.StartSweep,
	}
	if plugin.IsSweep() {
		os.Exit(p.MainSweep(ctx))
	}
	if hangs := os.Getenv(env.Hangs); hangs != "" {
		p.Runner = &impatient{delegate.Processes{Point: point}, hangs}
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
	os.Exit(p.Main(ctx, "CNI plugin unwind dev: under test"))
}

// impatient runs delegates as processes. If a delegate has a deadline and reports that it hangs,
// impatient behaves as if the deadline had passed.
type impatient struct {
	delegate.Processes
	hangs string // see env.Hangs
}

func (r *impatient) Run(ctx context.Context, c *delegate.Call, stderr io.Writer) ([]byte, *delegate.Failure) {
	if _, limited := ctx.Deadline(); !limited {
		return r.Processes.Run(ctx, c, stderr)
	}
	var conf struct{ Instance string }
	_ = json.Unmarshal(c.Stdin, &conf) // only faulty's configuration has an instance
	name := []string{c.Command, c.ContainerID, c.Ifname, cmp.Or(conf.Instance, c.Plugin)}
	file := filepath.Join(r.hangs, strings.Join(name, "."))
	_ = os.Remove(file) // an earlier call may have left this file
	ended, over := make(chan struct{}), make(chan struct{})
	defer close(ended)
	go func() {
		defer close(over)
		for poll := time.Tick(5 * time.Millisecond); ; {
			select {
			case <-ended:
				return
			case <-ctx.Done():
				return
			case <-poll:
				if _, err := os.Lstat(file); err == nil {
					return
				}
			}
		}
	}()
	return r.Processes.Run(limited{ctx, over}, c, stderr)
}

// limited is a context whose deadline can pass early.
type limited struct {
	context.Context
	over chan struct{}
}

func (l limited) Done() <-chan struct{} { return l.over }

func (l limited) Err() error {
	select {
	case <-l.over:
		return cmp.Or(l.Context.Err(), context.DeadlineExceeded)
	default:
		return nil
	}
}

// points returns a function that kills this process at the crash point that env.KillAt names, and
// panics at the commit that env.FailAt names, so that the commit fails.
func points() func(point string) {
	kill := at(os.Getenv(env.KillAt), func() {
		_ = os.WriteFile(os.Getenv(env.Killed), nil, 0o600)
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	})
	fail := at(os.Getenv(env.FailAt), func() { panic(syscall.EIO) })
	return func(point string) {
		kill(point)
		fail(point)
	}
}

// at returns a function to call at each point with the point's name. The function calls do at a
// single point, which where gives: "commit 2" is the second point named commit, and "2" is the
// second point of any name. If where is "", the function never calls do.
func at(where string, do func()) func(point string) {
	space := strings.LastIndex(where, " ")
	name := where[:max(0, space)]
	n, err := strconv.Atoi(where[space+1:])
	if err != nil {
		return func(string) {}
	}
	var passed atomic.Int64 // atomic, because a sweep's workers reach points at the same time
	return func(point string) {
		if (name == "" || point == name) && passed.Add(1) == int64(n) {
			do()
		}
	}
}
