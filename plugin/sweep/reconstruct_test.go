package sweep

import (
	"encoding/json"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// TestReconstruct: for an owner that is not in the journal, reconstruct builds a record from
// libcni's cache or a conflist. The record determines what the owner's DELs get.
func TestReconstruct(t *testing.T) {
	t.Parallel()
	const (
		bridge   = `{"type": "bridge", "ipam": {"type": "host-local"}}`
		portmap  = `{"type": "portmap", "capabilities": {"portMappings": true}}`
		firewall = `{"type": "firewall"}`
		result   = `{"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.9/24"}]}`
	)
	const pool = "/var/lib/cni/networks/podnet"
	type want struct {
		Ports  string // runtimeConfig of portmap
		Others bool   // a plugin other than portmap has runtimeConfig
		Claims []journal.Claim
		Result []string
		Args   string
	}
	address, second := netip.MustParseAddr("10.1.0.2"), netip.MustParseAddr("fd01::2")
	held := []ipam.Reservation{{Address: address, Pool: pool}, {Address: second, Pool: pool}}
	for _, c := range []struct {
		name    string
		plugins string
		version string
		held    []ipam.Reservation
		cached  *facts.Cached
		want    want
	}{
		{"a conflist", bridge + "," + portmap + "," + firewall, "1.0.0", held, nil, want{
			Ports: `{"portMappings":[{"hostPort":1,"containerPort":1,"protocol":"tcp"}]}`, Result: []string{"10.1.0.2/32", "fd01::2/128"},
			Claims: []journal.Claim{{Address: address, Pool: pool}, {Address: second, Pool: pool}}}},
		{"without portmap", firewall + "," + bridge, "0.3.1", held[:1], nil, want{Result: []string{"10.1.0.2/32"},
			Claims: []journal.Claim{{Address: address, Step: 1, Pool: pool}}}},
		{"flannel's", `{"type": "flannel"},` + portmap, "1.0.0", held[:1], nil, want{
			Ports: `{"portMappings":[{"hostPort":1,"containerPort":1,"protocol":"tcp"}]}`, Result: []string{"10.1.0.2/32"},
			Claims: []journal.Claim{{Address: address, Pool: pool}}}},
		{"the cache", bridge + "," + portmap, "1.0.0", nil, &facts.Cached{Result: json.RawMessage(result), Args: [][2]string{{"K8S_POD_NAME", "p"}},
			RuntimeConfig: map[string]json.RawMessage{"portMappings": json.RawMessage(`[{"hostPort":8555}]`)}}, want{
			Ports: `{"portMappings":[{"hostPort":8555}]}`, Result: []string{"10.1.0.9/24"}, Args: "K8S_POD_NAME=p",
			Claims: []journal.Claim{{Address: netip.MustParseAddr("10.1.0.9"), Pool: pool}}}},
		{"the cache, and an address that it lacks", bridge, "1.0.0", held[:1], &facts.Cached{Result: json.RawMessage(result)}, want{Result: []string{"10.1.0.9/24"},
			Claims: []journal.Claim{{Address: address, Pool: pool}, {Address: netip.MustParseAddr("10.1.0.9"), Pool: pool}}}},
		{"no host-local", firewall, "1.0.0", nil, &facts.Cached{Result: json.RawMessage(result)}, want{Result: []string{"10.1.0.9/24"},
			Claims: []journal.Claim{{Address: netip.MustParseAddr("10.1.0.9"), Step: -1}}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			list, err := netconf.ParseConflist([]byte(`{"name": "podnet", "cniVersion": "` + c.version + `", "plugins": [` + c.plugins + `]}`))
			if err != nil {
				t.Fatal(err)
			}
			o := &owner{Key: journal.Key{Network: "podnet", ContainerID: "a", IfName: "eth0"}, held: c.held, cached: c.cached,
				grace: decide.Grace{SameBoot: decide.True}}
			if o.chain, o.conf, err = list.Chain(); err != nil {
				t.Fatal(err)
			}
			if c.cached != nil {
				o.conf.RuntimeConfig = c.cached.RuntimeConfig
			}
			s := &Sweep{w: &undo.Worker{Node: &facts.Node{}}}
			e, err := s.reconstruct(o)
			if err != nil || e.Key != o.Key || e.State != journal.Deleting {
				t.Fatalf("%+v, %v", e, err)
			}
			p := decide.Pass{SameBoot: true, Steps: e.Steps}
			if decide.PortPending(-1, p) != (c.cached != nil && c.want.Ports != "") {
				t.Errorf("only a port mapping from the cache is a real one: %+v", p.Steps)
			}
			p.Claims = e.Got.Claims
			for _, step := range e.Steps {
				if next := decide.Due(&step, p); c.cached == nil && next.Why != "" {
					t.Errorf("%s waits (%s), but only this sweep runs its DEL", step.Type, next.Why)
				}
			}
			g := e
			got := want{Claims: g.Got.Claims, Args: g.Added.Args}
			for i, step := range g.Steps {
				if step.Index != i {
					t.Errorf("step %d has the index %d", i, step.Index)
				}
				config, isPortmap := netconf.ObjectOf(step.Config)["runtimeConfig"], step.Type == "portmap"
				if isPortmap {
					got.Ports = string(config)
				}
				got.Others = got.Others || !isPortmap && config != nil
			}
			r, err := netconf.ParseResult(g.Got.Result)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range r.Prefixes() {
				got.Result = append(got.Result, p.String())
			}
			if diff := cmp.Diff(c.want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			for name, spoil := range map[string]func(*owner){
				"before this boot":      func(o *owner) { o.grace.SameBoot = decide.False },
				"without a chain":       func(o *owner) { o.chain = nil },
				"without its interface": func(o *owner) { o.IfName = "" },
			} {
				spoiled := *o
				spoil(&spoiled)
				if e, err := s.reconstruct(&spoiled); e != nil || err != nil {
					t.Errorf("%s: %+v, %v", name, e, err)
				}
			}
		})
	}
}

// TestUndatedGetsDELs: if the clock was changed, an ADD that is not in the journal may be from an
// earlier boot. Its DELs then run only if no plugin except host-local can have assigned an address.
func TestUndatedGetsDELs(t *testing.T) {
	t.Parallel()
	for plugins, want := range map[string]bool{
		`{"type": "bridge", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}, {"type": "firewall"}`: true,
		`{"type": "bridge", "ipam": {"type": "dhcp"}}`:                                                      false,
		`{"type": "own"}`: false,
	} {
		list, err := netconf.ParseConflist([]byte(`{"name": "podnet", "cniVersion": "1.0.0", "plugins": [` + plugins + `]}`))
		if err != nil {
			t.Fatal(err)
		}
		o := &owner{Key: journal.Key{IfName: "eth0"}, grace: decide.Grace{SameBoot: decide.Unclear}}
		if o.chain, o.conf, err = list.Chain(); err != nil {
			t.Fatal(err)
		}
		if got := o.getsDELs(); got != want {
			t.Errorf("%s: %t", plugins, got)
		}
	}
}
