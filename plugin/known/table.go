// Package known is a table of facts about CNI plugins, including IPAM plugins. The facts are taken
// from the plugins' source code. Each row describes a plugin. The package does no I/O.
package known

import (
	"cmp"
	"encoding/json"
)

// Plugin lists the facts about a plugin. The zero value is safe for an unknown plugin.
type Plugin struct {
	Name   string
	Source string // the repository that was read, with its version; comments in a row name the files

	// ExecutesIPAM reports whether the plugin's ADD executes the binary that ipam.type names. The
	// function is nil if the ADD never does, or if that is unknown.
	ExecutesIPAM func(ipam string, config Object) bool
	// DefaultIPAM is the IPAM plugin that the plugin uses if its configuration has no ipam.type.
	DefaultIPAM string

	// Pinned is set if the plugin's DEL uses CNI_NETNS only to open the namespace. Such a DEL may get
	// any path to the namespace, for example /proc/PID/fd/N.
	Pinned bool
	// NetNS is the CNI_NETNS of the plugin's DEL if the container's namespace cannot be used or (for
	// Scratch) lacks the interface: see decide.Show.
	NetNS NetNS
	// NeedsNetNS is set if the plugin's DEL fails without a namespace, even if it has nothing to
	// release.
	NeedsNetNS bool

	// GoesWithNetNS is set if the plugin's DEL fails once the container's namespace is gone, and the
	// provider itself then removes everything that the DEL would have removed.
	GoesWithNetNS bool

	// FreesByPod is set if a DEL for one sandbox of a pod also releases what its other sandboxes use.
	FreesByPod bool
	// ByContainer is set if the plugin's DEL finds what it removes by the container ID or in the
	// container's namespace, so it removes nothing of another container.
	ByContainer bool
}

// Object is a plugin's configuration, by key.
type Object = map[string]json.RawMessage

// NetNS is a kind of CNI_NETNS: see Plugin.NetNS.
type NetNS string

// The values of NetNS. If NetNS is "", a DEL gets the path that the runtime sent for it, if any.
const (
	Scratch NetNS = "scratch" // a new namespace with an interface of the same name and addresses
	None    NetNS = "none"    // no CNI_NETNS
)

// ByType returns the facts about a plugin. Callers must not change them.
func ByType(name string) *Plugin {
	for i := range table {
		if table[i].Name == name {
			return &table[i]
		}
	}
	return &Plugin{Name: name}
}

// IPAM returns the facts about the IPAM plugin of a delegate, given its type and its ipam.type.
func IPAM(plugin, ipam string) *Plugin { return ByType(cmp.Or(ipam, ByType(plugin).DefaultIPAM)) }

// IPAMOf is IPAM for a delegate's configuration.
func IPAMOf(config json.RawMessage) *Plugin {
	var conf struct {
		Type string `json:"type"`
		IPAM struct {
			Type string `json:"type"`
		} `json:"ipam"`
	}
	_ = json.Unmarshal(config, &conf) // an error leaves the type empty
	return IPAM(conf.Type, conf.IPAM.Type)
}

const reference = "containernetworking/plugins 1.10.0"

// table is initialized at compile time, so it takes no time when a pod starts.
var table = []Plugin{
	// The reference plugins. In cmdAdd, the plugins in plugins/main except loopback call ipam.ExecAdd.
	// In cmdDel, the Pinned plugins pass CNI_NETNS only to ns.GetNS or ns.WithNetNSPath, and the other
	// plugins do not read CNI_NETNS. Only firewall's cmdDel removes rules by address alone; firewall
	// has no row.
	//
	// A DEL of bridge or ptp finds its ipMasq rules by the interface's addresses. The veth's host end
	// disappears with the interface. bridge removes its macspoofchk rules only if it gets a namespace.
	{Name: "bridge", Source: reference,
		ExecutesIPAM: always, Pinned: true, NetNS: Scratch, ByContainer: true},
	{Name: "ptp", Source: reference,
		ExecutesIPAM: always, Pinned: true, NetNS: Scratch, ByContainer: true},
	{Name: "macvlan", Source: reference, ExecutesIPAM: always, Pinned: true, ByContainer: true},
	{Name: "ipvlan", Source: reference, ExecutesIPAM: always, Pinned: true, ByContainer: true},
	{Name: "vlan", Source: reference, ExecutesIPAM: always, Pinned: true, ByContainer: true},
	// A DEL moves the interface CNI_IFNAME to the host, and fails if CNI_NETNS does not exist. In
	// another namespace, it would move that namespace's device.
	{Name: "host-device", Source: reference,
		ExecutesIPAM: always, Pinned: true, NetNS: None, ByContainer: true},
	{Name: "dummy", Source: reference, ExecutesIPAM: always, Pinned: true, ByContainer: true},
	{Name: "tap", Source: reference, ExecutesIPAM: always, Pinned: true, ByContainer: true},
	{Name: "loopback", Source: reference, Pinned: true, ByContainer: true}, // it sets lo up and down
	{Name: "tuning", Source: reference, Pinned: true, NetNS: Scratch, ByContainer: true},
	// The routes disappear with the interface. A DEL fails without a namespace. If nothing exists at
	// the path, the DEL creates a file there.
	{Name: "sbr", Source: reference,
		Pinned: true, NetNS: Scratch, NeedsNetNS: true, ByContainer: true},
	{Name: "vrf", Source: reference, Pinned: true, ByContainer: true},
	// A DEL finds its chain by name, or its rules by comment. Both come from the container ID.
	{Name: "portmap", Source: reference, ByContainer: true},
	// A DEL removes the device whose name is a hash of network and container ID.
	{Name: "bandwidth", Source: reference, ByContainer: true},

	// Providers of a cluster's network.
	{ // cmd/egress-cni-plugin/main.go, add
		Name: "egress-cni", Source: "aws/amazon-vpc-cni-k8s 1.23.2",
		ExecutesIPAM: func(_ string, config Object) bool { return string(config["enabled"]) == `"true"` },
	},
	{
		// The plugin calls Azure CNS itself if ipam.type is azure-cns or multiTenancy is set.
		// If neither, invoker_azure.go executes the ipam.type binary (cni/network/network.go, Add).
		Name: "azure-vnet", Source: "Azure/azure-container-networking cbd7560c",
		ExecutesIPAM: func(ipam string, config Object) bool {
			return ipam != "azure-cns" && string(config["multiTenancy"]) != "true"
		},
	},
	// cni-plugin/internal/pkg/utils/utils.go, AddIPAM
	{Name: "calico", Source: "projectcalico/calico 3.32.1, 0c474030", ExecutesIPAM: always},
	{ // flannel_linux.go, getDelegateIPAM: flannel sets ipam.type for the plugin that it calls
		Name: "flannel", Source: "flannel-io/cni-plugin 1.9.1, 6f13a99d",
		ExecutesIPAM: always, DefaultIPAM: "host-local",
	},
	// go-controller/pkg/cni/cni.go, cmdDel: a DEL removes the port of the sandbox, if it can open
	// CNI_NETNS. Every minute, ovnkube-node removes the ports whose interface is gone
	// (pkg/controllermanager/node_controller_manager.go, checkForStaleOVSInternalPorts).
	{
		Name: "ovn-k8s-cni-overlay", Source: "ovn-kubernetes/ovn-kubernetes 1.3.0",
		GoesWithNetNS: true, ByContainer: true,
	},
	// pkg/plugin/plugin.go, CmdAdd; a DEL finds its port by the namespace's path
	{Name: "ovs", Source: "k8snetworkplumbingwg/ovs-cni 01654939", ExecutesIPAM: always},
	// pkg/cnicommands/cni.go, CmdAdd
	{
		Name: "sriov", Source: "k8snetworkplumbingwg/sriov-cni 2.10.0, 023eb832", ExecutesIPAM: always,
	},
	// plugin/terway/cni.go, cmdDel
	{Name: "terway", Source: "AliyunContainerService/terway 1.17.5", ByContainer: true},

	// IPAM plugins.
	{
		// A DEL exits 0 even if the agent cannot release the address
		// (cmd/spiderpool/cmd/command_delete.go). The agent frees the addresses of the pod's
		// current UID (pkg/ipam/release.go, Release).
		Name: "spiderpool", Source: "spidernet-io/spiderpool 1.2.2",
		FreesByPod: true,
	},
}

func always(string, Object) bool { return true }
