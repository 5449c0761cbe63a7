package undo

import "time"

// Budgets limit the time of a verb. CNI passes no deadline to a plugin, so Undo is the longest time
// that a runtime allows a DEL: killing a delegate that would have succeeded does harm, while a DEL
// that the runtime kills earlier is merely interrupted.
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
	LateDel  time.Duration // a late DEL with an address that nobody can hold, see hold
	HostLink time.Duration // waiting for the host's end of an interface to go after its namespace
	Orphans  time.Duration // waiting for a dead unwind's delegates to end; below Release
	Stop     time.Duration // a DEL, for an ADD of its attachment that was asked to stop: see stopping
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
	Stop:     5 * time.Second,
}
