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

	// ExecutesIPAM reports whether its ADD executes the binary of ipam.type, so that no ADD succeeds
	// without that binary. Nil means unknown: the plugin, or its daemon, may serve ipam.type itself.
	ExecutesIPAM func(ipam string, config Object) bool

	// Pinned says that its DEL opens CNI_NETNS itself, and takes the path for nothing else. So it may
	// get any path of the namespace, such as that of a descriptor.
	Pinned bool
	// NetNS is the CNI_NETNS of its DEL if the DEL must not get the container's network namespace.
	NetNS NetNS
	// ByInterface are keys with which its DEL uses the container's own interface, or a device that
	// another container may have by now. It gets no empty namespace then.
	ByInterface []string
	// LeftTo names the program that cleans up instead of its DEL. With a key of ByInterface, the DEL
	// always fails once the container's namespace is gone, and counts as done anyway.
	LeftTo string
	// SkipsUnnamed says that its DEL exits 0 and does nothing on the node without CNI_NETNS.
	SkipsUnnamed bool

	// FreesByPod says that its DEL frees what the pod has, whichever sandbox of the pod that is.
	FreesByPod bool
	// FreesByContainer says that its DEL may exit 0 without freeing the address, and frees only what
	// was allocated for the container ID, so another DEL frees nothing of others.
	FreesByContainer bool
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
// configuration: the zero Plugin without one, or if the configuration cannot be read.
func IPAMOf(config json.RawMessage) *Plugin {
	var conf struct {
		IPAM struct {
			Type string `json:"type"`
		} `json:"ipam"`
	}
	if err := json.Unmarshal(config, &conf); err != nil {
		return &Plugin{}
	}
	return Of(conf.IPAM.Type)
}
