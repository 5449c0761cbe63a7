package plugin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	bolt "go.etcd.io/bbolt"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/plugintest/env"
	"cni-unwind/plugin/plugintest/sandbox"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

const (
	// seedEnv is the environment variable with the seed that an earlier TestSoak printed.
	seedEnv = "UNWIND_TEST_SEED"
	// soakEnv is the environment variable with the number of pods that TestSoak adds and deletes.
	soakEnv = "UNWIND_TEST_SOAK"
	// soakWorkers is the number of pods that are added and deleted at the same time.
	soakWorkers = 32
	// soakPoints is the number of points at which TestSoak measures.
	soakPoints = 10
)

// soakFaults are the possible faults. About 1 in 20 pairs of an ADD and its DEL has a fault: the
// plugin with this index fails at this command, in this mode. All DELs work during a sweep, so a
// DEL fails only until the next sweep.
var soakFaults = []struct {
	index         int
	command, mode string
}{
	{0, "ADD", "fail"}, {0, "ADD", "fail-effect"}, {0, "ADD", "crash-effect"}, {0, "ADD", "kill-parent-effect"},
	{1, "ADD", "fail"}, {1, "ADD", "fail-effect"}, {1, "ADD", "crash-effect"}, {1, "ADD", "kill-parent-effect"},
	{0, "DEL", "fail"}, {0, "DEL", "crash"}, {0, "DEL", "crash-effect"},
	{1, "DEL", "fail"}, {1, "DEL", "crash"}, {1, "DEL", "crash-effect"},
}

// soak is a node on which pods are added and deleted for a long time.
type soak struct {
	*node
	clean  *libcni.NetworkConfigList
	faults []*libcni.NetworkConfigList
	owners sync.Map // the container ID by address, between ADD and DEL
	begun  atomic.Int64
	count  struct{ faults, addFailed, delFailed, retried, sweeps, swept atomic.Int64 }
}

// point contains measurements made while no pod exists. Of its fields, only pairs may keep growing.
type point struct {
	pairs       int64
	file        int64 // bytes of the journal's file, which doubles when it is full
	journal     int64 // bytes of the file up to the last page that was ever used
	used        int64 // bytes of the journal's keys and values
	heap        int64
	goroutines  int
	descriptors int
	mappings    int // memory mappings; each open journal has one
	mounts      int
	names       string // of the files in stateDir
}

func (p point) String() string {
	return fmt.Sprintf("%d pairs: journal %d KiB of %d in a file of %d; sweeper: heap %d KiB, %d goroutines, %d descriptors, %d mappings",
		p.pairs, p.used>>10, p.journal>>10, p.file>>10, p.heap>>10, p.goroutines, p.descriptors, p.mappings)
}

// TestSoak adds and deletes pods, 32 at a time: 100 pairs of ADD and DEL in `make test`, 300 in
// `make matrix`, 10,000 in `make proof`, or UNWIND_TEST_SOAK pairs. The node's history is full, and
// the test's process sweeps all the time. In 1 of 20 pairs, a plugin fails, is killed, or kills
// unwind. All other ADDs and DELs must succeed, and no address may have two owners. At ten points,
// while no pod exists, nothing may be left: no address, record, lock file, process, zombie, mount
// or descriptor. The journal and the sweeper's memory, goroutines and descriptors may not grow.
// TestSoak stops early if the next point would come less than a minute before go test's -timeout.
func TestSoak(t *testing.T) {
	sandbox.Concurrent(t)
	pairs := sandbox.Rounds(100, 300, 10_000)
	if n, err := strconv.Atoi(os.Getenv(soakEnv)); err == nil {
		pairs = n
	}
	seed, err := strconv.ParseUint(os.Getenv(seedEnv), 10, 64)
	if err != nil {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("%s=%d", seedEnv, seed)
	s := newSoak(t, pairs)
	began := time.Now()
	var points []point
	for i := range soakPoints {
		s.round(seed+uint64(i), int64(pairs*(i+1)/soakPoints))
		points = append(points, s.point())
		t.Logf("%s, after %s", points[i], time.Since(began).Round(time.Second))
		if end, ok := t.Deadline(); t.Failed() || ok && time.Until(end) < time.Minute+time.Since(began)/time.Duration(i+1) {
			break
		}
	}
	s.steady(points)
	c := &s.count
	t.Logf("%d pairs in %s; faults in %d; %d ADDs and %d DELs failed, %d DELs were tried again; %d sweeps released %d",
		s.begun.Load(), time.Since(began).Round(time.Second), c.faults.Load(), c.addFailed.Load(), c.delFailed.Load(), c.retried.Load(),
		c.sweeps.Load(), c.swept.Load())
}

func newSoak(t *testing.T, pairs int) *soak {
	s := &soak{node: newNode(t)}
	s.conf["logLevel"] = "error"
	s.subnet = "10.99.0.0/16"
	chain := func(instances [2]string, extra [2]string) *libcni.NetworkConfigList {
		return s.unwind(
			s.faulty(instances[0], `, "ipam": `+s.hostLocal(s.subnet)+extra[0]),
			s.faulty(instances[1], extra[1]))
	}
	s.clean = chain([2]string{"p0", "p1"}, [2]string{})
	for _, f := range soakFaults {
		instances, extra := [2]string{"p0", "p1"}, [2]string{}
		if f.command == "ADD" {
			extra[f.index] = fmt.Sprintf(`, "modes": {"ADD": %q}`, f.mode)
		} else {
			instances[f.index] += " " + f.mode
		}
		s.faults = append(s.faults, chain(instances, extra))
	}
	s.age()
	return s
}

// age fills the history to its limit.
func (s *soak) age() {
	for i := range 3000 {
		key := journal.Key{Network: s.network, ContainerID: fmt.Sprintf("a%d", i), IfName: "eth0"}
		must(s, s.store.Record(journal.Event{Key: key, Kind: journal.Swept, Reason: "it is gone, and so is its network namespace"}))
	}
}

// hurt makes the DELs of soakFaults fail if yes is true; otherwise, it makes them succeed.
func (s *soak) hurt(yes bool) {
	plan := map[string]map[string]string{}
	for _, f := range soakFaults {
		if yes && f.command == "DEL" {
			plan[fmt.Sprintf("p%d %s", f.index, f.mode)] = map[string]string{"DEL": f.mode}
		}
	}
	s.setModes(plan)
}

// round runs pairs, and sweeps meanwhile. until is the test's total of pairs after the round.
// At the end, round sweeps with working plugins until no record is left.
func (s *soak) round(seed uint64, until int64) {
	s.hurt(true)
	done := make(chan struct{})
	var sweeper, workers sync.WaitGroup
	sweeper.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(300 * time.Millisecond):
				s.hurt(false)
				s.sweepAll()
				s.hurt(true)
			}
		}
	})
	for n := range uint64(soakWorkers) {
		r := rand.New(rand.NewPCG(seed, n))
		netns := filepath.Join(s.dir, "netns", fmt.Sprint(n))
		if _, err := os.Stat(netns); err != nil {
			s.netns(fmt.Sprint(n))
		}
		workers.Go(func() {
			for !s.Failed() {
				i := s.begun.Add(1)
				if i > until {
					s.begun.Add(-1)
					return
				}
				s.pair(r, fmt.Sprintf("c%d", i), netns)
			}
		})
	}
	workers.Wait()
	close(done)
	sweeper.Wait()
	s.hurt(false)
	eventually(s, "what is dead is released", func() bool { return s.sweepAll() == 0 })
}

// sweepAll sweeps in this process, and returns the number of findings.
func (s *soak) sweepAll() int {
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	findings, err := (&Plugin{Env: undo.Env{Stderr: io.Discard, Budgets: env.Long, Runner: &delegate.Processes{}}}).Sweep(ctx, s.stateDir, sweep.Options{})
	if err != nil {
		s.Errorf("sweep: %v", err)
	}
	s.count.sweeps.Add(1)
	for _, f := range findings {
		if f.Released {
			s.count.swept.Add(1)
		}
	}
	return len(findings)
}

// pair runs the ADD and the DEL of a pod. It runs the DEL even if the ADD failed, as a runtime
// does. It retries some of the failed DELs once, at random.
func (s *soak) pair(r *rand.Rand, id, netns string) {
	list, faulty := s.clean, r.IntN(20) == 0
	if faulty {
		list = s.faults[r.IntN(len(s.faults))]
		s.count.faults.Add(1)
	}
	p := &pod{node: s.node, RuntimeConf: libcni.RuntimeConf{ContainerID: id, NetNS: netns, IfName: "eth0"}}
	result, err := p.addWith(list)
	switch {
	case err == nil:
		given := address(s, result)
		if other, taken := s.owners.LoadOrStore(given, id); taken {
			s.Errorf("%v and %s have %s", other, id, given)
		}
		s.owners.Delete(given)
	case !faulty:
		s.Errorf("ADD %s: %v", id, err)
	default:
		s.count.addFailed.Add(1)
	}
	for try := range 2 {
		err := p.delWith(list)
		if err == nil {
			return
		}
		if !faulty {
			s.Errorf("DEL %s: %v", id, err)
			return
		}
		s.count.delFailed.Add(1)
		if r.IntN(2) == 0 || try == 1 {
			return
		}
		s.count.retried.Add(1)
	}
}

// point checks that nothing is left, and measures.
func (s *soak) point() point {
	s.Helper()
	s.nothingLeft()
	s.forgetCalls()
	eventually(s, "no process of the node's, and no zombie", func() bool { return len(s.processes()) == 0 })
	runtime.GC()
	runtime.GC()
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	info, err := os.Stat(s.store.Path())
	must(s, err)
	db, err := bolt.Open(s.store.Path(), 0, &bolt.Options{ReadOnly: true, Timeout: time.Second})
	must(s, err)
	var journal, used int64
	must(s, errors.Join(db.View(func(tx *bolt.Tx) error {
		journal = tx.Size()
		return tx.ForEach(func(_ []byte, b *bolt.Bucket) error {
			of := b.Stats()
			used += int64(of.BranchInuse + of.LeafInuse)
			return nil
		})
	}), db.Close()))
	return point{
		pairs: s.begun.Load(), file: info.Size(), journal: journal, used: used, heap: int64(memory.HeapAlloc), goroutines: runtime.NumGoroutine(),
		descriptors: len(s.names("/proc/self/fd")), mappings: strings.Count(read(s, "/proc/self/maps"), "\n"), mounts: strings.Count(read(s, "/proc/self/mounts"), "\n"),
		names: strings.Join(s.names(s.stateDir), " "),
	}
}

// steady checks that nothing has grown since the first point, apart from random variation.
func (s *soak) steady(points []point) {
	s.Helper()
	first, last := points[0], points[len(points)-1]
	half := points[len(points)/2]
	// The journal is empty at each point. But the position of its last used page depends on the
	// largest number of records that it ever contained, so this position may vary.
	if last.used > first.used+1<<10 || last.journal > max(2*first.journal, 512<<10) {
		s.Errorf("the journal at first, half-way and now:\n%s\n%s\n%s", first, half, last)
	}
	if last.heap > first.heap+1<<20 {
		s.Errorf("the sweeper's heap has grown from %d to %d bytes", first.heap, last.heap)
	}
	const chance = 5 // the Go runtime may add this many of each; a leak in the sweep would add dozens
	if last.goroutines > first.goroutines+chance || last.descriptors > first.descriptors+chance ||
		last.mappings > first.mappings+soakWorkers {
		s.Errorf("the sweeper had\n%s, now it has\n%s", first, last)
	}
	if last.mounts > first.mounts || last.names != first.names {
		s.Errorf("%d mounts, then %d; in stateDir %s, then %s", first.mounts, last.mounts, first.names, last.names)
	}
}

// processes returns a line for each process that has the node's directory in its environment, and
// for each zombie child of this process. It ignores other zombies: init must reap them, but in some
// containers init reaps nothing.
func (s *soak) processes() (lines []string) {
	zombie := fmt.Sprintf(") Z %d ", os.Getpid())
	for _, pid := range s.names("/proc") {
		if _, err := strconv.Atoi(pid); err != nil || pid == strconv.Itoa(os.Getpid()) {
			continue
		}
		environ, err1 := os.ReadFile("/proc/" + pid + "/environ")
		stat, err2 := os.ReadFile("/proc/" + pid + "/stat")
		if errors.Join(err1, err2) == nil && strings.Contains(string(environ), s.dir) || strings.Contains(string(stat), zombie) {
			lines = append(lines, string(stat))
		}
	}
	return lines
}
