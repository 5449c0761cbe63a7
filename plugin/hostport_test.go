package plugin

import (
	"net/netip"
	"strings"
	"testing"

	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/tristate"
)

// hostPorts are statements about the rules of host ports.
var hostPorts = acts{
	// forwards ADDRESS yes|no
	"forwards": func(s *story, w []string) {
		is, err := facts.ForwardsTo(s.Context(), netip.MustParseAddr(w[0]))
		s.want(err == nil && (is == tristate.Yes) == (w[1] == "yes"), "%v, %v", is, err)
	},
	// flush ADDRESS: the chain of its host port is empty
	"flush": func(s *story, w []string) {
		for _, rule := range s.node.rules("-A CNI-DN-") {
			if strings.Contains(rule, " "+w[0]+":") {
				run(s, "iptables", "-w", "-t", "nat", "-F", strings.Fields(rule)[1])
			}
		}
	},
}

// TestHostPortKeepsAddress: portmap's DEL fails, and its rule forwards to the pod's address. The address
// stays with the pod until the rule is gone, in the runtime's DEL and in a sweep. Then nothing keeps it,
// although the DEL still fails.
func TestHostPortKeepsAddress(t *testing.T) {
	stories(t, `
	chain bridge | portmap
	add a; let first $a; breaks portmap
	either by a DEL: fails del a 'portmap (code 999)'
	or by a sweep: drop a; status
	forwards $first yes; reserved 1
	either the rule goes: flush $first; forwards $first no; sweep; reserved 0
	or portmap works again:
	works portmap; sweep; forwards $first no; gone a`, hostPorts)
}

// TestPortmapPassesWithoutEffect: portmap's DEL cannot use iptables. It exits with 0, since it can use
// ip6tables, and its rule still forwards to the pod's address. That DEL counts as one that failed: the
// next sweep runs it again, and then frees the address, which would stay for good with a DEL that is done.
func TestPortmapPassesWithoutEffect(t *testing.T) {
	stories(t, `
	shell 'mkdir $dir/six; ln -s $(command -v ip6tables) $dir/six'
	script portmap 'if [ $CNI_COMMAND = DEL ] && [ -e $dir/blind ]; then PATH=$dir/six; fi; exec $cni/portmap'
	chain bridge | portmap
	add a; let first $a; file $dir/blind
	either by a DEL: del a
	or by a sweep: drop a; status
	forwards $first yes; reserved 1; pending a bridge portmap
	if DEL: logged 'exit code 0, but a host port of this node still forwards to $first'
	if sweep: warned 'exit code 0, but a host port of this node still forwards to $first'
	lose $dir/blind; sweep; forwards $first no; reserved 0; gone a`, hostPorts)
}
