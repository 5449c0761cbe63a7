package known

import (
	"encoding/json"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// source matches the name of a repository, followed by one or more versions whose source code was
// read.
var source = regexp.MustCompile(`^[\w-]+/[\w-]+( [\w./-]*\d[\w./-]*)(, [\w./-]*\d[\w./-]*)*$`)

// TestRows: each plugin has exactly one row, with a source and at least one fact. Its facts don't
// contradict each other.
func TestRows(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range table {
		facts := p
		facts.Name, facts.Source = "", ""
		for problem, is := range map[string]bool{
			"has no name":                  p.Name == "",
			"has two rows":                 seen[p.Name],
			"has no source with a version": !source.MatchString(p.Source),
			"has no fact":                  reflect.ValueOf(facts).IsZero(),
			"moves a device, and would take it from a Scratch namespace": slices.Contains([]string{"host-device", "sriov"}, p.Name) && p.NetNS == Scratch,
		} {
			if is {
				t.Errorf("%q %s: %+v", p.Name, problem, p)
			}
		}
		seen[p.Name] = true
	}
}

// TestUnknown: a plugin without a row in the table has no facts.
func TestUnknown(t *testing.T) {
	for _, name := range []string{"", "own", "Bridge"} {
		if got := ByType(name); !reflect.DeepEqual(got, &Plugin{Name: name}) {
			t.Errorf("%q: %+v", name, got)
		}
	}
}

// names returns the plugins for which a fact holds, in the order of the table.
func names(holds func(*Plugin) bool) (all []string) {
	for i := range table {
		if holds(&table[i]) {
			all = append(all, table[i].Name)
		}
	}
	return all
}

// TestColumns lists, for each fact, the plugins for which it holds.
func TestColumns(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		column string
		holds  func(*Plugin) bool
		want   string
	}{
		{"Pinned", func(p *Plugin) bool { return p.Pinned }, "bridge ptp macvlan ipvlan vlan host-device dummy tap loopback tuning sbr vrf"},
		{"Scratch", func(p *Plugin) bool { return p.NetNS == Scratch }, "bridge ptp tuning sbr"},
		{"NeedsNetNS", func(p *Plugin) bool { return p.NeedsNetNS }, "sbr"},
		{"GoesWithNetNS", func(p *Plugin) bool { return p.GoesWithNetNS }, "ovn-k8s-cni-overlay"},
		{"None", func(p *Plugin) bool { return p.NetNS == None }, "host-device"},
		{"FreesByPod", func(p *Plugin) bool { return p.FreesByPod }, "spiderpool"},
		{"ByContainer", func(p *Plugin) bool { return p.ByContainer },
			"bridge ptp macvlan ipvlan vlan host-device dummy tap loopback tuning sbr vrf portmap bandwidth ovn-k8s-cni-overlay terway"},
		{"DefaultIPAM", func(p *Plugin) bool { return p.DefaultIPAM == "host-local" }, "flannel"},
		{"ExecutesIPAM", func(p *Plugin) bool { return p.ExecutesIPAM != nil },
			"bridge ptp macvlan ipvlan vlan host-device dummy tap egress-cni azure-vnet calico flannel ovs sriov"},
	} {
		if got := strings.Join(names(tt.holds), " "); got != tt.want {
			t.Errorf("%s holds for %s, want %s", tt.column, got, tt.want)
		}
	}
}

// TestExecutesIPAM: whether a plugin executes its IPAM plugin (ipam.type) may depend on other keys
// of its configuration.
func TestExecutesIPAM(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		plugin, ipam, config string
		want                 bool
	}{
		{"bridge", "own", `{}`, true},
		{"egress-cni", "host-local", `{"enabled": "true"}`, true},
		{"egress-cni", "host-local", `{"enabled": "false"}`, false},
		{"egress-cni", "host-local", `{}`, false},
		{"azure-vnet", "azure-vnet-ipam", `{}`, true},
		{"azure-vnet", "azure-vnet-ipam", `{"multiTenancy": false}`, true},
		{"azure-vnet", "azure-vnet-ipam", `{"multiTenancy": true}`, false},
		{"azure-vnet", "azure-cns", `{}`, false},
	} {
		var config Object
		if err := json.Unmarshal([]byte(tt.config), &config); err != nil {
			t.Fatal(err)
		}
		if got := ByType(tt.plugin).ExecutesIPAM(tt.ipam, config); got != tt.want {
			t.Errorf("%+v: %t", tt, got)
		}
	}
}

func TestIPAMOf(t *testing.T) {
	for config, want := range map[string]Plugin{
		`{"type": "macvlan", "ipam": {"type": "spiderpool"}}`: {Name: "spiderpool", FreesByPod: true},
		`{"type": "bridge", "ipam": {"type": "own"}}`:         {Name: "own"},
		`{"ipam": {"type": "static"}}`:                        {Name: "static"},
		`{"type": "whereabouts"}`:                             {},
		`{"ipam": {}}`:                                        {},
		`{"ipam": null}`:                                      {},
		`{"ipam": "whereabouts"}`:                             {},
		`{"ipam": {"type": 5}}`:                               {},
		`[`:                                                   {},
		``:                                                    {},
	} {
		got := *IPAMOf(json.RawMessage(config))
		got.Source = ""
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v", config, got)
		}
	}
}

// TestDocument: the table in plugin/README.md, "DELs that prove nothing", lists each plugin that
// frees addresses by pod, with the version whose source code was read.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	const head = "| plugin (version read) |"
	_, rest, found := strings.Cut(string(text), head)
	body, _, closed := strings.Cut(rest, "|\n\n")
	if !found || !closed {
		t.Fatalf("plugin/README.md has no table %s", head)
	}
	has := func(p *Plugin) bool { return p.FreesByPod }
	var named []string
	for _, row := range strings.Split(body, "\n")[2:] {
		cell := strings.Split(row, "|")[1]
		for _, m := range regexp.MustCompile(`([a-z][a-z0-9-]*) \(([^)]+)\)`).FindAllStringSubmatch(cell, -1) {
			p := ByType(m[1])
			named = append(named, p.Name)
			if has(p) && !strings.Contains(p.Source, m[2]) {
				t.Errorf("plugin/README.md, table %s: %s; table.go has %s", head, m[0], p.Source)
			}
		}
	}
	for _, name := range names(has) {
		if !slices.Contains(named, name) {
			t.Errorf("plugin/README.md, table %s: no row of %s, which has FreesByPod", head, name)
		}
	}
}
