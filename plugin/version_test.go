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
	one-in 2
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
			s.want(len(s.callLog()) == 2, "%v", s.node.calls())
			for _, l := range s.callLog() {
				var prev struct{ CNIVersion string }
				raw, there := l.Stdin["prevResult"]
				s.want(string(l.Stdin["cniVersion"]) == fmt.Sprintf("%q", w[0]) && there == (l.Command == "ADD" || w[0] >= "0.4.0") &&
					(!there || json.Unmarshal(raw, &prev) == nil && prev.CNIVersion == w[0]), "%s: %s, prevResult %s", l.Command, l.Stdin["cniVersion"], raw)
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
