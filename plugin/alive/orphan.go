package alive

import (
	"cni-unwind/plugin/tristate"
)

// Orphan is the evidence on a reservation, or on an attachment in libcni's cache, whose owner is
// not in the journal. A list covers it by container, regardless of the interface.
type Orphan struct {
	SameNamespaces  tristate.Value // this process sees what the runtime sees
	Listed          tristate.Value // a list has the container; unknown if none covers it
	PastGracePeriod tristate.Value // the reservation is older than the grace period
	Cached          tristate.Value // libcni's cache has it with an existing network namespace
	InUse           tristate.Value // an interface in some network namespace has the address
	Doubt           string         // for people: why the look for that interface failed, or ""
}

// DecideOrphan returns the verdict on a reservation whose owner is not in the journal. The owner is
// a pod from before the installation or, after a loss of the journal, any pod (antrea#8239). The
// reservation is dead only if all evidence agrees. No list of pods covers a container of nerdctl or
// podman: it is live if its address is there, else unknown.
func DecideOrphan(o Orphan) Verdict {
	for _, doubt := range []struct {
		doubt  bool
		fate   Fate
		reason Reason
	}{
		{o.SameNamespaces != tristate.Yes, Unknown,
			Reason{"", "this process does not see what the runtime sees; " +
				"run this on the host, or with --cri"}},
		{o.Listed == tristate.Unknown && o.InUse == tristate.Yes, Live,
			Reason{"", "no list of the runtime covers its owner, but an interface has the address"}},
		{o.Listed == tristate.Unknown, Unknown,
			Reason{"", "its owner is not in the journal, and no list of the runtime covers it"}},
		{o.Listed == tristate.Yes, Live, Reason{"", "the runtime lists its owner"}},
		{o.PastGracePeriod == tristate.Unknown, Unknown, Reason{"", "its age is unknown"}},
		{o.PastGracePeriod == tristate.No, Live,
			Reason{WithinGrace.Code,
				"the runtime does not list its owner, but the grace period has not expired"}},
		{o.Cached == tristate.Unknown, Unknown, Reason{"", "libcni's cache cannot be read"}},
		{o.Cached == tristate.Yes, Live,
			Reason{"", "libcni's cache has its owner, and the owner's network namespace exists"}},
		{o.InUse == tristate.Unknown, Unknown, Reason{"", "some network namespaces cannot be inspected"}},
		{o.InUse == tristate.Yes, Live, Reason{"", "an interface has the address"}},
	} {
		if doubt.doubt {
			return Verdict{Fate: doubt.fate, Reason: doubt.reason.because(o.Doubt)}
		}
	}
	return Verdict{Fate: Dead,
		Reason: Reason{"orphan", "its owner is neither in the journal nor in the runtime's list, " +
			"and no interface has the address"}}
}
