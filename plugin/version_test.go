package plugin

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/plugin/netconf"
)

// versions are those of the specification since results have interfaces.
var versions = []string{"0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// TestVersions runs every outer version with every inner one: the runtime gets its own, delegates
// get theirs, and the DEL passes. The delegates log what they get.
func TestVersions(t *testing.T) {
	t.Parallel()
	for _, outer := range versions {
		for _, inner := range versions {
			t.Run(outer+" outside, "+inner+" inside", func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				n.outer, n.inner = outer, inner
				list := n.unwind(n.bridgePlugin(""), `{"type": "tuning"}`, n.faulty("p0", ""))
				n.versionsThrough(list, outer, inner)
			})
		}
	}
}

// TestCNIVersionsPair lists two versions, for old and new runtimes: the higher one is used.
func TestCNIVersionsPair(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := `{"cniVersion": "0.4.0", "cniVersions": ["0.4.0", "1.0.0", "9.9.9"], "plugins": [%s, %s]}`
	list, err := libcni.NetworkConfFromBytes(fmt.Appendf(nil,
		`{"cniVersion": "1.0.0", "cniVersions": ["1.0.0", "1.1.0"], "name": %q, "plugins": [%s]}`, n.network,
		n.unwindChain(fmt.Sprintf(chain, n.bridgePlugin(""), n.faulty("p0", ""))).Plugins[0].Bytes))
	if err != nil {
		t.Fatal(err)
	}
	n.versionsThrough(list, "1.1.0", "1.0.0")
}

// TestVersionOfTheChainAbsent: a chain without a version uses unwind's own.
func TestVersionOfTheChainAbsent(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outer = "0.4.0"
	list := n.unwindChain(fmt.Sprintf(`{"plugins": [%s, %s]}`, n.bridgePlugin(""), n.faulty("p0", "")))
	n.versionsThrough(list, "0.4.0", "0.4.0")
}

// versionsThrough takes a pod through ADD and DEL of a chain that ends with a faulty plugin, and
// checks the outer and inner versions.
func (n *node) versionsThrough(list *libcni.NetworkConfigList, outer, inner string) {
	n.Helper()
	p := n.pod("a")
	r := p.mustAdd(list)
	if r.Version() != outer {
		n.Errorf("the runtime got a result in %q, not %q", r.Version(), outer)
	}
	if result := p.result(r); len(result.IPs) != 1 || len(result.Interfaces) != 3 {
		n.Errorf("the result is not whole: %v", result)
	}
	p.mustDel(list)
	calls := n.callLog()
	if len(calls) != 2 {
		n.Fatalf("the faulty plugin was called %d times", len(calls))
	}
	prevOnDel, err := version.GreaterThanOrEqualTo(inner, "0.4.0")
	if err != nil {
		n.Fatal(err)
	}
	for _, l := range calls {
		if got := string(l.Stdin["cniVersion"]); got != fmt.Sprintf("%q", inner) {
			n.Errorf("%s: the delegate's version is %s, not %q", l.Command, got, inner)
		}
		var prev struct {
			CNIVersion string
			IPs        []struct{ Version string }
		}
		raw, there := l.Stdin["prevResult"]
		if want := l.Command == "ADD" || prevOnDel; there != want {
			n.Errorf("%s: the delegate has a prevResult: %t, want %t", l.Command, there, want)
		}
		if !there {
			continue
		}
		if err := json.Unmarshal(raw, &prev); err != nil {
			n.Fatal(err)
		}
		if hasFamily := prev.IPs[0].Version != ""; prev.CNIVersion != inner || hasFamily == (inner >= "1.0.0") {
			n.Errorf("%s: the delegate's prevResult is not in %q: %s", l.Command, inner, raw)
		}
	}
	n.nothingLeft()
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
