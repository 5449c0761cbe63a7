package alive

import (
	"slices"

	"cni-unwind/plugin/tristate"
)

// OtherOwner is another attachment that claims an address.
type OtherOwner struct {
	BeingUndone bool // it is being undone
	GaveBack    bool // host-local's file names the attachment whose DEL is about to run, see gaveBack
	Fate        Fate
}

// HasOtherOwner decides whether an address belongs to another attachment than the one whose DEL is
// about to run. named says whether host-local's file has another owner.
func HasOtherOwner(named tristate.Value, others []OtherOwner) bool {
	return named != tristate.No || slices.ContainsFunc(others, func(r OtherOwner) bool {
		return !r.BeingUndone && !r.GaveBack && r.Fate != Dead
	})
}
