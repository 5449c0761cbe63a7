package known

const (
	reference = "containernetworking/plugins 1.9.1"
	cilium    = "cilium/cilium 1.19.6, 1.20.2"
	multus    = "k8snetworkplumbingwg/multus-cni 4.3.0"
)

// table has a row for each plugin. The compiler lays it out, so the program that starts for each
// pod spends no time on it.
var table = []Plugin{
	// The reference plugins. Those of plugins/main call ipam.ExecAdd in cmdAdd.
	//
	// A DEL of bridge or ptp finds the rules of ipMasq by the addresses of the interface, and its
	// host's end goes with the interface; macspoofchk makes rules too.
	{
		Name: "bridge", Source: reference, ReadsFirst: true, ExecutesIPAM: always,
		Traces: []Trace{Reservation, Interface, RulesOfContainer}, Labels: masqueradeLabels,
		Chain: masqueradeChain, Masquerades: true, NetNS: Scratch,
	},
	{
		Name: "ptp", Source: reference, ReadsFirst: true, ExecutesIPAM: always,
		Traces: []Trace{Reservation, Interface, RulesOfContainer}, Labels: masqueradeLabels,
		Chain: masqueradeChain, Masquerades: true, NetNS: Scratch,
	},
	{ // the interface is in the container alone
		Name: "macvlan", Source: reference, ReadsFirst: true, ExecutesIPAM: always,
		Traces: []Trace{Reservation, Interface},
	},
	{
		Name: "ipvlan", Source: reference, ReadsFirst: true, ExecutesIPAM: always,
		Traces: []Trace{Reservation, Interface},
	},
	{
		Name: "vlan", Source: reference, ReadsFirst: true, ExecutesIPAM: always,
		Traces: []Trace{Reservation, Interface},
	},
	{
		// A DEL moves the interface to the host, finds it by CNI_IFNAME, and fails at a path at which
		// nothing is. In another namespace it would take that one's device.
		Name: "host-device", Source: reference, ReadsFirst: true, ExecutesIPAM: always,
		Traces: []Trace{Reservation, Interface}, NetNS: None,
	},
	{Name: "dummy", Source: reference, ReadsFirst: true, ExecutesIPAM: always},
	{Name: "tap", Source: reference, ReadsFirst: true, ExecutesIPAM: always},
	{ // sets lo up and down: plugins/main/loopback/loopback.go
		Name: "loopback", Source: reference, ReadsFirst: true, LeavesNothing: true,
	},
	{ // of each backend: firewalld writes nftables rules too
		Name: "firewall", Source: reference, ReadsFirst: true, Traces: []Trace{RulesOfAddresses},
	},
	{
		Name: "portmap", Source: reference, ReadsFirst: true, Traces: []Trace{RulesOfContainer},
		Labels: portLabels, Chain: portChain,
	},
	{ // the queueing discipline of the host's end goes with that
		Name: "bandwidth", Source: reference, ReadsFirst: true, Traces: []Trace{IFB},
	},
	{ // a DEL restores what its backup file has
		Name: "tuning", Source: reference, ReadsFirst: true, Traces: []Trace{Backup}, NetNS: Scratch,
	},
	{
		// Its routes go with the interface. A DEL fails without a namespace, and makes a file at a path
		// at which nothing is.
		Name: "sbr", Source: reference, ReadsFirst: true, Traces: []Trace{RoutingRules},
		NetNS: Scratch, BorrowsInterface: true,
	},
	{Name: "vrf", Source: reference, ReadsFirst: true},
	{Name: "static", Source: reference, LeavesNothing: true}, // plugins/ipam/static/main.go, cmdDel

	// Providers of a cluster's network.
	{
		Name: "antrea", Source: "antrea-io/antrea 2.7.0", ReadsFirst: true,
	},
	{
		// Writes two lines to a log before main, and rotates the log if it is full, by a rename
		// (pkg/netlinkwrapper/netlink.go, pkg/utils/logger; lumberjack). That takes no lock, and
		// nothing of it is an attachment's. A process that is started twice writes them twice.
		//
		// From 1.13 on, a DEL exits with 0 if ipamd is away, or of another version. If ipamd answers
		// with an error, it removes the routing rules of the address in prevResult, whoever has that
		// (cmd/routed-eni-cni-plugin/cni.go, del). It frees by the container's ID.
		Name: "aws-cni", Source: "aws/amazon-vpc-cni-k8s 1.23.2", ReadsFirst: true,
		MayLie: true, RemovesByAddress: true,
	},
	{ // the log as aws-cni; cmd/egress-cni-plugin/main.go, add
		Name: "egress-cni", Source: "aws/amazon-vpc-cni-k8s 1.23.2", ReadsFirst: true,
		ExecutesIPAM: func(_ string, config Object) bool { return string(config["enabled"]) == `"true"` },
	},
	{
		// Takes a lock of the whole node before it reads. It asks Azure CNS itself if ipam.type is
		// azure-cns or multiTenancy is set; else invoker_azure.go executes ipam.type
		// (cni/network/network.go, Add).
		Name: "azure-vnet", Source: "Azure/azure-container-networking cbd7560c",
		ExecutesIPAM: func(ipam string, config Object) bool {
			return ipam != "azure-cns" && string(config["multiTenancy"]) != "true"
		},
	},
	{
		// Sets a variable of its own process before it reads (cni-plugin/internal/pkg/utils/utils.go,
		// AddIPAM).
		Name: "calico", Source: "projectcalico/calico 3.32.1, 0c474030", ReadsFirst: true,
		ExecutesIPAM: always,
	},
	{ // plugins/cilium-cni/lib/deletion_queue.go; the agent's installer renames
		Name: "cilium-cni", Source: cilium, Provider: "cilium", ReadsFirst: true, Queues: true,
		RenamesUnless: "cni.exclusive=false",
	},
	{ // flannel_linux.go: the plugin that it calls gets its ipam
		Name: "flannel", Source: "flannel-io/cni-plugin 1.9.1, 6f13a99d", ReadsFirst: true,
		ExecutesIPAM: always, HidesIPAM: true,
	},
	{ // pkg/daemon/handler.go, handleDel
		Name: "kube-ovn", Source: "kubeovn/kube-ovn 1.16.2", ReadsFirst: true, SkipsUnnamed: true,
	},
	{
		// A DEL frees by the container's ID, and fails unless CNI_NETNS names some namespace
		// (go-controller/pkg/cni/helper_linux.go, UnconfigureInterface). deviceID is of a device,
		// netAttachDefName of a secondary network: with one of them it fails once the container's
		// namespace is gone. Before that it has taken the device out of the pod's annotation
		// (cni.go, cmdDel), and ovnkube-node itself removes, each minute, ports without an interface,
		// and ports of devices whose pod is gone (controllermanager/node_controller_manager.go,
		// checkForStaleOVS…).
		Name: "ovn-k8s-cni-overlay", Source: "ovn-kubernetes/ovn-kubernetes 1.3.0", ReadsFirst: true,
		NetNS: Empty, ByInterface: []string{"deviceID", "netAttachDefName"}, LeftTo: "ovnkube-node",
		ReadsDefinitions: true,
	},
	{ // pkg/plugin/plugin.go, CmdAdd; a DEL finds its port by the path of the namespace
		Name: "ovs", Source: "k8snetworkplumbingwg/ovs-cni 01654939", ExecutesIPAM: always,
	},
	{ // pkg/cnicommands/cni.go, CmdAdd and CmdDel: without CNI_NETNS it calls its IPAM plugin alone
		Name: "sriov", Source: "k8snetworkplumbingwg/sriov-cni 2.10.0, 023eb832", ReadsFirst: true,
		ExecutesIPAM: always, SkipsUnnamed: true,
	},
	{
		// A DEL frees by the container's ID, and frees nothing unless CNI_NETNS names some namespace
		// (plugin/terway/cni.go, cmdDel; cni_linux.go, getCmdArgs).
		Name: "terway", Source: "AliyunContainerService/terway 1.17.5", NetNS: Empty,
	},

	// IPAM plugins. Both free by the container's ID or the pod's UID.
	{ // whatever the API server says: cmd/whereabouts.go, cmdDel
		Name: "whereabouts", Source: "k8snetworkplumbingwg/whereabouts 0.9.4",
		MayLie: true, Elsewhere: true,
	},
	{ // if the agent cannot release the address: cmd/spiderpool/cmd/command_delete.go
		Name: "spiderpool", Source: "spidernet-io/spiderpool 1.2.2", MayLie: true, Elsewhere: true,
	},

	// Meshes.
	{ // sets up its log on stderr before it reads; cni/pkg/install/cniconfig.go
		Name: "istio-cni", Source: "istio/istio 1.31", ReadsFirst: true, IsMesh: true, Restarts: true,
	},
	{ // cni-plugin/deployment/scripts/install-cni.sh: find and sync
		Name: "linkerd-cni", Source: "linkerd/linkerd2-proxy-init cni-plugin/v1.6.8",
		ReadsFirst: true, IsMesh: true,
	},
	{ // app/cni/pkg/install/transform.go
		Name: "kuma-cni", Source: "kumahq/kuma 8a6739ee", IsMesh: true,
	},
	{ // control-plane/subcommand/install-cni/cniconfig.go, appendCNIConfig
		Name: "consul-cni", Source: "hashicorp/consul-k8s 172786e6", IsMesh: true,
	},

	// Plugins that call other networks' conflists: pkg/server/config/generator.go.
	{Name: "multus", Source: multus, Provider: "Multus", IsMultus: true},
	{Name: "multus-shim", Source: multus, Provider: "Multus", IsMultus: true},
}

func always(string, Object) bool { return true }
