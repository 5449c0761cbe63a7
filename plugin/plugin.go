package plugin

import (
	"io"

	"cni-unwind/ipam"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/undo"
)

// Plugin has what the verbs need from their process.
type Plugin struct {
	Stdout  io.Writer
	Stderr  io.Writer
	Budgets undo.Budgets
	// CacheDir is the directory of libcni's cache of results; "" is the one that all runtimes use.
	CacheDir string
	// CiliumQueue is the directory of cilium-cni's queue of DELs; "" is the one that Cilium uses.
	CiliumQueue string
	// Probes ask stores that are not on this node. The agent has some; the program that starts for
	// each pod has none.
	Probes []ipam.Probe
	// Slow is called each time a delegate takes longer than half a second. From the first time on, a
	// signal should no longer end the process before it has undone what it did; until then a signal
	// is to the journal what SIGKILL is. Handlers take a thread, which most verbs do without. Nil does
	// nothing.
	Slow func()
	// Point is called with the name of each place where a crash would leave another state behind.
	// Tests set it.
	Point func(name string)

	// delegates runs delegates; nil runs them as processes. Tests set it.
	delegates delegate.Runner
}

// at marks a place where tests try a crash.
func (p *Plugin) at(point string) {
	if p.Point != nil {
		p.Point(point)
	}
}

// newRunner returns what runs the delegates of one worker.
func (p *Plugin) newRunner() delegate.Runner {
	if p.delegates != nil {
		return p.delegates
	}
	return &delegate.Processes{At: p.Point, Slow: p.Slow}
}
