package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
)

// ciliumDir is the directory that cilium-cni knows as /var/run/cilium. The node's /var/run links to
// /run. A test sees the node's files below Root, but would follow this link to the machine's /run.
const (
	ciliumDir   = "/run/cilium"
	ciliumQueue = ciliumDir + "/deleteQueue"

	ciliumSocket = ciliumDir + "/cilium.sock"
)

// ConfigureCilium gives the node Cilium's network. The chain consists of the real cilium-cni and
// the plugins that the caller adds (more). The socket of Cilium's agent exists, but no process
// listens on it, as if the agent had been killed.
func (n *Node) ConfigureCilium(unwind bool, more ...string) {
	n.Helper()
	text, err := os.ReadFile(Path(n, "testdata/conflists/cilium.conflist"))
	err = errors.Join(err, os.Symlink(tool(n, "cilium/cilium-cni"), n.File(PluginDir, "cilium-cni")),
		os.MkdirAll(n.File(ciliumDir), 0o755))
	if err != nil {
		n.Fatal(err)
	}
	_ = n.listen(ciliumSocket).Close()
	n.configure("cilium", n.extend(string(text), more), unwind, nil)
}

// CiliumAgent stands in for Cilium's agent (1.19.6). It listens on the socket to which cilium-cni
// connects, and assigns an address of its pool to each endpoint. Unlike the real agent, it doesn't
// remove an endpoint 5 to 10 minutes after the endpoint's interface was removed
// (pkg/endpointmanager/gc.go), and doesn't release addresses that no endpoint uses.
type CiliumAgent struct {
	n      *Node
	pool   []string
	server *http.Server

	mu        sync.Mutex
	taken     map[string]bool // the assigned addresses
	endpoints map[string]ciliumEndpoint
	refuses   bool
}

// ciliumEndpoint is the part of an EndpointChangeRequest that CiliumAgent uses.
type ciliumEndpoint struct {
	ContainerID   string `json:"container-id"`
	InterfaceName string `json:"interface-name"` // on the host
	Addressing    struct {
		IPv4 string `json:"ipv4"`
	} `json:"addressing"`
}

// NewCiliumAgent creates an agent, but doesn't start it.
func (n *Node) NewCiliumAgent(pool ...string) *CiliumAgent {
	return &CiliumAgent{
		n: n, pool: pool, taken: map[string]bool{}, endpoints: map[string]ciliumEndpoint{},
	}
}

// Start starts the agent. Like the real agent, it drops the endpoints whose interfaces no longer
// exist (validateEndpoint), processes the queued deletions, and then serves requests.
func (a *CiliumAgent) Start() {
	a.n.Helper()
	a.refuses = false
	a.n.do(func() error {
		for id, e := range a.endpoints {
			if _, err := netlink.LinkByName(e.InterfaceName); err != nil {
				a.delete(id)
			}
		}
		return nil
	})
	listener := a.n.listen(ciliumSocket)
	a.takeQueue()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/config", a.config)
	mux.HandleFunc("POST /v1/ipam", a.allocate)
	mux.HandleFunc("DELETE /v1/ipam/{ip}", a.release)
	mux.HandleFunc("PUT /v1/endpoint/{id}", a.create)
	mux.HandleFunc("DELETE /v1/endpoint", a.remove)
	a.server = &http.Server{Handler: mux}
	a.n.Cleanup(a.Stop)
	go func() { _ = a.server.Serve(listener) }()
}

// Stop stops the agent, but leaves its socket, its endpoints and its queue, as after a kill.
func (a *CiliumAgent) Stop() { _ = a.server.Close() }

// Refuse sets whether the agent returns 503 for each deletion until its next start. A real agent
// does so while it cannot restore its endpoints.
func (a *CiliumAgent) Refuse(refuses bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.refuses = refuses
}

func (a *CiliumAgent) Endpoints() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.endpoints)
}

// takeQueue processes the queued deletions, as Cilium's processQueuedDeleteEntryLocked does.
func (a *CiliumAgent) takeQueue() {
	a.n.Helper()
	paths, err := filepath.Glob(a.n.File(ciliumQueue, "*.delete"))
	for _, path := range paths {
		var e ciliumEndpoint
		data, readErr := os.ReadFile(path)
		err = errors.Join(err, readErr, json.Unmarshal(data, &e), os.Remove(path))
		a.delete(e.ContainerID)
	}
	if err != nil {
		a.n.Fatal(err)
	}
}

// delete deletes an endpoint and releases its address.
func (a *CiliumAgent) delete(containerID string) (had bool) {
	e, had := a.endpoints[containerID]
	delete(a.taken, e.Addressing.IPv4)
	delete(a.endpoints, containerID)
	return had
}

const ciliumHost = `{"ipv4": {"enabled": true, "ip": "10.0.12.1", "alloc-range": "10.0.12.0/24"}}`

func (a *CiliumAgent) config(w http.ResponseWriter, _ *http.Request) {
	answer(w, http.StatusOK, `{"status": {"datapathMode": "veth", "ipam-mode": "cluster-pool",
		"deviceMTU": 1500, "routeMTU": 1500, "addressing": `+ciliumHost+`}}`)
}

func (a *CiliumAgent) allocate(w http.ResponseWriter, _ *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, ip := range a.pool {
		if !a.taken[ip] {
			a.taken[ip] = true
			answer(w, http.StatusCreated, fmt.Sprintf(
				`{"host-addressing": %s, "address": {"ipv4": %q}, "ipv4": {"ip": %q}}`, ciliumHost, ip, ip))
			return
		}
	}
	answer(w, http.StatusBadGateway, `"all addresses are taken"`)
}

func (a *CiliumAgent) release(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.taken, r.PathValue("ip"))
	w.WriteHeader(http.StatusOK)
}

func (a *CiliumAgent) create(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var e ciliumEndpoint
	if err := json.NewDecoder(r.Body).Decode(&e); err != nil || e.ContainerID == "" {
		answer(w, http.StatusBadRequest, `"no container"`)
		return
	}
	a.endpoints[e.ContainerID] = e
	answer(w, http.StatusCreated, `{}`)
}

func (a *CiliumAgent) remove(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var e ciliumEndpoint
	switch err := json.NewDecoder(r.Body).Decode(&e); {
	case err != nil || e.ContainerID == "":
		w.WriteHeader(http.StatusBadRequest)
	case a.refuses:
		w.WriteHeader(http.StatusServiceUnavailable)
	case !a.delete(e.ContainerID):
		w.WriteHeader(http.StatusNotFound)
	default:
		w.WriteHeader(http.StatusOK)
	}
}

func answer(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(body))
}

// FillCiliumQueue puts 256 deletions into the queue, the maximum that cilium-cni allows. It also
// creates the queue's lock file.
func (n *Node) FillCiliumQueue() {
	n.Helper()
	for i := range 256 {
		n.Write(fmt.Sprintf("%s/%d.delete", ciliumQueue, i), "{}")
	}
	n.Write(ciliumQueue+"/lockfile", "")
}

// BlockCiliumQueue creates a file at the path of the queue's directory, so that cilium-cni cannot
// create the directory.
func (n *Node) BlockCiliumQueue() {
	n.Helper()
	n.Write(ciliumQueue, "")
}

// CiliumQueued returns the number of deletions in the queue that name one of cnitool's containers.
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
