package plugin

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
)

// orphanage are statements on a node with pods that were added before unwind was installed, or are
// unknown to its journal. Its libcni has its cache where every runtime has it, below $lib; $any are the
// words of "give gc" there.
var orphanage = acts{
	"orphanage": func(s *story, _ []string) {
		s.vars["lib"] = filepath.Join(s.dir, "varlib")
		s.vars["any"] = "any varLib=" + s.vars["lib"]
		s.cni = libcni.NewCNIConfigWithCacheDir(s.path, filepath.Join(s.vars["lib"], "cni"), &nodeExec{node: s.node})
		s.chain, s.outer, s.inner = []string{"bridge"}, "1.1.0", "1.1.0"
	},
	// gcs N [KEY=JSON …]: GCs after the grace period, until N addresses are reserved. While processes come
	// and go, not every namespace can be examined each time.
	"gcs": func(s *story, w []string) {
		eventually(s, "as many addresses", func() bool {
			s.passes(append([]string{"give", "gc", "any", "varLib=" + s.vars["lib"], "gracePeriod=0s"}, w[1:]...))
			return fmt.Sprint(len(s.reserved())) == w[0]
		})
	},
	// have CONTAINERS: just these have an address
	"have": func(s *story, w []string) {
		var ids []string
		for _, owner := range s.reserved() {
			id, _, _ := strings.Cut(owner, " ")
			ids = append(ids, id)
		}
		slices.Sort(ids)
		s.want(slices.Equal(ids, w), "%v have an address", ids)
	},
}

// TestOrphans: there are pods of every kind from before the install. Only reservations that nobody
// has and no evidence supports go. The cache has lost one whose interface is there; it never had the one
// whose ADD and DEL failed.
func TestOrphans(t *testing.T) {
	stories(t, `
	orphanage; past add cached gone listed moved; drop gone listed; lose $lib/cni/results/$network-moved-eth0
	chain bridge | p1; plan p1 ADD fail, p1 DEL fail; fails past add leaked; drop leaked; chain bridge
	let list 'valid=[{"containerID":"listed","ifname":"eth0"}]'
	have cached gone leaked listed moved
	give gc $any; give status $any; give gc $any valid=; give status $any valid=; give gc $any $list gracePeriod=1h
	have cached gone leaked listed moved
	gcs 3 $list; have cached listed moved
	gcs 2 'valid=[{"containerID":"other","ifname":"eth0"}]'; have cached moved; leaves`, orphanage)
}

// TestLostJournal: after the journal was lost, every live pod is an orphan (antrea#8239 is of this
// kind). With a list that lacks them unwind takes nothing. Once they are gone, unwind releases them, but
// not by an empty list.
func TestLostJournal(t *testing.T) {
	stories(t, `
	orphanage; add p0 p1 p2; lose $state; let list 'valid=[{"containerID":"other","ifname":"eth0"}]'
	give gc $any $list gracePeriod=0s; have p0 p1 p2
	drop p1; give gc $any valid=[] gracePeriod=0s; have p0 p1 p2
	gcs 2 $list; have p0 p2
	del p0 p2`, orphanage)
}

// TestReservedWhileListed: an ADD reserves its address after a list was read, and has made no interface
// yet. A reaper that goes by the list takes the address from the new pod (whereabouts#162); unwind's
// grace period keeps it.
func TestReservedWhileListed(t *testing.T) {
	stories(t, `
	orphanage; chain p0, "ipam": $hostlocal; plan p0 ADD hold-effect; start past add new; appears $dir/faulty/held/ADD.new.p0
	have new; give gc $any 'valid=[{"containerID":"other","ifname":"eth0"}]' gracePeriod=10m; have new
	lose $dir/faulty/held/ADD.new.p0; wait add new; leaves`, orphanage)
}

// TestAddressLeftByDEL: host-device does not call its IPAM plugin if its device went with the
// namespace. Its success proves nothing.
func TestAddressLeftByDEL(t *testing.T) {
	stories(t, `
	either plain: let past past; let left 1; leaves
	or wrapped: let past; let left 0
	shell 'ip link add d$bridge type veth peer name e$bridge'
	chain {"type": "host-device", "device": "d$bridge", "ipam": $hostlocal}
	$past add a; drop a; names a; $past del a; reserved $left`)
}

// TestOrphanRuns: neither a list nor libcni's cache nor an interface has anything of a container, as
// with KubeVirt's bridge binding while the runtime starts, but a process of it runs.
func TestOrphanRuns(t *testing.T) {
	stories(t, `
	conf gracePeriod 1ms; chain bridge; reserve $ip7 orphan eth0; pause 10ms
	runs orphan; gc list other; reserved 1
	ends; gc list other; reserved 0`, acts{"runs": func(s *story, w []string) {
		root := "/sys/fs/cgroup"
		if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
			root = filepath.Join(root, "systemd") // cgroup v1
		}
		process := exec.Command("sleep", "600")
		s.must(process.Start())
		move := func(dir string) error {
			return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(fmt.Sprint(process.Process.Pid)), 0)
		}
		dir := filepath.Join(root, w[0])
		if os.Mkdir(dir, 0o755) != nil || move(dir) != nil {
			s.Skip("no cgroup can be made")
		}
		end := func() {
			_ = process.Process.Kill()
			_ = process.Wait()
			_ = os.Remove(dir)
		}
		s.Cleanup(end)
		s.undo["ends"] = end
	}, "ends": func(s *story, _ []string) { s.undo["ends"]() }})
}
