// Package ipam reads what host-local keeps on the disk, and releases what is dead there. Its probes
// look into the stores of other IPAM plugins.
package ipam

import (
	"context"
	"errors"
	"net/netip"
	"os"
)

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
	name    string // of its file
}

// Ownerless reports whether host-local died before it wrote an owner. No DEL ever finds such a
// reservation.
func (r Reservation) Ownerless() bool { return r.Owner == Owner{} }

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

// OwnerOf returns the owner of an address in a pool. ok is false if nobody has the address, or if
// it has no owner. The result serves only as a reason to keep something.
func OwnerOf(pool string, address netip.Addr) (owner Owner, ok bool, err error) {
	r, ok, err := look(pool, address)
	return r.Owner, ok && !r.Ownerless(), err
}

// Lost reports whether an address that an attachment had belongs to no one by now, or to another
// owner. An error means that this is unknown, as where there is no such pool.
func Lost(pool string, owner Owner, address netip.Addr) (bool, error) {
	r, ok, err := look(pool, address)
	if err == nil && !ok {
		_, err = os.Stat(pool)
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

var errUnnamed = errors.New("container ID or interface is missing")

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

// Free releases an address of an attachment in a pool, if under host-local's own lock it still
// belongs to exactly this attachment. Without a pool Free does nothing and creates none. ctx bounds
// the wait for the lock.
func Free(ctx context.Context, pool string, owner Owner, address netip.Addr) (freed bool, err error) {
	if owner.ContainerID == "" || owner.IfName == "" {
		return false, errUnnamed
	}
	r, ok, err := look(pool, address)
	if err != nil || !ok || r.Ownerless() || !r.Owner.Is(owner.ContainerID, owner.IfName) {
		return false, err
	}
	released, err := Apply(ctx, pool, []Planned{{Reservation: r}})
	return len(released) > 0, err
}
