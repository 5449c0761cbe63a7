// Bench times ADDs, DELs and failing ADDs on chains of real plugins: without unwind, with unwind,
// and, if MULTUS names a multus binary, as delegates of multus (see comparison). It also times the
// release of dead pods (see benchSweep), and STATUS and GC (see benchStatus).
//
// Bench acts as the runtime, with CNI's libraries. unwind's stateDir is on the disk of the working
// directory, because disk syncs take most of the time. Everything runs in new network, mount and
// PID namespaces, and disappears at the end.
//
// `make bench` runs it as root in the project's directory. The durations of ADDs and DELs go to the
// file that -out names, in the format of `go test -bench`, for benchstat. Bench prints the rest.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// workEnv is the environment variable with the work directory. It is set only in the process that
// runs in the namespaces.
const workEnv = "UNWIND_BENCH_DIR"

// init reserves the main thread for main, so that netns changes another thread's network namespace.
func init() { runtime.LockOSThread() }

type options struct {
	out      string
	chains   []string // see chains
	parallel []int    // numbers of pods at the same time
	pods     int      // pods for each kind, chain and number in parallel
	warmUp   int
	dead     int
	live     int
	drain    []int // numbers of pods at the same time, for benchDrain
	rounds   int   // rounds of benchDrain for each kind
}

// listOf returns the parser of a flag whose value is a comma-separated list.
func listOf[T any](list *[]T, parse func(string) (T, error)) func(string) error {
	return func(text string) error {
		*list = nil
		for word := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == ',' }) {
			value, err := parse(word)
			if err != nil {
				return err
			}
			*list = append(*list, value)
		}
		return nil
	}
}

func chainName(name string) (string, error) {
	if _, known := chains[name]; !known {
		return "", fmt.Errorf("no chain %q; there are %s", name,
			strings.Join(slices.Sorted(maps.Keys(chains)), ", "))
	}
	return name, nil
}

func main() {
	o := options{chains: []string{"light", "1", "3", "5"}, parallel: []int{1, 8, 32, 128}}
	flag.StringVar(&o.out, "out", "", "write the timings to this `file`")
	flag.Func("chains", "`names` of the chains, of light, 1, 3, 4 and 5 (default: all but 4)",
		listOf(&o.chains, chainName))
	flag.Func("parallel", "`pods` at the same time (default 1,8,32,128)",
		listOf(&o.parallel, strconv.Atoi))
	flag.IntVar(&o.pods, "n", 40,
		"`pods` of each kind, for each chain and each number in -parallel; at least that number")
	flag.IntVar(&o.warmUp, "warm-up", 4, "`pods` of each kind to start first, without timing")
	flag.IntVar(&o.dead, "dead", 250,
		"dead `pods` to sweep, and to delete one by one; 0 for none")
	flag.IntVar(&o.live, "live", 5000, "live `attachments` in the larger journal")
	flag.Func("drain", "start and end this many `pods` at the same time, and do nothing else",
		listOf(&o.drain, strconv.Atoi))
	flag.IntVar(&o.rounds, "rounds", 3, "`rounds` of -drain, of each kind")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	work := os.Getenv(workEnv)
	var err error
	if work == "" {
		err = enterNamespaces(ctx)
	} else {
		err = bench(ctx, work, o)
	}
	stop()
	// If the process in the namespaces failed, it has already printed its error.
	if _, printed := errors.AsType[*exec.ExitError](err); err != nil && !printed {
		fmt.Fprintln(os.Stderr, "error:", err)
	}
	if err != nil {
		os.Exit(1)
	}
}

// enterNamespaces runs this program again in new namespaces. Afterwards, it removes the work
// directory.
func enterNamespaces(ctx context.Context) error {
	work, err := os.MkdirTemp(".tools", "bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if work, err = filepath.Abs(work); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), workEnv+"="+work)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	if err = cmd.Run(); errors.Is(err, syscall.EPERM) {
		return fmt.Errorf("cannot create namespaces; run as root: %w", err)
	}
	return err
}

// bench runs the benchmarks, in the namespaces.
func bench(ctx context.Context, work string, o options) error {
	if err := prepare(); err != nil {
		return err
	}
	if err := onDisk(work); err != nil {
		return err
	}
	fmt.Printf("kernel %s, %d cores, load %s\n", kernel(), runtime.NumCPU(), load())
	if len(o.drain) > 0 {
		for _, pods := range o.drain {
			if err := benchDrain(ctx, work, pods, o.rounds); err != nil {
				return err
			}
		}
		return nil
	}
	if o.dead > 0 { // first, because benchSweep waits until no pod has a veth
		if err := benchSweep(ctx, work, o.dead); err != nil {
			return err
		}
	}
	out, err := os.Create(cmp.Or(o.out, os.Stdout.Name()))
	if err != nil {
		return err
	}
	r := &results{out: out}
	for _, name := range o.chains {
		c, err := newComparison(ctx, work, name, o)
		if err != nil {
			return err
		}
		for _, parallel := range o.parallel {
			if err := c.run(ctx, r, parallel); err != nil {
				return fmt.Errorf("chain %s, %d at once: %w", name, parallel, err)
			}
		}
	}
	if err := r.err; err != nil {
		return err
	}
	return benchStatus(ctx, work, o.live)
}

// prepare keeps mounts inside the mount namespace. It mounts /proc for the PID namespace, and an
// empty /run, where tuning and other plugins keep files. It also brings up the loopback interface.
func prepare() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mount --make-rprivate /: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=0755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// netns creates a network namespace, and keeps it alive with a mount at path.
func netns(path string) error {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so Go ends the thread with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND,
				"")
		}
		done <- err
	}()
	return <-done
}

// onDisk returns an error if a directory's file system is in memory, where a sync costs nothing.
func onDisk(dir string) error {
	var st unix.Statfs_t
	err := unix.Statfs(dir, &st)
	if err == nil && (st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC) {
		err = fmt.Errorf("%s is in memory, where a sync costs nothing; run this in a directory on a disk",
			dir)
	}
	return err
}

func kernel() string {
	var u unix.Utsname
	_ = unix.Uname(&u) // impossible: uname(2) fails only for a wrong pointer
	return unix.ByteSliceToString(u.Release[:])
}

func load() string {
	data, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	one, _, _ := strings.Cut(string(data), " ")
	return one
}

// inTurn returns the list, rotated to the left by turn elements.
func inTurn[T any](list []T, turn int) []T {
	first := turn % len(list)
	return slices.Concat(list[first:], list[:first])
}
