// Package known has a table of facts about CNI plugins, from their sources: a row for each plugin,
// including IPAM plugins, and a field for each fact. It reads nothing and runs nothing.
package known

import (
	"encoding/json"
)

// Plugin has the facts about a plugin. Each comment says what holds if its field is set. The zero
// value is safe for an unknown plugin.
type Plugin struct {
	Name string
	// Source names the repositories that were read, with their versions. The rows name the files.
	Source string
	// Provider is the provider's name in messages, if it is not Name.
	Provider string

	// ExecutesIPAM reports whether its ADD executes the binary of ipam.type, so that no ADD succeeds
	// without that binary. Nil means unknown: the plugin, or its daemon, may serve ipam.type itself.
	ExecutesIPAM func(ipam string, config Object) bool
	// ReadsFirst says that it does nothing before it has read its whole configuration, so its process
	// may start before its turn. Never set it for a plugin that takes a node-wide lock first.
	ReadsFirst bool

	// LeavesNothing says that its ADD takes nothing that outlives the container's network namespace or
	// that other attachments compete for.
	LeavesNothing bool
	// Masquerades says that it supports ipMasq, see MasqueradesBy.
	Masquerades bool
	// Traces are all places where its DEL removes something that belongs only to the attachment; empty
	// means unknown. Shared objects, such as a bridge or a common chain, do not count.
	Traces []Trace
	// Labels returns the texts by which its DEL finds the rules and chains of an attachment.
	Labels func(network, containerID, ifname string) []string
	// Chain names the chain of a container in table nat of iptables.
	Chain func(network, containerID string) string

	// NetNS is the CNI_NETNS of its DEL if the DEL must not get the container's network namespace.
	NetNS NetNS
	// ByInterface are keys with which its DEL uses the container's own interface, or a device that
	// another container may have by now. It gets no empty namespace then.
	ByInterface []string
	// LeftTo names the program that cleans up instead of its DEL. With a key of ByInterface, the DEL
	// always fails once the container's namespace is gone, and counts as done anyway.
	LeftTo string
	// BorrowsInterface says that its DEL finds rules in the container's namespace by the addresses of
	// an interface, so it gets a temporary one if the container's is gone.
	BorrowsInterface bool
	// SkipsUnnamed says that its DEL exits 0 and does nothing on the node without CNI_NETNS.
	SkipsUnnamed bool

	// MayLie says that its DEL may exit 0 without freeing the address.
	MayLie bool
	// Elsewhere says that it keeps its addresses on another machine.
	Elsewhere bool
	// RemovesByAddress says that its DEL, given an address in prevResult, also removes what the next
	// owner of that address created in its ADD. The plugin allocates addresses itself.
	RemovesByAddress bool
	// Queues says that its DEL may exit 0 after it was only queued on the node, see ipam.ErrQueued.
	Queues bool

	// HidesIPAM says that it calls another plugin, whose addresses unwind finds only if the entry of
	// this one also has an "ipam".
	HidesIPAM bool
	// IsMesh says that its installer adds it to conflists of the directory, at its start and
	// whenever one changes.
	IsMesh bool
	// Restarts says that the pod of its installer may need a restart after its entry has moved to
	// another conflist.
	Restarts bool
	// IsMultus says that it calls a conflist of the directory for the cluster network, and the
	// configurations of NetworkAttachmentDefinitions.
	IsMultus bool
	// ReadsDefinitions says that another program of its provider reads NetworkAttachmentDefinitions,
	// and finds the plugin only at their top level.
	ReadsDefinitions bool
	// RenamesUnless is the setting that keeps its installer from renaming the other conflists of the
	// directory.
	RenamesUnless string
}

// Object is a configuration of a plugin by its keys.
type Object = map[string]json.RawMessage

// NetNS is the CNI_NETNS of a DEL that must not get the container's namespace.
type NetNS string

// The values of NetNS.
const (
	AsPlain NetNS = ""        // as the plain chain would pass it, if the runtime asks
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

// Of returns the facts about a plugin. Callers must not change them.
func Of(name string) *Plugin {
	for i := range table {
		if table[i].Name == name {
			return &table[i]
		}
	}
	return &Plugin{Name: name}
}

// IPAMOf returns the facts about the IPAM plugin that a delegate calls, given the delegate's
// configuration. Without an IPAM plugin, the result has the name "" and leaves nothing. For a
// configuration that cannot be read, it is the zero Plugin.
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

// MasqueradesBy reports whether the plugin creates masquerading rules for each container, given its
// configuration.
func (p *Plugin) MasqueradesBy(config json.RawMessage) bool {
	var conf struct {
		IPMasq bool `json:"ipMasq"`
	}
	return p.Masquerades && json.Unmarshal(config, &conf) == nil && conf.IPMasq
}

// Names returns the plugins for which holds returns true, in the order of the table.
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
