package probe

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/bits"
	"net/http"
	"net/netip"
	"strconv"
)

// maxAnswer bounds the answer with a pool in bytes. An object of Kubernetes has at most some 3 MiB.
const maxAnswer = 16 << 20

// ipPool is the object in which whereabouts keeps the addresses of one range. A key of Allocations
// is the distance of the address from the first of the range, in decimal.
type ipPool struct {
	Kind     string
	Metadata struct{ Name string }
	Spec     struct {
		Range       string
		Allocations map[string]struct{ ID, IfName string }
	}
}

// status is the answer in which the API says that an object does not exist.
type status struct {
	Kind, Reason string
	Details      struct{ Name, Kind string }
}

// held returns the addresses that a pool keeps for an attachment. A pool that does not exist keeps
// none.
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
		// Any server says 404, also an API without the kind of the pool.
		var s status
		if json.Unmarshal(data, &s) == nil && s.Kind == "Status" && s.Reason == "NotFound" &&
			s.Details.Kind == "ippools" && s.Details.Name == name {
			return nil, nil
		}
		return nil, errors.New("404 Not Found: the API has no IPPools")
	}
	return nil, statusError(code)
}

// held returns the addresses of an attachment. Before 0.9.0 an allocation had no ifname.
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
			return nil, fmt.Errorf("its allocation %.40q is not an address of %v", offset, network)
		}
		held = append(held, address)
	}
	return held, nil
}

// after returns the address that is n after another. It is of another network if there is none.
func after(first netip.Addr, n uint64) netip.Addr {
	b := first.As16()
	low, carry := bits.Add64(binary.BigEndian.Uint64(b[8:]), n, 0)
	binary.BigEndian.PutUint64(b[8:], low)
	binary.BigEndian.PutUint64(b[:8], binary.BigEndian.Uint64(b[:8])+carry)
	return netip.AddrFrom16(b).Unmap()
}
