package plugin

import (
	"io"

	"cni-unwind/ipam"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/undo"
)

// Plugin has what the verbs need from their process.
type Plugin struct {
	Stdout  io.Writer
	Stderr  io.Writer
	Budgets undo.Budgets
	// CacheDir is the directory of libcni's cache of results; "" is the one that all runtimes use.
	CacheDir string
	// Probes are the probes of IPAM stores, by plugin; nil means ipam.OnNode, as in the program that
	// starts for each pod. The agent also probes stores on other machines.
	Probes map[string]ipam.Probe
	// Slow, if set, is called each time a delegate takes longer than half a second. From the first
	// call on, a signal should no longer end the process before the rollback; until then a signal
	// has the effect of SIGKILL. Signal handlers need a thread, which most verbs do without.
	Slow func()
	// Point is called with the name of each crash point: a place where a crash would leave another
	// state behind. Tests set it.
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

// newRunner returns what runs the delegates of one worker.
func (p *Plugin) newRunner() delegate.Runner {
	if p.delegates != nil {
		return p.delegates
	}
	return &delegate.Processes{At: p.Point, Slow: p.Slow}
}
