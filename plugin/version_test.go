package plugin

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
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

// script makes a plugin that is a shell script.
func (n *node) script(plugin, body string) {
	n.Helper()
	file := filepath.Join(n.path[0], plugin)
	must(n, os.WriteFile(file, []byte("#!/bin/sh\n"+body+"\n"), 0o700))
}
