// Package ipam reads host-local's reservations on disk and releases dead ones. Its probes query the
// stores of other IPAM plugins.
package ipam

import (
	"context"
	"errors"
	"net/netip"
	"slices"
)

// Owner is the attachment that owns an address. IfName is "" if host-local before 0.8 wrote the
// file.
type Owner struct {
	ContainerID string
	IfName      string
}

// Is reports whether the owner is the attachment with this container ID and interface.
func (o Owner) Is(containerID, ifname string) bool {
	return o.ContainerID == containerID && (o.IfName == "" || o.IfName == ifname)
}

// Reservation is an assigned address.
type Reservation struct {
	Address netip.Addr
	Owner   Owner // zero if empty or held
	HeldFor Owner // zero unless held (see Hold)
	Pool    string
	File    File

	content string // the content of its file
}

// Empty reports whether host-local died before it wrote an owner (see WhyEmpty). host-local creates
// and writes a reservation under one lock. While Apply holds that lock, no host-local process can
// be about to write the owner.
func (r Reservation) Empty() bool { return r.Owner == Owner{} && !r.IsHeld() }

// WhyEmpty says why an empty reservation can be released.
const WhyEmpty = "host-local died before it wrote an owner, so no DEL releases the address"

// IsHeld reports whether Hold made the reservation. The attachment in HeldFor has lost the address,
// so it is not the owner.
func (r Reservation) IsHeld() bool { return r.HeldFor != Owner{} }

// belongsTo reports whether the reservation belongs to an attachment.
func (r Reservation) belongsTo(o Owner) bool {
	return r.Owner != Owner{} && r.Owner.Is(o.ContainerID, o.IfName)
}

// OwnerOf returns the owner of an address in a pool. ok is false if the address is free or has no
// owner. Use the result only as a reason to keep something: the owner may change at any time.
func OwnerOf(pool string, address netip.Addr) (owner Owner, ok bool, err error) {
	r, _, err := look(pool, address)
	return r.Owner, r.Owner != Owner{}, err
}

// HeldBy returns the addresses of an attachment in a pool.
func HeldBy(pool, containerID, ifname string) (addresses []netip.Addr, err error) {
	found, err := Scan(pool)
	for _, r := range found {
		if r.belongsTo(Owner{containerID, ifname}) {
			addresses = append(addresses, r.Address)
		}
	}
	return addresses, err
}

// Release releases an attachment's addresses in a pool: the given ones, or all if none is given. It
// takes host-local's own lock, and keeps an address that no longer belongs to the attachment. If
// the pool does not exist, Release does nothing and does not create it. ctx limits the wait for the
// lock.
func Release(
	ctx context.Context, pool string, owner Owner, addresses ...netip.Addr,
) (released []Reservation, err error) {
	return remove(ctx, pool, owner, addresses, Reservation.belongsTo)
}

var errUnnamed = errors.New("the container ID or the interface name is missing")

// remove releases an owner's reservations of the given addresses, or all if no address is given.
func remove(ctx context.Context, pool string, owner Owner, addresses []netip.Addr,
	isOf func(Reservation, Owner) bool) (released []Reservation, err error) {
	if owner.ContainerID == "" || owner.IfName == "" {
		return nil, errUnnamed
	}
	var found []Reservation
	if len(addresses) == 0 {
		found, err = Scan(pool)
	}
	for _, address := range addresses {
		r, _, lookErr := look(pool, address)
		found, err = append(found, r), errors.Join(err, lookErr)
	}
	found = slices.DeleteFunc(found, func(r Reservation) bool { return !isOf(r, owner) })
	released, applyErr := Apply(ctx, pool, found)
	return released, errors.Join(err, applyErr)
}
