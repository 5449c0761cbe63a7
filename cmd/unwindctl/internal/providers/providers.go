// Package providers has a table of facts about what comes with CNI plugins, from their sources:
// their installers and the programs beside them. Facts about the plugins themselves are in
// plugin/known.
package providers

// Provider has the facts about the provider of a plugin. Each comment says what holds if its field
// is set.
type Provider struct {
	Plugin string // the name of the plugin
	Name   string // the provider's, in messages
	// Source names the repositories that were read, with their versions.
	Source string

	// RenamesUnless is the setting that keeps its installer from renaming the other conflists of the
	// directory.
	RenamesUnless string
	// Restarts says that the pod of its installer may need a restart after its entry has moved to
	// another conflist.
	Restarts bool
	// IsMultus says that the plugin calls a conflist in the directory for the cluster network, and the
	// configurations of NetworkAttachmentDefinitions.
	IsMultus bool
	// ReadsDefinitions says that another program of it reads NetworkAttachmentDefinitions, and finds
	// the plugin only at their top level.
	ReadsDefinitions bool
}

// Of returns the facts about the provider of a plugin, none if it has no row.
func Of(plugin string) Provider {
	for _, p := range table {
		if p.Plugin == plugin {
			return p
		}
	}
	return Provider{Plugin: plugin}
}

const multus = "k8snetworkplumbingwg/multus-cni 4.3.0"

var table = []Provider{
	{ // daemon/cmd/cni/config.go
		Plugin: "cilium-cni", Name: "cilium", Source: "cilium/cilium 1.19.6, 1.20.2",
		RenamesUnless: "cni.exclusive=false",
	},
	{ // cni/pkg/install/cniconfig.go
		Plugin: "istio-cni", Name: "istio", Source: "istio/istio 1.31", Restarts: true,
	},
	{
		Plugin: "ovn-k8s-cni-overlay", Name: "ovn-kubernetes",
		Source: "ovn-kubernetes/ovn-kubernetes 1.3.0", ReadsDefinitions: true,
	},
	// pkg/server/config/generator.go
	{Plugin: "multus", Name: "Multus", Source: multus, IsMultus: true},
	{Plugin: "multus-shim", Name: "Multus", Source: multus, IsMultus: true},
}
