package decide

import (
	"cmp"
	"time"
)

// Grace is the grace period of an owner that is not in the journal.
type Grace struct {
	Over bool
	// Dated is set if the owner's files were all written in this boot, as far as the clock shows.
	// Otherwise the owner may be from an earlier boot, or on a copy of another machine's disk.
	Dated bool
	Left  time.Duration // 0 if it is over, or if the files are not dated
}

// DecideGrace decides whether the grace period of an owner is over, given the ages of its files by
// the wall clock. The clock may have been set since (a board without a clock of its own, a paused
// virtual machine), so a time before this boot or in the future proves nothing about the age. Only
// given ends the period then: it is --grace-period, or 0, and replaces grace.
func DecideGrace(ages []time.Duration, sinceBoot, grace, given time.Duration) (g Grace) {
	g.Dated = true
	age := sinceBoot
	for _, one := range ages {
		age = min(age, one)
		g.Dated = g.Dated && one >= 0 && one <= sinceBoot
	}
	if !g.Dated {
		g.Over = given > 0
		return g
	}
	g.Left = max(0, cmp.Or(given, grace)-age)
	g.Over = g.Left == 0
	return g
}
