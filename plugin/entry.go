package plugin

import (
	"fmt"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/tristate"
	"cni-unwind/plugin/netconf"
)

// markKilled records that unwind killed delegates of an entry: those whose programs it names, or all
// if none of them is such a program, as where a child of a delegate outlived it. It says whether any
// was killed.
func markKilled(e *journal.Entry, programs []string, grace time.Duration) bool {
	if len(programs) == 0 {
		return false
	}
	steps := e.Newest().Steps
	named := func(s journal.Step) bool { return slices.Contains(programs, s.Type) }
	some := slices.ContainsFunc(steps, named)
	for i := range steps {
		if !some || named(steps[i]) {
			steps[i].RepeatAt = journal.BootNanos() + int64(grace)
		}
	}
	return true
}

// failingPlugins returns the plugins with a pending DEL that has failed, or is unproven, if the
// attachment has no other pending DELs.
func failingPlugins(e *journal.Entry) (plugins []string) {
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			if s.LastError == "" && s.Unproven == "" {
				return nil
			}
			plugins = append(plugins, s.Type)
		}
	}
	return plugins
}

// eventOf begins an event of an attachment from the entry as it is now.
func eventOf(kind journal.EventKind, e *journal.Entry) journal.Event {
	return journal.Event{Key: e.Key, Kind: kind, Pod: e.Pod, Addresses: e.Addresses()}
}

// interfacesOf returns the known interfaces of the ADDs that an entry still has.
func interfacesOf(e *journal.Entry) []journal.Interface {
	var all []journal.Interface
	for i := range e.Generations {
		if named := netconf.InterfaceOf(e.Generations[i].Result, e.IfName); named.Known() {
			all = append(all, named)
		}
	}
	return all
}

// sameADD says whether two results can be of the same ADD. A conversion to an old version of the
// specification drops the interfaces and all but one address of each family, so the addresses of
// one may be a part of the other's.
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

// anySameADD says whether any of several interfaces can be of the same ADD as another one.
func anySameADD(all []journal.Interface, one journal.Interface) tristate.Value {
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

// OnceMore says for which of the two facts a DEL that passed runs once more; "" for none.
func OnceMore(killed, provesNothing bool) string {
	switch {
	case killed && provesNothing:
		return "once more: was killed, proves nothing"
	case killed:
		return "once more: was killed"
	case provesNothing:
		return "once more: proves nothing"
	}
	return ""
}

// pendingSteps names the delegates with a pending DEL, each with the reason.
func pendingSteps(e *journal.Entry) []string {
	var names []string
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			switch {
			case s.LastError != "":
				names = append(names, fmt.Sprintf("%s (code %d)", s.Type, s.LastCode))
			case s.Unproven != "":
				names = append(names, s.Type+" (unproven)")
			case s.Parked:
				names = append(names, s.Type+" (its address has another owner)")
			case s.RepeatAt != 0, s.ConfirmAt != 0:
				names = append(names, fmt.Sprintf("%s (%s)", s.Type, OnceMore(s.RepeatAt != 0, s.ConfirmAt != 0)))
			default:
				names = append(names, s.Type)
			}
		}
	}
	return names
}
