package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// check fails the test at once if its error is not nil.
var check = nodetest.Check

func TestMain(m *testing.M) { os.Exit(sandbox.Run(m)) }

// Bounds on the cost of the plugin, in numbers that don't depend on the machine's speed. A change
// that exceeds a bound makes every pod on every node slower to start: look for the cause before you
// raise the bound.
const (
	// maxSize bounds the released binary, in bytes. The kernel maps the binary for each verb, and
	// reads its pages from disk at the first verb after a boot.
	maxSize = 5_080_000
	// maxInitAllocs bounds the allocations of all packages before main. A regexp in a global variable
	// needs hundreds. unwind once linked knftables, through host-local's package allocator. knftables
	// needed 677, and took a tenth of the time until main.
	maxInitAllocs = 300
)

type cost struct {
	syncs     int // exact: fewer would lose records in a crash, more are slow
	openings  int // of the journal, at most: each one waits in the journal's queue
	calls     int // system calls, at most
	processes int // exact: one for each delegate, and no sweep, because no DEL is pending
}

// costs returns the cost of each verb for a chain with the given number of plugins.
//
// Each commit syncs twice: its pages, and then the meta page that makes them valid. An ADD commits
// its intent, and one result, because all plugins of the test return the same one. A DEL commits
// its end. STATUS and GC write only the time of their last sweep, at most once a minute.
//
// The bounds on system calls are a tenth above the numbers that were measured. A GC that may not
// inspect process 1 also reads the mounts, which takes 25 calls. If a process ends while a GC reads
// /proc, the GC reads /proc once more, which takes up to 70 calls.
func costs(plugins int) map[string]cost {
	return map[string]cost{
		"VERSION": {0, 0, 40, 0},
		"ADD":     {4, 2, 245 + 33*plugins, plugins}, // 10 of the calls look for an interface
		"DEL":     {2, 2, 218 + 35*plugins, plugins},
		secondDEL: {0, 1, 190 + 35*plugins, plugins},
		"STATUS":  {0, 1, 109 + 31*plugins, plugins},
		"GC":      {0, 3, 275 + 31*plugins, plugins},
	}
}

// secondDEL is the DEL that containerd sends when it removes a sandbox, after the DEL that deleted
// the attachment. Its CNI_NETNS is empty, and it writes nothing.
const secondDEL = "DEL again"

// maxThreads and maxWakes bound the threads of a verb, and how often one thread wakes another. Both
// numbers depend on the scheduler, so the test compares the lowest of several runs. An ADD of three
// plugins has 6 to 8 threads, and 6 to 20 wake-ups on an idle machine or up to 70 on a busy one.
const (
	maxThreads = 10
	maxWakes   = 120
)

// markAfter is the time after which a running DEL is recorded as tried (plugin/undo/step.go).
const markAfter = 500 * time.Millisecond

// idle matches system calls whose number depends on the scheduler, so the test doesn't count them.
var idle = regexp.MustCompile(`^(futex|nanosleep|clock_nanosleep|sched_yield|epoll_pwait|tgkill|rt_sig\w+|madvise|restart_syscall|exit|gettid|sigaltstack|clone3?|mmap|munmap|prctl|\+\+\+|---|<\.\.\.)\b`)

// ofProcesses matches calls that inspect other processes. The test doesn't count these either.
var ofProcesses = regexp.MustCompile(`"/proc/[1-9]`)

// trace contains what strace recorded of a verb: the number of its delegates (processes), and the
// system calls of its own threads, in total (calls) and by name.
type trace struct {
	byName                                            map[string]int
	calls, syncs, openings, processes, threads, wakes int
	took                                              time.Duration
}

// traced runs a verb of the released binary under strace. It repeats a STATUS that times
// out, because strace may be the cause on a busy machine.
func traced(t *testing.T, binary, dir, verb string, plugins []string) trace {
	t.Helper()
	for tries := 1; ; tries++ {
		began := time.Now()
		logs, out, err := straced(t, binary, dir, verb, plugins)
		if err == nil {
			seen := readTrace(t, binary, logs)
			seen.took = time.Since(began)
			return seen
		}
		if verb != "STATUS" || tries == 20 || !bytes.Contains(out, []byte("timed out")) {
			t.Fatalf("%s: %v: %s", verb, err, out)
		}
	}
}

// straced runs a verb under strace, which writes a log file for each thread.
func straced(t *testing.T, binary, dir, verb string, plugins []string) (logs string, out []byte, err error) {
	t.Helper()
	logs = t.TempDir()
	cmd := exec.Command("strace", "-ff", "-qq", "-o", filepath.Join(logs, "t"), binary)
	netns := filepath.Join(dir, "netns")
	if verb == secondDEL {
		verb, netns = "DEL", ""
	}
	cmd.Env = []string{"CNI_COMMAND=" + verb, "CNI_CONTAINERID=c", "CNI_IFNAME=eth0", "CNI_NETNS=" + netns, "CNI_PATH=" + dir}
	var chain []string
	for _, plugin := range plugins {
		chain = append(chain, fmt.Sprintf(`{"type": %q}`, plugin))
	}
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"cniVersion": "1.1.0", "name": "net", "type": "unwind", "stateDir": "%s/state",
		"cni.dev/valid-attachments": [], "chain": {"cniVersion": "1.1.0", "plugins": [%s]}}`, dir, strings.Join(chain, ",")))
	out, err = cmd.CombinedOutput()
	return logs, out, err
}

// readTrace reads strace's log files. Each delegate has only one thread, so a delegate's file
// counts as one process.
func readTrace(t *testing.T, binary, logs string) trace {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(logs, "t.*"))
	if err != nil || len(files) == 0 {
		t.Fatalf("strace wrote nothing: %v", err)
	}
	seen := trace{byName: map[string]int{}}
	for _, file := range files {
		data, err := os.ReadFile(file)
		check(t, err)
		if bytes.Contains(data, []byte("execve(\"")) && !bytes.Contains(data, []byte("execve(\""+binary+"\"")) {
			seen.processes++ // a delegate
			continue
		}
		seen.threads++
		seen.wakes += bytes.Count(data, []byte("FUTEX_WAKE"))
		seen.openings += bytes.Count(data, []byte(`/state/journal.db", O_`))
		for line := range strings.Lines(string(data)) {
			if name, _, ok := strings.Cut(line, "("); ok && !idle.MatchString(name) && !ofProcesses.MatchString(line) {
				seen.byName[name]++
				seen.calls++
			}
		}
	}
	for _, name := range []string{"fsync", "fdatasync", "sync", "msync"} {
		seen.syncs += seen.byName[name]
	}
	return seen
}

// TestCost checks the cost of each verb, for chains of one plugin and of three.
func TestCost(t *testing.T) {
	sandbox.Need(t)
	binary := build(t)
	cat, err := exec.LookPath("cat") // serves as a plugin that prints its configuration
	check(t, err)
	for _, plugins := range [][]string{{"p0"}, {"p0", "p1", "p2"}} {
		dir := t.TempDir()
		for _, plugin := range plugins {
			check(t, os.Symlink(cat, filepath.Join(dir, plugin)))
		}
		namespace(t, filepath.Join(dir, "netns"))
		// A first run creates the journal, and writes what STATUS and GC write only once a minute.
		for _, verb := range []string{"ADD", "DEL", "STATUS", "GC"} {
			traced(t, binary, dir, verb, plugins)
		}
		// least contains the lowest numbers of all rounds. A busy machine needs more than three rounds:
		// there, threads wake each other more often, and a slow DEL takes two more syncs (see markAfter).
		least := map[string]trace{}
		distorted := func(verb string) bool {
			seen := least[verb]
			return seen.wakes > maxWakes || seen.threads > maxThreads || verb == "DEL" && seen.syncs > costs(len(plugins))[verb].syncs
		}
		for round := range 20 {
			verbs := []string{"VERSION", "ADD", "STATUS", "GC", "DEL", secondDEL}
			if round >= 3 {
				if !slices.ContainsFunc(verbs, distorted) {
					break
				}
				verbs = slices.DeleteFunc(verbs, func(verb string) bool { // ADD and DEL need each other
					return verb != "ADD" && verb != "DEL" && !distorted(verb)
				})
			}
			for _, verb := range verbs {
				seen, want := traced(t, binary, dir, verb, plugins), costs(len(plugins))[verb]
				if verb != "DEL" && seen.syncs != want.syncs || seen.processes != want.processes {
					t.Errorf("%s, %v: %d syncs and %d processes, want %d and %d", verb, plugins, seen.syncs, seen.processes, want.syncs, want.processes)
				}
				if before, found := least[verb]; found {
					if before.calls < seen.calls {
						seen.calls, seen.byName = before.calls, before.byName
					}
					seen.syncs, seen.openings = min(seen.syncs, before.syncs), min(seen.openings, before.openings)
					seen.threads, seen.wakes = min(seen.threads, before.threads), min(seen.wakes, before.wakes)
					seen.took = min(seen.took, before.took)
				}
				least[verb] = seen
			}
		}
		if del := least["DEL"]; del.syncs > costs(len(plugins))["DEL"].syncs && del.took > markAfter {
			t.Logf("DEL, %v: not compared, because each one took more than %s, and was recorded as tried", plugins, markAfter)
			delete(least, "DEL")
		}
		for verb, seen := range least {
			want := costs(len(plugins))[verb]
			t.Logf("%s, %v: at least %d system calls, %d threads, %d wake-ups", verb, plugins, seen.calls, seen.threads, seen.wakes)
			if seen.syncs != want.syncs || seen.openings > want.openings || seen.calls > want.calls || seen.threads > maxThreads || seen.wakes > maxWakes {
				t.Errorf("%s, %v: %d syncs, want %d; at most: the journal opened %d times, want %d; %d threads, want %d; %d wake-ups, want %d; %d system calls, want %d: %s",
					verb, plugins, seen.syncs, want.syncs, seen.openings, want.openings, seen.threads, maxThreads, seen.wakes, maxWakes, seen.calls, want.calls, sorted(seen.byName))
			}
		}
	}
}

// TestSharedAddress: pods on isolated networks may share one static address. Even if many such pods
// exist, an ADD opens the journal at most once more than without them.
func TestSharedAddress(t *testing.T) {
	sandbox.Need(t)
	binary, dir := build(t), t.TempDir()
	const static = "#!/bin/sh\ncat >/dev/null; echo '{\"cniVersion\": \"1.1.0\", \"ips\": [{\"address\": \"10.1.1.1/24\"}]}'\n"
	check(t, os.WriteFile(filepath.Join(dir, "static-pod"), []byte(static), 0o755))
	namespace(t, filepath.Join(dir, "netns"))
	plugins := []string{"static-pod"}
	traced(t, binary, dir, "ADD", plugins)
	alone := traced(t, binary, dir, "ADD", plugins)
	store := &journal.Store{Dir: filepath.Join(dir, "state")}
	check(t, store.Update(t.Context(), func(tx *journal.Tx) error {
		e, err := tx.Get(journal.Key{Network: "net", ContainerID: "c", IfName: "eth0"})
		check(t, err)
		for i := range 20 {
			other := e.Clone()
			other.ContainerID, other.Number = fmt.Sprintf("c%d", i), 0
			check(t, tx.Put(other))
		}
		return nil
	}))
	if among := traced(t, binary, dir, "ADD", plugins); among.openings > alone.openings+1 {
		t.Errorf("the journal was opened %d times, and %d times with 20 other pods of the same address", alone.openings, among.openings)
	}
}

func sorted(calls map[string]int) string {
	var words []string
	for name, n := range calls {
		words = append(words, fmt.Sprintf("%6d %s", n, name))
	}
	slices.Sort(words)
	slices.Reverse(words)
	return "\n" + strings.Join(words, "\n")
}

// build builds the binary with the flags of a release.
func build(t *testing.T) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "unwind")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-trimpath", "-ldflags", "-s -w", "-o", binary, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v: %s", err, out)
	}
	return binary
}

// namespace creates a network namespace, mounted at the path.
func namespace(t *testing.T, path string) {
	t.Helper()
	check(t, os.WriteFile(path, nil, 0o600))
	if out, err := exec.Command("unshare", "--net="+path, "true").CombinedOutput(); err != nil {
		t.Fatalf("unshare: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", path).CombinedOutput(); err != nil {
			t.Errorf("umount: %v: %s", err, out)
		}
	})
}

// TestStart bounds the size of the binary, and the allocations of its packages before main.
func TestStart(t *testing.T) {
	binary := build(t)
	info, err := os.Stat(binary)
	check(t, err)
	t.Logf("%d bytes", info.Size())
	if info.Size() > maxSize {
		t.Errorf("the binary's size is %d bytes, want at most %d", info.Size(), maxSize)
	}
	if allocs := inits(t, binary); allocs == 0 || allocs > maxInitAllocs {
		t.Errorf("%d allocations before main, want at most %d", allocs, maxInitAllocs)
	}
}

// inits returns the number of allocations of all packages before main.
func inits(t *testing.T, binary string) (allocs int) {
	t.Helper()
	cmd := exec.Command(binary)
	cmd.Env = []string{"CNI_COMMAND=VERSION", "GODEBUG=inittrace=1"}
	cmd.Stdin = strings.NewReader(`{"cniVersion": "1.1.0"}`)
	var trace bytes.Buffer
	cmd.Stderr = &trace
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, &trace)
	}
	for line := range strings.Lines(trace.String()) {
		var pkg string
		var began, took float64
		var size, n int
		if _, err := fmt.Sscanf(line, "init %s @%f ms, %f ms clock, %d bytes, %d allocs", &pkg, &began, &took, &size, &n); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		allocs += n
	}
	return allocs
}
