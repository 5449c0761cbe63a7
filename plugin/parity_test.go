package plugin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// TestResultsAreLibcnis runs a chain with libcni alone and through unwind, for many plugin outputs
// in every CNI version. Each verb must succeed both ways or fail both ways. Each plugin must get
// the same stdin, and the runtime the same result. The test does not compare the DELs after a
// failed ADD, because without unwind they get no prevResult.
func TestResultsAreLibcnis(t *testing.T) {
	t.Parallel()
	for i, v := range version.All.SupportedVersions() {
		t.Run(v, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.outer, n.inner = v, v
			p := n.pod("a")
			for j, tt := range plugintest.Printed {
				if !sandbox.Sampled(sandbox.Rounds(14, 7, 1), i, j) {
					continue
				}
				t.Run(tt.Name, func(t *testing.T) {
					printed := fmt.Sprintf(`, "result": %s`, netconf.Marshal(plugintest.InVersion(tt.Text, v)))
					chain := []string{n.faulty("p0", printed), n.faulty("p1", printed)}
					want, got := p.life(n.plain(chain...)), p.life(n.unwind(chain...))
					if diff := cmp.Diff(want, got); diff != "" {
						t.Errorf("(-plain +unwind):\n%s", diff)
					}
					n.nothingLeft()
				})
			}
		})
	}
}

// lived is the outcome of a pod's ADD, CHECK and DEL.
type lived struct {
	Added, Checked, Deleted bool
	Result                  any // of the ADD, as the runtime gets it
	Calls                   []heard
}

// heard is one call of a plugin.
type heard struct {
	Verb, Instance string
	Stdin          any
}

// life adds, checks and deletes the pod.
func (p *pod) life(list *libcni.NetworkConfigList) (l lived) {
	p.Helper()
	p.forgetCalls()
	r, err := p.addWith(list)
	if l.Added = err == nil; l.Added {
		l.Result = valueOf(p, netconf.Marshal(r))
		l.Checked = p.checkWith(list) == nil
	} else {
		l.Calls = p.heard() // before the runtime's DEL
		l.Calls = slices.DeleteFunc(l.Calls, func(h heard) bool { return h.Verb == "DEL" })
	}
	l.Deleted = p.delWith(list) == nil
	if l.Added {
		l.Calls = p.heard()
	}
	return l
}

// heard returns the calls of the faulty plugins.
func (n *node) heard() (all []heard) {
	n.Helper()
	for _, c := range n.callLog() {
		all = append(all, heard{c.Command, c.Instance, valueOf(n, netconf.Marshal(c.Stdin))})
	}
	return all
}

// valueOf decodes JSON, and keeps each number as it is written.
func valueOf(t testing.TB, data json.RawMessage) (v any) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%v in %s", err, data)
	}
	return v
}
