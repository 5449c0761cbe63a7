package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/undo"
)

// wantConfirmation checks that the DEL of the pod's one pending step passed, proves nothing, and
// runs once more after a grace period that has just begun.
func (p *pod) wantConfirmation(grace time.Duration) {
	p.Helper()
	e := p.entry()
	if e == nil || e.Pending() != 1 {
		p.Fatalf("the journal has %+v, want one step", e)
	}
	s := e.Newest().Steps[0]
	in := time.Duration(s.ConfirmAt - journal.BootNanos())
	if in > grace || in < grace-time.Minute || s.LastError != "" {
		p.Errorf("the DEL runs again in %s, want %s; %q", in, grace, s.LastError)
	}
	if s.ADD != journal.AddCutOff && s.RepeatAt != 0 {
		p.Error("it counts as killed")
	}
}

// TestConfirmationIsNoKill: aws-cni's DEL passed, proves nothing and waits for the one once more. No
// DEL of the attachment has less time for that.
func TestConfirmationIsNoKill(t *testing.T) {
	t.Parallel()
	a := newAWS(t)
	a.conf["gracePeriod"] = "1h"
	list := a.unwind(a.plugin(), a.faulty("p1", ""))
	p := a.pod("a")
	p.mustAdd(list)
	a.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
	if err := p.del(list); err == nil {
		t.Fatal("the DEL passed")
	}
	if s := p.entry().Newest().Steps[0]; s.ConfirmAt == 0 || s.RepeatAt != 0 {
		t.Fatalf("%+v", s)
	}
}

// TestFailedADDLies: the ADD of a plugin fails after it has written the address, and its DEL passes
// and frees nothing, since the API is away for both. The DEL runs once more after the grace period.
//
// The script does what whereabouts 0.9.4 does (pkg/storage/kubernetes/ipam.go,
// IPManagementKubernetesUpdate): the ADD writes the IPPool (pool.Update, line 688), then the
// reservation across pools (UpdateOverlappingRangeAllocation, line 701), and returns an error of the
// second write without taking back the first. cmdDel drops every error (cmd/whereabouts.go, line
// 113). spiderpool 1.2.2 returns the error of any other check after its agent gave the address
// (cmd/spiderpool/cmd/command_add.go, CmdAdd), and aws-cni 1.23.2 that of its network policies
// (cmd/routed-eni-cni-plugin/cni.go, add: "kubelet will send delete").
func TestFailedADDLies(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"whereabouts", "spiderpool", "aws-cni"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["gracePeriod"] = "1h"
			n.conf["stores"] = map[string]string{"aws-cni": filepath.Join(n.dir, "none", "ipam.json")}
			n.script(name, `cat >/dev/null; cd "${0%/*}"
				[ "$CNI_COMMAND" != ADD ] || touch held.$CNI_CONTAINERID
				if [ -e away ]; then [ "$CNI_COMMAND" = DEL ] || { echo '{"code": 11, "msg": "no API"}'; exit 1; }; exit 0; fi
				[ "$CNI_COMMAND" != DEL ] || rm -f held.$CNI_CONTAINERID
				[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0", "ips": [{"address": "192.0.2.9/32"}]}'`)
			delegate := n.faulty("p0", fmt.Sprintf(`, "ipam": {"type": %q}`, name))
			if name == "aws-cni" {
				delegate = `{"type": "aws-cni"}`
			}
			list := n.unwind(delegate, n.faulty("p1", ""))
			away, held := filepath.Join(n.path[0], "away"), filepath.Join(n.path[0], "held.a")
			n.write(away, "")
			p := n.pod("a")
			if _, err := p.add(list); err == nil {
				t.Fatal("the ADD passed")
			}
			if _, err := os.Stat(held); err != nil {
				t.Fatalf("nothing is held, so that the test shows nothing: %v", err)
			}
			p.wantConfirmation(time.Hour)
			p.mustDel(list) // the runtime's, which frees nothing either
			if err := os.Remove(away); err != nil {
				t.Fatal(err)
			}
			n.sweep(undo.DefaultBudgets)
			p.wantConfirmation(time.Hour)
			p.edit(func(g *journal.Generation) { g.Steps[0].ConfirmAt = 1 })
			n.sweep(undo.DefaultBudgets)
			if _, err := os.Stat(held); err == nil || p.entry() != nil {
				t.Errorf("the address is held: %t; %+v", err == nil, p.entry())
			}
		})
	}
}
