package e2e

import (
	"testing"
	"time"
)

// Chained is a node with a provider's chain, with or without unwind.
type Chained struct {
	*Node
	Unwind bool
}

// Call makes cnitool add or delete a pod's sandbox.
func (n *Chained) Call(t *testing.T, verb, sandbox, pod string, env ...string) error {
	t.Helper()
	out, stderr, err := n.Cnitool(sandbox, verb, "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME="+pod, env...)
	if err != nil {
		t.Logf("%s %s: %v\n%s%s", verb, sandbox, err, out, stderr)
	}
	return err
}

// Sweep makes unwind retry pending DELs, and ignores an error, because the DELs may fail again.
// Without unwind, it does nothing.
func (n *Chained) Sweep() {
	if n.Unwind {
		_, _, _ = n.Try(Path(n, "bin/unwindctl"), "sweep")
	}
}

// Settle sweeps until nothing is pending, for at most a minute.
func (n *Chained) Settle() {
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		n.Sweep()
		if n.Pending() == 0 || time.Now().After(end) {
			return
		}
	}
}

// Pending returns the number of attachments in unwind's journal that are not live.
func (n *Chained) Pending() (count int) {
	if n.Unwind {
		for _, a := range n.Journal() {
			if a.State != "live" {
				count++
			}
		}
	}
	return count
}
