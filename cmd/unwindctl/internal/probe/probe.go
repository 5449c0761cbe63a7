// Package probe reads an attachment's addresses from the whereabouts store in the Kubernetes API.
// It is read-only. It also reads Multus's NetworkAttachmentDefinitions from the API.
package probe

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/plugin/netconf"
)

// DefaultTimeout bounds one request, from the dial to the last byte of the response.
const DefaultTimeout = 2 * time.Second

// maxRanges bounds the number of requests for one query: each range has a pool of its own.
const maxRanges = 16

// Prober queries the whereabouts store. The zero value is ready to use, and safe for concurrent
// use: a Prober keeps no state between queries.
type Prober struct {
	Root    string        // the directory that contains the plugin's paths; "" is /
	Timeout time.Duration // of one request; 0 is DefaultTimeout
}

// Held returns the addresses that whereabouts keeps for an attachment, sorted. asked is false if
// the package cannot query the configured store: node slices, the datastore etcd, or a kubeconfig
// that gets its token from a program. An error means that the query failed: asked is then true, and
// it is unknown which addresses are kept. It names the API's host or the file, and the reason, but
// contains no secret.
//
// Each query reads whole pools from a quorum of etcd (a GET without a resourceVersion), so the
// result is never older than the query. whereabouts does not record the network.
//
// The pools and their keys are as in whereabouts 0.9.4 (pkg/config, pkg/storage/kubernetes).
func (p *Prober) Held(
	ctx context.Context, q ipam.Query,
) (held []netip.Addr, asked bool, err error) {
	conf, err := p.whereabouts(q.Config)
	if err != nil {
		return nil, true, fmt.Errorf("whereabouts: %w", err)
	}
	if conf == nil {
		return nil, false, nil
	}
	pools, err := conf.pools()
	if err != nil {
		return nil, true, fmt.Errorf("whereabouts: %w", err)
	}
	if conf.Kubernetes.Kubeconfig == "" {
		return nil, true, errors.New("whereabouts: no kubeconfig set; set kubernetes.kubeconfig in " +
			"the IPAM configuration or in whereabouts.conf")
	}
	api, err := p.connect(conf.Kubernetes.Kubeconfig)
	if errors.Is(err, errProgram) {
		return nil, false, nil // an error would keep the address pending forever
	}
	if err != nil {
		return nil, true, fmt.Errorf("whereabouts: kubeconfig %s: %w", conf.Kubernetes.Kubeconfig, err)
	}
	defer api.client.CloseIdleConnections()
	for _, name := range pools {
		addresses, err := api.held(ctx, name, q.ContainerID, q.IfName)
		if err != nil {
			return nil, true, fmt.Errorf("whereabouts: pool %s at %s: %w", name, api.server.Host,
				api.reason(err))
		}
		held = append(held, addresses...)
	}
	slices.SortFunc(held, netip.Addr.Compare)
	return held, true, nil
}

// whereaboutsConf contains the keys of whereabouts's "ipam" that identify its pools.
type whereaboutsConf struct {
	Datastore         string
	ConfigurationPath string `json:"configuration_path"`
	NetworkName       string `json:"network_name"`
	NodeSliceSize     string `json:"node_slice_size"`
	Range             string
	IPRanges          []struct{ Range string }
	Kubernetes        struct{ Kubeconfig string }
}

// whereabouts returns the plugin's configuration as the plugin reads it. It returns nil and no
// error if this package cannot read such pools.
func (p *Prober) whereabouts(config json.RawMessage) (*whereaboutsConf, error) {
	var delegate struct{ IPAM whereaboutsConf }
	if err := json.Unmarshal(config, &delegate); err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	c := delegate.IPAM
	if err := p.merge(&c); err != nil {
		return nil, err
	}
	if c.NodeSliceSize != "" || c.Datastore == "etcd" {
		return nil, nil
	}
	return &c, nil
}

// merge fills empty keys from the first flat file that exists. The plugin tries the files in this
// order (pkg/config, GetFlatIPAM).
func (p *Prober) merge(c *whereaboutsConf) error {
	for _, path := range []string{
		c.ConfigurationPath,
		"/etc/kubernetes/cni/net.d/whereabouts.d/whereabouts.conf",
		"/etc/cni/net.d/whereabouts.d/whereabouts.conf",
		"/host/etc/cni/net.d/whereabouts.d/whereabouts.conf",
	} {
		if _, err := os.Stat(filepath.Join(p.Root, path)); path == "" || err != nil {
			continue
		}
		var flat whereaboutsConf
		data, err := p.read(path)
		if err == nil {
			err = json.Unmarshal(data, &flat)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		c.Datastore = cmp.Or(c.Datastore, flat.Datastore)
		c.NetworkName = cmp.Or(c.NetworkName, flat.NetworkName)
		c.NodeSliceSize = cmp.Or(c.NodeSliceSize, flat.NodeSliceSize)
		c.Range = cmp.Or(c.Range, flat.Range)
		c.Kubernetes.Kubeconfig = cmp.Or(c.Kubernetes.Kubeconfig, flat.Kubernetes.Kubeconfig)
		if len(c.IPRanges) == 0 {
			c.IPRanges = flat.IPRanges
		}
		return nil
	}
	return nil
}

// read reads a file that the plugin's configuration names. It opens no device and no pipe.
func (p *Prober) read(path string) ([]byte, error) {
	return netconf.ReadFile(filepath.Join(cmp.Or(p.Root, "/"), path))
}

// objectName matches the name of a Kubernetes object (RFC 1123 subdomain), which needs no escaping
// in a URL.
var objectName = regexp.MustCompile(`^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$`)

// pools returns the names of the ranges' IPPools (pkg/storage/kubernetes, IPPoolName), without
// duplicates. A range is a CIDR, whose host bits are ignored, or FIRST-LAST/BITS.
func (c *whereaboutsConf) pools() ([]string, error) {
	var ranges []string
	if c.Range != "" {
		ranges = append(ranges, c.Range)
	}
	for _, r := range c.IPRanges {
		ranges = append(ranges, r.Range)
	}
	if len(ranges) > maxRanges {
		return nil, fmt.Errorf("too many ranges: %d (at most %d)", len(ranges), maxRanges)
	}
	var names []string
	for _, r := range ranges {
		_, network, err := net.ParseCIDR(r[strings.Index(r, "-")+1:])
		if err != nil {
			return nil, fmt.Errorf("range %q: not a CIDR", r)
		}
		name := strings.NewReplacer(":", "-", "/", "-").Replace(network.String())
		if c.NetworkName != "" {
			name = c.NetworkName + "-" + name
		}
		if !objectName.MatchString(name) {
			return nil, fmt.Errorf("range %q: %q is not a valid pool name", r, name)
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// maxAnswer is the maximum size of a response in bytes. A Kubernetes object has at most about 3
// MiB.
const maxAnswer = 16 << 20

// ipPool is the object in which whereabouts keeps the addresses of one range. A key of Allocations
// is the decimal offset of the address from the first address of the range.
type ipPool struct {
	Kind     string
	Metadata struct{ Name string }
	Spec     struct {
		Range       string
		Allocations map[string]struct{ ID, IfName string }
	}
}

// status is the API's response for an object that does not exist.
type status struct {
	Kind, Reason string
	Details      struct{ Name, Kind string }
}

// held returns the addresses that a pool keeps for an attachment. A missing pool keeps none.
func (a *api) held(ctx context.Context, name, containerID, ifname string) ([]netip.Addr, error) {
	from := a.server.JoinPath("apis/whereabouts.cni.cncf.io/v1alpha1/namespaces", a.namespace,
		"ippools", name)
	code, data, err := a.get(ctx, from, maxAnswer)
	if err != nil {
		return nil, err
	}
	switch code {
	case http.StatusOK:
		var pool ipPool
		if err := json.Unmarshal(data, &pool); err != nil {
			return nil, fmt.Errorf("malformed response: %w", err)
		}
		if pool.Kind != "IPPool" || pool.Metadata.Name != name {
			return nil, errors.New("the response is not that IPPool")
		}
		return pool.held(containerID, ifname)
	case http.StatusNotFound:
		// any server may return 404, and so does an API without the kind IPPool
		var s status
		if json.Unmarshal(data, &s) == nil && s.Kind == "Status" && s.Reason == "NotFound" &&
			s.Details.Kind == "ippools" && s.Details.Name == name {
			return nil, nil
		}
		return nil, errors.New("404 Not Found: the API has no IPPools")
	}
	return nil, statusError(code)
}

// held returns an attachment's addresses. Before whereabouts 0.9.0 an allocation had no ifname.
func (p *ipPool) held(containerID, ifname string) ([]netip.Addr, error) {
	network, err := netip.ParsePrefix(p.Spec.Range)
	if err != nil {
		return nil, fmt.Errorf("malformed response: range %q", p.Spec.Range)
	}
	var held []netip.Addr
	for offset, a := range p.Spec.Allocations {
		if a.ID != containerID || a.IfName != "" && a.IfName != ifname {
			continue
		}
		n, err := strconv.ParseUint(offset, 10, 64)
		address := after(network.Addr(), n)
		if err != nil || !network.Contains(address) {
			return nil, fmt.Errorf("allocation %.40q is not an address of %v", offset, network)
		}
		held = append(held, address)
	}
	return held, nil
}

// after returns the address at an offset from the first one. If the sum overflows, it returns an
// address in another network.
func after(first netip.Addr, n uint64) netip.Addr {
	b := first.As16()
	low, carry := bits.Add64(binary.BigEndian.Uint64(b[8:]), n, 0)
	binary.BigEndian.PutUint64(b[8:], low)
	binary.BigEndian.PutUint64(b[:8], binary.BigEndian.Uint64(b[:8])+carry)
	return netip.AddrFrom16(b).Unmap()
}
