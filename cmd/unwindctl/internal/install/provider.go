package install

// provider contains facts about the installers and other programs that come with a CNI plugin, as
// found in their sources. Facts about the plugins themselves are in plugin/known. The comment of a
// bool field describes what true means.
type provider struct {
	Plugin string // the name of the plugin
	Name   string // the provider's name in messages
	// Source names the repositories that were read, with their versions.
	Source string

	// RenamesUnless is the setting that keeps the provider's installer from renaming other conflists
	// in the directory; "" if the installer renames none.
	RenamesUnless string
	// IsMultus: for the cluster network the plugin runs a conflist in the directory.
	IsMultus bool
}

// providerOf returns the facts about a plugin's provider. They are empty if the table has no such
// plugin.
func providerOf(plugin string) provider {
	for _, p := range providers {
		if p.Plugin == plugin {
			return p
		}
	}
	return provider{Plugin: plugin}
}

const multus = "k8snetworkplumbingwg/multus-cni 4.3.0"

var providers = []provider{
	{ // daemon/cmd/cni/config.go
		Plugin: "cilium-cni", Name: "cilium", Source: "cilium/cilium 1.19.6, 1.20.2",
		RenamesUnless: "cni.exclusive=false",
	},
	// pkg/server/config/generator.go
	{Plugin: "multus", Name: "Multus", Source: multus, IsMultus: true},
	{Plugin: "multus-shim", Name: "Multus", Source: multus, IsMultus: true},
}
