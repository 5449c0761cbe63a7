// Package ipam reads host-local's reservations on disk and releases dead ones. Its probes query the
// stores of other IPAM plugins.
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

// Reservation is an assigned address.
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

// Plan returns the reservations of a scan that should be released. For one with an owner, judge
// says whether the owner is dead, and why. Plan always includes ownerless ones: host-local creates
// and writes a reservation under one lock, so nobody is about to write it while Apply holds that
// lock.
func Plan(found []Reservation, judge func(Reservation) (dead bool, reason string)) []Planned {
	var plan []Planned
	for _, r := range found {
		dead, reason := true, "host-local died before it wrote an owner, so no DEL releases it"
		if !r.Ownerless() {
			dead, reason = judge(r)
		}
		if dead {
			plan = append(plan, Planned{r, reason})
		}
	}
	return plan
}

// OwnerOf returns the owner of an address in a pool. ok is false if the address is free or has no
// owner. Use the result only as a reason to keep something.
func OwnerOf(pool string, address netip.Addr) (owner Owner, ok bool, err error) {
	r, ok, err := look(pool, address)
	return r.Owner, ok && !r.Ownerless(), err
}

// Lost reports whether an address that an attachment had is free by now, or has another owner. An
// error means unknown, for example because the pool does not exist.
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

// Free releases an address of an attachment in a pool, if it still belongs to this attachment under
// host-local's own lock. Without a pool, Free does nothing and creates none. ctx limits the wait
// for the lock.
func Free(
	ctx context.Context, pool string, owner Owner, address netip.Addr,
) (freed bool, err error) {
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
