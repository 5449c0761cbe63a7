package netconf

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types/create"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"
)

// TestReadResult: ReadResult decodes a delegate's output as libcni does. TestReadEachResult
// compares the two for more outputs.
func TestReadResult(t *testing.T) {
	for _, tt := range []struct{ name, stdout, cniVersion, want string }{
		{"the same version", `{"cniVersion": "1.0.0",  "ips": [], "mine": 1e9}`, "1.0.0",
			`{"cniVersion":"1.0.0"}`},
		{"no version", `{"ips": [{"address": "10.0.0.7/24"}], "mine": {}}`, "1.0.0",
			`{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.7/24"}]}`},
		{"null", `null`, "1.1.0", `{"cniVersion":"1.1.0"}`},
		{"no version, no version in the configuration", `{}`, "", `{"cniVersion":"0.1.0","dns":{}}`},
	} {
		got, err := ReadResult([]byte(tt.stdout), tt.cniVersion)
		if err != nil || string(got) != tt.want {
			t.Errorf("%s:\ngot  %s (%v)\nwant %s", tt.name, got, err, tt.want)
		}
	}
	want := `invalid character 'Ã' looking for beginning of value: invalid result "` + strings.Repeat("é", 98) + `…"`
	if got, err := ReadResult([]byte(strings.Repeat("é", 200)), "1.0.0"); fmt.Sprint(err) != want {
		t.Errorf("\ngot  %v (%s)\nwant %s", err, got, want)
	}
}

// TestConvertResult converts a result from each version to each other version and back. The
// addresses stay the same.
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
				got, err := ConvertResult(raw, to)
				if err != nil {
					t.Fatal(err)
				}
				if v, err := create.DecodeVersion(got); err != nil || !SameVersion(v, to) {
					t.Errorf("version %q, %v", v, err)
				}
				r, err := ParseResult(got)
				if err != nil || fmt.Sprint(r.Addresses()) != "[10.0.0.7 fd00::7]" {
					t.Errorf("addresses of %s: %v, %v", got, r.Addresses(), err)
				}
				back, err := ConvertResult(got, from)
				again, parseErr := ParseResult(back)
				if err != nil || parseErr != nil || fmt.Sprint(again.Prefixes()) != fmt.Sprint(r.Prefixes()) {
					t.Errorf("back: %s, %v, %v, want the addresses of %s", back, err, parseErr, raw)
				}
			})
		}
	}
	for _, tt := range []struct{ name, raw, to, want string }{
		{"to an unknown version", `{"cniVersion": "1.0.0"}`, "3.0.0", "3.0.0"},
		{"of an unknown version", `{"cniVersion": "3.0.0"}`, "1.0.0", "3.0.0"},
		{"no result", `[]`, "1.0.0", "array"},
		{"an address that is null", `{"cniVersion": "1.0.0", "ips": [null]}`, "0.4.0",
			`cannot convert the result to CNI version "0.4.0"`},
	} {
		if got, err := ConvertResult(json.RawMessage(tt.raw), tt.to); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %s, %v, want an error with %q", tt.name, got, err, tt.want)
		}
	}
}

func TestAddresses(t *testing.T) {
	for _, tt := range []struct{ name, result, want string }{
		{"both families", `{"ips": [{"address": "10.0.0.7/24"}, {"address": "fd00::7/64"}]}`, "[10.0.0.7 fd00::7]"},
		{"before 0.3.0", `{"ip4": {"ip": "10.0.0.7/24"}, "ip6": {"ip": "fd00::7/64"}}`, "[10.0.0.7 fd00::7]"},
		{"an address twice", `{"ips": [{"address": "10.0.0.7/24"}, {"address": "10.0.0.7/16"}]}`, "[10.0.0.7]"},
		{"loopback, link-local and other special addresses", `{"ips": [{"address": "127.0.0.1/8"}, {"address": "::1/128"}, {"address": "169.254.1.1/16"},
			{"address": "fe80::1/64"}, {"address": "224.0.0.1/4"}, {"address": "0.0.0.0/0"}, {"address": "255.255.255.255/32"}]}`, "[]"},
		{"invalid addresses", `{"ips": [{"address": ""}, {"address": "10.0.0.7"}, {"address": "10.0.0/24"}, {}, null]}`, "[]"},
		{"nothing", ``, "[]"},
	} {
		r, err := ParseResult(json.RawMessage(tt.result))
		if got := fmt.Sprint(r.Addresses()); got != tt.want || err != nil {
			t.Errorf("%s: %s, %v, want %s", tt.name, got, err, tt.want)
		}
	}
}

// TestSharedAddresses: two ADDs share an address if both got it from the same pool, or from two
// pools for the same bridge.
func TestSharedAddresses(t *testing.T) {
	entry := func(address, pool, interfaces string) *journal.Record {
		e := &journal.Record{Got: journal.Got{Claims: []journal.Claim{{Address: netip.MustParseAddr(address), Pool: pool}}}}
		if interfaces != "" {
			e.Got.Result = json.RawMessage(`{"cniVersion": "1.0.0", "interfaces": [` + interfaces + `]}`)
		}
		return e
	}
	const bridge, another, inPod = `{"name": "cni0"}`, `{"name": "cni1"}`, `{"name": "cni0", "sandbox": "/run/netns/a"}`
	for _, tt := range []struct {
		name       string
		one, other *journal.Record
		shared     bool
	}{
		{"same pool", entry("10.1.0.2", "/p", ""), entry("10.1.0.2", "/p", ""), true},
		{"another address", entry("10.1.0.2", "/p", bridge), entry("10.1.0.3", "/p", bridge), false},
		{"other pools", entry("10.1.0.2", "/p", ""), entry("10.1.0.2", "/q", ""), false},
		{"other pools, same bridge", entry("10.1.0.2", "/p", bridge), entry("10.1.0.2", "/q", bridge), true},
		{"other pools, other bridges", entry("10.1.0.2", "/p", bridge), entry("10.1.0.2", "/q", another), false},
		{"other pools, the name is that of a pod's interface", entry("10.1.0.2", "/p", inPod), entry("10.1.0.2", "/q", bridge), false},
		{"other pools, the name is that of the other pod's interface", entry("10.1.0.2", "/p", bridge), entry("10.1.0.2", "/q", inPod), false},
		{"no pool", entry("10.1.0.2", "", bridge), entry("10.1.0.2", "", bridge), false},
		{"the other has no pool", entry("10.1.0.2", "/p", bridge), entry("10.1.0.2", "", bridge), false},
	} {
		if got := len(SharedAddresses(tt.one, tt.other)) > 0; got != tt.shared {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}

func TestWithoutAddresses(t *testing.T) {
	drop := []netip.Addr{netip.MustParseAddr("10.0.0.7"), netip.MustParseAddr("fd00::7")}
	for _, tt := range []struct{ name, result, want string }{
		{"one of three", `{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.8/24", "mine": 1e400}, {"address": "10.0.0.7/24"},
			{"address": "10.0.0.70/24"}], "interfaces": [{"name": "eth0"}]}`,
			`{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.8/24", "mine": 1e400}, {"address": "10.0.0.70/24"}],
				"interfaces": [{"name": "eth0"}]}`},
		{"other spellings of the same addresses", `{"IPs": [{"Address": "::ffff:10.0.0.7/120"}, {"address": "FD00:0::0007/128"}]}`, `{"IPs": []}`},
		{"before 0.3.0", `{"ip4": {"ip": "10.0.0.7/24"}, "ip6": {"ip": "fd00::8/64"}}`, `{"ip6": {"ip": "fd00::8/64"}}`},
		{"values that are no addresses", `{"ips": [null, {}, {"address": "x"}, 5], "ip4": "x"}`, `{"ips": [null, {}, {"address": "x"}, 5], "ip4": "x"}`},
		{"null", `{"ips": null, "ip4": null}`, `{"ips": null, "ip4": null}`},
	} {
		got, err := WithoutAddresses(json.RawMessage(tt.result), drop)
		if err != nil {
			t.Fatal(tt.name, err)
		}
		if diff := cmp.Diff(value(t, json.RawMessage(tt.want)), value(t, got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
	for _, result := range []string{``, `[]`, `{"ips": {}}`, `{"IPS": 5}`} {
		if got, err := WithoutAddresses(json.RawMessage(result), drop); err == nil {
			t.Errorf("%s became %s, want an error", result, got)
		}
	}
}

// FuzzResult decodes arbitrary output of a delegate, and removes an address from the result.
func FuzzResult(f *testing.F) {
	f.Add([]byte(`{"cniVersion": "1.0.0", "ips": [{"address": "10.0.0.7/24"}, {"address": "fd00::7/64"}], "mine": 1e400}`), "0.4.0", []byte{10, 0, 0, 7})
	f.Add([]byte(`{"ip4": {"ip": "10.0.0.7/24"}, "IP6": {"ip": "fd00::7/64"}}`), "", []byte{10, 0, 0, 7})
	f.Add([]byte(`{"IPs": [null, {"Address": "::ffff:10.0.0.7/120"}]}`), "1.1.0", []byte{10, 0, 0, 7})
	f.Add([]byte(`{"ips": [{"address": "10.0.0.7/24"}], "ips": [{}]}`), "1.0.0", []byte{10, 0, 0, 7})
	f.Fuzz(func(t *testing.T, stdout []byte, cniVersion string, dropped []byte) {
		drop, ok := netip.AddrFromSlice(dropped)
		drop = drop.Unmap()
		if !ok || cniVersion != "" && !slices.Contains(version.All.SupportedVersions(), cniVersion) {
			return
		}
		sameAsLibcni(t, stdout, cniVersion)
		raw, err := ReadResult(stdout, cniVersion)
		if err != nil {
			return
		}
		before, err := ParseResult(raw)
		if err != nil {
			t.Fatal(err)
		}
		without, err := WithoutAddresses(raw, []netip.Addr{drop})
		if err != nil {
			return
		}
		after, err := ParseResult(without)
		if err != nil {
			t.Fatalf("%s: %v", without, err)
		}
		want := slices.DeleteFunc(before.Prefixes(), func(p netip.Prefix) bool { return p.Addr() == drop })
		if got := after.Prefixes(); !reflect.DeepEqual(want, got) && len(want)+len(got) > 0 {
			t.Errorf("%s without %s: %v, want %v", raw, drop, got, want)
		}
	})
}

// sameAsLibcni checks that ReadResult and libcni decode a delegate's output to the same result,
// byte for byte, or that both return an error.
func sameAsLibcni(t *testing.T, printed []byte, cniVersion string) {
	t.Helper()
	conf := Marshal(map[string]string{"cniVersion": cniVersion})
	result, err := invoke.ExecPluginWithResult(context.Background(), "", conf, ran{}, ran(printed))
	got, gotErr := ReadResult(printed, cniVersion)
	if (err == nil) != (gotErr == nil) {
		t.Errorf("%q in %q: libcni %v, unwind %v", printed, cniVersion, err, gotErr)
		return
	}
	if err != nil {
		return
	}
	if want := Marshal(result); string(want) != string(got) {
		t.Errorf("%q in %q:\nlibcni %s\nunwind %s", printed, cniVersion, want, got)
	}
}

// TestReadEachResult compares ReadResult with libcni for each output and each version.
// TestResultsAreLibcnis does so for whole chains.
func TestReadEachResult(t *testing.T) {
	for _, tt := range plugintest.Printed {
		for _, v := range append(version.All.SupportedVersions(), "") {
			sameAsLibcni(t, []byte(plugintest.InVersion(tt.Text, v)), v)
		}
	}
}

// ran is an invoke.Exec that returns the output of a plugin that has already run.
type ran []byte

func (r ran) ExecPlugin(context.Context, string, []byte, []string) ([]byte, error) { return r, nil }

func (r ran) FindInPath(string, []string) (string, error) { return "", nil }

func (r ran) Decode([]byte) (version.PluginInfo, error) { return nil, nil }

// AsEnv makes ran an invoke.CNIArgs, which ExecPluginWithResult also needs.
func (r ran) AsEnv() []string { return nil }
