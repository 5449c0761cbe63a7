package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// ciliumDir is /var/run/cilium. /var/run is a link, which Root would follow out of the node.
const (
	ciliumDir   = "/run/cilium"
	ciliumQueue = ciliumDir + "/deleteQueue"
)

// ConfigureCilium has the node's network be that of Cilium, with the real cilium-cni. Its agent was
// killed: its socket is there, and nobody listens.
func (n *Node) ConfigureCilium(unwind bool) {
	n.Helper()
	text, err := os.ReadFile(Path(n, "testdata/conflists/cilium.conflist"))
	err = errors.Join(err, os.Symlink(tool(n, "cilium/cilium-cni"), n.File(PluginDir, "cilium-cni")),
		os.MkdirAll(n.File(ciliumDir), 0o755))
	if err != nil {
		n.Fatal(err)
	}
	n.do(func() error {
		listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: ciliumDir + "/cilium.sock"})
		if err != nil {
			return err
		}
		listener.SetUnlinkOnClose(false)
		return listener.Close()
	})
	n.configure("cilium", string(text), unwind, nil)
}

// FillCiliumQueue puts as many deletions into the queue as cilium-cni allows: 256 files, with the
// lock's own.
func (n *Node) FillCiliumQueue() {
	n.Helper()
	for i := range 256 {
		n.Write(fmt.Sprintf("%s/%d.delete", ciliumQueue, i), "{}")
	}
	n.Write(ciliumQueue+"/lockfile", "")
}

// BlockCiliumQueue puts a file where the queue is to be made.
func (n *Node) BlockCiliumQueue() {
	n.Helper()
	n.Write(ciliumQueue, "")
}

// TakeCiliumQueue removes the queue, as the agent's start empties it.
func (n *Node) TakeCiliumQueue() {
	n.Helper()
	if err := os.RemoveAll(n.File(ciliumQueue)); err != nil {
		n.Fatal(err)
	}
}

// CiliumQueued returns the number of deletions in the queue that name a container of cnitool's.
func (n *Node) CiliumQueued() (count int) {
	n.Helper()
	paths, err := filepath.Glob(n.File(ciliumQueue, "*.delete"))
	for _, path := range paths {
		data, readErr := os.ReadFile(path)
		err = errors.Join(err, readErr)
		if strings.Contains(string(data), `"container-id":"cnitool-`) {
			count++
		}
	}
	if err != nil {
		n.Fatal(err)
	}
	return count
}
