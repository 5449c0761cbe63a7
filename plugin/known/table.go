package known

const (
	reference = "containernetworking/plugins 1.9.1"
	cilium    = "cilium/cilium 1.19.6, 1.20.2"
)

// table has a row for each plugin. The compiler lays it out, so the program that starts for each
// pod spends no time on it.
var table = []Plugin{
	// The reference plugins. Those of plugins/main call ipam.ExecAdd in cmdAdd. In cmdDel, Pinned ones
	// give CNI_NETNS to ns.GetNS or ns.WithNetNSPath alone; the others do not read it.
	//
	// A DEL of bridge or ptp finds the rules of ipMasq by the addresses of the interface, and its
	// host's end goes with the interface; macspoofchk makes rules too.
	{Name: "bridge", Source: reference, ExecutesIPAM: always, Pinned: true, NetNS: Scratch},
	{Name: "ptp", Source: reference, ExecutesIPAM: always, Pinned: true, NetNS: Scratch},
	{Name: "macvlan", Source: reference, ExecutesIPAM: always, Pinned: true},
	{Name: "ipvlan", Source: reference, ExecutesIPAM: always, Pinned: true},
	{Name: "vlan", Source: reference, ExecutesIPAM: always, Pinned: true},
	{
		// A DEL moves the interface to the host, finds it by CNI_IFNAME, and fails at a path at which
		// nothing is. In another namespace it would take that one's device.
		Name: "host-device", Source: reference, ExecutesIPAM: always, Pinned: true, NetNS: None,
	},
	{Name: "dummy", Source: reference, ExecutesIPAM: always, Pinned: true},
	{Name: "tap", Source: reference, ExecutesIPAM: always, Pinned: true},
	{ // sets lo up and down: plugins/main/loopback/loopback.go
		Name: "loopback", Source: reference, Pinned: true,
	},
	{ // a DEL restores what its backup file has
		Name: "tuning", Source: reference, Pinned: true, NetNS: Scratch,
	},
	{
		// Its routes go with the interface. A DEL fails without a namespace, and makes a file at a path
		// at which nothing is.
		Name: "sbr", Source: reference, Pinned: true, NetNS: Scratch,
	},
	{Name: "vrf", Source: reference, Pinned: true},

	// Providers of a cluster's network.
	{
		// From 1.13 on, a DEL exits with 0 if ipamd is away, or of another version. If ipamd answers
		// with an error, it removes the routing rules of the address in prevResult, whoever has that
		// (cmd/routed-eni-cni-plugin/cni.go, del). It frees by the container's ID.
		Name: "aws-cni", Source: "aws/amazon-vpc-cni-k8s 1.23.2",
		FreesByContainer: true, RemovesByAddress: true,
	},
	{ // cmd/egress-cni-plugin/main.go, add
		Name: "egress-cni", Source: "aws/amazon-vpc-cni-k8s 1.23.2",
		ExecutesIPAM: func(_ string, config Object) bool { return string(config["enabled"]) == `"true"` },
	},
	{
		// It asks Azure CNS itself if ipam.type is
		// azure-cns or multiTenancy is set; else invoker_azure.go executes ipam.type
		// (cni/network/network.go, Add).
		Name: "azure-vnet", Source: "Azure/azure-container-networking cbd7560c",
		ExecutesIPAM: func(ipam string, config Object) bool {
			return ipam != "azure-cns" && string(config["multiTenancy"]) != "true"
		},
	},
	{ // cni-plugin/internal/pkg/utils/utils.go, AddIPAM
		Name: "calico", Source: "projectcalico/calico 3.32.1, 0c474030",
		ExecutesIPAM: always,
	},
	{ // plugins/cilium-cni/lib/deletion_queue.go
		Name: "cilium-cni", Source: cilium, Queues: true,
	},
	{ // flannel_linux.go: the plugin that it calls gets its ipam
		Name: "flannel", Source: "flannel-io/cni-plugin 1.9.1, 6f13a99d",
		ExecutesIPAM: always, HidesIPAM: true,
	},
	{ // pkg/daemon/handler.go, handleDel
		Name: "kube-ovn", Source: "kubeovn/kube-ovn 1.16.2", SkipsUnnamed: true,
	},
	{
		// A DEL frees by the container's ID, and fails unless CNI_NETNS names some namespace
		// (go-controller/pkg/cni/helper_linux.go, UnconfigureInterface). deviceID is of a device,
		// netAttachDefName of a secondary network: with one of them it fails once the container's
		// namespace is gone. Before that it has taken the device out of the pod's annotation
		// (cni.go, cmdDel), and ovnkube-node itself removes, each minute, ports without an interface,
		// and ports of devices whose pod is gone (controllermanager/node_controller_manager.go,
		// checkForStaleOVS…).
		Name: "ovn-k8s-cni-overlay", Source: "ovn-kubernetes/ovn-kubernetes 1.3.0",
		NetNS: Empty, ByInterface: []string{"deviceID", "netAttachDefName"}, LeftTo: "ovnkube-node",
	},
	{ // pkg/plugin/plugin.go, CmdAdd; a DEL finds its port by the path of the namespace
		Name: "ovs", Source: "k8snetworkplumbingwg/ovs-cni 01654939", ExecutesIPAM: always,
	},
	{ // pkg/cnicommands/cni.go, CmdAdd and CmdDel: without CNI_NETNS it calls its IPAM plugin alone
		Name: "sriov", Source: "k8snetworkplumbingwg/sriov-cni 2.10.0, 023eb832",
		ExecutesIPAM: always, SkipsUnnamed: true,
	},
	{
		// A DEL frees by the container's ID, and frees nothing unless CNI_NETNS names some namespace
		// (plugin/terway/cni.go, cmdDel; cni_linux.go, getCmdArgs).
		Name: "terway", Source: "AliyunContainerService/terway 1.17.5", NetNS: Empty,
	},

	// IPAM plugins.
	{
		// A DEL exits with 0 whatever the API server says (cmd/whereabouts.go, cmdDel). It frees by the
		// container's ID (pkg/allocate/allocate.go, DeallocateIP).
		Name: "whereabouts", Source: "k8snetworkplumbingwg/whereabouts 0.9.4",
		FreesByContainer: true, Elsewhere: true,
	},
	{
		// A DEL exits with 0 if the agent cannot release the address
		// (cmd/spiderpool/cmd/command_delete.go). The agent frees what the pod's present UID has
		// (pkg/ipam/release.go, Release).
		Name: "spiderpool", Source: "spidernet-io/spiderpool 1.2.2",
		FreesByPod: true, Elsewhere: true,
	},
}

func always(string, Object) bool { return true }
