package plugin

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"
)

func TestReadResult(t *testing.T) {
	for _, tt := range []struct{ name, stdout, cniVersion, want string }{
		{"the same version, byte for byte", `{"cniVersion": "1.0.0",  "ips": [], "mine": 1e400}`, "1.0.0",
			`{"cniVersion": "1.0.0",  "ips": [], "mine": 1e400}`},
		{"no version", `{"ips": [{"address": "10.0.0.7/24"}], "mine": 1e400}`, "0.4.0",
			`{"cniVersion": "0.4.0", "ips": [{"address": "10.0.0.7/24"}], "mine": 1e400}`},
		{"an older one", `{"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.0.0.7/24"}]}`, "1.0.0",
			`{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.7/24"}]}`},
		{"a newer one", `{"cniVersion": "1.0.0", "ips": [{"address": "fd00::7/64"}]}`, "0.3.1",
			`{"cniVersion": "0.3.1", "ips": [{"version": "6", "address": "fd00::7/64"}], "dns": {}}`},
		{"nothing in it", `{}`, "1.1.0", `{"cniVersion": "1.1.0"}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := readResult([]byte(tt.stdout), tt.cniVersion)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(value(t, json.RawMessage(tt.want)), value(t, got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	for _, tt := range []struct{ name, stdout, want string }{
		{"nothing", ``, `its result is not a JSON object: ""`},
		{"null", `null`, `its result is not a JSON object: "null"`},
		{"text", "oops\x00\xff\n", `its result is not a JSON object: "oops\x00\xff\n"`},
		{"much text", strings.Repeat("é", 200), `its result is not a JSON object: "` + strings.Repeat("é", 98) + `…"`},
		{"two results", `{}{}`, `its result is not a JSON object: "{}{}"`},
		{"ips an object", `{"ips": {}}`, `its result: key "ips" is an object, not a list`},
		{"an address that is a number", `{"ips": [{"address": 10}]}`, `its result: key "ips.address" is a number, not a string`},
		{"a version that is none", `{"cniVersion": "2.0.0"}`, `unsupported CNI result version "2.0.0"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, err := readResult([]byte(tt.stdout), "1.0.0"); fmt.Sprint(err) != tt.want {
				t.Errorf("\ngot  %v (%s)\nwant %s", err, got, tt.want)
			}
		})
	}
}

// TestConvertResult converts from each version to each, and back: the addresses stay.
func TestConvertResult(t *testing.T) {
	results := map[string]string{
		"":      `{"ip4": {"ip": "10.0.0.7/24", "gateway": "10.0.0.1"}, "ip6": {"ip": "fd00::7/64"}, "dns": {}}`,
		"0.3.0": `{"ips": [{"version": "4", "address": "10.0.0.7/24"}, {"version": "6", "address": "fd00::7/64"}]}`,
		"1.0.0": `{"ips": [{"address": "10.0.0.7/24"}, {"address": "fd00::7/64"}]}`,
	}
	of := map[string]string{"": "", "0.1.0": "", "0.2.0": "", "0.3.0": "0.3.0", "0.3.1": "0.3.0", "0.4.0": "0.3.0",
		"1.0.0": "1.0.0", "1.1.0": "1.0.0"}
	for from, result := range of {
		for to := range of {
			t.Run(from+" to "+to, func(t *testing.T) {
				raw := json.RawMessage(fmt.Sprintf(`{"cniVersion": %q, %s`, from, results[result][1:]))
				got, err := convertResult(raw, to)
				if err != nil {
					t.Fatal(err)
				}
				if v, err := create.DecodeVersion(got); err != nil || !sameVersion(v, to) {
					t.Errorf("version %q, %v", v, err)
				}
				r, err := parseResult(got)
				if err != nil || fmt.Sprint(r.addresses()) != "[10.0.0.7 fd00::7]" {
					t.Errorf("addresses of %s: %v, %v", got, r.addresses(), err)
				}
				back, err := convertResult(got, from)
				if err != nil || !sameMeaning(raw, back) {
					t.Errorf("back: %s, %v, want the meaning of %s", back, err, raw)
				}
			})
		}
	}
	for _, tt := range []struct{ name, raw, to, want string }{
		{"to a version that is none", `{"cniVersion": "1.0.0"}`, "3.0.0", "3.0.0"},
		{"of a version that is none", `{"cniVersion": "3.0.0"}`, "1.0.0", "3.0.0"},
		{"no result", `[]`, "1.0.0", "array"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got, err := convertResult(json.RawMessage(tt.raw), tt.to); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%s, %v, want an error with %q", got, err, tt.want)
			}
		})
	}
}

func TestAddresses(t *testing.T) {
	for _, tt := range []struct{ name, result, want string }{
		{"both families", `{"ips": [{"address": "10.0.0.7/24"}, {"address": "fd00::7/64"}]}`, "[10.0.0.7 fd00::7]"},
		{"before 0.3.0", `{"ip4": {"ip": "10.0.0.7/24"}, "ip6": {"ip": "fd00::7/64"}}`, "[10.0.0.7 fd00::7]"},
		{"twice", `{"ips": [{"address": "10.0.0.7/24"}, {"address": "10.0.0.7/16"}]}`, "[10.0.0.7]"},
		{"IPv4 in IPv6", `{"ips": [{"address": "::ffff:10.0.0.7/120"}]}`, "[10.0.0.7]"},
		{"those that say nothing", `{"ips": [{"address": "127.0.0.1/8"}, {"address": "::1/128"}, {"address": "169.254.1.1/16"},
			{"address": "fe80::1/64"}, {"address": "224.0.0.1/4"}, {"address": "0.0.0.0/0"}, {"address": "255.255.255.255/32"}]}`, "[]"},
		{"no addresses", `{"ips": [{"address": ""}, {"address": "10.0.0.7"}, {"address": "10.0.0/24"}, {}, null]}`, "[]"},
		{"nothing", ``, "[]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := parseResult(json.RawMessage(tt.result))
			if err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(r.addresses()); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

func TestWithoutAddresses(t *testing.T) {
	drop := []netip.Addr{netip.MustParseAddr("10.0.0.7"), netip.MustParseAddr("fd00::7")}
	for _, tt := range []struct{ name, result, want string }{
		{"one of three", `{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.8/24", "mine": 1e400}, {"address": "10.0.0.7/24"},
			{"address": "10.0.0.70/24"}], "interfaces": [{"name": "eth0"}]}`,
			`{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.8/24", "mine": 1e400}, {"address": "10.0.0.70/24"}],
				"interfaces": [{"name": "eth0"}]}`},
		{"all", `{"ips": [{"address": "10.0.0.7/24"}, {"address": "fd00::7/64"}]}`, `{"ips": []}`},
		{"written otherwise", `{"IPs": [{"Address": "::ffff:10.0.0.7/120"}, {"address": "FD00:0::0007/128"}]}`, `{"IPs": []}`},
		{"before 0.3.0", `{"ip4": {"ip": "10.0.0.7/24"}, "ip6": {"ip": "fd00::8/64"}}`, `{"ip6": {"ip": "fd00::8/64"}}`},
		{"what is no address", `{"ips": [null, {}, {"address": "x"}, 5], "ip4": "x"}`, `{"ips": [null, {}, {"address": "x"}, 5], "ip4": "x"}`},
		{"none", `{"dns": {}}`, `{"dns": {}}`},
		{"null", `{"ips": null, "ip4": null}`, `{"ips": null, "ip4": null}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := withoutAddresses(json.RawMessage(tt.result), drop)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(value(t, json.RawMessage(tt.want)), value(t, got)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	for _, result := range []string{``, `[]`, `{"ips": {}}`, `{"IPS": 5}`} {
		if got, err := withoutAddresses(json.RawMessage(result), drop); err == nil {
			t.Errorf("%s became %s, want an error", result, got)
		}
	}
}

func TestSameMeaning(t *testing.T) {
	one := `{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.7/24"}], "interfaces": [{"name": "eth0", "sandbox": "/n"}]}`
	for _, tt := range []struct {
		name, other string
		want        bool
	}{
		{"the same", one, true},
		{"other bytes", `{"dns": {}, "interfaces": [{"sandbox": "/n", "name": "eth0"}], "ips": [{"address": "10.0.0.7/24"}], "cniVersion": "1.0.0"}`, true},
		{"an older version", `{"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.0.0.7/24"}], "interfaces": [{"name": "eth0", "sandbox": "/n"}]}`, true},
		{"another address", `{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.8/24"}], "interfaces": [{"name": "eth0", "sandbox": "/n"}]}`, false},
		{"a longer prefix", `{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.7/25"}], "interfaces": [{"name": "eth0", "sandbox": "/n"}]}`, false},
		{"a route more", strings.Replace(one, `"ips"`, `"routes": [{"dst": "0.0.0.0/0"}], "ips"`, 1), false},
		{"nothing", ``, false},
		{"no result", `[]`, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := json.RawMessage(one), json.RawMessage(tt.other)
			if sameMeaning(a, b) != tt.want || sameMeaning(b, a) != tt.want {
				t.Errorf("want %t", tt.want)
			}
		})
	}
}

// FuzzResult reads what a delegate may print, and takes an address out of it.
func FuzzResult(f *testing.F) {
	f.Add([]byte(`{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.7/24"}, {"address": "fd00::7/64"}], "mine": 1e400}`), "0.4.0", []byte{10, 0, 0, 7})
	f.Add([]byte(`{"ip4": {"ip": "10.0.0.7/24"}, "IP6": {"ip": "fd00::7/64"}}`), "", []byte{10, 0, 0, 7})
	f.Add([]byte(`{"IPs": [null, {"Address": "::ffff:10.0.0.7/120"}]}`), "1.1.0", []byte{10, 0, 0, 7})
	f.Add([]byte(`{"ips": [{"address": "10.0.0.7/24"}], "ips": [{}]}`), "1.0.0", []byte{10, 0, 0, 7})
	f.Fuzz(func(t *testing.T, stdout []byte, cniVersion string, dropped []byte) {
		drop, ok := netip.AddrFromSlice(dropped)
		if drop = drop.Unmap(); !ok || cniVersion != "" && !slices.Contains(version.All.SupportedVersions(), cniVersion) {
			return
		}
		raw, err := readResult(stdout, cniVersion)
		if err != nil {
			return
		}
		if v, err := create.DecodeVersion(raw); err != nil || !sameVersion(v, cniVersion) {
			t.Errorf("version %q, %v, want %q", v, err, cniVersion)
		}
		before, err := parseResult(raw)
		if err != nil {
			t.Fatal(err)
		}
		without, err := withoutAddresses(raw, []netip.Addr{drop})
		if err != nil {
			return
		}
		after, err := parseResult(without)
		if err != nil {
			t.Fatalf("%s: %v", without, err)
		}
		want := slices.DeleteFunc(before.prefixes(), func(p netip.Prefix) bool { return p.Addr() == drop })
		if got := after.prefixes(); !reflect.DeepEqual(want, got) && len(want)+len(got) > 0 {
			t.Errorf("%s less %s: %v, want %v", raw, drop, got, want)
		}
	})
}
