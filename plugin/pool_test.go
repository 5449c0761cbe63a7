package plugin

import (
	"encoding/json"
	"fmt"
	"maps"
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

// useVarLib makes libcni store its cache below varLib. giveVarLib mounts varLib at /var/lib, so
// unwind finds the cache in the default directory. A test calls giveVarLib on the pod that
// useVarLib returns.
func (n *node) useVarLib() (runtime *pod) {
	n.Helper()
	n.cni = libcni.NewCNIConfigWithCacheDir(n.path, filepath.Join(n.varLib(), "cni"), &nodeExec{node: n})
	n.chain(bridge)
	n.versions("1.1.0", "1.1.0")
	return n.newPod("any")
}

// giveVarLib runs a GC or a STATUS, with varLib mounted at /var/lib for unwind.
func (p *pod) giveVarLib(verb string, changes ...keys) {
	p.Helper()
	g := given{varLib: p.varLib(), keys: keys{}}
	for _, some := range changes {
		maps.Copy(g.keys, some)
	}
	p.give(verb, g)
}

// gcUntilReserved runs GCs without a grace period until this many addresses are reserved. One GC
// may not be enough: while processes start and end, unwind cannot inspect every namespace.
func (p *pod) gcUntilReserved(count int, list keys) {
	p.Helper()
	eventually(p, "as many addresses", func() bool {
		p.giveVarLib("GC", list, keys{"gracePeriod": "0s"})
		return len(p.reserved()) == count
	})
}

// wantAddressesOf checks that exactly these containers have an address.
func (n *node) wantAddressesOf(containers ...string) {
	n.Helper()
	var ids []string
	for _, owner := range n.reserved() {
		id, _, _ := strings.Cut(owner, " ")
		ids = append(ids, id)
	}
	slices.Sort(ids)
	n.wantEqual("owners", ids, containers)
}

// listOther is a list that contains only a container that does not exist.
var listOther = keys{validKey: rawJSON(`[{"containerID":"other","ifname":"eth0"}]`)}

// TestStrays: pods were added before unwind was installed. A GC releases an address only if both
// hold: the list lacks its owner, and no other evidence shows that the owner is alive. libcni's
// cache lacks two of the pods: moved, whose interface exists, and leaked, whose ADD and DEL failed.
func TestStrays(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	runtime := n.useVarLib()
	n.addPast("cached")
	gone, listed, moved := n.addPast("gone"), n.addPast("listed"), n.addPast("moved")
	gone.dropNetNS()
	listed.dropNetNS()
	n.remove(filepath.Join(n.varLib(), "cni", "results", n.network+"-"+moved.ContainerID+"-eth0"))
	n.chain(bridge, p1)
	n.plan(p1.ADD("fail"), p1.DEL("fail"))
	leaked := n.newPod("leaked")
	n.wantError(leaked.tryAddPast())
	leaked.dropNetNS()
	n.chain(bridge)
	list := valid(listed)
	n.wantAddressesOf("cached", "gone", "leaked", "listed", "moved")
	runtime.giveVarLib("GC")
	runtime.giveVarLib("STATUS")
	runtime.giveVarLib("GC", keys{validKey: nil})
	runtime.giveVarLib("STATUS", keys{validKey: nil})
	runtime.giveVarLib("GC", list, keys{"gracePeriod": "1h"})
	n.wantAddressesOf("cached", "gone", "leaked", "listed", "moved")
	runtime.gcUntilReserved(3, list)
	n.wantAddressesOf("cached", "listed", "moved")
	runtime.gcUntilReserved(2, listOther)
	n.wantAddressesOf("cached", "moved")
}

// TestLostJournal: the journal was lost, so no live pod has a record (similar to antrea#8239). A GC
// with a list that lacks these pods releases nothing. Once a pod is dead, a GC releases its
// address, unless the list is empty.
func TestLostJournal(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	runtime := n.useVarLib()
	first, second, third := n.add("p0"), n.add("p1"), n.add("p2")
	n.remove(n.stateDir)
	runtime.giveVarLib("GC", listOther, keys{"gracePeriod": "0s"})
	n.wantAddressesOf("p0", "p1", "p2")
	second.dropNetNS()
	runtime.giveVarLib("GC", valid(), keys{"gracePeriod": "0s"})
	n.wantAddressesOf("p0", "p1", "p2")
	runtime.gcUntilReserved(2, listOther)
	n.wantAddressesOf("p0", "p2")
	first.del()
	third.del()
	n.wantClean()
}

// TestReservedWhileListed: a GC's list of valid attachments lacks a new pod, whose ADD has reserved
// an address, but has not created the interface yet. A cleanup that trusts the list alone would
// release this address (whereabouts#207). unwind's grace period prevents that.
func TestReservedWhileListed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	runtime := n.useVarLib()
	n.chain(p0.with(`"ipam": %s`, n.hostLocal(n.subnet)))
	n.plan(p0.ADD("hold-effect"))
	fresh := n.newPod("new")
	add := fresh.beginAddPast()
	n.awaitHeld("ADD", "new", "p0")
	n.wantAddressesOf("new")
	runtime.giveVarLib("GC", listOther, keys{"gracePeriod": "10m"})
	n.wantAddressesOf("new")
	n.letGo("ADD", "new", "p0")
	add.passes()
}

// TestAddressLeftByDEL: host-device's DEL doesn't call its IPAM plugin if the device disappeared
// with the namespace. flannel's DEL doesn't if a power loss emptied the file that flannel's ADD
// wrote (flannel#1662). Both DELs succeed, so unwind itself must release the address, even though
// flannel's configuration does not name its IPAM plugin.
func TestAddressLeftByDEL(t *testing.T) {
	plugins := oneOf("device", "flannel")
	each2(t, oneOf("plain", "wrapped"), plugins, func(t *testing.T, by, plugin choice) {
		n := newNode(t)
		if plugin.is("device") {
			n.shell("ip link add d%[1]s type veth peer name e%[1]s", n.bridge)
			n.chain(object(`{"type": "host-device", "device": "d%s", "ipam": %s}`, n.bridge, n.hostLocal(n.subnet)))
		} else {
			n.script("flannel", `[ $CNI_COMMAND = DEL ] ||
				sed "s/\"flannel\"/\"bridge\"/; s/\"ipam\": *{/&\"type\":\"host-local\",/" | exec `+
				filepath.Join(n.path[1], "bridge"))
			n.chain(object(`{"type": "flannel", "bridge": %q, "ipam": {"subnet": %q, "dataDir": %q}}`,
				n.bridge, n.subnet, n.dataDir()))
		}
		a := n.newPod("a")
		add, del := a.add, a.del
		if by.is("plain") {
			add, del = a.addPast, a.delPast
		}
		add()
		a.dropNetNS()
		a.NetNS = ""
		del()
		if by.is("plain") {
			n.wantReserved(1)
			return
		}
		n.wantReserved(0)
		n.wantClean()
	})
}

// TestOrphanRuns: a container's process runs, but nothing else shows the container: no list, no
// entry in libcni's cache, and no interface. KubeVirt's bridge binding causes this while the
// runtime starts. unwind keeps the container's address until the process ends.
func TestOrphanRuns(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.conf["gracePeriod"] = "1ms"
	n.chain(bridge)
	n.reserve(n.ip(7), "orphan", "eth0")
	time.Sleep(10 * time.Millisecond)
	end := n.runInCgroup("orphan")
	n.gc(listOther)
	n.wantReserved(1)
	end()
	eventually(n, "no address", func() bool { // while processes start and end, one GC may not suffice
		n.gc(listOther)
		return len(n.reserved()) == 0
	})
	n.wantClean()
}

// runInCgroup starts a process in a container's cgroup.
func (n *node) runInCgroup(container string) (end func()) {
	n.Helper()
	root := "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
		root = filepath.Join(root, "systemd") // cgroup v1
	}
	process := exec.Command("sleep", "600")
	must(n, process.Start())
	pid := []byte(fmt.Sprint(process.Process.Pid))
	dir := filepath.Join(root, container)
	move := func() error { return os.WriteFile(filepath.Join(dir, "cgroup.procs"), pid, 0) }
	if os.Mkdir(dir, 0o755) != nil || move() != nil {
		n.Skip("no cgroup can be made")
	}
	end = func() {
		_ = process.Process.Kill()
		_ = process.Wait()
		_ = os.Remove(dir)
	}
	n.Cleanup(end)
	return end
}

// holders records which container holds each address, according to the ADDs' results.
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

// gives checks that a container still has its address. It is called before the container's DEL.
func (h *holders) gives(address, id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	data, err := os.ReadFile(filepath.Join(h.dataDir(), h.network, address))
	if owner, _, _ := strings.Cut(string(data), "\r\n"); owner != id || err != nil {
		h.Errorf("%s of %s is %q's (%v)", address, id, owner, err)
	}
	delete(h.by, address)
}

// hostLocal runs host-local directly, as a chain without unwind would.
func (h *holders) hostLocal(verb, id string) (address string) {
	cmd := exec.Command(filepath.Join(toolsDir(h), "cni", "host-local"))
	cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=" + id, "CNI_NETNS=/none", "CNI_IFNAME=eth0", "CNI_PATH=/none"}
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "ipam": %s}`, h.network, h.node.hostLocal(h.subnet)))
	out, err := cmd.Output()
	if err != nil {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.refused++ // the pool may be full
		return ""
	}
	var result struct{ IPs []struct{ Address string } }
	if verb == "ADD" && json.Unmarshal(out, &result) == nil && len(result.IPs) == 1 {
		address, _, _ = strings.Cut(result.IPs[0].Address, "/")
	}
	return address
}

// TestPoolRace uses one small pool for ten containers that call host-local directly and for two
// pods that go through unwind. At the same time, it simulates crashes of host-local and runs GCs.
// No address may be lost or assigned twice, and no empty file may remain.
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

// crash creates an empty file for an address, like the file that host-local leaves if it dies
// before it writes the owner. Meanwhile, crash holds the pool's lock, as host-local does.
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
