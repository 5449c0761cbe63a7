// Package ipam reads host-local's reservations on disk and releases dead ones. It reads no other
// IPAM plugin's store.
package ipam

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
)

// Owner is the attachment that has an address. IfName is "" if host-local before 0.8 wrote the
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
	Owner   Owner // zero if empty
	Pool    string
	File    File

	content string // the content of its file
}

// Empty reports whether the file contains no owner (see WhyEmpty). host-local creates and writes a
// file under one lock, so a file that is empty while Apply holds that lock stays empty.
func (r Reservation) Empty() bool { return r.Owner == Owner{} }

// WhyEmpty is the reason why an empty reservation can be released.
const WhyEmpty = "host-local or the node died before an owner was written, so no DEL releases " +
	"the address"

// belongsTo reports whether the reservation belongs to an attachment.
func (r Reservation) belongsTo(o Owner) bool {
	return r.Owner != Owner{} && r.Owner.Is(o.ContainerID, o.IfName)
}

// isOf is like belongsTo, for an attachment whose journal record claims the address. It is also
// true if the file is empty, or has only the beginning of what host-local writes for the
// attachment, as after a power loss: neither host-local nor a DEL removes such a file.
func (r Reservation) isOf(o Owner) bool {
	whole := o.ContainerID + "\r\n" + o.IfName
	return r.belongsTo(o) || strings.HasPrefix(whole, textOf(r.content))
}

// HasFileOf reports whether the file of an address belongs to an attachment (see isOf). The
// attachment's record must claim the address.
func HasFileOf(pool string, owner Owner, address netip.Addr) (bool, error) {
	r, there, err := readReservation(pool, address)
	return there && r.isOf(owner), err
}

// OwnerOf returns the owner of an address in a pool. ok is false if the address is free or has no
// owner. Use the result only as a reason to keep something: the owner may change at any time.
func OwnerOf(pool string, address netip.Addr) (owner Owner, ok bool, err error) {
	r, _, err := readReservation(pool, address)
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

// Release releases the given addresses of an attachment in a pool, or all of its addresses if none
// is given. The attachment's record must claim the given addresses. Release acquires host-local's
// own lock, and keeps an address that no longer belongs to the attachment. If the pool does not
// exist, Release does nothing and does not create it. ctx limits the wait for the lock.
func Release(
	ctx context.Context, pool string, owner Owner, addresses ...netip.Addr,
) (released []Reservation, err error) {
	if owner.ContainerID == "" || owner.IfName == "" {
		return nil, errors.New("the container ID or the interface name is missing")
	}
	var found []Reservation
	isOf := Reservation.isOf
	if len(addresses) == 0 {
		isOf = Reservation.belongsTo
		found, err = Scan(pool)
	}
	for _, address := range addresses {
		r, _, lookErr := readReservation(pool, address)
		found, err = append(found, r), errors.Join(err, lookErr)
	}
	found = slices.DeleteFunc(found, func(r Reservation) bool { return !isOf(r, owner) })
	released, applyErr := Apply(ctx, pool, found)
	return released, errors.Join(err, applyErr)
}
