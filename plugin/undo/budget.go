package undo

import "time"

// Budgets limit the time of a verb. CNI passes no deadline to a plugin, so Undo is the longest time
// that any runtime allows for a DEL. A shorter time would kill delegates that would have succeeded.
// If the runtime kills a DEL earlier, that DEL is only interrupted.
//
//	kubelet      2 min for StopPodSandbox: runtimeRequestTimeout, k8s.io/cri-client
//	             pkg/remote_runtime.go; containerd passes that context on, v2.2.0
//	             internal/cri/server/sandbox_stop.go
//	containerd   1 min after a RunPodSandbox that failed: DeferContext, internal/cri/util/util.go
//	CRI-O        1 min: networkStop, v1.34.0 server/sandbox_network.go
//	nerdctl      none
type Budgets struct {
	Undo     time.Duration // a DEL, the rollback of an ADD, or the wait for the attachment's lock
	GC       time.Duration // a whole GC
	Status   time.Duration // a whole STATUS
	Release  time.Duration // releasing other attachments during an ADD
	Step     time.Duration // the minimum for one DEL
	Reserve  time.Duration // reserved for each later DEL, unless a delegate was killed
	LateDel  time.Duration // a DEL whose address is free; well below Release (see late)
	HostLink time.Duration // the wait until the host end disappears after its namespace
	Orphans  time.Duration // the wait until a dead unwind's delegates end; below Release
	Stop     time.Duration // a DEL's wait until an ADD of its attachment stops (see stopping)
}

// DefaultBudgets are the budgets on a real node.
var DefaultBudgets = Budgets{
	Undo:     2 * time.Minute,
	GC:       25 * time.Second,
	Status:   2 * time.Second,
	Release:  5 * time.Second,
	Step:     500 * time.Millisecond,
	Reserve:  4 * time.Second,
	LateDel:  3 * time.Second,
	HostLink: time.Second,
	Orphans:  2 * time.Second,
	Stop:     5 * time.Second,
}
