// Bench times ADD and DEL of a chain of real plugins (bridge with host-local, tuning, portmap), plain and through unwind;
// the release of dead pods, see benchSweep; and STATUS and GC, see benchStatus.
//
// libcni is the runtime of both. The pods take turns in one run, after a warm-up: ADD and DEL of the plain chain, ADD and
// DEL of the wrapped one, and the other way round for the next pair. Both chains have a bridge, a subnet and folders of
// their own; unwind's stateDir is on the disk that the working directory is on, since it is syncing that costs. All of
// it happens in a network, a mount and a PID namespace of its own and is gone at the end.
//
// It is run by make bench, in the project's folder and as root.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// workEnv tells this program that it is in the namespaces, and which folder it has.
const workEnv = "UNWIND_BENCH_DIR"

// init keeps the main thread out of other network namespaces: see netns.
func init() { runtime.LockOSThread() }

func main() {
	pods := flag.Int("n", 50, "`pods` that count, of each kind")
	dead := flag.Int("dead", 250, "dead `pods` to sweep, and to delete one by one")
	live := flag.Int("live", 5000, "live `attachments` in the journal, for STATUS and GC")
	warmUp := flag.Int("warm-up", 5, "`pods` before, of each kind")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	work := os.Getenv(workEnv)
	var err error
	if work == "" {
		err = enterNamespaces(ctx)
	} else {
		err = bench(ctx, work, *pods, *warmUp, *dead, *live)
	}
	stop()
	if err == nil {
		return
	}
	var exit *exec.ExitError
	if told := work == "" && errors.As(err, &exit); !told { // by ourselves, in the namespaces
		fmt.Fprintln(os.Stderr, "error:", err)
	}
	os.Exit(1)
}

// enterNamespaces runs this program again in namespaces of its own, and removes what it leaves.
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
		return fmt.Errorf("making namespaces, which takes root: %w", err)
	}
	return err
}

// bench is the run, in the namespaces.
func bench(ctx context.Context, work string, pods, warmUp, dead, live int) error {
	if err := prepare(); err != nil {
		return err
	}
	disk, err := disk(work)
	if err != nil {
		return err
	}
	plain, wrapped, err := networks(work)
	if err != nil {
		return err
	}
	fmt.Printf("kernel %s, %d cores, load %s, state on %s; %d pods of each kind after %d to warm up\n\n",
		kernel(), runtime.NumCPU(), load(), disk, pods, warmUp)
	var p, w times
	for i := range warmUp + pods {
		order := []*network{plain, wrapped}
		if i%2 == 1 {
			slices.Reverse(order)
		}
		for _, n := range order {
			add, del, err := n.pod(ctx, i)
			if err != nil {
				return err
			}
			switch {
			case i < warmUp:
			case n == plain:
				p.add, p.del = append(p.add, add), append(p.del, del)
			default:
				w.add, w.del = append(w.add, add), append(w.del, del)
			}
		}
	}
	fmt.Printf("%-6s %22s   %22s   %17s\n", "", "plain", "through unwind", "ratio of")
	fmt.Printf("%-6s %11s%11s   %11s%11s   %8s%9s\n", "", "median", "p90", "median", "p90", "medians", "pairs")
	report("ADD", p.add, w.add)
	report("DEL", p.del, w.del)
	if err := benchSweep(ctx, work, dead); err != nil {
		return err
	}
	return benchStatus(ctx, work, wrapped, live)
}

// times are those of the pods of one kind, in order.
type times struct{ add, del []time.Duration }

// report prints a line of the table. The ratio of pairs is the median over the pairs of pods that ran next to each other.
func report(verb string, plain, wrapped []time.Duration) {
	var ratios []float64
	for i := range plain {
		ratios = append(ratios, wrapped[i].Seconds()/plain[i].Seconds())
	}
	ms := func(all []time.Duration, q float64) string {
		return fmt.Sprintf("%.1f ms", 1000*quantile(all, q).Seconds())
	}
	fmt.Printf("%-6s %11s%11s   %11s%11s   %8.2f%9.2f\n", verb, ms(plain, 0.5), ms(plain, 0.9), ms(wrapped, 0.5), ms(wrapped, 0.9),
		quantile(wrapped, 0.5).Seconds()/quantile(plain, 0.5).Seconds(), quantile(ratios, 0.5))
}

// quantile returns the smallest value that at least that part of all is not above.
func quantile[T float64 | time.Duration](all []T, q float64) T {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}

// prepare keeps our mounts to ourselves, has /proc show our processes and brings the loopback up.
func prepare() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("mount --make-rprivate /: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// network is a conflist with the runtime that runs it.
type network struct {
	list  *libcni.NetworkConfigList
	cni   *libcni.CNIConfig
	netns string // the folder of the pods' namespaces
}

func networks(work string) (plain, wrapped *network, err error) {
	entry := `{"type": "unwind", "stateDir": "%s/state", "capabilities": {"portMappings": true}, "chain": {"cniVersion": "1.0.0", "plugins": [%s]}}`
	if plain, err = newNetwork(work, "plain", chain(work, "plain", "10.214.0.0/24")); err != nil {
		return nil, nil, err
	}
	wrapped, err = newNetwork(work, "wrapped", fmt.Sprintf(entry, work, chain(work, "wrapped", "10.214.1.0/24")))
	return plain, wrapped, err
}

func chain(work, name, subnet string) string {
	return fmt.Sprintf(`
		{"type": "bridge", "bridge": "bench-%[2]s", "isGateway": true,
			"ipam": {"type": "host-local", "subnet": "%[3]s", "dataDir": "%[1]s/ipam"}},
		{"type": "tuning", "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}, "mtu": 1400, "dataDir": "%[1]s/tuning"},
		{"type": "portmap", "backend": "iptables", "capabilities": {"portMappings": true}}`, work, name, subnet)
}

func newNetwork(work, name, plugins string) (*network, error) {
	list, err := libcni.NetworkConfFromBytes(fmt.Appendf(nil,
		`{"cniVersion": "1.0.0", "name": "bench-%s", "plugins": [%s]}`, name, plugins))
	if err != nil {
		return nil, err
	}
	var path []string
	for _, dir := range []string{"bin", ".tools/cni"} {
		abs, err := filepath.Abs(dir)
		if err != nil {
			return nil, err
		}
		path = append(path, abs)
	}
	n := &network{list: list, netns: filepath.Join(work, "netns")}
	n.cni = libcni.NewCNIConfigWithCacheDir(path, filepath.Join(work, "cache-"+name), nil)
	return n, os.MkdirAll(n.netns, 0o700)
}

// pod times ADD and DEL of a pod with one port. Making and removing its namespace does not count.
func (n *network) pod(ctx context.Context, i int) (add, del time.Duration, err error) {
	id := fmt.Sprintf("%s-%d", n.list.Name, i)
	path := filepath.Join(n.netns, id)
	if err := netns(path); err != nil {
		return 0, 0, err
	}
	defer func() { err = errors.Join(err, unix.Unmount(path, unix.MNT_DETACH)) }()
	rt := n.runtimeConf(id, path, 20000+i)
	start := time.Now()
	if _, err := n.cni.AddNetworkList(ctx, n.list, rt); err != nil {
		return 0, 0, fmt.Errorf("ADD of %s: %w", id, err)
	}
	add = time.Since(start)
	start = time.Now()
	if err := n.cni.DelNetworkList(ctx, n.list, rt); err != nil {
		return 0, 0, fmt.Errorf("DEL of %s: %w", id, err)
	}
	return add, time.Since(start), nil
}

// runtimeConf is that of a pod with one port.
func (n *network) runtimeConf(id, netns string, port int) *libcni.RuntimeConf {
	return &libcni.RuntimeConf{
		ContainerID: id, NetNS: netns, IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "bench"}, {"K8S_POD_NAME", id}},
		CapabilityArgs: map[string]any{"portMappings": []map[string]any{
			{"hostPort": port, "containerPort": 80, "protocol": "tcp"},
		}},
	}
}

// netns makes a network namespace, pinned by a mount.
func netns(path string) error {
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return err
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with us
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	return <-done
}

// disk names the file system of a folder. One that keeps nothing would make a sync free.
func disk(dir string) (string, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return "", err
	}
	known := map[int64]string{
		unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.OVERLAYFS_SUPER_MAGIC: "overlayfs",
	}
	switch name := known[st.Type]; {
	case st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC:
		return "", fmt.Errorf("%s is in memory, where a sync costs nothing; run this in a folder on a disk", dir)
	case name != "":
		return name, nil
	}
	return fmt.Sprintf("file system %#x", st.Type), nil
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
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
