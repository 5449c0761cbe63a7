package plugin

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"cni-unwind/plugin/netconf"
)

// TestVersions runs every outer version with every inner one: the runtime gets its own, delegates
// get theirs, and the DEL passes. The last delegate logs what it gets.
func TestVersions(t *testing.T) {
	const all = "0.3.0 0.3.1 0.4.0 1.0.0 1.1.0" // since results have interfaces
	stories(t, `
	each outer `+all+`
	each inner `+all+`
	versions $outer $inner; chain bridge | {"type": "tuning"} | p0
	add a; del a; got $outer; given $inner`, acts{
		"got": func(s *story, w []string) {
			r := s.added["a"]
			result := s.who("a").result(r)
			s.want(r.Version() == w[0] && len(result.IPs) == 1 && len(result.Interfaces) == 3, "%s: %v", r.Version(), result)
		},
		"given": func(s *story, w []string) {
			inner := w[0]
			calls := s.callLog()
			s.want(len(calls) == 2, "%v", s.node.calls())
			for _, l := range calls {
				var prev struct {
					CNIVersion string
					IPs        []struct{ Version string }
				}
				raw, there := l.Stdin["prevResult"]
				s.want(string(l.Stdin["cniVersion"]) == fmt.Sprintf("%q", inner) &&
					there == (l.Command == "ADD" || inner >= "0.4.0"), "%s: %s, prevResult %s", l.Command, l.Stdin["cniVersion"], raw)
				if there {
					s.must(json.Unmarshal(raw, &prev))
					s.want(prev.CNIVersion == inner && (prev.IPs[0].Version != "") == (inner < "1.0.0"), "%s: %s", l.Command, raw)
				}
			}
		},
	})
}

// TestVersionOfResults: a delegate prints its result in no version, in another than the chain's, or
// in an unknown one. A runtime of another version than the chain's gets the result in its own, or
// it is an error of the delegate, which is undone.
func TestVersionOfResults(t *testing.T) {
	stories(t, `
	let old "ips": [{"version": "4", "address": "192.0.2.7/24"}]; let new "ips": [{"address": "192.0.2.7/24"}]; let inner 1.1.0
	either none: let printed {$new}
	or older: let printed {"cniVersion": "0.4.0", $old}
	or newer: let printed {"cniVersion": "1.1.0", $new}; let inner 0.4.0
	or oldest: let printed {"cniVersion": "0.2.0", "ip4": {"ip": "192.0.2.7/24"}}
	or the runtime's: let printed {"cniVersion": "1.0.0", $new}; let inner 0.4.0
	or unusable, unknown: let printed {"cniVersion": "9.9.9"}
		let says plugin type="faulty" failed (add): invalid result "{\"cniVersion\": \"9.9.9\"}": unsupported
	or unusable, not a result: let printed []; let says plugin type="faulty" failed (add): invalid result "[]": json: cannot unmarshal array
	or unusable, not an address: let printed {"ips": [{"address": "192.0.2.7"}]}; let says invalid CIDR address: 192.0.2.7
	versions 1.0.0 $inner; prints '$printed'
	if unusable: fails add a '$says'; calls ADD p0, ADD p1, DEL p1, DEL p0
	unless unusable: add a; result 1.0.0 192.0.2.7/24; del a; deleted-in $inner`, acts{
		"prints": func(s *story, w []string) { s.chain = []string{"p0", `p1, "result": ` + string(netconf.Marshal(w[0]))} },
		"result": func(s *story, w []string) {
			r := s.added["a"]
			s.want(r.Version() == w[0] && s.who("a").result(r).IPs[0].Address.String() == w[1], "%v", r)
		},
		"deleted-in": func(s *story, w []string) {
			var prev struct{ CNIVersion string }
			err := json.Unmarshal(s.callLog()[2].Stdin["prevResult"], &prev)
			s.want(err == nil && prev.CNIVersion == w[0], "%s (%v)", prev.CNIVersion, err)
		},
	})
}

// script makes a plugin that is a shell script.
func (n *node) script(plugin, body string) {
	n.Helper()
	file := filepath.Join(n.path[0], plugin)
	if err := os.WriteFile(file, []byte("#!/bin/sh\n"+body+"\n"), 0o700); err != nil {
		n.Fatal(err)
	}
}
