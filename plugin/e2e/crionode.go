package e2e

import (
	"os/exec"
	"testing"
	"time"
)

type CrioNode struct {
	*Node
	RT     *Crio
	Unwind bool
}

// NewCrioNode creates a node with or without unwind. CRI-O sends STATUS at its start and, if
// statusGrace is not "", also afterwards.
func NewCrioNode(t *testing.T, unwind bool, statusGrace string) *CrioNode {
	n := NewNode(t)
	n.Configure(Network{Subnet: Small, Plugins: []string{Firewall, n.Faulty()}, Unwind: unwind,
		Keys: crioKeys(unwind)})
	rt := n.StartCrio(CrioNetwork{ConfDir: ConfDir, PluginDir: PluginDir, StatusGrace: statusGrace})
	rt.AwaitNetwork()
	return &CrioNode{n, rt, unwind}
}

// crioGrace is the grace period: until it ends, unwind keeps an attachment that CRI-O doesn't list.
// It is short, because tests wait for its end.
const crioGrace = 10 * time.Second

func crioKeys(unwind bool) map[string]any {
	if !unwind {
		return nil
	}
	return map[string]any{"gracePeriod": crioGrace.String()}
}

// Pending returns the number of records in the journal, except the live records of running pods.
func (c *CrioNode) Pending() int {
	c.Helper()
	if !c.Unwind {
		return 0
	}
	return len(c.Owed(c.RT.CRI))
}

// Restart stops CRI-O and starts it again. CRI-O sends one GC when it starts.
func (c *CrioNode) Restart() {
	c.Helper()
	c.RT.Stop()
	c.RT.Start()
	c.RT.AwaitNetwork()
}

// StartAgent starts the agent, which sweeps every second until the test ends.
func (c *CrioNode) StartAgent() {
	c.Helper()
	cmd := exec.Command(Path(c, "bin/unwindctl"), "run", "--no-install", "--cri", "auto", "--interval", "1s", "--listen", "")
	if err := c.Start(cmd); err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
}
