package alive

import (
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
	// Runtimes are the processes of the runtimes that gave the list, 0 for one that this process does
	// not see. None are known of a list from elsewhere.
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

// has says whether an attachment is on the list. Without a list, or with one that does not cover
// the attachment, the answer is unknown. A podman container has a pod's name in its arguments, but
// no pod namespace (podman#12083).
func (l *List) has(e *journal.Entry) tristate.Value {
	if l == nil || l.Network != "" && l.Network != e.Network || l.Pods && (e.Pod.Namespace == "" || e.Pod.Name == "") {
		return tristate.Unknown
	}
	return tristate.Of(l.Names(e.Key), nil)
}

func (l *List) Names(k journal.Key) bool {
	return l.Valid[netconf.Attachment{ContainerID: k.ContainerID, IfName: k.IfName}] || l.Valid[netconf.Attachment{ContainerID: k.ContainerID, IfName: ""}]
}

// HasContainer says whether a list has a container, with any interface. A list of pods says nothing
// of a container that is no pod; libcni's cache tells.
func (l *List) HasContainer(network, id string, cache []Cached) tristate.Value {
	if l == nil || l.Network != "" && l.Network != network {
		return tristate.Unknown
	}
	for a := range l.Valid {
		if a.ContainerID == id {
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
