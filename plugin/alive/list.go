package alive

import (
	"strings"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/tristate"
)

// List is a runtime's list of attachments.
type List struct {
	Network string // the network that it covers; "" for all
	Pods    bool   // it covers pods only
	// Valid has the attachments, by container ID and interface; an interface "" stands for all of a
	// container.
	Valid map[netconf.Attachment]bool
	// Runtimes are the processes of the runtimes that returned the list; 0 stands for one that this
	// process cannot see. It is empty for a list from another source.
	Runtimes []int
}

// NewList makes a list of the attachments of a network.
func NewList(network string, valid []netconf.Attachment) *List {
	l := &List{Network: network, Valid: map[netconf.Attachment]bool{}}
	for _, a := range valid {
		l.Valid[a] = true
	}
	return l
}

// has reports whether an attachment is on the list. The result is unknown without a list, or if the
// list does not cover the attachment. A podman container has a pod's name in its arguments, but no
// pod namespace (podman#12083).
func (l *List) has(e *journal.Entry) tristate.Value {
	if l == nil || l.Network != "" && l.Network != e.Network ||
		l.Pods && (e.Pod.Namespace == "" || e.Pod.Name == "") {
		return tristate.Unknown
	}
	return tristate.Of(l.Names(e.Key), nil)
}

// shortID is the least that crictl, nerdctl and podman print of a container ID.
const shortID = 12

// Names reports whether the list has the attachment, or all interfaces of its container. A list
// that people made may have the beginnings of container IDs.
func (l *List) Names(k journal.Key) bool {
	names := func(id string) bool {
		return l.Valid[netconf.Attachment{ContainerID: id, IfName: k.IfName}] ||
			l.Valid[netconf.Attachment{ContainerID: id, IfName: ""}]
	}
	for n := shortID; n < len(k.ContainerID); n++ {
		if names(k.ContainerID[:n]) {
			return true
		}
	}
	return names(k.ContainerID)
}

// HasContainer reports whether a list has a container, with any interface. A list of pods does not
// cover a container that is not a pod; libcni's cache shows which ones are.
func (l *List) HasContainer(network, id string, cache []Cached) tristate.Value {
	if l == nil || l.Network != "" && l.Network != network {
		return tristate.Unknown
	}
	for a := range l.Valid {
		if a.ContainerID == id ||
			len(a.ContainerID) >= shortID && strings.HasPrefix(id, a.ContainerID) {
			return tristate.Yes
		}
	}
	for _, c := range cache {
		if l.Pods && !c.isPod() {
			return tristate.Unknown
		}
	}
	return tristate.No
}
