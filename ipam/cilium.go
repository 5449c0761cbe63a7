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

// Cilium is the probe of cilium-cni. Its DEL exits with 0 where it has only queued the deletion, as
// a file, since the agent is away or answers 503 (1.19.6 and 1.20.2,
// plugins/cilium-cni/lib/deletion_queue.go). The agent takes the queue up once, at its start, and
// removes each file after it has deleted what the file names
// (pkg/endpoint/api/endpoint_deletion_queue.go).
type Cilium struct{}

// ciliumQueue is DeleteQueueDir of pkg/defaults.
const ciliumQueue = "/var/run/cilium/deleteQueue"

// ErrQueued says that a DEL that passed waits in a queue of the plugin's own. Another DEL adds
// nothing.
var ErrQueued = errors.New("the deletion is queued")

// Held returns ErrQueued while a file of the attachment is in the queue. Without one, the agent has
// answered the DEL. The other probes look for what cilium-cni's own IPAM plugin keeps.
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
