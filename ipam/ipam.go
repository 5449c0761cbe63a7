// Package ipam looks at what a node-local IPAM plugin keeps on the disk, and releases what is dead there.
package ipam

import (
	"context"
	"encoding/json"
	"errors"
	"math/big"
	"net/netip"
	"slices"
	"time"
)

// Backend is a node-local IPAM plugin. A pool is where it keeps the addresses of a network, and is named by a text: that of
// host-local is the path of a folder; that of another one would begin with its name and a colon.
type Backend interface {
	// Pool returns the pool of a network, given the configuration of the delegate that calls the plugin, or "" if the delegate
	// calls another one.
	Pool(config json.RawMessage, network string) string
	// Ranges returns the sets of ranges of a pool, none if its configuration does not say them. An ADD gets an address out of
	// each set.
	Ranges(config json.RawMessage) ([][]Range, error)
	// Look returns the reservation of an address. As Scan, it only looks.
	Look(pool string, address netip.Addr) (r Reservation, ok bool, err error)
	// Scan returns all reservations, sorted. It writes nothing and takes no lock: what it returns may be old news. What cannot
	// be read is left out, and told by the error. A pool that is not there has none.
	Scan(pool string) ([]Reservation, error)
	// Taken returns the addresses that are given out, without looking to whom.
	Taken(pool string) ([]netip.Addr, error)
	// Changed returns when a reservation was made, by the wall clock.
	Changed(r Reservation) (time.Time, error)
	// Apply carries out a plan under the plugin's own lock: what is not as it was when it was scanned stays. It returns what it
	// released, and all errors. The wait for the lock is bounded by ctx. A crash leaves each reservation released or not.
	Apply(ctx context.Context, pool string, plan []Planned) (released []Planned, err error)
}

// backendOf returns the plugin that a pool is of.
func backendOf(string) Backend { return hostLocal{} }

// Owner is the attachment that an address is given to. IfName is "" in files of host-local before 0.8.
type Owner struct {
	ContainerID string
	IfName      string
}

// Is says whether the owner is this attachment.
func (o Owner) Is(containerID, ifname string) bool {
	return o.ContainerID == containerID && (o.IfName == "" || o.IfName == ifname)
}

// Reservation is an address that is given out.
type Reservation struct {
	Address netip.Addr
	Owner   Owner // zero if ownerless
	Pool    string
	name    string // as the plugin has it
}

// Ownerless says whether the plugin died before it wrote an owner: no DEL ever finds the reservation.
func (r Reservation) Ownerless() bool { return r.Owner == Owner{} }

// Changed returns when the reservation was made, by the wall clock.
func (r Reservation) Changed() (time.Time, error) { return backendOf(r.Pool).Changed(r) }

// Planned is a reservation that is to go, and why.
type Planned struct {
	Reservation
	Reason string
}

// Plan returns what is to be released of the reservations that a scan found. Of those with an owner, judge says whether it
// is dead, and why. An ownerless one is released whatever else: it is written under the lock under which it was made, so
// under that lock nobody is about to.
func Plan(found []Reservation, judge func(Reservation) (dead bool, reason string)) []Planned {
	var plan []Planned
	for _, r := range found {
		dead, reason := true, "host-local died before it wrote an owner: no DEL can release it"
		if !r.Ownerless() {
			dead, reason = judge(r)
		}
		if dead {
			plan = append(plan, Planned{r, reason})
		}
	}
	return plan
}

// Pool returns the pool of a network, given the configuration of a delegate, or "" if its IPAM plugin is none that is known.
// network is a valid network name.
func Pool(config json.RawMessage, network string) string { return hostLocal{}.Pool(config, network) }

// Scan returns the reservations in a pool, see Backend.
func Scan(pool string) ([]Reservation, error) { return backendOf(pool).Scan(pool) }

// Apply carries out what was planned for a pool, see Backend.
func Apply(ctx context.Context, pool string, plan []Planned) (released []Planned, err error) {
	return backendOf(pool).Apply(ctx, pool, plan)
}

// Ranges returns the sets of ranges of a delegate's pool, see Backend.
func Ranges(config json.RawMessage) ([][]Range, error) { return hostLocal{}.Ranges(config) }

// OwnerOf returns to whom the address is given in a pool. ok is false if it is given to no one, or if it has no owner. It
// serves only as a reason to keep.
func OwnerOf(pool string, address netip.Addr) (owner Owner, ok bool, err error) {
	r, ok, err := backendOf(pool).Look(pool, address)
	return r.Owner, ok && !r.Ownerless(), err
}

// HeldBy returns the addresses that are given to an attachment in a pool.
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

// Free gives back an address of an attachment in a pool, if it is given to exactly this attachment also under the plugin's
// own lock. Without a pool there is nothing to do, and none is made. The wait for the lock is bounded by ctx.
func Free(ctx context.Context, pool string, owner Owner, address netip.Addr) (freed bool, err error) {
	if owner.ContainerID == "" || owner.IfName == "" {
		return false, errUnnamed
	}
	r, ok, err := backendOf(pool).Look(pool, address)
	if err != nil || !ok || r.Ownerless() || !r.Owner.Is(owner.ContainerID, owner.IfName) {
		return false, err
	}
	released, err := Apply(ctx, pool, []Planned{{Reservation: r}})
	return len(released) > 0, err
}

// Range is a run of addresses that are given out, but for Gateway, if that is in it.
type Range struct {
	First, Last, Gateway netip.Addr
}

// Has says whether the address is given out from the range.
func (r Range) Has(a netip.Addr) bool {
	a = a.Unmap()
	return a.BitLen() == r.First.BitLen() && r.First.Compare(a) <= 0 && a.Compare(r.Last) <= 0 && a != r.Gateway
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

// Exhausted says whether no address is left to give out of one of the sets of ranges of a pool, given the configuration of
// the delegate that calls the plugin. It only looks, and opens no reservation.
func Exhausted(config json.RawMessage, network string) (bool, error) {
	sets, err := Ranges(config)
	if err != nil {
		return false, err
	}
	pool := Pool(config, network)
	taken, err := backendOf(pool).Taken(pool)
	if err != nil {
		return false, err
	}
	for _, set := range sets {
		free := Size(set)
		for _, a := range taken {
			if slices.ContainsFunc(set, func(r Range) bool { return r.Has(a) }) {
				free.Sub(free, big.NewInt(1))
			}
		}
		if free.Sign() <= 0 {
			return true, nil
		}
	}
	return false, nil
}
