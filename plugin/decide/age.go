package decide

import (
	"cmp"
	"time"
)

// Grace is the grace period of an owner that is not in the journal.
type Grace struct {
	Over bool
	// SameBoot is True if one of the owner's files was written in this boot, False if all are older,
	// and Unclear if the clock does not show which.
	SameBoot Truth
	Left     time.Duration // until the period is over; 0 if that is unknown
}

// Clock contains the known facts about the wall clock.
type Clock struct {
	SinceBoot time.Duration
	Kept      bool // nobody has changed the clock in this boot
}

// DecideGrace decides whether the grace period of an owner is over, from the ages of its files by
// the wall clock. The parameter "given" is --grace-period: if it is not 0, it replaces grace.
//
// A file time in the future proves nothing. Neither does a time before the boot if the clock was
// changed in this boot, as on a board without a clock of its own, or in a virtual machine that was
// paused. In these cases, the period is over if --grace-period was given, and otherwise not.
func DecideGrace(ages []time.Duration, clock Clock, grace, given time.Duration) Grace {
	age, older := clock.SinceBoot, 0
	for _, one := range ages {
		switch {
		case one < 0, one > clock.SinceBoot && !clock.Kept:
			return Grace{Over: given > 0, SameBoot: Unclear}
		case one > clock.SinceBoot:
			older++
		}
		age = min(age, one)
	}
	if older > 0 && older == len(ages) {
		return Grace{Over: true, SameBoot: False}
	}
	left := max(0, cmp.Or(given, grace)-age)
	return Grace{Over: left == 0, SameBoot: True, Left: left}
}
