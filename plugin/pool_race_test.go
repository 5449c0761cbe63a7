package plugin

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/disk"

	"cni-unwind/plugin/netconf"
)

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
				if r, err := p.add(list); err == nil {
					a := address(t, r)
					h.got(a, p.ContainerID)
					h.gives(a, p.ContainerID)
				}
				if err := p.del(list); err != nil {
					t.Error(err)
				}
			}
		})
	}
	gc := func() {
		if out := n.ask("GC", "1.0.0", keys{"gracePeriod": "0s", validKey: valid}, n.bridgePlugin("")); out.code != 0 {
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

// TestLateDELsOfOneAddress: three dead pods have a pending DEL of p1 with the same address, which is
// free. Only one of these DELs can hold the address at a time; the GCs that follow run them all.
func TestLateDELsOfOneAddress(t *testing.T) {
	stories(t, `
	chain single | p1, "rules": true, "delayMS": 300; plan p1 DEL fail
	add a; fails del a; add b; fails del b; add c; fails del c; reserved 0; entries 3
	plan p1 DEL late; until 0 tries gc`)
}
