// Package plugintest contains two things that tests of several packages share. Printed lists
// outputs that a delegate may print on ADD, valid and invalid, for tests that compare unwind with
// libcni. Table compares a document's table with the code.
package plugintest

import (
	"fmt"
	"strings"
)

// Printed lists outputs of a delegate's ADD. V stands for the key cniVersion with the chain's
// version (see InVersion).
var Printed = []struct{ Name, Text string }{
	{"all fields of 0.2.0", `{V, "ip4": {"ip": "10.9.0.5/24", "gateway": "10.9.0.1",
		"routes": [{"dst": "0.0.0.0/0", "gw": "10.9.0.1"}]}, "ip6": {"ip": "fd00::5/64"},
		"dns": {"nameservers": ["10.9.0.2"]}}`},
	{"all fields of 0.4.0", `{V,
		"interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:05", "sandbox": "/n"}],
		"ips": [{"version": "4", "address": "10.9.0.5/24", "gateway": "10.9.0.1", "interface": 0},
			{"version": "6", "address": "fd00::5/64"}],
		"routes": [{"dst": "0.0.0.0/0", "gw": "10.9.0.1"}, {"dst": "10.8.0.0/16"}],
		"dns": {"nameservers": ["10.9.0.2"], "domain": "d", "search": ["s"], "options": ["o"]}}`},
	{"all fields of 1.1.0", `{V,
		"interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:05", "mtu": 1400, "sandbox": "/n",
			"socketPath": "/s", "pciID": "0000:00:01.0"}, {"name": "eth1", "mtu": 0}],
		"ips": [{"address": "10.9.0.5/24", "gateway": "10.9.0.1", "interface": 0},
			{"address": "fd00::5/64", "interface": 1}],
		"routes": [{"dst": "0.0.0.0/0", "gw": "10.9.0.1", "mtu": 1300, "advmss": 1200,
			"priority": 7, "table": 100, "scope": 200},
			{"dst": "10.8.0.0/16", "priority": 0, "table": 0, "scope": 0, "mtu": 0, "advmss": 0}],
		"dns": {}}`},
	{"fields that are null",
		`{V, "interfaces": null, "ips": [null], "routes": null, "dns": null, "ip4": null}`},
	{"unknown fields", `{V, "mine": {"a": 1}, "dns": {"mine": ""},
		"ips": [{"address": "10.9.0.5/24", "version": "4", "mine": 1}],
		"interfaces": [{"name": "eth0", "mine": true}], "routes": [{"dst": "10.8.0.0/16", "mine": []}]}`},
	{"field names in another case", `{"CNIVersion": "0.4.0", "IP4": {"IP": "10.9.0.5/24"},
		"IPs": [{"Address": "10.9.0.5/24", "Version": "4"}]}`},
	{"a field twice", `{V, "ips": [{"address": "10.9.0.4/24"}], "ips": [{"address": "10.9.0.5/24"}]}`},
	{"host bits, IPv4 in IPv6", `{V, "routes": [{"dst": "10.8.0.9/16"}],
		"ips": [{"address": "::ffff:10.9.0.5/120", "version": "4"}]}`},
	{"characters that are special in HTML", `{V, "interfaces": [{"name": "<&>\u2028"}]}`},
	{"bytes that are not UTF-8", `{V, "interfaces": [{"name": "` + "\xff" + `"}]}`},
	{"large numbers",
		`{V, "routes": [{"dst": "10.8.0.0/16", "table": 4294967295, "priority": 4294967295}]}`},
	{"an invalid MAC address", `{V, "interfaces": [{"name": "eth0", "mac": "none"}]}`},
	{"no version", `{"mine": 1.10, "ip4": {"ip": "10.9.0.5/24"},
		"ips": [{"address": "10.9.0.5/24", "version": "4"}]}`},
	{"an empty version", `{"cniVersion": "", "ips": [{"address": "10.9.0.5/24", "version": "4"}]}`},
	{"a version that is a number",
		`{"cniVersion": 1, "ips": [{"address": "10.9.0.5/24", "version": "4"}]}`},
	{"version 0.2.0", `{"cniVersion": "0.2.0", "ip4": {"ip": "10.9.0.5/24"}}`},
	{"version 0.3.1", `{"cniVersion": "0.3.1", "routes": [{"dst": "10.8.0.0/16"}],
		"ips": [{"version": "4", "address": "10.9.0.5/24"}]}`},
	{"version 0.4.0", `{"cniVersion": "0.4.0", "interfaces": [{"name": "eth0"}],
		"ips": [{"version": "4", "address": "10.9.0.5/24"}]}`},
	{"version 1.1.0", `{"cniVersion": "1.1.0", "interfaces": [{"name": "eth0", "mtu": 1400}],
		"ips": [{"address": "10.9.0.5/24"}]}`},
	{"an unknown version", `{"cniVersion": "9.9.9"}`},
	{"no fields", `{}`},
	{"null", `null`},
	{"white space around the result", " \n{V}\n\n"},
	{"no output", ``},
	{"output that is not JSON", `not json`},
	{"half a result", `{V, "ips": [`},
	{"two results", `{V}{}`},
	{"a list", `[]`},
	{"an address without a prefix length",
		`{V, "ips": [{"address": "10.9.0.5"}], "ip4": {"ip": "10.9.0.5"}}`},
	{"an empty address", `{V, "ips": [{"address": ""}], "ip4": {"ip": ""}}`},
	{"an address that is a number", `{V, "ips": [{"address": 10}], "ip4": {"ip": 10}}`},
	{"an invalid gateway", `{V, "ips": [{"address": "10.9.0.5/24", "gateway": "x"}],
		"ip4": {"ip": "10.9.0.5/24", "gateway": "x"}}`},
	{"an invalid route", `{V, "routes": [{"dst": "x"}],
		"ip4": {"ip": "10.9.0.5/24", "routes": [{"dst": "x"}]}}`},
	{"a fraction where an integer belongs", `{V, "interfaces": [{"name": "eth0", "mtu": 1.5}]}`},
	{"a number that is too large",
		`{V, "mine": 1e400, "routes": [{"dst": "10.8.0.0/16", "table": 1e30}]}`},
	{"ips is an object", `{V, "ips": {}, "ip4": []}`},
	{"dns is a string", `{V, "dns": "10.9.0.2"}`},
}

// InVersion replaces the V in a text (see Printed) with the key cniVersion and this version.
func InVersion(text, cniVersion string) string {
	return strings.ReplaceAll(text, "{V", fmt.Sprintf(`{"cniVersion": %q`, cniVersion))
}
