package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/cmd/unwindctl/internal/probe"
	"cni-unwind/cmd/unwindctl/internal/providers"
	"cni-unwind/cmd/unwindctl/internal/wrap"
	"cni-unwind/plugin/netconf"
)

// multusConf holds the keys of a plugin's or a list's configuration that are needed to find Multus.
type multusConf struct {
	Type       string
	Kubeconfig string
	ConfDir    string // where Multus finds a file for a definition without spec.config
	Plugins    []multusConf
	Chain      *multusConf // if the plugin is unwind
}

// find returns Multus's own configuration, or nil.
func (m *multusConf) find() *multusConf {
	if m == nil || providers.Of(m.Type).IsMultus {
		return m
	}
	for i := range m.Plugins {
		if found := m.Plugins[i].find(); found != nil {
			return found
		}
	}
	return m.Chain.find()
}

// findMultus returns the configuration of Multus on a node, with the defaults of 4.3, or nil.
func findMultus(confDir string) *multusConf {
	var found *multusConf
	paths, _ := netconf.Conflists(confDir)
	for _, path := range paths {
		if c, _ := netconf.ReadConflist(path); c != nil && found == nil {
			var list multusConf
			_ = json.Unmarshal(c.Data, &list) // another plugin's key may have another type
			found = list.find()
		}
	}
	kubeconfig := filepath.Join(confDir, "multus.d/multus.kubeconfig")
	if found == nil && !durable.Exists(kubeconfig) {
		return nil
	}
	if found == nil {
		found = &multusConf{}
	}
	found.Kubeconfig = cmp.Or(found.Kubeconfig, kubeconfig)
	found.ConfDir = cmp.Or(found.ConfDir, "/etc/cni/multus/net.d")
	return found
}

// multus reports the NetworkAttachmentDefinitions that are not wrapped, if Multus is on the node.
func (e *examination) multus(ctx context.Context, r node.Runtime) {
	m := findMultus(r.ConfDir)
	if m == nil {
		return
	}
	if !durable.Exists(m.Kubeconfig) { // a thick Multus may have one only in its pod
		e.add("multus", OK, "", "NetworkAttachmentDefinitions were not examined: there is no %s",
			m.Kubeconfig)
		return
	}
	var d definitions
	err := (&probe.Prober{}).Definitions(ctx, m.Kubeconfig, func(one probe.Definition) {
		d.add(m, one)
	})
	if err != nil {
		e.add("multus", Warning, "", "not all NetworkAttachmentDefinitions were examined: %v", err)
	}
	const page = "scripts/providers/multus.md"
	if len(d.plain) > 0 {
		e.add("multus", Warning, "run kubectl get net-attach-def -n NAMESPACE -o yaml | unwindctl "+
			"wrap - | kubectl apply -f -; "+page+" lists exceptions",
			"%s not wrapped, so pods on such a network bypass unwind: %s", plural(len(d.plain)),
			some(d.plain))
	}
	if len(d.files) > 0 {
		e.add("multus", Warning, "run unwindctl wrap --in-place FILE on each node",
			"%s in a file that does not use unwind: %s", plural(len(d.files)), some(d.files))
	}
	if len(d.refused) > 0 {
		e.add("multus", Warning, "correct the definition, or leave it as it is; see "+page,
			"%s refused by unwindctl wrap: %s", plural(len(d.refused)), some(d.refused))
	}
	if d.wrapped > 0 {
		e.add("multus", OK, "", "%s wrapped", plural(d.wrapped))
	}
}

// definitions are the names of NetworkAttachmentDefinitions, grouped by the outcome of wrap.
type definitions struct {
	wrapped               int
	plain, files, refused []string
}

// add adds a definition to its group. For a definition without spec.config, Multus uses a file on
// the node. If there is no such file, no pod on the node uses that network.
func (d *definitions) add(m *multusConf, one probe.Definition) {
	name, list, file := one.Namespace+"/"+one.Name, &d.plain, ""
	config := []byte(one.Config)
	if one.Config == "" {
		c := configOf(one.Name, m.ConfDir)
		if c == nil {
			return
		}
		config, list, file = c.Data, &d.files, c.Path
	}
	switch wrapped, err := wrap.Wrapped(one.Name, config); {
	case err != nil:
		d.refused = append(d.refused, fmt.Sprintf("%s (%v)", name+term.Because(file), err))
	case wrapped:
		d.wrapped++
	case !othersRead(config):
		*list = append(*list, name+term.Because(file))
	}
}

// configOf returns the first configuration of a network in a directory, or nil
// (GetCNIConfigFromFile in network-attachment-definition-client).
func configOf(network, dir string) *netconf.Conflist {
	paths, _ := netconf.Conflists(dir)
	for _, path := range paths {
		if c, _ := netconf.ReadConflist(path); c != nil && c.Name == network {
			return c
		}
	}
	return nil
}

// othersRead reports whether a program other than Multus reads the configuration. It would not find
// its plugin in "chain".
func othersRead(config []byte) bool {
	c, _ := netconf.ParseConflist(config)
	return c != nil && slices.ContainsFunc(c.Types, func(plugin string) bool {
		return providers.Of(plugin).ReadsDefinitions
	})
}

func plural(n int) string {
	return term.Plural(n, "NetworkAttachmentDefinition is",
		"NetworkAttachmentDefinitions are")
}

// some returns at most five of the names, and the number of the other names.
func some(names []string) string {
	const most = 5
	text := strings.Join(names[:min(most, len(names))], ", ")
	if more := len(names) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
