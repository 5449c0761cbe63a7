// Package known is a table of facts about CNI plugins, taken from their source code. It has a row
// for each plugin, including IPAM plugins, and a field for each fact. The package does no I/O.
package known

import "encoding/json"

// Plugin lists the facts about a plugin. The zero value is safe for an unknown plugin.
type Plugin struct {
	Name   string
	Source string // the repository that was read, with its version; comments in a row name the files

	// ExecutesIPAM reports whether the plugin's ADD executes the binary that ipam.type names, so
	// that no ADD succeeds without that binary. Nil means unknown: the plugin, or its daemon, may
	// implement ipam.type itself.
	ExecutesIPAM func(ipam string, config Object) bool
	// HidesIPAM is set if the plugin calls another plugin. unwind finds that plugin's addresses
	// only if this plugin's entry also contains "ipam".
	HidesIPAM bool

	// Pinned is set if the plugin's DEL only opens CNI_NETNS, so that any path of the namespace will
	// do, such as /proc/PID/fd/N.
	Pinned bool
	// NetNS is the CNI_NETNS of the plugin's DEL if that must not get the container's namespace.
	NetNS NetNS
	// ByInterface lists configuration keys with which the plugin's DEL uses the container's own
	// interface, or a device that may have moved to another container since. Such a DEL does not get
	// an empty namespace. It always fails once the container's namespace is gone, and unwind counts
	// it as done, because the program LeftTo cleans up.
	ByInterface []string
	LeftTo      string
	// SkipsUnnamed is set if the plugin's DEL, without CNI_NETNS, exits 0 and leaves the node alone.
	SkipsUnnamed bool

	// FreesByPod is set if the plugin's DEL of any sandbox of a pod frees the pod's resources.
	FreesByPod bool
	// MayFreeNothing is set if the plugin's DEL may exit 0 without freeing the address. It frees by
	// container ID only, so a second DEL cannot free another container's address.
	MayFreeNothing bool
	// Elsewhere is set if the plugin stores its addresses outside the node.
	Elsewhere bool
	// RemovesByAddress is set if the plugin's DEL, given an address in prevResult, also removes
	// rules that the address's next owner created. Such a plugin allocates addresses itself.
	RemovesByAddress bool
	// ByContainer is set if the plugin's DEL finds what it removes by the container ID or in the
	// container's namespace, so it removes nothing of another container.
	ByContainer bool
}

// Object is a plugin's configuration, by key.
type Object = map[string]json.RawMessage

// NetNS is the CNI_NETNS of a DEL that must not get the container's namespace.
type NetNS string

// The values of NetNS. Without one, the runtime's own DEL gets the same as without unwind.
const (
	Scratch NetNS = "scratch" // a namespace with the same interface name and addresses
	Empty   NetNS = "empty"   // a namespace without an interface
	None    NetNS = "none"    // no CNI_NETNS
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

// IPAMOf returns the facts about the IPAM plugin that a delegate's configuration names, if any.
func IPAMOf(config json.RawMessage) *Plugin {
	var conf struct {
		IPAM struct {
			Type string `json:"type"`
		} `json:"ipam"`
	}
	_ = json.Unmarshal(config, &conf) // an error leaves the type empty
	return Of(conf.IPAM.Type)
}
