package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// providers are statements about the stand-in for a provider's plugin (testdata/standin), which keeps
// a file for each attachment whose address it holds.
func providers() acts {
	return acts{
		// provider TYPE [KEYS]: the chain is this plugin. Where it is not installed, a DEL fails.
		"provider": func(s *story, w []string) {
			s.vars["provider"], s.vars["holds"] = w[0], filepath.Join(s.dir, "held")
			s.mkdir(s.vars["holds"])
			s.chain = []string{fmt.Sprintf(`{"type": %q, "dir": %q%s}`, w[0], s.vars["holds"], strings.Join(w[1:], " "))}
			s.link(w[0], filepath.Join(s.path[2], "standin"))
		},
		"before":    func(s *story, w []string) { s.chain = append(s.chain, strings.Join(w, " ")) }, // before PLUGIN: the next in the chain
		"uninstall": func(s *story, _ []string) { s.must(os.Remove(filepath.Join(s.path[0], s.vars["provider"]))) },
		"install":   func(s *story, _ []string) { s.link(s.vars["provider"], filepath.Join(s.path[2], "standin")) },
		"occupy": func(s *story, w []string) { // occupy POD: another's eth0 is in its namespace; the other end is elsewhere
			run(s, "nsenter", "--net="+s.who(w[0]).NetNS, "ip", "link", "add", "eth0", "type", "veth",
				"peer", "name", "far0", "netns", s.netns("far"))
		},
		"occupied": func(s *story, w []string) {
			s.want(slices.Contains(s.links(s.who(w[0]).NetNS), "eth0"), "another's interface is gone")
		},
	}
}

// TestShownToProviders: where the plain chain's DEL frees what a provider's plugin holds, so does
// unwind's, although the container's network namespace is gone or must not be shown. It also frees
// where the plain chain's DEL fails or frees nothing: terway and ovn-kubernetes need a namespace to
// look into.
func TestShownToProviders(t *testing.T) {
	stories(t, `
	one-in 2
	let how passes; let left 0
	either plain: let past past; let occupied leaves
	or unwind: let past; let occupied occupied a
	either terway: provider terway
	or kube-ovn: provider kube-ovn
	or sriov: provider sriov
	or ovn: provider ovn-k8s-cni-overlay
	either gone, and the runtime names it: $past add a; drop a
	or gone after a DEL that failed: $past add a; uninstall; fails $past del a; drop a; install
	or with an interface of another before an ADD that fails: before p1, "modes": {"ADD": "fail"}; occupy a; fails $past add a
	or with the interface of an earlier ADD: $past add a; uninstall; fails $past del a; install; occupy a; $past add a
	if plain, terway, gone: let how fails; let left 1
	if plain, ovn, gone: let how fails; let left 1
	$how $past del a; held $left
	if interface of another: $occupied
	if plain: leaves`, providers())
}

// TestWaitsForRuntime: a DEL that does nothing without a path waits for the runtime, which names one, until
// the grace period is over. After that it is over, and the provider cleans up.
func TestWaitsForRuntime(t *testing.T) {
	stories(t, `
	provider kube-ovn; before p1
	either the runtime asks: conf gracePeriod 1h
	or the grace period is over: conf gracePeriod 10ms
	add a; plan p1 DEL fail; uninstall; fails del a; drop a; install; pause 20ms; plan; sweep; held 1
	if the runtime asks: pending a kube-ovn; del a; held 0
	if the grace period: tombstone a; del a; held 1; leaves`, providers())
}

// TestNextPodAtSamePath: a sweep runs A's DELs. Meanwhile the runtime removes A's network namespace, and
// makes pod B at the same path. The DEL of bridge still runs in A's namespace, so A's interface goes
// and B's stays; that of p0, which may take its path for a name, is shown none.
func TestNextPodAtSamePath(t *testing.T) {
	stories(t, `
	chain bridge | p0 | p2; let held $dir/faulty/held/DEL.a.p2
	kill added 1 add a; was-killed; ports 1
	plan p2 DEL hold
	each by sweep status gc ADD
	unless ADD: start $by
	if ADD: sandbox a c; start add c
	appears $held; unpin a; takes b a; add b; remember b; ports 2
	plan; lose $held
	unless ADD: wait $by
	if ADD: wait add c; del c
	gone a; pathless DEL a p0; ports 1; reserved 1; unchanged b; pings b
	del b`, acts{
		"ports": func(s *story, w []string) { s.wantCount(len(s.node.ports()), w[0]) },
		"pathless": func(s *story, w []string) {
			i := slices.IndexFunc(s.callLog(), func(l logged) bool { return l.Command == w[0] && l.ContainerID == w[1] && l.Instance == w[2] })
			s.want(i >= 0 && s.callLog()[i].NetNS == "", "shown %q", s.callLog()[max(0, i)].NetNS)
		},
	})
}
