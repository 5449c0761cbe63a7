// Command unwind is the CNI plugin. A runtime starts it with the CNI variables in its environment and unwind's entry of a
// conflist on its standard input.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"

	"cni-unwind/plugin"
)

// version is set by the linker.
var version = "dev"

func main() {
	// One thread at a time does: we wait for delegates and the disk. More only wake each other, on every core of a node that
	// starts its pods.
	runtime.GOMAXPROCS(1)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	p := &plugin.Plugin{Stdout: os.Stdout, Stderr: os.Stderr, Budgets: plugin.DefaultBudgets}
	code := p.Main(ctx, fmt.Sprintf("CNI plugin unwind %s: runs a chain of plugins and undoes it", version))
	stop()
	os.Exit(code)
}
