package plugin

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"cni-unwind/journal"
)

// wantConfirmation checks that the DEL of the pod's one pending step passed, proves nothing, and
// runs once more after a grace period that has just begun.
func (p *pod) wantConfirmation(grace time.Duration) {
	p.Helper()
	e := p.entry()
	if e == nil || len(e.Steps) != 1 {
		p.Fatalf("the journal has %+v, want one step", e)
	}
	s := e.Steps[0]
	in := time.Duration(s.Again - journal.BootNanos())
	if in > grace || in < grace-time.Minute || s.Last != "" {
		p.Errorf("the DEL runs again in %s, want %s; %q", in, grace, s.Last)
	}
	if s.Wait.For != journal.ForRepeat || s.ADD == journal.AddKilled {
		p.Error("it counts as killed")
	}
}

// TestFailedADDLies: the ADD of a plugin fails after it has written the address, and its DEL passes
// and frees nothing, since the API is away for both. The DEL runs once more after the grace period.
//
// The script does what whereabouts 0.9.4 does (pkg/storage/kubernetes/ipam.go, IPManagementKubernetesUpdate):
// the ADD writes the IPPool, then the reservation across pools, and returns an error of the second write
// without taking back the first; cmdDel drops every error. aws-cni 1.23.2 fails an ADD likewise
// (cmd/routed-eni-cni-plugin/cni.go, add: "kubelet will send delete").
func TestFailedADDLies(t *testing.T) {
	stories(t, `
	each plugin whereabouts aws-cni
	conf gracePeriod 1h; liar $plugin; fails add a
	appears $held; confirms a
	# the runtime's DEL, which frees nothing either
	del a; lose $away; sweep; confirms a
	ripe a; sweep; gone a; absent $held
	leaves`, whereabouts(), acts{"liar": func(s *story, w []string) {
		s.conf["stores"] = map[string]string{"aws-cni": filepath.Join(s.dir, "none", "ipam.json")}
		s.node.script(w[0], `cat >/dev/null; cd "${0%/*}"
			[ "$CNI_COMMAND" != ADD ] || touch held.$CNI_CONTAINERID
			if [ -e away ]; then [ "$CNI_COMMAND" = DEL ] || { echo '{"code": 11, "msg": "no API"}'; exit 1; }; exit 0; fi
			[ "$CNI_COMMAND" != DEL ] || rm -f held.$CNI_CONTAINERID
			[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0", "ips": [{"address": "198.18.0.8/32"}]}'`)
		s.chain = []string{fmt.Sprintf(`p0, "ipam": {"type": %q}`, w[0]), "p1"}
		if w[0] == "aws-cni" {
			s.chain[0] = `{"type": "aws-cni"}`
		}
		s.vars["held"] = filepath.Join(s.path[0], "held.a")
		s.vars["away"] = filepath.Join(s.path[0], "away")
		s.write(s.vars["away"], "")
	}})
}
