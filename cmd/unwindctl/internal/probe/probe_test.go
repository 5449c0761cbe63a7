package probe

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/ipam"
	"cni-unwind/testdata/nodetest"
)

// check ends a test that has an error.
var check = nodetest.Check

const (
	flatFile   = "/etc/cni/net.d/whereabouts.d/whereabouts.conf"
	kubeFile   = "/etc/cni/net.d/whereabouts.d/whereabouts.kubeconfig"
	flatConfig = `{"datastore": "kubernetes", "configuration_path": "/etc/cni/net.d/whereabouts.d",
		"kubernetes": {"kubeconfig": "` + kubeFile + `"}, "reconciler_cron_expression": "30 4 * * *"}`
)

// put writes a file below a root.
func put(t *testing.T, root, path, content string) {
	t.Helper()
	path = filepath.Join(root, path)
	check(t, os.MkdirAll(filepath.Dir(path), 0o755))
	check(t, os.WriteFile(path, []byte(content), 0o600))
}

// whereaboutsWith is the configuration of a delegate with further keys of whereabouts, which begin with a comma.
func whereaboutsWith(keys string) string {
	return `{"name": "podnet", "type": "macvlan", "ipam": {"type": "whereabouts"` + keys + `}}`
}

// query asks for container c0ffee, interface net1.
func query(config string) ipam.Query {
	return ipam.Query{Network: "podnet", ContainerID: "c0ffee", IfName: "net1",
		Config: json.RawMessage(config), IPAM: "whereabouts"}
}

// addresses prints what Held returns, for a comparison.
func addresses(held []netip.Addr) string { return strings.Trim(fmt.Sprint(held), "[]") }

// TestPools: each range leads to the pool that whereabouts takes for it.
func TestPools(t *testing.T) {
	many := func(n int) string {
		var ranges []string
		for i := range n {
			ranges = append(ranges, fmt.Sprintf(`{"range": "10.0.%d.0/24"}`, i))
		}
		return `{"ipRanges": [` + strings.Join(ranges, ",") + `]}`
	}
	var sixteen []string
	for i := range maxRanges {
		sixteen = append(sixteen, fmt.Sprintf("10.0.%d.0-24", i))
	}
	for _, tt := range []struct{ name, ipam, want, wantErr string }{
		{name: "range", ipam: `{"range": "10.56.0.0/16"}`, want: "10.56.0.0-16"},
		{name: "host bits", ipam: `{"range": "10.56.217.171/16"}`, want: "10.56.0.0-16"},
		{name: "first and last", ipam: `{"range": "192.168.2.10-192.168.2.20/24"}`, want: "192.168.2.0-24"},
		{name: "IPv6", ipam: `{"range": "fd00:1::/64"}`, want: "fd00-1---64"},
		{name: "IPv6, host bits, capitals, zeros", ipam: `{"range": "FD00:0001:0:0::a/64"}`, want: "fd00-1---64"},
		{name: "IPv6, first and last", ipam: `{"range": "fd00::10-fd00::20/112"}`, want: "fd00---112"},
		{name: "network_name", ipam: `{"range": "10.0.0.0/8", "network_name": "blue"}`, want: "blue-10.0.0.0-8"},
		{name: "the legacy range first", ipam: `{"ipRanges": [{"range": "fd00::/64"}], "range": "10.0.0.0/8"}`,
			want: "10.0.0.0-8 fd00---64"},
		{name: "the same network twice", ipam: `{"ipRanges": [{"range": "10.0.0.1-10.0.0.9/24"}, {"range": "10.0.0.11-10.0.0.19/24"}]}`,
			want: "10.0.0.0-24"},
		{name: "none", ipam: `{}`},
		{name: "sixteen", ipam: many(maxRanges), want: strings.Join(sixteen, " ")},
		{name: "too many", ipam: many(maxRanges + 1), wantErr: "too many ranges: 17 (at most 16)"},
		{name: "no range", ipam: `{"ipRanges": [{}]}`, wantErr: `range "": not a CIDR`},
		{name: "an address", ipam: `{"range": "10.0.0.1"}`, wantErr: `range "10.0.0.1": not a CIDR`},
		{name: "a path", ipam: `{"range": "10.0.0.0/8", "network_name": "../../../secrets/x?"}`,
			wantErr: `range "10.0.0.0/8": "../../../secrets/x?-10.0.0.0-8" is not a valid pool name`},
		{name: "a long name", ipam: `{"range": "10.0.0.0/8", "network_name": "` + strings.Repeat("n", 250) + `"}`,
			wantErr: `is not a valid pool name`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var c whereaboutsConf
			check(t, json.Unmarshal([]byte(tt.ipam), &c))
			got, err := c.pools()
			if strings.Join(got, " ") != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
			if (err != nil) != (tt.wantErr != "") || err != nil && !strings.Contains(err.Error(), tt.wantErr) {
				t.Errorf("%v, want %q", err, tt.wantErr)
			}
		})
	}
}

// TestUnknown: without a store that the package knows, nothing is claimed, and nobody is asked.
func TestUnknown(t *testing.T) {
	for _, tt := range []struct{ name, config, flat string }{
		{"node slices", whereaboutsWith(`, "range": "10.0.0.0/8", "node_slice_size": "/24"`), flatConfig},
		{"node slices in the flat file", whereaboutsWith(`, "range": "10.0.0.0/8"`), `{"node_slice_size": "/24"}`},
		{"etcd", whereaboutsWith(`, "range": "10.0.0.0/8", "datastore": "etcd"`), flatConfig},
		{"etcd in the flat file", whereaboutsWith(`, "range": "10.0.0.0/8"`), `{"datastore": "etcd"}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := &Prober{Root: t.TempDir()}
			put(t, p.Root, flatFile, tt.flat)
			held, known, err := p.Held(t.Context(), query(tt.config))
			if held != nil || known || err != nil {
				t.Errorf("%v, %v, %v", held, known, err)
			}
		})
	}
}

// TestMerge: the first flat file fills what is empty, as for whereabouts.
func TestMerge(t *testing.T) {
	const (
		openshift = "/etc/kubernetes/cni/net.d/whereabouts.d/whereabouts.conf"
		container = "/host/etc/cni/net.d/whereabouts.d/whereabouts.conf"
		all       = `{"range": "10.0.0.0/8", "ipRanges": [{"range": "fd00::/64"}], "network_name": "flat",
			"kubernetes": {"kubeconfig": "/flat"}}`
	)
	for _, tt := range []struct {
		name, keys string
		files      map[string]string
		want       string // pools and kubeconfig
		wantErr    string
	}{
		{"all from the flat file", ``, map[string]string{flatFile: all}, "[flat-10.0.0.0-8 flat-fd00---64] /flat", ""},
		{"nothing from the flat file",
			`, "range": "11.0.0.0/8", "ipRanges": [{"range": "fd11::/64"}], "network_name": "own", "kubernetes": {"kubeconfig": "/own"}`,
			map[string]string{flatFile: all}, "[own-11.0.0.0-8 own-fd11---64] /own", ""},
		{"no flat file", `, "kubernetes": {"kubeconfig": "/own"}`, nil, "[] /own", ""},
		{"the order", ``, map[string]string{
			openshift: `{"kubernetes": {"kubeconfig": "/1"}}`,
			flatFile:  `{"range": "10.0.0.0/8", "kubernetes": {"kubeconfig": "/2"}}`,
			container: `{"range": "10.0.0.0/8", "kubernetes": {"kubeconfig": "/3"}}`}, "[] /1", ""},
		{"the last", ``, map[string]string{container: `{"kubernetes": {"kubeconfig": "/3"}}`}, "[] /3", ""},
		{"configuration_path first", `, "configuration_path": "/opt/wb.conf"`, map[string]string{
			"/opt/wb.conf": `{"kubernetes": {"kubeconfig": "/0"}}`,
			openshift:      `{"kubernetes": {"kubeconfig": "/1"}}`}, "[] /0", ""},
		{"configuration_path is not there", `, "configuration_path": "/opt/wb.conf"`,
			map[string]string{flatFile: `{"kubernetes": {"kubeconfig": "/2"}}`}, "[] /2", ""},
		{"configuration_path is a directory", `, "configuration_path": "/etc/cni"`,
			map[string]string{flatFile: all}, "", "/etc/cni: not a regular file"},
		{"half a flat file", ``, map[string]string{flatFile: all[:40]}, "", flatFile + ": unexpected end of JSON input"},
		{"wrong types", `, "range": ["10.0.0.0/8"]`, map[string]string{flatFile: all}, "", "configuration: json: cannot unmarshal"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := &Prober{Root: t.TempDir()}
			for path, content := range tt.files {
				put(t, p.Root, path, content)
			}
			c, err := p.whereabouts(json.RawMessage(whereaboutsWith(tt.keys)))
			if tt.wantErr != "" {
				if err == nil || !strings.HasPrefix(err.Error(), tt.wantErr) {
					t.Errorf("%v, want %q", err, tt.wantErr)
				}
				return
			}
			check(t, err)
			pools, err := c.pools()
			if diff := cmp.Diff(tt.want, fmt.Sprint(pools, " ", c.Kubernetes.Kubeconfig)); diff != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
}
