package netconf

// executes are the plugins whose ADD executes the binary that ipam.type names, by their sources: it
// fails without that binary. A plugin that is not here may serve ipam.type itself, or have its
// daemon do so.
var executes = map[string]func(Delegate) bool{
	// containernetworking/plugins v1.9.1, plugins/main/*/*.go cmdAdd: ipam.ExecAdd
	"bridge":      always,
	"dummy":       always,
	"host-device": always,
	"ipvlan":      always,
	"macvlan":     always,
	"ptp":         always,
	"tap":         always,
	"vlan":        always,

	// flannel-io/cni-plugin 6f13a99d, flannel_linux.go: its own delegate gets its ipam
	"flannel": always,
	// projectcalico/calico 0c474030, cni-plugin/internal/pkg/utils/utils.go AddIPAM
	"calico": always,
	// k8snetworkplumbingwg/sriov-cni 023eb832, pkg/cnicommands/cni.go CmdAdd
	"sriov": always,
	// k8snetworkplumbingwg/ovs-cni 01654939, pkg/plugin/plugin.go CmdAdd
	"ovs": always,
	// aws/amazon-vpc-cni-k8s v1.23.2, cmd/egress-cni-plugin/main.go add
	"egress-cni": func(d Delegate) bool { return string(d.object["enabled"]) == `"true"` },
	// Azure/azure-container-networking cbd7560c, cni/network/network.go Add: azure-vnet asks Azure
	// CNS itself if ipam.type is azure-cns or multiTenancy is set, else invoker_azure.go executes it
	"azure-vnet": func(d Delegate) bool {
		return d.IPAM != "azure-cns" && string(d.object["multiTenancy"]) != "true"
	},
}

func always(Delegate) bool { return true }

// ExecutesIPAM reports whether the delegate is known to execute the binary of its ipam.type. No ADD
// can succeed without it then.
func (d Delegate) ExecutesIPAM() bool {
	known := executes[d.Type]
	return d.IPAM != "" && known != nil && known(d)
}
