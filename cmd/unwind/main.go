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

// init keeps the main thread out of other network namespaces, as the reference plugins do: it is what /proc shows of this
// process, and a goroutine that enters a namespace may run on any other.
func init() { runtime.LockOSThread() }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	p := &plugin.Plugin{Stdout: os.Stdout, Stderr: os.Stderr, Budgets: plugin.DefaultBudgets}
	code := p.Main(ctx, fmt.Sprintf("CNI plugin unwind %s: runs a chain of plugins and undoes it", version))
	stop()
	os.Exit(code)
}
