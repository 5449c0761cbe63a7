// Package known is the table of what is known of plugins of CNI by their sources: a row for each
// plugin, also for each IPAM plugin, and a field for each fact. It reads nothing and runs nothing.
package known

import (
	"encoding/json"
)

// Plugin is what is known of a plugin. Each field says what holds if it is set; its zero value is
// right for a plugin of which nobody knows anything.
type Plugin struct {
	Name string
	// Source is what was read: repositories, each with the versions. The rows say in which file of
	// it a fact is.
	Source string
	// Provider is its provider's name in messages, where that is not Name.
	Provider string

	// ExecutesIPAM says whether its ADD executes the binary that ipam.type names, given that and its
	// configuration: no ADD succeeds without that binary then. Nil is unknown: the plugin, or its
	// daemon, may serve ipam.type itself.
	ExecutesIPAM func(ipam string, config Object) bool
	// ReadsFirst says that it does nothing before it has read all of its configuration. Its process
	// may start before its turn. A plugin that takes a lock of the node first must never have it.
	ReadsFirst bool

	// LeavesNothing says that its ADD takes nothing that outlives the container's network namespace
	// or that another attachment could lack.
	LeavesNothing bool
	// Masquerades says that its rules are those of ipMasq, see MasqueradesBy.
	Masquerades bool
	// Traces are all places where its DEL removes something that belongs to the attachment alone.
	// None is unknown. Things that attachments share, such as a bridge or a chain that all jump to,
	// do not count.
	Traces []Trace
	// Labels returns the texts by which its DEL finds the rules and chains of an attachment.
	Labels func(network, containerID, ifname string) []string
	// Chain names the chain of a container in table nat of iptables.
	Chain func(network, containerID string) string

	// NetNS is what its DEL is shown where the container's network namespace must not be.
	NetNS NetNS
	// ByInterface are keys with which its DEL goes by the container's own interface, or by a device
	// that another container may have by now. It is not shown an empty namespace then.
	ByInterface []string
	// LeftTo names who removes what its DEL does not: the DEL always fails once the container's
	// namespace is gone and is over all the same, if it has one of ByInterface.
	LeftTo string
	// BorrowsInterface says that its DEL finds rules in the container's namespace by the addresses
	// of an interface: it is lent one where the container's is gone.
	BorrowsInterface bool
	// SkipsUnnamed says that its DEL exits with 0 and does nothing on the node without CNI_NETNS.
	SkipsUnnamed bool

	// MayLie says that its DEL exits with 0 where it freed no address.
	MayLie bool
	// Elsewhere says that it keeps its addresses on another machine.
	Elsewhere bool
	// RemovesByAddress says that its DEL also removes what the next owner of the address in
	// prevResult has made by the end of its own ADD. It gives out addresses itself.
	RemovesByAddress bool
	// Queues says that its DEL exits with 0 where it is only queued on the node, see ipam.ErrQueued.
	Queues bool

	// HidesIPAM says that it calls another plugin, whose addresses unwind sees only if the entry of
	// this one has an "ipam" too.
	HidesIPAM bool
	// IsMesh says that its installer adds it to conflists of the directory, at its start and
	// whenever one changes.
	IsMesh bool
	// Restarts says that the pod of its installer may have to be started anew once its entry has
	// moved to another conflist.
	Restarts bool
	// IsMultus says that it calls a conflist of the directory for the cluster's network, and those
	// of NetworkAttachmentDefinitions.
	IsMultus bool
	// ReadsDefinitions says that another program of it reads NetworkAttachmentDefinitions, and sees
	// the plugin at their top alone.
	ReadsDefinitions bool
	// RenamesUnless is the setting without which its installer renames the other conflists of the
	// directory.
	RenamesUnless string
}

// Object is a configuration of a plugin by its keys.
type Object = map[string]json.RawMessage

// NetNS is the CNI_NETNS of a DEL that must not be shown the container's namespace.
type NetNS string

// What such a DEL is shown.
const (
	AsPlain NetNS = ""        // what the plain chain would show it, if the runtime asks
	Scratch NetNS = "scratch" // a namespace with an interface of that name and the recorded addresses
	Empty   NetNS = "empty"   // a namespace without one
	None    NetNS = "none"    // none
)

// Trace is a place where the ADD of a plugin may have left something.
type Trace string

// The places.
const (
	Reservation      Trace = "reservation"                // in the store of its IPAM plugin
	Interface        Trace = "interface"                  // CNI_IFNAME, in the container's namespace
	RulesOfContainer Trace = "rules with a label"         // of Labels
	RulesOfAddresses Trace = "rules with an address"      // that it was given
	IFB              Trace = "interface on the host"      // of bandwidth
	Backup           Trace = "backup file"                // of tuning
	RoutingRules     Trace = "routing rules in container" // in its namespace
)

// Of returns what is known of a plugin. Nobody may change it.
func Of(name string) *Plugin {
	for i := range table {
		if table[i].Name == name {
			return &table[i]
		}
	}
	return &Plugin{Name: name}
}

// IPAMOf returns what is known of the IPAM plugin that a delegate calls, given the delegate's
// configuration. None has the name "" and leaves nothing. The zero Plugin stands for that of a
// configuration that cannot be read.
func IPAMOf(config json.RawMessage) *Plugin {
	var conf struct {
		IPAM struct {
			Type string `json:"type"`
		} `json:"ipam"`
	}
	switch err := json.Unmarshal(config, &conf); {
	case err != nil:
		return &Plugin{}
	case conf.IPAM.Type == "":
		return &Plugin{LeavesNothing: true}
	}
	return Of(conf.IPAM.Type)
}

// MasqueradesBy says whether the plugin makes masquerading rules for each container, given its
// configuration.
func (p *Plugin) MasqueradesBy(config json.RawMessage) bool {
	var conf struct {
		IPMasq bool `json:"ipMasq"`
	}
	return p.Masquerades && json.Unmarshal(config, &conf) == nil && conf.IPMasq
}

// Names returns the plugins of which something is known to hold, in the order of the table.
func Names(holds func(*Plugin) bool) (names []string) {
	for i := range table {
		if holds(&table[i]) {
			names = append(names, table[i].Name)
		}
	}
	return names
}

// AllLabels returns the labels of all plugins for an attachment. Plugins may share one.
func AllLabels(network, containerID, ifname string) (all []string) {
	for i := range table {
		if labels := table[i].Labels; labels != nil {
			all = append(all, labels(network, containerID, ifname)...)
		}
	}
	return all
}
