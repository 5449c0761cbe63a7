package plugin

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest/sandbox"
)

const (
	// likePlainSeedEnv sets the first seed, such as one that an earlier run has printed. If it is set
	// and likePlainCountEnv is not, TestLikePlain runs only the sequence of that seed.
	likePlainSeedEnv = "UNWIND_LIKEPLAIN_SEED"
	// likePlainCountEnv sets the number of sequences.
	likePlainCountEnv = "UNWIND_LIKEPLAIN_COUNT"
	// likePlainWithoutEnv sets a regular expression for the steps to leave out, so that a known
	// difference doesn't hide others.
	likePlainWithoutEnv = "UNWIND_LIKEPLAIN_WITHOUT"
	// likePlainSeed is the default first seed. `make proof` uses the time instead.
	likePlainSeed = 700_001
	// likePlainWorkers is how many sequences run at the same time.
	likePlainWorkers = 4
)

// setup is the initial configuration of both machines of a sequence.
type setup struct {
	ChainFile bool   // unwind is configured with a chainFile, not with a chain
	Outer     string // cniVersion of unwind's conflist
	Version   string // of the chain
	Plugins   string // of the chain
	Masq, NFT bool
}

func (s setup) String() string { return strings.Replace(fmt.Sprintf("%#v", s), "plugin.", "", 1) }

// difference is something that is worse with unwind than without. Its class is the kind of
// difference, which stays the same while shrinkYear shortens the sequence.
type difference struct {
	class, text string
	record      *journal.Record // set only in class "pending"
}

// attempt is the testing.TB of one run of a sequence, with its own failure, log and cleanups.
type attempt struct {
	testing.TB
	ctx      context.Context
	failed   bool
	log      []string
	cleanups []func()
}

func (a *attempt) Helper()                      {}
func (a *attempt) Context() context.Context     { return a.ctx }
func (a *attempt) Cleanup(f func())             { a.cleanups = append(a.cleanups, f) }
func (a *attempt) Failed() bool                 { return a.failed }
func (a *attempt) Log(args ...any)              { a.log = append(a.log, fmt.Sprintln(args...)) }
func (a *attempt) Logf(f string, args ...any)   { a.log = append(a.log, fmt.Sprintf(f, args...)) }
func (a *attempt) Error(args ...any)            { a.Log(args...); a.failed = true }
func (a *attempt) Errorf(f string, args ...any) { a.Logf(f, args...); a.failed = true }
func (a *attempt) Fatal(args ...any)            { a.Error(args...); runtime.Goexit() }
func (a *attempt) Fatalf(f string, args ...any) { a.Errorf(f, args...); runtime.Goexit() }
func (a *attempt) FailNow()                     { a.failed = true; runtime.Goexit() }

func (a *attempt) TempDir() string {
	dir, err := os.MkdirTemp("", "likeplain")
	must(a, err)
	a.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// runYear runs a sequence on two new machines. It returns the first difference (if there is none,
// its class is empty) and a log of what happened.
func runYear(t testing.TB, s setup, steps []string) (found difference, log []string) {
	// If a plugin hangs, a sequence takes minutes: U tries each pod's DEL five times, up to 10 s each.
	ctx, cancel := context.WithTimeout(context.Background(), 4*sandbox.Patience)
	defer cancel()
	a := &attempt{TB: t, ctx: ctx}
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked, because the thread enters other network namespaces
		defer close(done)
		defer func() {
			for _, f := range slices.Backward(a.cleanups) {
				f()
			}
		}()
		y := newYear(a, s)
		defer func() { found, log = y.found, y.log }()
		y.run(steps)
	}()
	<-done
	if a.failed && found.class == "" {
		found = difference{class: "the test itself", text: strings.Join(a.log, "\n")}
	}
	return found, append(log, a.log...)
}

// likePlain runs a sequence that TestLikePlain has printed.
func likePlain(t *testing.T, s setup, steps ...string) {
	t.Helper()
	sandbox.Need(t)
	if found, log := runYear(t, s, steps); found.class != "" {
		t.Errorf("%s: %s\n%s", found.class, found.text, strings.Join(log, "\n"))
	}
}

// TestLikePlain: whatever happens on a machine in a year, unwind makes nothing worse. Two machines,
// one without unwind (P) and one with unwind (U), go through the same random sequence of steps of
// runtimes, operators and failures. TestLikePlain checks that
//
//   - every verb that succeeds in P succeeds in U (of a DEL and its retries, the last one counts);
//   - no live pod in U lacks an address file, a link, a rule or a connection that it has in P;
//   - at the end, what is left in U is also left in P, and no DEL that succeeded in P is pending;
//   - no verb in U takes both more than 5 s and more than three times as long as in P (checked only
//     in `make proof`, on a quiet machine).
//
// allowedDifferences contains the exceptions.
func TestLikePlain(t *testing.T) {
	sandbox.Need(t)
	t.Parallel()
	count := sandbox.Rounds(20, 100, 2_000)
	if n, err := strconv.Atoi(os.Getenv(likePlainCountEnv)); err == nil {
		count = n
	}
	first := uint64(likePlainSeed) // `make proof` runs new sequences each time; other runs don't
	if sandbox.Long() {
		first = uint64(time.Now().UnixNano())
	}
	if seed, err := strconv.ParseUint(os.Getenv(likePlainSeedEnv), 10, 64); err == nil {
		if first = seed; os.Getenv(likePlainCountEnv) == "" {
			count = 1
		}
	}
	t.Logf("%s=%d, %d sequences", likePlainSeedEnv, first, count)
	began := time.Now()
	var mu sync.Mutex
	classes, next, shrunk := map[string]int{}, 0, map[string]int{}
	var wait sync.WaitGroup
	for range min(likePlainWorkers, count) {
		wait.Add(1)
		go func() {
			defer wait.Done()
			for {
				mu.Lock()
				i := next
				next++
				mu.Unlock()
				if end, ok := t.Deadline(); i >= count || ok && time.Until(end) < time.Minute {
					return
				}
				s, steps := someYear(first + uint64(i))
				found, log := runYear(t, s, steps)
				if found.class == "" {
					if count == 1 {
						t.Logf("%s\n%s", s, strings.Join(log, "\n"))
					}
					continue
				}
				mu.Lock()
				classes[found.class]++
				shrunk[found.class]++
				short := shrunk[found.class] <= 3
				mu.Unlock()
				reportYear(t, first+uint64(i), s, steps, found, log, short)
			}
		}()
	}
	wait.Wait()
	took := time.Since(began)
	t.Logf("%d sequences in %s, %s each; differences: %v", min(next, count), took.Round(time.Second),
		(took / time.Duration(max(1, count))).Round(time.Millisecond), classes)
}

// reportYear runs a sequence twice more, to see whether its difference occurs again. It reports the
// difference and the sequence or, if short is set, the shorter sequence of shrinkYear.
func reportYear(t *testing.T, seed uint64, s setup, steps []string, found difference, log []string, short bool) {
	again := 0
	for range 2 {
		if other, _ := runYear(t, s, steps); other.class == found.class {
			again++
		}
	}
	if strings.HasSuffix(found.class, " is slow") && again < 2 {
		return // the machine was slow
	}
	if again == 0 {
		say := t.Logf // a loaded machine may be to blame
		if sandbox.Long() {
			say = t.Errorf
		}
		say("%s=%d is flaky: %s: %s\n%s", likePlainSeedEnv, seed, found.class, found.text, strings.Join(log, "\n"))
		return
	}
	if short {
		steps, found, log = shrinkYear(t, s, steps, found, log)
	}
	var b strings.Builder
	for _, step := range steps {
		fmt.Fprintf(&b, "\t\t%q,\n", step)
	}
	if !short {
		log = nil
	}
	t.Errorf("%s=%d (again in %d of 2 more runs): %s: %s\n\tlikePlain(t, %s,\n%s\t)\n%s", likePlainSeedEnv, seed, again, found.class,
		found.text, s, b.String(), strings.Join(log, "\n"))
}

// shrinkYear removes steps from a sequence while a difference of the same class still occurs.
func shrinkYear(t testing.TB, s setup, steps []string, found difference, log []string) ([]string, difference, []string) {
	for size := max(1, len(steps)/2); ; size /= 2 {
		for at := len(steps) - size; at >= 0; at -= size {
			fewer := slices.Concat(steps[:at], steps[at+size:])
			if other, otherLog := runYear(t, s, fewer); other.class == found.class {
				steps, found, log = fewer, other, otherLog
				at = min(at, len(steps))
			}
		}
		if size <= 1 {
			return steps, found, log
		}
	}
}

// someYear returns the setup and the steps that belong to a seed.
func someYear(seed uint64) (setup, []string) {
	d := &dice{Rand: rand.New(rand.NewPCG(seed, 46)), pods: map[string]bool{}, broken: "mesh"}
	s := setup{ChainFile: d.IntN(2) == 0, Outer: d.pick("1.0.0", "1.1.0"), Masq: d.IntN(4) == 0,
		Version: d.pick("1.0.0", "1.0.0", "1.1.0", "0.4.0"), NFT: d.IntN(5) == 0}
	d.chain = []string{d.pick("bridge", "bridge", "bridge", "ptp")}
	for _, chained := range []struct {
		name string
		odds int
	}{{"tuning", 8}, {"bandwidth", 8}, {"firewall", 4}, {"portmap", 3}, {"mesh", 2}} {
		if d.IntN(chained.odds) == 0 {
			d.chain = append(d.chain, chained.name)
		}
	}
	s.Plugins = strings.Join(d.chain, " ")
	var steps []string
	for range 16 + d.IntN(10) {
		steps = append(steps, d.step())
	}
	if without := os.Getenv(likePlainWithoutEnv); without != "" {
		steps = slices.DeleteFunc(steps, regexp.MustCompile("^(?:"+without+")").MatchString)
	}
	return s, steps
}

// TestLikePlainFaults runs sequences of steps, most of which once ended worse with unwind than
// without.
func TestLikePlainFaults(t *testing.T) {
	t.Parallel()
	bridge := setup{Outer: "1.0.0", Version: "1.0.0", Plugins: "bridge mesh"}
	with := func(s setup, plugins string) setup { s.Plugins = plugins; return s }
	masq := setup{Outer: "1.0.0", Version: "1.0.0", Plugins: "bridge", Masq: true}
	for i, c := range []struct {
		name  string
		s     setup
		steps []string
	}{
		{"nothing happens", with(bridge, "bridge firewall portmap"), []string{"add a ports", "check a", "status", "add b", "del a containerd", "del b crio"}},
		{"1: a mesh is uninstalled, its binary deleted", bridge, []string{"add a", "remove mesh deleted", "del a containerd"}},
		{"1: a mesh is uninstalled, its daemon down", bridge, []string{"add a", "remove mesh down", "del a containerd"}},
		{"2: portmap's cniVersion is corrected", with(bridge, "bridge portmap"), []string{"add a ports", "old portmap", "set version 0.4.0", "del a containerd"}},
		{"18: a configuration is renewed, code 999", bridge, []string{"add a", "renew mesh 999", "del a containerd"}},
		{"18: a configuration is renewed, code 4", bridge, []string{"add a", "renew mesh 4", "del a containerd"}},
		{"18: a configuration is renewed, code 100", bridge, []string{"add a", "renew mesh 100", "del a containerd"}},
		{"18: a configuration is renewed, then the plugin removed", bridge, []string{"add a", "renew mesh 999", "remove mesh kept", "del a containerd"}},
		{"19: a container is restarted twice while unwind is off", masq, []string{"add a", "off", "restart a", "restart a", "on", "del a nerdctl"}},
		{"20: the IPAM plugin is replaced", with(bridge, "bridge"), []string{"add a", "ipam static deleted", "del a containerd"}},
		{"the main plugin is replaced, its binary deleted", masq, []string{"add a", "set main ptp deleted", "del a containerd"}},
		{"the main plugin is replaced, its binary deleted, and a pod has a host port", with(masq, "bridge portmap firewall"),
			[]string{"add a ports", "set main ptp deleted", "del a crio"}},
		{"the IPAM plugin is replaced, and the runtime has forgotten a pod", with(bridge, "bridge"), []string{"add a", "lose a", "ipam static deleted"}},
		{"portmap is removed, and a container with a host port restarted", with(bridge, "bridge portmap"), []string{"add a ports", "remove portmap deleted", "restart a"}},
		{"portmap's configuration is renewed, and a container with a host port restarted", with(bridge, "bridge portmap"), []string{"add a ports", "renew portmap 999", "restart a"}},
		{"portmap is removed while its DEL fails", with(bridge, "bridge portmap"), []string{"add a ports", "break portmap DEL fail", "check a", "remove portmap kept", "restart a"}},
		{"portmap is removed, and a journal is lost", with(bridge, "bridge portmap"), []string{"add d ports", "remove portmap deleted", "del d containerd", "nostate"}},
		{"a network is renamed, its IPAM plugin goes, and the runtime sends a GC", setup{Outer: "1.1.0", Version: "0.4.0", Plugins: "bridge"},
			[]string{"add b ip", "set name net1", "again b", "ipam static deleted", "gc"}},
		{"all plugins are missing for a while, and so is the journal", setup{Outer: "1.1.0", Version: "1.1.0", Plugins: "ptp tuning portmap mesh"},
			[]string{"add d", "nostate", "wipe", "nocache", "del d containerd"}},
		{"an ADD failed while unwind was off, and all plugins are missing for a while", setup{Outer: "1.0.0", Version: "0.4.0", Plugins: "bridge bandwidth"},
			[]string{"missing bandwidth", "off", "add a ports ip", "on", "wipe", "del a containerd"}},
		{"firewall is missing for a while", setup{Outer: "1.1.0", Version: "1.0.0", Plugins: "ptp bandwidth firewall"},
			[]string{"add a ports", "missing firewall", "del a crio"}},
		{"ipMasq is switched off, and a container restarted", setup{Outer: "1.1.0", Version: "1.1.0", Plugins: "ptp portmap", Masq: true},
			[]string{"add a ports", "set ipMasq off", "restart a"}},
		{"portmap gets another backend, and a container is restarted", setup{Outer: "1.1.0", Version: "1.1.0", Plugins: "ptp tuning portmap"},
			[]string{"add c ports", "set backend nftables", "restart c"}},
		{"a configuration is renewed, and the DEL hangs without it", bridge, []string{"add a", "renew mesh hang", "reboot", "del a containerd"}},
		{"a configuration is renewed, and the DEL does nothing without it", masq, []string{"add a", "renew bridge nothing", "del a nerdctl"}},
		{"a mesh is replaced, its binary deleted", bridge, []string{"add a", "replace mesh mesh2 deleted", "del a containerd"}},
		{"a mesh is replaced, its daemon down, and its successor fails for a while", bridge,
			[]string{"add a", "replace mesh mesh2 down", "break mesh2 DEL fail", "del a containerd", "status", "repair mesh2"}},
		{"the main plugin is replaced, its daemon down", with(masq, "bridge portmap"), []string{"add a ports", "set main ptp down", "status", "del a containerd"}},
		{"host-local gets another directory, and the first one again", with(masq, "bridge firewall"),
			[]string{"add a", "set dataDir 1", "add b", "set dataDir 0", "del b crio", "del a crio"}},
		{"the plugins' directory is renamed", with(bridge, "bridge portmap"), []string{"add a ports", "directory", "del a containerd"}},
		{"host ports and masquerading with nftables", setup{Outer: "1.0.0", Version: "1.0.0", Plugins: "bridge portmap", Masq: true, NFT: true},
			[]string{"add a ports", "restart a", "break portmap DEL fail", "add b ports", "del b containerd", "repair portmap", "del a crio"}},
	} {
		for j, key := range []string{"chain", "chainFile"} {
			if !sandbox.Sampled(sandbox.Rounds(4, 1, 1), i, j) {
				continue
			}
			s := c.s
			s.ChainFile = key == "chainFile"
			t.Run(c.name+", "+key, func(t *testing.T) {
				t.Parallel()
				likePlain(t, s, c.steps...)
			})
		}
	}
}
