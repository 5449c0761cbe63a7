// Command unwind is the CNI plugin. A runtime starts it with the CNI variables in its environment
// and unwind's entry from a conflist on standard input.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"

	"cni-unwind/plugin"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/undo"
)

// version is set by the linker.
var version = "dev"

func main() {
	// One processor is enough: unwind mostly waits for plugins and the disk. With more, Go would wake
	// idle threads for nothing, on cores that the node needs to start its pods.
	runtime.GOMAXPROCS(1)
	ctx, stop := context.WithCancel(context.Background())
	// The signal handler needs a thread, so it is installed only once a plugin is slow. Before that, a
	// signal kills this process. After that, a signal stops the verb, and unwind rolls back an ADD.
	handleSignals := sync.OnceFunc(func() {
		asked := make(chan os.Signal, 1)
		signal.Notify(asked, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
		go func() { <-asked; stop() }()
	})
	p := &plugin.Plugin{
		Env: undo.Env{Stderr: plugin.Unbroken(syscall.Stderr), Budgets: undo.DefaultBudgets,
			Runner: &delegate.Processes{Slow: handleSignals}},
		Stdout: plugin.Unbroken(syscall.Stdout), Unread: plugin.Unbroken(syscall.Stdout).Unread,
		Behind: plugin.StartSweep,
	}
	if plugin.IsSweep() {
		handleSignals()
		os.Exit(p.MainSweep(ctx))
	}
	code := p.Main(ctx, fmt.Sprintf("CNI plugin unwind %s: runs a CNI plugin chain and "+
		"rolls it back if it fails",
		version))
	os.Exit(code)
}
