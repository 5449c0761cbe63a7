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
	Step     time.Duration // the minimum for one DEL, and reserved for each later one
	LateDel  time.Duration // a DEL whose address is free; well below Release (see late)
	HostLink time.Duration // the wait until the host end disappears after its namespace
	Orphans  time.Duration // the wait until a dead unwind's delegates end; below Release
	Stop     time.Duration // a DEL's wait for the rollback of a running ADD (see stopping)
	Exchange time.Duration // the wait for a file or a plugin that its provider replaces
}

// DefaultBudgets are the budgets on a real node. A delegate that is slow is not one that hangs, and
// costs a second DEL if it is killed. So a DEL that cannot have Step does not start, also in an
// ADD.
var DefaultBudgets = Budgets{
	Undo:     2 * time.Minute,
	GC:       25 * time.Second,
	Status:   5 * time.Second,
	Release:  10 * time.Second,
	Step:     5 * time.Second,
	LateDel:  3 * time.Second,
	HostLink: time.Second,
	Orphans:  2 * time.Second,
	Stop:     8 * time.Second,
	Exchange: time.Second,
}
