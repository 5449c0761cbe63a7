package plugin

import (
	"io"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/plugin/internal/delegate"
)

// Plugin has what the verbs need from their process.
type Plugin struct {
	Stdout  io.Writer
	Stderr  io.Writer
	Budgets Budgets
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

// Budgets bound the time of a verb. CNI tells a plugin no deadline, so Undo is the longest that a
// runtime gives a DEL: to kill a delegate that would have passed is harm, while a DEL that its
// runtime kills before is only cut off.
//
//	kubelet      2 min for StopPodSandbox: runtimeRequestTimeout, k8s.io/cri-client
//	             pkg/remote_runtime.go; containerd passes that context on, v2.2.0
//	             internal/cri/server/sandbox_stop.go
//	containerd   1 min after a RunPodSandbox that failed: DeferContext, internal/cri/util/util.go
//	CRI-O        1 min: networkStop, v1.34.0 server/sandbox_network.go
//	nerdctl      none
type Budgets struct {
	Undo     time.Duration // DEL, and the rollback of an ADD, and waiting for the attachment's lock
	GC       time.Duration // a GC in all
	Status   time.Duration // a STATUS in all
	Release  time.Duration // other attachments, during an ADD
	Step     time.Duration // the minimum for one DEL
	Reserve  time.Duration // kept for each later DEL while none has hung
	LateDel  time.Duration // a late DEL, since its address was last seen free; below Release, see undoing.whileFree
	HostLink time.Duration // waiting for the host's end of an interface to go after its namespace
	Orphans  time.Duration // waiting for a dead unwind's delegates to end; below Release
}

// DefaultBudgets are the budgets on a real node.
var DefaultBudgets = Budgets{
	Undo:     2 * time.Minute,
	GC:       25 * time.Second,
	Status:   2 * time.Second,
	Release:  5 * time.Second,
	Step:     500 * time.Millisecond,
	Reserve:  4 * time.Second,
	LateDel:  4 * time.Second,
	HostLink: time.Second,
	Orphans:  2 * time.Second,
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
