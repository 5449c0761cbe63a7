package ipam

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
)

// Probe queries a plugin's store for the addresses of an attachment, because some plugins exit 0
// after a DEL that freed nothing. A probe only reads. To free the remaining addresses, unwind runs
// the plugin's DEL again.
type Probe interface {
	// Held returns the addresses that the store still assigns to an attachment. asked is false if
	// no store exists on this node. An error means that the store cannot be queried now.
	Held(ctx context.Context, q Query) (held []netip.Addr, asked bool, err error)
}

// Query is the input of a probe: an attachment, and a delegate that either is the plugin with the
// store or calls it.
type Query struct {
	Network, ContainerID, IfName string

	Config json.RawMessage // the delegate's configuration
	IPAM   string          // the IPAM plugin that the delegate calls, or ""
	Store  string          // the path of the store; "" means the plugin's default path
}

// OnNode returns the probes that read stores on the node, by plugin.
func OnNode() map[string]Probe {
	return map[string]Probe{"aws-cni": AWS{}, "cilium-cni": Cilium{}}
}

// Cilium is the probe of cilium-cni. If Cilium's agent is down or returns 503, cilium-cni's DEL
// queues the deletion as a file and exits 0 (1.19.6 and 1.20.2,
// plugins/cilium-cni/lib/deletion_queue.go). The agent processes the queue once, at its start, and
// removes each file after the deletion (pkg/endpoint/api/endpoint_deletion_queue.go).
type Cilium struct{}

// ciliumQueue is the queue's directory (DeleteQueueDir in Cilium's pkg/defaults).
const ciliumQueue = "/var/run/cilium/deleteQueue"

// ErrQueued means that the plugin's DEL exited 0, but only put the deletion into the plugin's own
// queue. Another DEL would not help.
var ErrQueued = errors.New("the deletion is queued")

// Held returns ErrQueued while the queue contains a file for the attachment. Otherwise the agent
// has handled the DEL. Other probes cover the IPAM plugin that cilium-cni calls.
func (Cilium) Held(_ context.Context, q Query) (held []netip.Addr, asked bool, err error) {
	// A file's name is the SHA-256 of its content. The content identifies the attachment since
	// 1.20, and the container before that (EndpointBatchDeleteRequest).
	for _, content := range []string{
		"cni-attachment-id:" + q.ContainerID + ":" + q.IfName,
		`{"container-id":"` + q.ContainerID + `"}`,
	} {
		path := filepath.Join(cmp.Or(q.Store, ciliumQueue),
			fmt.Sprintf("%x.delete", sha256.Sum256([]byte(content))))
		switch _, err := os.Lstat(path); {
		case err == nil:
			return nil, true, fmt.Errorf("%w for Cilium's agent: %s", ErrQueued, path)
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR):
			return nil, true, err
		}
	}
	return nil, q.IPAM == "", nil
}
