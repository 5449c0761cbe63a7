package alive

import (
	"slices"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// InterfacesOf returns the known interfaces of the ADDs that an entry still has.
func InterfacesOf(e *journal.Entry) []journal.Interface {
	var all []journal.Interface
	for i := range e.Generations {
		if named := netconf.InterfaceOf(e.Generations[i].Result, e.IfName); named.Known() {
			all = append(all, named)
		}
	}
	return all
}

// sameADD reports whether two results can come from the same ADD. A conversion to an old version of
// the specification drops the interfaces and all but one address per family, so the addresses of
// one may be a subset of the other's.
func sameADD(a, b journal.Interface) tristate.Value {
	if a.MAC != "" && b.MAC != "" && a.MAC != b.MAC {
		return tristate.No
	}
	if len(a.Addresses) > len(b.Addresses) {
		a, b = b, a
	}
	for _, address := range a.Addresses {
		if !slices.Contains(b.Addresses, address) {
			return tristate.No
		}
	}
	return tristate.Equal(a.MAC != "" && b.MAC != "" || len(a.Addresses) > 0, true)
}

// AnySameADD reports whether any of several interfaces can come from the same ADD as another one.
func AnySameADD(all []journal.Interface, one journal.Interface) tristate.Value {
	found := tristate.No
	for _, i := range all {
		switch same := sameADD(i, one); {
		case same == tristate.Yes:
			return tristate.Yes
		case same == tristate.Unknown:
			found = tristate.Unknown
		}
	}
	return found
}
