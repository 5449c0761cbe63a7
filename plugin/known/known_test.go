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

// source is a repository with the versions that were read; a row may have several.
var source = regexp.MustCompile(`^[\w-]+/[\w-]+( [\w./-]*\d[\w./-]*)(, [\w./-]*\d[\w./-]*)*$`)

// TestRows: each plugin has one row, a source and a fact, and no facts that contradict each other.
func TestRows(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range table {
		facts := p
		facts.Name, facts.Source, facts.Provider = "", "", ""
		for problem, is := range map[string]bool{
			"has no name":                                  p.Name == "",
			"has two rows":                                 seen[p.Name],
			"has no source with a version":                 !source.MatchString(p.Source),
			"has no fact":                                  reflect.ValueOf(facts).IsZero(),
			"leaves nothing, in a place":                   p.LeavesNothing && p.Traces != nil,
			"leaves rules that have no label":              slices.Contains(p.Traces, RulesOfContainer) != (p.Labels != nil),
			"has a chain and no label of it":               p.Chain != nil && p.Labels == nil,
			"masquerades without a chain":                  p.Masquerades && p.Chain == nil,
			"masquerades and gets no address to find it":   p.Masquerades && p.NetNS != Scratch,
			"goes by an interface and is not kept from it": p.ByInterface != nil != (p.NetNS == Empty && p.LeftTo != ""),
			"does nothing without what it gets":            p.SkipsUnnamed && p.NetNS != AsPlain,
			"is lent an interface, and gets none":          p.BorrowsInterface && p.NetNS != Scratch,
			"is elsewhere, and does not lie":               p.Elsewhere && !p.MayLie,
			"moves a device, which it could take":          slices.Contains([]string{"host-device", "sriov"}, p.Name) && p.NetNS == Scratch,
			"takes a lock of the node before it reads":     p.Name == "azure-vnet" && p.ReadsFirst,
		} {
			if is {
				t.Errorf("%q %s: %+v", p.Name, problem, p)
			}
		}
		seen[p.Name] = true
	}
}

// TestUnknown: of a plugin without a row nothing holds.
func TestUnknown(t *testing.T) {
	for _, name := range []string{"", "own", "Bridge"} {
		if got := Of(name); !reflect.DeepEqual(got, &Plugin{Name: name}) {
			t.Errorf("%q: %+v", name, got)
		}
	}
}

func TestIPAMOf(t *testing.T) {
	for config, want := range map[string]Plugin{
		`{"type": "macvlan", "ipam": {"type": "whereabouts"}}`: {Name: "whereabouts", MayLie: true, Elsewhere: true},
		`{"type": "bridge", "ipam": {"type": "own"}}`:          {Name: "own"},
		`{"ipam": {"type": "static"}}`:                         {Name: "static", LeavesNothing: true},
		`{"type": "whereabouts"}`:                              {LeavesNothing: true},
		`{"ipam": {}}`:                                         {LeavesNothing: true},
		`{"ipam": null}`:                                       {LeavesNothing: true},
		`{"ipam": "whereabouts"}`:                              {},
		`{"ipam": {"type": 5}}`:                                {},
		`[`:                                                    {},
		``:                                                     {},
	} {
		got := *IPAMOf(json.RawMessage(config))
		got.Source = ""
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v", config, got)
		}
	}
}

// TestDocument: the table in plugin/README.md, "DELs that prove nothing", has each plugin whose DEL
// may free nothing, in the version that was read.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	const head = "| plugin (version read) |"
	_, rest, found := strings.Cut(string(text), head)
	body, _, closed := strings.Cut(rest, "|\n\n")
	if !found || !closed {
		t.Fatalf("no table %s", head)
	}
	has := func(p *Plugin) bool { return p.MayLie || p.Queues || p.SkipsUnnamed }
	var named []string
	for _, row := range strings.Split(body, "\n")[2:] {
		cell := strings.Split(row, "|")[1]
		for _, m := range regexp.MustCompile(`([a-z][a-z0-9-]*) \(([^)]+)\)`).FindAllStringSubmatch(cell, -1) {
			p := Of(m[1])
			if named = append(named, p.Name); has(p) && !strings.Contains(p.Source, m[2]) {
				t.Errorf("%s says %s; the table has %s", head, m[0], p.Source)
			}
		}
	}
	for _, name := range Names(has) {
		if !slices.Contains(named, name) {
			t.Errorf("%s lacks %s", head, name)
		}
	}
}
