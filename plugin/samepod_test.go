package plugin

import (
	"fmt"
	"path/filepath"
	"testing"
)

// TestFreedByPod: spiderpool frees what the pod has, whichever of its sandboxes a DEL names. The DEL of
// the pod's old sandbox failed, or passed before unwind was killed or lost the record. Its next sandbox
// lives or is being added, and no DEL of the old one frees its address: not that of a sweep, and not the
// runtime's second one. Once the next one is gone, nothing is pending.
func TestFreedByPod(t *testing.T) {
	stories(t, `
	by-pod; add a; held 1
	either it failed: breaks bridge; fails del a; sandbox a b; add b; works bridge
	or it failed, and the next is being added: breaks bridge; fails del a; sandbox a b
		plan p1 ADD hold; start add b; appears $dir/faulty/held/ADD.b.p1; works bridge
	or unwind was killed: kill undone 2 del a; was-killed; sandbox a b; add b
	or it passed: del a; sandbox a b; add b
	held 1
	either sweep: sweep
	or STATUS: status
	or GC: gc
	or the runtime's second DEL: del a
	held 1; entry b
	if being added: plan; lose $dir/faulty/held/ADD.b.p1; wait add b
	entry b live 2; del b; held 0; sweep; entries 0`, byPod)
}

// TestFreedByPodMeanwhile: a GC runs such a DEL of the old sandbox when the next one is added, and that
// ADD does not release the old one, since it is in a pause. The ADD waits, once its intent is on
// record, for the DEL, which would free its address.
func TestFreedByPodMeanwhile(t *testing.T) {
	stories(t, `
	by-pod; script bridge 'while [ $CNI_COMMAND = DEL ] && [ -e $dir/hold ] && touch $dir/held-up; do sleep 0.01; done;
		[ $CNI_COMMAND = DEL ] && [ -e $dir/broken ] && exit 1; exec $cni/bridge'
	add a; file $dir/broken; fails del a; fails del a; fails del a; fails del a; lose $dir/broken
	file $dir/hold; start gc; appears $dir/held-up
	sandbox a b; start add b; pause 500ms; lose $dir/hold; wait gc; wait add b
	gone a; held 1; del b; held 0`, byPod)
}

// byPod are statements about a stand-in for spiderpool (testdata/standin/spiderpool.go).
var byPod = acts{
	// by-pod: the chain is a bridge with it, and p1
	"by-pod": func(s *story, _ []string) {
		s.vars["holds"] = filepath.Join(s.dir, "held")
		s.mkdir(s.vars["holds"])
		s.link("spiderpool", filepath.Join(s.path[2], "standin"))
		s.chain = []string{fmt.Sprintf(`{"type": "bridge", "bridge": %q, "dir": %q, "ipam": {"type": "spiderpool"}}`, s.bridge, s.vars["holds"]), "p1"}
	},
}
