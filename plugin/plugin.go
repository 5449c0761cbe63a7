package plugin

import (
	"io"

	"cni-unwind/ipam"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/undo"
)

// Plugin contains what the verbs need from their process.
type Plugin struct {
	Stdout  io.Writer
	Stderr  io.Writer
	Budgets undo.Budgets
	// CacheDir is the directory of libcni's cache of results; "" means the one that all runtimes
	// use.
	CacheDir string
	// Probes are the probes of IPAM stores, by plugin. nil means ipam.OnNode; the program that
	// starts for each pod uses that. The agent also probes stores outside the node.
	Probes map[string]ipam.Probe
	// Slow, if set, is called each time a delegate takes longer than half a second. The first call
	// should install signal handlers, so that a signal no longer ends the process before the
	// rollback. Until then, a signal has the effect of SIGKILL. Signal handlers need a thread, and
	// most verbs can do without it.
	Slow func()
	// StartSweep starts the sweep behind a STATUS (see StartSweep). If it is nil, none starts.
	StartSweep func(conf []byte) (ended <-chan error, err error)
	// Point is called with the name of each crash point: a place where a crash would leave a
	// different state. Tests set it.
	Point func(name string)

	// delegates runs delegates; nil runs them as processes. Tests set it.
	delegates delegate.Runner
}

func (p *Plugin) at(point string) {
	if p.Point != nil {
		p.Point(point)
	}
}

func (p *Plugin) probes() map[string]ipam.Probe {
	if p.Probes == nil {
		return ipam.OnNode()
	}
	return p.Probes
}

// newRunner returns the Runner of one worker.
func (p *Plugin) newRunner() delegate.Runner {
	if p.delegates != nil {
		return p.delegates
	}
	return &delegate.Processes{At: p.Point, Slow: p.Slow}
}
