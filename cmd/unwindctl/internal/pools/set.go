package pools

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"slices"
)

// Range is a range of assignable addresses, except for Gateway, if the range contains it.
type Range struct {
	First, Last, Gateway netip.Addr
}

// Has reports whether the address is assignable from the range.
func (r Range) Has(a netip.Addr) bool { return r.Contains(a) && a.Unmap() != r.Gateway }

// Contains reports whether an address is in the range, even if it is the gateway.
func (r Range) Contains(a netip.Addr) bool {
	a = a.Unmap()
	return a.BitLen() == r.First.BitLen() && r.First.Compare(a) <= 0 && a.Compare(r.Last) <= 0
}

// String returns the range in the notation of host-local's errors.
func (r Range) String() string { return r.First.String() + "-" + r.Last.String() }

// Unbounded is the size of a range or a set with 2^53 addresses or more, such as an IPv6 /64. JSON
// readers represent smaller numbers exactly (RFC 8259 §6), and no file system holds so many files.
const Unbounded = 1 << 53

var be = binary.BigEndian

// Size returns the number of assignable addresses of the range, at most Unbounded.
func (r Range) Size() int64 {
	first, last := r.First.As16(), r.Last.As16()
	low, borrow := bits.Sub64(be.Uint64(last[8:]), be.Uint64(first[8:]), 0)
	high, _ := bits.Sub64(be.Uint64(last[:8]), be.Uint64(first[:8]), borrow)
	switch {
	case high > 0 || low >= Unbounded:
		return Unbounded
	case r.Contains(r.Gateway):
		return int64(low)
	}
	return int64(low) + 1
}

// Set is a range set of one address family. An ADD gets an address from each set of its pool, and
// fails if one set has none left.
type Set []Range

// Has reports whether the address is assignable from the set.
func (s Set) Has(a netip.Addr) bool {
	return slices.ContainsFunc(s, func(r Range) bool { return r.Has(a) })
}

// Size returns the number of assignable addresses of the set, at most Unbounded.
func (s Set) Size() (size int64) {
	for _, r := range s {
		size = min(size+r.Size(), Unbounded)
	}
	return size
}
