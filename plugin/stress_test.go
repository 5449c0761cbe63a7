package plugin

import (
	"context"
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

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
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
	live  map[string]*stressed // by container ID: the ADD succeeded, nobody asked for the DEL
	stale []string             // some earlier list
	next  atomic.Int64
	count struct{ adds, failed, dels, forgotten, kills, sweeps, pings, lost, leaked atomic.Int64 }
}

// stressed is a pod with a process in its network namespace.
type stressed struct {
	*pod
	inside  *exec.Cmd
	address string
}

// TestStress runs ADD, DEL, GC with lists that are right, wrong, late, empty and null, STATUS, and
// kills, all at once over real plugins, one of which fails. Repeatedly, when all is quiet, every
// live container can be reached, has its rules and an address that no other has; and one sweep
// leaves nothing of the dead ones.
func TestStress(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if s, err := strconv.ParseUint(os.Getenv(seedEnv), 10, 64); err == nil {
		seed = s
	}
	t.Logf("%s=%d", seedEnv, seed)
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
		p.leave()
		p.mustDel(s.list)
	}
	s.nothingLeft()
	c := &s.count
	t.Logf("%d ADDs (%d failed), %d DELs, %d forgotten, %d kills, %d GCs and STATUSes, %d pings: %d live lost, %d leaked",
		c.adds.Load(), c.failed.Load(), c.dels.Load(), c.forgotten.Load(), c.kills.Load(), c.sweeps.Load(), c.pings.Load(),
		c.lost.Load(), c.leaked.Load())
}

func newStress(t *testing.T) *stress {
	s := &stress{node: newNode(t), live: map[string]*stressed{}}
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
			p.leave()
			s.end(r, p)
		}
		return
	}
	if s.living() > 12 {
		return
	}
	id := fmt.Sprintf("c%d", s.next.Add(1))
	p := &stressed{pod: s.pod(id)}
	p.CapabilityArgs = map[string]any{"portMappings": []map[string]any{
		{"hostPort": 20000 + int(s.next.Load())%20000, "containerPort": 80, "protocol": "tcp"}}}
	p.enter()
	s.count.adds.Add(1)
	result, err := s.maybeKilled(r, p.pod).add(s.list)
	if err != nil {
		s.count.failed.Add(1)
		p.leave()
		s.end(r, p)
		return
	}
	p.address = address(s, result)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.live[id] = p
}

// end asks for a DEL, which may be killed or fail, or does not ask. The namespace goes before or
// after.
func (s *stress) end(r *rand.Rand, p *stressed) {
	first := r.IntN(3) == 0
	if first {
		p.drop()
	}
	if r.IntN(3) > 0 {
		s.count.dels.Add(1)
		_ = s.maybeKilled(r, p.pod).del(s.list)
	} else {
		s.count.forgotten.Add(1)
	}
	if !first {
		p.drop()
	}
}

// pick removes a random pod from the live ones and returns it.
func (s *stress) pick(r *rand.Rand) *stressed {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := s.ids()
	if len(ids) == 0 {
		return nil
	}
	p := s.live[ids[r.IntN(len(ids))]]
	delete(s.live, p.ContainerID)
	return p
}

// ids returns the container IDs of the live pods, sorted. The caller holds the lock.
func (s *stress) ids() (ids []string) {
	for id := range s.live {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func (s *stress) living() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.live)
}

// sweep runs a GC with some list, or a STATUS.
func (s *stress) sweep(r *rand.Rand) {
	s.count.sweeps.Add(1)
	s.mu.Lock()
	right := s.ids()
	late := s.stale
	if r.IntN(4) == 0 {
		s.stale = right
	}
	s.mu.Unlock()
	attachments := func(ids []string) []netconf.Attachment {
		list := []netconf.Attachment{}
		for _, id := range ids {
			list = append(list, netconf.Attachment{ContainerID: id, IfName: "eth0"})
		}
		return list
	}
	changes := map[string]any{}
	switch r.IntN(7) {
	case 0:
		s.keep(s.ask("STATUS", s.inner, nil, s.chain...))
		return
	case 1: // no list
	case 2:
		changes[netconf.ValidKeys[0]] = nil
	case 3:
		changes[netconf.ValidKeys[0]] = []netconf.Attachment{}
	case 4:
		changes[netconf.ValidKeys[0]] = attachments(late)
	case 5:
		changes[netconf.ValidKeys[0]] = attachments([]string{"c1", "nobody"})
	default:
		changes[netconf.ValidKeys[0]] = attachments(right)
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
	valid := []netconf.Attachment{}
	for _, id := range s.ids() {
		valid = append(valid, netconf.Attachment{ContainerID: id, IfName: "eth0"})
	}
	for try := 0; ; try++ {
		s.keep(s.ask("GC", s.inner, map[string]any{netconf.ValidKeys[0]: valid}, s.chain...))
		if len(s.entries()) == len(s.live) || try == 5 {
			break
		}
		time.Sleep(time.Second)
	}
	owners := map[string]string{}
	for id, p := range s.live {
		if other := owners[p.address]; other != "" {
			s.Errorf("%s and %s have %s", id, other, p.address)
		}
		owners[p.address] = id
		s.answers(p)
	}
	for a, owner := range s.reserved() {
		if id, _, _ := strings.Cut(owner, " "); owners[a] != id {
			s.count.leaked.Add(1)
			s.Errorf("%s is still given to %s", a, owner)
		}
	}
	findings, err := (&Plugin{Stdout: io.Discard, Stderr: io.Discard, Budgets: undo.DefaultBudgets}).Sweep(s.Context(), s.stateDir, sweep.Job{DryRun: true})
	if err != nil {
		s.Error(err)
	}
	for _, f := range findings {
		if s.live[f.ContainerID] == nil {
			s.count.leaked.Add(1)
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

// answers checks that a live pod has all that its ADD gave it.
func (s *stress) answers(p *stressed) {
	s.Helper()
	s.count.pings.Add(1)
	lost := func(format string, args ...any) {
		s.Helper()
		s.count.lost.Add(1)
		s.Errorf("%s (%s): "+format, append([]any{p.ContainerID, p.address}, args...)...)
	}
	if out, err := exec.Command("ping", "-c", "1", "-W", "5", p.address).CombinedOutput(); err != nil {
		lost("%v: %s", err, out)
	}
	if owner := s.reserved()[p.address]; owner != p.ContainerID+" eth0" {
		lost("its address is given to %q", owner)
	}
	if e := p.entry(); e == nil || e.State != journal.Live {
		lost("its entry is %+v", e)
	}
	// firewall has two, portmap at least one.
	if rules := s.rules(p.address + "/32"); len(rules) < 3 {
		lost("it has the rules %q", rules)
	}
}

// rulesOfTheDead checks that every rule with an address of the network belongs to a live pod.
func (s *stress) rulesOfTheDead(owners map[string]string) {
	s.Helper()
	for _, rule := range s.rules(strings.TrimSuffix(s.subnet, "0/24")) {
		for _, field := range strings.Fields(rule) {
			a, err := netip.ParsePrefix(field)
			if err == nil && a.Bits() == 32 && owners[a.Addr().String()] == "" {
				s.count.leaked.Add(1)
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

// enter starts a process in the pod.
func (p *stressed) enter() {
	p.inside = exec.Command("nsenter", "--net="+p.NetNS, "sleep", "600")
	if err := p.inside.Start(); err != nil {
		p.Fatal(err)
	}
	p.Cleanup(p.leave)
	self, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		p.Fatal(err)
	}
	eventually(p, "a process in "+p.NetNS, func() bool {
		there, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", p.inside.Process.Pid))
		return err == nil && there != self
	})
}

// leave ends the pod's process.
func (p *stressed) leave() {
	if p.inside != nil {
		_ = p.inside.Process.Kill()
		_ = p.inside.Wait()
	}
	p.inside = nil
}

// drop removes the pod's network namespace, and does not wait for the kernel to remove its
// contents.
func (p *stressed) drop() {
	run(p, "umount", "-l", p.NetNS)
	if err := os.Remove(p.NetNS); err != nil {
		p.Error(err)
	}
}
