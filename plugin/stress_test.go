package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"golang.org/x/sys/unix"

	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/unwind/env"
)

const (
	// seedEnv makes the stress test and the model run again with the seed that they printed.
	seedEnv = "UNWIND_TEST_SEED"
	// stressEnv is the duration of the stress test, such as 5m.
	stressEnv = "UNWIND_TEST_STRESS"
)

// stress is a node on which everything happens at once.
type stress struct {
	*node
	list  *libcni.NetworkConfigList
	chain []string
	mu    sync.Mutex
	live  []*resident // the ADD succeeded, nobody asked for the DEL
	stale []*resident // some earlier list
	next  atomic.Int64
	count struct{ adds, failed, dels, forgotten, kills, sweeps, pings atomic.Int64 }
}

// TestStress runs ADD, DEL, GC with lists that are right, wrong, late, empty and null, STATUS, and
// kills, all at once over real plugins, one of which fails. Repeatedly, when all is quiet, every
// live container can be reached, has its rules and an address that no other has; and one sweep
// leaves nothing of the dead ones.
func TestStress(t *testing.T) {
	t.Parallel()
	seed := seedOf(t)
	left := 10 * time.Second
	if d, err := time.ParseDuration(os.Getenv(stressEnv)); err == nil {
		left = d
	}
	s := newStress(t)
	end := time.Now().Add(left)
	for round := uint64(0); round == 0 || time.Now().Before(end) && !t.Failed(); round++ {
		s.round(seed+round, 5*time.Second)
		s.quiet()
	}
	for _, p := range s.live {
		p.end()
		p.mustDel(s.list)
	}
	s.nothingLeft()
	c := &s.count
	t.Logf("%d ADDs (%d failed), %d DELs, %d forgotten, %d kills, %d GCs and STATUSes, %d pings",
		c.adds.Load(), c.failed.Load(), c.dels.Load(), c.forgotten.Load(), c.kills.Load(), c.sweeps.Load(), c.pings.Load())
}

// seedOf returns the seed of a random test: that of seedEnv, or another each time.
func seedOf(t *testing.T) uint64 {
	seed, err := strconv.ParseUint(os.Getenv(seedEnv), 10, 64)
	if err != nil {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("%s=%d", seedEnv, seed)
	return seed
}

func newStress(t *testing.T) *stress {
	s := &stress{node: newNode(t)}
	s.outer, s.inner = "1.1.0", "1.0.0"
	s.chain = []string{s.bridgePlugin(`, "ipMasq": true`), `{"type": "firewall"}`,
		`{"type": "portmap", "capabilities": {"portMappings": true}}`, s.faulty("p3", "")}
	s.list = s.unwind(s.chain...)
	return s
}

// round runs some workers for a while.
func (s *stress) round(seed uint64, length time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), length)
	defer cancel()
	var workers sync.WaitGroup
	work := func(n uint64, do func(*rand.Rand)) {
		r := rand.New(rand.NewPCG(seed, n))
		workers.Go(func() {
			for ctx.Err() == nil {
				do(r)
			}
		})
	}
	for n := range uint64(3) {
		work(n, s.pods)
	}
	work(10, s.sweep)
	work(11, func(r *rand.Rand) {
		modes := []string{"fail", "fail-effect", "crash", "ok", "ok", "ok", "ok", "ok", "ok"}
		s.plan(map[string]map[string]string{"p3": {"ADD": modes[r.IntN(9)], "DEL": modes[r.IntN(9)]}})
		time.Sleep(time.Duration(r.IntN(200)) * time.Millisecond)
	})
	workers.Wait()
	s.plan(nil)
}

// pods adds a pod, or ends one in one of the usual ways.
func (s *stress) pods(r *rand.Rand) {
	if r.IntN(2) == 0 {
		if p := s.pick(r); p != nil {
			p.end()
			s.end(r, p)
		}
		return
	}
	if len(s.living()) > 12 {
		return
	}
	p := &resident{pod: s.pod(fmt.Sprintf("c%d", s.next.Add(1)))}
	p.CapabilityArgs = map[string]any{"portMappings": []map[string]any{
		{"hostPort": 20000 + int(s.next.Load())%20000, "containerPort": 80, "protocol": "tcp"}}}
	p.process = p.processInside()
	s.count.adds.Add(1)
	var err error
	if p.address, err = s.maybeKilled(r, p.pod).tryAdd(s.list); err != nil {
		s.count.failed.Add(1)
		p.end()
		s.end(r, p)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live = append(s.live, p)
}

// end asks for a DEL, which may be killed or fail, or does not ask. The namespace goes before or
// after.
func (s *stress) end(r *rand.Rand, p *resident) {
	first := r.IntN(3) == 0
	if first {
		s.drop(p.NetNS)
	}
	if r.IntN(3) > 0 {
		s.count.dels.Add(1)
		_ = s.maybeKilled(r, p.pod).del(s.list)
	} else {
		s.count.forgotten.Add(1)
	}
	if !first {
		s.drop(p.NetNS)
	}
}

// pick removes a random pod from the live ones and returns it.
func (s *stress) pick(r *rand.Rand) *resident {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.live) == 0 {
		return nil
	}
	i := r.IntN(len(s.live))
	p := s.live[i]
	s.live = slices.Delete(s.live, i, i+1)
	return p
}

// living returns the live pods.
func (s *stress) living() []*resident {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.live)
}

// sweep runs a GC with some list, or a STATUS.
func (s *stress) sweep(r *rand.Rand) {
	s.count.sweeps.Add(1)
	right, late := s.living(), s.stale
	if r.IntN(4) == 0 {
		s.stale = right
	}
	changes := map[string]any{}
	switch r.IntN(7) {
	case 0:
		s.keep(s.ask("STATUS", s.inner, nil, s.chain...))
		return
	case 1: // no list
	case 2:
		changes[validKey] = nil
	case 3:
		changes[validKey] = listOf()
	case 4:
		changes[validKey] = listOfResidents(late)
	case 5:
		changes[validKey] = json.RawMessage(`[{"containerID": "c1", "ifname": "eth0"}, {"containerID": "nobody", "ifname": "eth0"}]`)
	default:
		changes[validKey] = listOfResidents(right)
	}
	s.keep(s.ask("GC", s.inner, changes, s.chain...))
}

// keep stores the log of a GC or STATUS, to print it if the test fails.
func (s *stress) keep(out outcome) {
	f, err := os.OpenFile(filepath.Join(s.dir, "stderr"), os.O_WRONLY|os.O_APPEND, 0)
	if err == nil {
		_, err = f.WriteString(out.stderr)
		_ = f.Close()
	}
	if err != nil {
		s.Error(err)
	}
}

// quiet checks the invariants while nothing happens: after one sweep, or, if a delegate outlived
// its unwind, once its time is over.
func (s *stress) quiet() {
	s.Helper()
	for try := 0; ; try++ {
		s.keep(s.ask("GC", s.inner, map[string]any{validKey: listOfResidents(s.live)}, s.chain...))
		if len(s.entries()) == len(s.live) || try == 5 {
			break
		}
		time.Sleep(time.Second)
	}
	owners := s.owners(s.live)
	for _, p := range s.live {
		s.answers(p)
	}
	for a, owner := range s.reserved() {
		if id, _, _ := strings.Cut(owner, " "); owners[a] != id {
			s.Errorf("%s is still given to %s", a, owner)
		}
	}
	findings, err := (&Plugin{Stdout: io.Discard, Stderr: io.Discard, Budgets: undo.DefaultBudgets}).Sweep(s.Context(), s.stateDir, sweep.Job{DryRun: true})
	if err != nil {
		s.Error(err)
	}
	for _, f := range findings {
		if !slices.ContainsFunc(s.live, func(p *resident) bool { return p.ContainerID == f.ContainerID }) {
			s.Errorf("%s is dead and in the journal: %+v", f.Key, f)
		}
	}
	if taken := s.taken(); len(taken) != len(s.live) {
		s.Errorf("%d pods live, and the faulty plugin holds %v", len(s.live), taken)
	}
	if locks := s.names(filepath.Join(s.stateDir, "locks")); len(locks) > len(s.live) {
		s.Errorf("%d lock files, %d live", len(locks), len(s.live))
	}
	s.rulesOfTheDead(owners)
}

// answers checks that a live pod can be reached, and has its rules.
func (s *stress) answers(p *resident) {
	s.Helper()
	s.count.pings.Add(1)
	if out, err := exec.Command("ping", "-c", "1", "-W", "5", p.address).CombinedOutput(); err != nil {
		s.Errorf("%s (%s): %v: %s", p.ContainerID, p.address, err, out)
	}
	// firewall has two, portmap at least one.
	if rules := s.rules(p.address + "/32"); len(rules) < 3 {
		s.Errorf("%s (%s) has the rules %q", p.ContainerID, p.address, rules)
	}
}

// rulesOfTheDead checks that every rule with an address of the network belongs to a live pod.
func (s *stress) rulesOfTheDead(owners map[string]string) {
	s.Helper()
	for _, rule := range s.rules(strings.TrimSuffix(s.subnet, "0/24")) {
		for _, field := range strings.Fields(rule) {
			a, err := netip.ParsePrefix(field)
			if err == nil && a.Bits() == 32 && owners[a.Addr().String()] == "" {
				s.Errorf("of a dead pod: %s", rule)
			}
		}
	}
}

// maybeKilled returns the pod for a verb, which is killed one time in five.
func (s *stress) maybeKilled(r *rand.Rand, p *pod) *pod {
	if r.IntN(5) > 0 {
		return p
	}
	s.count.kills.Add(1)
	n := *s.node
	n.env = append(slices.Clone(n.env), fmt.Sprintf("%s=%d", env.KillAt, 1+r.IntN(40)))
	n.cni = libcni.NewCNIConfigWithCacheDir(n.path, filepath.Join(n.dir, "cache"), &nodeExec{node: &n, RawExec: invoke.RawExec{Stderr: io.Discard}})
	return &pod{&n, p.RuntimeConf}
}

// drop removes a network namespace, and does not wait for the kernel to remove its contents.
func (s *stress) drop(netns string) {
	if err := errors.Join(unix.Unmount(netns, unix.MNT_DETACH), os.Remove(netns)); err != nil {
		s.Error(err)
	}
}

// listOfResidents is the runtime's list of pods.
func listOfResidents(all []*resident) json.RawMessage {
	var pods []*pod
	for _, r := range all {
		pods = append(pods, r.pod)
	}
	return listOf(pods...)
}
