package e2e

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// awsDir is the directory that aws-cni knows as /var/run/aws-node. The node's /var/run links to
// /run. A test sees the node's files below Root, but would follow this link to the machine's /run.
const awsDir = "/run/aws-node"

// awsVersion is the format version of ipamd's file.
const awsVersion = "vpc-cni-ipam/1"

// ConfigureAWS gives the node the network of the AWS VPC CNI. The chain consists of the real
// aws-cni and egress-cni, portmap, and the plugins that the caller adds (more). unwind's grace
// period is short, because tests wait for its end.
func (n *Node) ConfigureAWS(unwind bool, more ...string) {
	n.Helper()
	for _, plugin := range []string{"aws-cni", "egress-cni"} {
		if err := os.Symlink(tool(n, "aws/"+plugin), n.File(PluginDir, plugin)); err != nil {
			n.Fatal(err)
		}
	}
	text, err := os.ReadFile(Path(n, "testdata/conflists/aws-vpc-cni.conflist"))
	if err != nil {
		n.Fatal(err)
	}
	var keys map[string]any
	if unwind {
		keys = map[string]any{"gracePeriod": "1s"}
	}
	n.configure("aws-cni", n.extend(string(text), more), unwind, keys)
}

// IPAMD stands in for ipamd, the daemon of the AWS VPC CNI (amazon-vpc-cni-k8s 1.23.2, pkg/ipamd).
// It listens on the socket to which aws-cni connects. Before it responds to a call, it writes its
// allocations to a file, with the network, the container ID and the interface as the key. Unlike
// ipamd, it never calls AWS, can reassign a released address within 30 s, and has only one ENI.
// This ENI is not the primary one, so each pod has one routing rule per direction.
type IPAMD struct {
	n      *Node
	pool   []string
	server *grpc.Server

	mu          sync.Mutex
	allocations []AWSAllocation // in the order of their ADDs
	refusal     error           // the error that DelNetwork returns; nil for none
}

// AWSAllocation is an entry of ipamd's file (CheckpointEntry).
type AWSAllocation struct {
	awsKey
	IPv4                string `json:"ipv4,omitempty"`
	AllocationTimestamp int64  `json:"allocationTimestamp"`
	Metadata            AWSPod `json:"metadata"`
}

type awsKey struct {
	NetworkName string `json:"networkName"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
}

// AWSPod is the pod that owns an allocation.
type AWSPod struct {
	Namespace  string `json:"k8sPodNamespace,omitempty"`
	Name       string `json:"k8sPodName,omitempty"`
	Interfaces int    `json:"interfacesCount,omitempty"`
}

type awsCheckpoint struct {
	Version     string          `json:"version"`
	Allocations []AWSAllocation `json:"allocations"`
}

// StartIPAMD starts the daemon. Like ipamd (ReadBackingStore), the daemon drops an allocation from
// its file if the pod has no interface on the host. It does so only at its start.
func (n *Node) StartIPAMD(pool ...string) *IPAMD {
	n.Helper()
	const socket = awsDir + "/ipamd.sock"
	d := &IPAMD{n: n, pool: pool}
	if err := os.MkdirAll(n.File(awsDir), 0o755); err != nil {
		n.Fatal(err)
	}
	stored := n.AWSAllocations()
	n.do(func() error {
		links, err := netlink.LinkList()
		for _, a := range stored {
			if a.Metadata.isAmong(links) {
				d.allocations = append(d.allocations, a)
			}
		}
		return err
	})
	if err := d.write(); err != nil {
		n.Fatal(err)
	}
	listener := n.listen(socket)
	n.Cleanup(d.Stop)
	d.server = grpc.NewServer(grpc.ForceServerCodec(wire{}))
	d.server.RegisterService(&grpc.ServiceDesc{ServiceName: "rpc.CNIBackend", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{method("AddNetwork", d.add), method("DelNetwork", d.del)}}, nil)
	go func() { _ = d.server.Serve(listener) }()
	return d
}

// Stop stops the daemon, but leaves its socket and its file, as after a kill.
func (d *IPAMD) Stop() { d.server.Stop() }

// Refuse makes each DelNetwork return an error with this text, and change nothing. With "",
// DelNetwork succeeds again.
func (d *IPAMD) Refuse(words string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refusal = nil
	if words != "" {
		d.refusal = status.Error(codes.Unknown, words)
	}
}

// AWSAllocations returns the allocations in ipamd's file.
func (n *Node) AWSAllocations() []AWSAllocation {
	n.Helper()
	data, err := os.ReadFile(n.File(awsDir, "ipam.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var stored awsCheckpoint
	if err == nil {
		err = json.Unmarshal(data, &stored)
	}
	if err != nil || stored.Version != awsVersion {
		n.Fatalf("ipamd's file, version %q: %v", stored.Version, err)
	}
	return stored.Allocations
}

// AWSLog returns aws-cni's log.
func (n *Node) AWSLog() string {
	data, err := os.ReadFile(n.File("/var/log/aws-routed-eni/plugin.log"))
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// isAmong reports whether one of the links has the name that aws-cni gives the host end of this
// pod's interface (networkutils.GeneratePodHostVethNameSuffix). If the pod's name is not known,
// isAmong returns true.
func (p AWSPod) isAmong(links []netlink.Link) bool {
	if p.Namespace == "" || p.Name == "" {
		return true
	}
	sum := sha1.Sum([]byte(p.Namespace + "." + p.Name))
	for _, link := range links {
		if strings.HasSuffix(link.Attrs().Name, hex.EncodeToString(sum[:])[:11]) {
			return true
		}
	}
	return false
}

// write writes the allocations to ipamd's file, as JSONFile.Checkpoint does: it syncs a new file,
// and renames it over the old one.
func (d *IPAMD) write() error {
	stored := awsCheckpoint{awsVersion, append([]AWSAllocation{}, d.allocations...)}
	f, err := os.CreateTemp(d.n.File(awsDir), "ipam.json.tmp*")
	if err != nil {
		return err
	}
	defer f.Close()
	return errors.Join(json.NewEncoder(f).Encode(stored), f.Sync(),
		os.Rename(f.Name(), d.n.File(awsDir, "ipam.json")))
}

// add handles AddNetwork. The field numbers are from rpc.proto.
func (d *IPAMD) add(request fields) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	key := awsKey{NetworkName: request[6], ContainerID: request[7], IfName: request[5]}
	i := d.find(key)
	if i < 0 {
		address := d.free()
		if address == "" {
			return nil, status.Error(codes.Unknown, "AssignPodIPv4Address: no available IP/Prefix addresses")
		}
		i = len(d.allocations)
		d.allocations = append(d.allocations, AWSAllocation{
			awsKey: key, IPv4: address, AllocationTimestamp: time.Now().UnixNano(),
			Metadata: AWSPod{Namespace: request[2], Name: request[1], Interfaces: 1},
		})
		if err := d.write(); err != nil {
			return nil, err
		}
	}
	return reply(d.allocations[i].IPv4), nil
}

func (d *IPAMD) del(request fields) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refusal != nil {
		return nil, d.refusal
	}
	i := d.find(awsKey{NetworkName: request[7], ContainerID: request[8], IfName: request[6]})
	if i < 0 {
		return nil, status.Error(codes.Unknown, "datastore: unknown pod")
	}
	address := d.allocations[i].IPv4
	d.allocations = append(d.allocations[:i:i], d.allocations[i+1:]...)
	return reply(address), d.write()
}

func (d *IPAMD) find(key awsKey) int {
	for i, a := range d.allocations {
		if a.awsKey == key {
			return i
		}
	}
	return -1
}

// free returns the first free address of the pool, or "".
func (d *IPAMD) free() string {
	for _, address := range d.pool {
		if !d.has(address) {
			return address
		}
	}
	return ""
}

func (d *IPAMD) has(address string) bool {
	for _, a := range d.allocations {
		if a.IPv4 == address {
			return true
		}
	}
	return false
}

// AWSLeft counts the resources of pods on the node, both live and leaked.
type AWSLeft struct {
	Addresses int // in ipamd's file
	Veths     int // on the host
	Routing   int // routing rules, two for each pod
	Rules     int // iptables rules and chains of containers
}

func (l AWSLeft) String() string {
	return fmt.Sprintf("%d/%d/%d/%d", l.Addresses, l.Veths, l.Routing, l.Rules)
}

// AWSSettled waits until the numbers of resources no longer change, and returns them.
func (n *Node) AWSSettled() AWSLeft {
	n.Helper()
	left := n.Settled()
	return AWSLeft{Addresses: len(n.AWSAllocations()), Veths: left.Veths,
		Routing: len(n.RoutingRules("")), Rules: left.Rules}
}

// RoutingRules returns the routing rules for an address or, with "", for all addresses.
func (n *Node) RoutingRules(address string) (rules []string) {
	n.Helper()
	n.do(func() error {
		all, err := netlink.RuleList(netlink.FAMILY_V4)
		for _, rule := range all {
			for _, end := range []*net.IPNet{rule.Src, rule.Dst} {
				if end != nil && (address == "" || end.IP.String() == address) {
					rules = append(rules, rule.String())
				}
			}
		}
		return err
	})
	return rules
}

func method(name string, answer func(fields) ([]byte, error)) grpc.MethodDesc {
	return grpc.MethodDesc{MethodName: name, Handler: func(_ any, _ context.Context,
		decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		var request []byte
		if err := decode(&request); err != nil {
			return nil, err
		}
		f, err := parse(request)
		if err != nil {
			return nil, status.Error(codes.InvalidArgument, err.Error())
		}
		out, err := answer(f)
		return &out, err
	}}
}
