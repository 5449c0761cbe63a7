// Package ipam reads what a node-local IPAM plugin keeps on the disk, and releases what is dead
// there.
package ipam

import (
	"context"
	"encoding/json"
	"errors"
	"net/netip"
	"time"
)

// Backend is a node-local IPAM plugin. A pool is the place where it keeps the addresses of a
// network, named by a text: for host-local the path of a directory. The name of another plugin's
// pool would begin with the plugin's name and a colon.
type Backend interface {
	// Pool returns the pool of a network, given the configuration of the delegate that calls the
	// plugin, or "" if the delegate calls another one.
	Pool(config json.RawMessage, network string) string
	// Ranges returns the range sets of a pool, or none if its configuration does not give them.
	Ranges(config json.RawMessage) ([]Set, error)
	// There returns an error if a pool does not exist, since it never gave out an address, or is
	// out of reach.
	There(pool string) error
	// Look returns the reservation of an address. Like Scan, it writes nothing.
	Look(pool string, address netip.Addr) (r Reservation, ok bool, err error)
	// Scan returns all reservations, sorted. It writes nothing and takes no lock, so its result may
	// be out of date. It leaves out what it cannot read, and returns an error for it. A pool that
	// does not exist has none.
	Scan(pool string) ([]Reservation, error)
	// Taken returns the addresses that the plugin does not give out now, since they are given out or
	// something else has their place. It opens none of them.
	Taken(pool string) ([]netip.Addr, error)
	// Changed returns when a reservation was made, by the wall clock.
	Changed(r Reservation) (time.Time, error)
	// Apply carries out a plan under the plugin's own lock. A reservation that changed since the
	// scan stays. Apply returns what it released, and all errors. ctx bounds the wait for the lock.
	// A crash leaves each reservation either released or untouched.
	Apply(ctx context.Context, pool string, plan []Planned) (released []Planned, err error)
}

// backendOf returns the plugin that owns a pool.
func backendOf(string) Backend { return hostLocal{} }

// Owner is the attachment that has an address. IfName is "" in files of host-local before 0.8.
type Owner struct {
	ContainerID string
	IfName      string
}

// Is reports whether the owner is this attachment.
func (o Owner) Is(containerID, ifname string) bool {
	return o.ContainerID == containerID && (o.IfName == "" || o.IfName == ifname)
}

// Reservation is an address that is given out.
type Reservation struct {
	Address netip.Addr
	Owner   Owner // zero if ownerless
	Pool    string
	name    string // the plugin's own name for it
}

// Ownerless reports whether the plugin died before it wrote an owner. No DEL ever finds such a
// reservation.
func (r Reservation) Ownerless() bool { return r.Owner == Owner{} }

// Changed returns when the reservation was made, by the wall clock.
func (r Reservation) Changed() (time.Time, error) { return backendOf(r.Pool).Changed(r) }

// Planned is a reservation to release, and the reason.
type Planned struct {
	Reservation
	Reason string
}

// Plan returns the reservations of a scan that are to be released. For one with an owner, judge
// says whether the owner is dead, and why. Plan always releases an ownerless one: host-local
// creates and writes a reservation under one lock, so under that lock nobody is about to write it.
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

// Pool returns the pool of a network, given the configuration of a delegate, or "" if its IPAM
// plugin is unknown. network is a valid network name.
func Pool(config json.RawMessage, network string) string { return hostLocal{}.Pool(config, network) }

// Scan returns the reservations in a pool: see Backend.
func Scan(pool string) ([]Reservation, error) { return backendOf(pool).Scan(pool) }

// Taken returns the addresses of a pool that are not free: see Backend.
func Taken(pool string) ([]netip.Addr, error) { return backendOf(pool).Taken(pool) }

// Apply carries out a plan for a pool: see Backend.
func Apply(ctx context.Context, pool string, plan []Planned) (released []Planned, err error) {
	return backendOf(pool).Apply(ctx, pool, plan)
}

// Ranges returns the range sets of a delegate's pool: see Backend.
func Ranges(config json.RawMessage) ([]Set, error) { return hostLocal{}.Ranges(config) }

// OwnerOf returns the owner of an address in a pool. ok is false if nobody has the address, or if
// it has no owner. The result serves only as a reason to keep something.
func OwnerOf(pool string, address netip.Addr) (owner Owner, ok bool, err error) {
	r, ok, err := backendOf(pool).Look(pool, address)
	return r.Owner, ok && !r.Ownerless(), err
}

// Lost reports whether an address that an attachment had belongs to no one by now, or to another
// owner. An error means that this is unknown, as where there is no such pool.
func Lost(pool string, owner Owner, address netip.Addr) (bool, error) {
	r, ok, err := backendOf(pool).Look(pool, address)
	if err == nil && !ok {
		err = backendOf(pool).There(pool)
	}
	return !ok || !r.Owner.Is(owner.ContainerID, owner.IfName), err
}

// HeldBy returns the addresses of an attachment in a pool.
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

// Release releases all addresses of an attachment in a pool: see Free.
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

// Free releases an address of an attachment in a pool, if under the plugin's own lock it still
// belongs to exactly this attachment. Without a pool Free does nothing and creates none. ctx bounds
// the wait for the lock.
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
