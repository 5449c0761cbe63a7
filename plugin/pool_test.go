package plugin

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/disk"

	"cni-unwind/plugin/netconf"
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
// yet. A reaper that goes by the list takes the address from the new pod (whereabouts#207); unwind's
// grace period keeps it.
func TestReservedWhileListed(t *testing.T) {
	stories(t, `
	orphanage; chain p0, "ipam": $hostlocal; plan p0 ADD hold-effect; start past add new; appears $dir/faulty/held/ADD.new.p0
	have new; give gc $any 'valid=[{"containerID":"other","ifname":"eth0"}]' gracePeriod=10m; have new
	lose $dir/faulty/held/ADD.new.p0; wait add new; leaves`, orphanage)
}

// TestAddressLeftByDEL: host-device does not call its IPAM plugin if its device went with the
// namespace, and flannel does not if a power loss emptied its file of the ADD (flannel#1662). Their
// success proves nothing. flannel's entry does not name its IPAM plugin.
func TestAddressLeftByDEL(t *testing.T) {
	stories(t, `
	either plain: let past past; let left 1; leaves
	or wrapped: let past; let left 0
	either device: shell 'ip link add d$bridge type veth peer name e$bridge'
		chain {"type": "host-device", "device": "d$bridge", "ipam": $hostlocal}
	or flannel: script flannel '[ $CNI_COMMAND = DEL ] || sed "s/\"flannel\"/\"bridge\"/; s/\"ipam\": *{/&\"type\":\"host-local\",/" | exec $cni/bridge'
		chain {"type": "flannel", "bridge": "$bridge", "ipam": {"subnet": "$subnet", "dataDir": "$data"}}
	$past add a; drop a; names a; $past del a; reserved $left`)
}

// TestOrphanRuns: neither a list nor libcni's cache nor an interface has anything of a container, as
// with KubeVirt's bridge binding while the runtime starts, but a process of it runs.
func TestOrphanRuns(t *testing.T) {
	stories(t, `
	conf gracePeriod 1ms; chain bridge; reserve $ip7 orphan eth0; pause 10ms
	runs orphan; gc list other; reserved 1
	ends; frees 0`, acts{"frees": func(s *story, w []string) { // while processes come and go, a GC may not see all
		eventually(s, "as many addresses", func() bool {
			s.verb("gc")(s, []string{"list", "other"})
			return fmt.Sprint(len(s.reserved())) == w[0]
		})
	}, "runs": func(s *story, w []string) {
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

// holders records the holder of each address, by the results of the ADDs.
type holders struct {
	*node
	mu      sync.Mutex
	by      map[string]string
	adds    int
	refused int
}

func (h *holders) got(address, id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if other := h.by[address]; other != "" {
		h.Errorf("%s was given to %s, and %s has it", address, id, other)
	}
	h.by[address] = id
	h.adds++
}

// gives checks that the address still belongs to its holder, which is about to release it.
func (h *holders) gives(address, id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	data, err := os.ReadFile(filepath.Join(h.dataDir(), h.network, address))
	if owner, _, _ := strings.Cut(string(data), "\r\n"); owner != id || err != nil {
		h.Errorf("%s of %s is %q's (%v)", address, id, owner, err)
	}
	delete(h.by, address)
}

// hostLocal runs the IPAM plugin itself, as a runtime without unwind would.
func (h *holders) hostLocal(verb, id string) (address string) {
	cmd := exec.Command(filepath.Join(toolsDir(h), "cni", "host-local"))
	cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_NETNS=/none", "CNI_IFNAME=eth0", "CNI_PATH=/none"}
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "ipam": %s}`, h.network, h.node.hostLocal(h.subnet)))
	out, err := cmd.Output()
	if err != nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.refused++ // the pool is small
		return ""
	}
	var result struct{ IPs []struct{ Address string } }
	if verb == "ADD" && json.Unmarshal(out, &result) == nil && len(result.IPs) == 1 {
		address, _, _ = strings.Cut(result.IPs[0].Address, "/")
	}
	return address
}

// TestPoolRace runs ten host-locals, two unwinds, which sweep as well, and crashes of host-local on
// one small pool at once. No address is lost or given twice, and no empty one is kept.
func TestPoolRace(t *testing.T) {
	t.Parallel()
	const rounds = 12
	n := newNode(t)
	n.subnet = strings.Replace(n.subnet, ".0/24", ".0/28", 1)
	h := &holders{node: n, by: map[string]string{}}
	list := n.unwind(n.bridgePlugin(""))
	var valid []netconf.Attachment
	var all, sweeps sync.WaitGroup
	for i := range 10 {
		id := fmt.Sprintf("h%d", i)
		valid = append(valid, netconf.Attachment{ContainerID: id, IfName: "eth0"})
		all.Go(func() {
			for range rounds {
				if address := h.hostLocal("ADD", id); address != "" {
					h.got(address, id)
					time.Sleep(10 * time.Millisecond)
					h.gives(address, id)
				}
				h.hostLocal("DEL", id)
			}
		})
	}
	for i := range 2 {
		p := n.pod(fmt.Sprintf("u%d", i))
		valid = append(valid, netconf.Attachment{ContainerID: p.ContainerID, IfName: "eth0"})
		all.Go(func() {
			for range rounds / 3 {
				if r, err := p.addWith(list); err == nil {
					a := address(t, r)
					h.got(a, p.ContainerID)
					h.gives(a, p.ContainerID)
				}
				if err := p.delWith(list); err != nil {
					t.Error(err)
				}
			}
		})
	}
	gc := func() {
		if out := n.ask("GC", keys{"gracePeriod": "0s", validKey: valid}, n.bridgePlugin("")); out.code != 0 {
			t.Errorf("GC: %s", out.stdout)
		}
	}
	stop := make(chan struct{})
	sweeps.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				h.crash()
				gc()
			}
		}
	})
	all.Wait()
	close(stop)
	sweeps.Wait()
	gc()
	if h.adds < rounds {
		t.Errorf("%d ADDs, too few to show anything (%d refused)", h.adds, h.refused)
	}
	n.nothingLeft()
}

// crash leaves what host-local leaves when it dies before it has written an owner. It works under
// host-local's lock, as host-local does.
func (h *holders) crash() {
	pool := filepath.Join(h.dataDir(), h.network)
	if _, err := os.Stat(pool); err != nil {
		return
	}
	lock, err := disk.NewFileLock(pool)
	must(h, err)
	defer lock.Close()
	must(h, lock.Lock())
	for last := 2; last < 15; last++ {
		name := strings.Replace(h.subnet, ".0/28", fmt.Sprintf(".%d", last), 1)
		f, err := os.OpenFile(filepath.Join(pool, name), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err == nil {
			_ = f.Close()
			return
		}
	}
}
