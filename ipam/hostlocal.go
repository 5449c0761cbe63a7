// Package ipam looks at what the node-local IPAM plugin host-local keeps on the disk, and releases what is dead there.
package ipam

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/allocator"
	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/disk"
)

// defaultDataDir is where host-local keeps its networks if its configuration names no dataDir.
const defaultDataDir = "/var/lib/cni/networks"

// Owner is the attachment that host-local has given an address to. IfName is "" in files of host-local before 0.8.
type Owner struct {
	ContainerID string
	IfName      string
}

// Is says whether the owner is this attachment.
func (o Owner) Is(containerID, ifname string) bool {
	return o.ContainerID == containerID && (o.IfName == "" || o.IfName == ifname)
}

// Pool returns the folder in which host-local keeps the addresses of a network, given the configuration of the delegate
// that calls it, or "" if the delegate uses another IPAM. network is a valid network name.
func Pool(config json.RawMessage, network string) string {
	var conf struct {
		IPAM struct {
			Type    string `json:"type"`
			DataDir string `json:"dataDir"`
		} `json:"ipam"`
	}
	if json.Unmarshal(config, &conf) != nil || conf.IPAM.Type != "host-local" {
		return ""
	}
	if conf.IPAM.DataDir == "" {
		conf.IPAM.DataDir = defaultDataDir
	}
	if !filepath.IsAbs(conf.IPAM.DataDir) {
		return ""
	}
	return filepath.Join(conf.IPAM.DataDir, network)
}

// OwnerOf returns to whom the address is given in a pool. ok is false if it is given to no one, or if the file says no
// owner (host-local died between making and writing it). It writes nothing and takes no lock: what it returns may be
// old news, and serves only as a reason to keep.
func OwnerOf(pool string, address netip.Addr) (owner Owner, ok bool, err error) {
	r, ok, err := reservationOf(pool, address)
	return r.Owner, ok && !r.Ownerless(), err
}

// HeldBy returns the addresses that are given to an attachment in a pool. As OwnerOf, it only looks.
func HeldBy(pool, containerID, ifname string) ([]netip.Addr, error) {
	found, err := Scan(pool)
	var held []netip.Addr
	for _, r := range found {
		if !r.Ownerless() && r.Owner.Is(containerID, ifname) {
			held = append(held, r.Address)
		}
	}
	return held, err
}

var errUnnamed = errors.New("no container ID or no interface is named")

// Release gives back all addresses of an attachment in a pool, see Free.
func Release(ctx context.Context, pool, containerID, ifname string) error {
	if containerID == "" || ifname == "" {
		return errUnnamed
	}
	held, err := HeldBy(pool, containerID, ifname)
	for _, address := range held {
		_, freeErr := Free(ctx, pool, Owner{containerID, ifname}, address)
		err = errors.Join(err, freeErr)
	}
	return err
}

// Free gives back an address of an attachment in a pool, under host-local's own lock: if it is still given to exactly this
// attachment there. Without a pool there is nothing to do, and none is made. The wait for the lock is bounded by ctx.
func Free(ctx context.Context, pool string, owner Owner, address netip.Addr) (freed bool, err error) {
	if owner.ContainerID == "" || owner.IfName == "" {
		return false, errUnnamed
	}
	r, ok, err := reservationOf(pool, address)
	if err != nil || !ok || r.Ownerless() || !r.Owner.Is(owner.ContainerID, owner.IfName) {
		return false, err
	}
	released, err := Apply(ctx, pool, []Planned{{Reservation: r}})
	return len(released) > 0, err
}

// lock takes host-local's lock of a pool. On a deadline the lock is given back as soon as it is had.
func lock(ctx context.Context, pool string) (unlock func(), err error) {
	file, err := disk.NewFileLock(pool)
	if err != nil {
		return nil, err
	}
	locked := make(chan error, 1)
	go func() { locked <- file.Lock() }()
	select {
	case err := <-locked:
		if err != nil {
			_ = file.Close()
			return nil, err
		}
		return func() { _ = file.Close() }, nil
	case <-ctx.Done():
		go func() {
			<-locked
			_ = file.Close()
		}()
		return nil, fmt.Errorf("the lock of pool %s: %w", pool, ctx.Err())
	}
}

// Ranges returns the sets of ranges of a delegate that calls host-local, given its configuration. An ADD gets an address out
// of each set.
func Ranges(config json.RawMessage) ([][]Range, error) {
	conf, _, err := allocator.LoadIPAMConfig(config, "")
	if err != nil {
		return nil, err
	}
	var sets [][]Range
	for _, ranges := range conf.Ranges {
		var set []Range
		for _, r := range ranges {
			set = append(set, Range{addressOf(r.RangeStart), addressOf(r.RangeEnd), addressOf(r.Gateway)})
		}
		sets = append(sets, set)
	}
	return sets, nil
}

func addressOf(ip net.IP) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	return a.Unmap()
}

// Exhausted says whether host-local has no address left to give out of one of its sets of ranges, given the configuration
// of the delegate that calls it. It only looks.
func Exhausted(config json.RawMessage, network string) (bool, error) {
	sets, err := Ranges(config)
	if err != nil {
		return false, err
	}
	files, err := os.ReadDir(Pool(config, network))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	for _, set := range sets {
		free := Size(set)
		for _, f := range files {
			if a, ok := parseName(f.Name()); ok && slices.ContainsFunc(set, func(r Range) bool { return r.Has(a) }) {
				free.Sub(free, big.NewInt(1))
			}
		}
		if free.Sign() <= 0 {
			return true, nil
		}
	}
	return false, nil
}

// Size returns how many addresses a set of ranges has.
func Size(set []Range) *big.Int {
	size := new(big.Int)
	for _, r := range set {
		first, last := r.First.As16(), r.Last.As16()
		size.Add(size, new(big.Int).Sub(new(big.Int).SetBytes(last[:]), new(big.Int).SetBytes(first[:])))
		if r.Gateway.BitLen() != r.First.BitLen() || r.Gateway.Less(r.First) || r.Last.Less(r.Gateway) {
			size.Add(size, big.NewInt(1))
		}
	}
	return size
}

// Range is a run of addresses that host-local gives out, but for Gateway, if that is in it.
type Range struct {
	First, Last, Gateway netip.Addr
}

// Has says whether host-local gives out the address from the range.
func (r Range) Has(a netip.Addr) bool {
	a = a.Unmap()
	return a.BitLen() == r.First.BitLen() && r.First.Compare(a) <= 0 && a.Compare(r.Last) <= 0 && a != r.Gateway
}
