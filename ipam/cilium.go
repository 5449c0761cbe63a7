package ipam

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
)

// Cilium is the probe of cilium-cni. If the agent is down or returns 503, its DEL queues the
// deletion as a file and exits 0 (1.19.6 and 1.20.2, plugins/cilium-cni/lib/deletion_queue.go). The
// agent processes the queue once, at its start, and removes each file after the deletion
// (pkg/endpoint/api/endpoint_deletion_queue.go).
type Cilium struct{}

// ciliumQueue is DeleteQueueDir of pkg/defaults.
const ciliumQueue = "/var/run/cilium/deleteQueue"

// ErrQueued says that a successful DEL is in the plugin's own queue. Another DEL would not help.
var ErrQueued = errors.New("the deletion is queued")

// Held returns ErrQueued while the queue has a file of the attachment. Without one, the agent has
// handled the DEL. Other probes cover the IPAM plugin that cilium-cni calls.
func (Cilium) Held(_ context.Context, q Query) (held []netip.Addr, asked bool, err error) {
	for _, name := range queued(q.ContainerID, q.IfName) {
		path := filepath.Join(cmp.Or(q.Store, ciliumQueue), name)
		switch _, err := os.Lstat(path); {
		case err == nil:
			return nil, true, fmt.Errorf("%w for Cilium's agent: %s", ErrQueued, path)
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR):
			return nil, true, err
		}
	}
	return nil, q.IPAM == "", nil
}

// queued returns the names that the file of an attachment may have: the SHA-256 of its content,
// which names the attachment from 1.20 on, and the container before (EndpointBatchDeleteRequest).
func queued(containerID, ifname string) (names []string) {
	for _, content := range []string{
		"cni-attachment-id:" + containerID + ":" + ifname,
		`{"container-id":"` + containerID + `"}`,
	} {
		names = append(names, fmt.Sprintf("%x.delete", sha256.Sum256([]byte(content))))
	}
	return names
}
