package trial

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/journal"
)

// WorkDir contains a directory for each attachment of a check. It is on the disk of libcni's cache,
// so a check detects if this disk is full. After a reboot, what a killed check left is still there.
// A check doesn't use the runtime's cache, because other commands would mistake the check's
// attachments for those of pods.
const WorkDir = "/var/lib/cni/unwind-check"

const (
	prefix  = "unwind-check-"
	ifName  = "eth0"
	netnses = "/run/netns" // where package netns mounts network namespaces
	listOf  = "list.json"  // the attachment's plugin list; removed once its DELs have succeeded
	failing = "failing"    // while this file exists, Plugin's DEL fails
)

// PluginName is the name under which this program acts as a plugin that fails.
const PluginName = "unwind-check-fail"

// Plugin implements a plugin that fails on purpose, at the end of a chain that unwind must roll
// back. Its ADD always fails. Its DEL fails while there is a file named "failing" in the plugin's
// directory.
func Plugin() {
	onPurpose := errors.New("fails on purpose, for unwindctl check")
	skel.PluginMainFuncs(skel.CNIFuncs{
		Add: func(*skel.CmdArgs) error { return onPurpose },
		Del: func(*skel.CmdArgs) error {
			if _, err := os.Lstat(filepath.Join(filepath.Dir(os.Args[0]), failing)); err == nil {
				return onPurpose
			}
			return nil
		},
	}, version.All, PluginName)
}

// lock lets only one check run on a node. The plugins that a check starts inherit the lock, so the
// next check also waits for the plugins of a killed check.
func lock(ctx context.Context) (*os.File, error) {
	parent := filepath.Dir(WorkDir)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return nil, err
	}
	f, err := os.Open(parent)
	if err != nil {
		return nil, err
	}
	for err = unix.EWOULDBLOCK; errors.Is(err, unix.EWOULDBLOCK); time.Sleep(20 * time.Millisecond) {
		if ctx.Err() != nil {
			return nil, term.WithHint("wait until it ends; fuser -v "+parent+" shows it",
				"another unwindctl check, or a plugin that it started, is still running")
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	return f, err
}

// space is the directory and the network namespace of one of a check's attachments.
type space struct {
	*check
	id, dir string
	list    *libcni.NetworkConfigList
	result  *types100.Result   // of the ADD
	links   []journal.HostLink // the host's interfaces that the ADD has created
}

func (c *check) space(id string) *space {
	return &space{check: c, id: id, dir: filepath.Join(WorkDir, id)}
}

func (s *space) stateDir() string { return filepath.Join(s.dir, "state") }

func (s *space) bin(name string) string { return filepath.Join(s.dir, "bin", name) }

func (s *space) netns() string { return filepath.Join(netnses, s.id) }

// make creates the directory, writes the list into it, and creates the network namespace.
func (s *space) make() error {
	err := os.MkdirAll(s.dir, 0o700)
	if err == nil {
		err = os.WriteFile(filepath.Join(s.dir, listOf), s.list.Bytes, 0o600)
	}
	if err != nil {
		return term.WithHint("fix this first: libcni also writes to that disk on each ADD", "%w", err)
	}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with this goroutine
		handle, err := netns.NewNamed(s.id)
		_ = handle.Close()
		made <- err
	}()
	return <-made
}

// linkPlugin creates a link to this program, under the name of the plugin that fails on purpose
// (see Plugin). The link's target is in /proc, so it works even if this program runs from a
// container. linkPlugin replaces a link that a killed check has left.
func (s *space) linkPlugin() error {
	err := os.MkdirAll(s.bin(""), 0o700)
	_ = os.Remove(s.bin(PluginName))
	return cmp.Or(err, os.Symlink(fmt.Sprintf("/proc/%d/exe", os.Getpid()), s.bin(PluginName)))
}

// verb runs a verb as a runtime does.
func (s *space) verb(ctx context.Context, verb string) (types.Result, error) {
	path := s.runtime.BinDirs
	if durable.Exists(s.bin("")) { // the chain has a failing plugin
		path = append([]string{s.bin("")}, path...)
	}
	cni := libcni.NewCNIConfigWithCacheDir(path, s.dir, &runner{invoke.DefaultExec{}, s})
	conf := &libcni.RuntimeConf{ContainerID: s.id, NetNS: s.netns(), IfName: ifName,
		Args: [][2]string{{"IgnoreUnknown", "1"}}}
	switch verb {
	case "ADD":
		return cni.AddNetworkList(ctx, s.list, conf)
	case "CHECK":
		return nil, cni.CheckNetworkList(ctx, s.list, conf)
	}
	return nil, cni.DelNetworkList(ctx, s.list, conf)
}

// remove removes everything that belongs to an attachment, even if its check was killed. If a DEL
// fails, the list stays for the next check.
func (s *space) remove() error {
	data, err := os.ReadFile(filepath.Join(s.dir, listOf))
	if err == nil {
		s.list, err = libcni.NetworkConfFromBytes(data)
	}
	deleted := err != nil // the DEL removed the list, or a killed check never wrote it
	if !deleted {
		err = s.deleteAll()
		deleted = err == nil
	}
	s.removeNetns()
	if !deleted {
		return fmt.Errorf("container %s: %w", s.id, err)
	}
	return os.RemoveAll(s.dir)
}

// deleteAll sends a DEL to every plugin of the list. Unlike libcni, it doesn't stop at a plugin
// that fails. It ignores an interrupt.
func (s *space) deleteAll() (first error) {
	if durable.Exists(s.bin("")) {
		_ = os.Remove(s.bin(failing))
		first = s.linkPlugin()
	}
	whole := s.list.Plugins
	for n := len(whole); n > 0; n-- {
		s.list.Plugins = whole[:n]
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), s.Timeout)
		_, err := s.verb(ctx, "DEL")
		cancel()
		if first = cmp.Or(first, err); err == nil {
			break
		}
	}
	if first == nil {
		first = os.Remove(filepath.Join(s.dir, listOf))
	}
	return first
}

func (s *space) removeNetns() {
	_ = unix.Unmount(s.netns(), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	_ = os.Remove(s.netns())
}

// recover removes what killed checks have left, and returns the number of these checks.
func (c *check) recover() (int, error) {
	dirs, err := filepath.Glob(filepath.Join(WorkDir, prefix+"*"))
	for _, dir := range dirs {
		err = errors.Join(err, c.space(filepath.Base(dir)).remove())
	}
	return len(dirs), err
}

// stopWithin is how long a plugin may run after SIGTERM. unwind needs the time to roll back an ADD.
const stopWithin = 15 * time.Second

// keepResult caches the result that a plugin's ADD gets from the plugin before it. libcni itself
// caches only the last plugin's result, so after a failed ADD without unwind, the DELs would get no
// result, and would leave rules behind.
func (s *space) keepResult(config []byte) error {
	var conf struct {
		PrevResult json.RawMessage `json:"prevResult"`
	}
	err := json.Unmarshal(config, &conf)
	if err != nil || conf.PrevResult == nil {
		return err
	}
	path := filepath.Join(s.dir, "results", fmt.Sprintf("%s-%s-%s", s.list.Name, s.id, ifName))
	cached, err := json.Marshal(map[string]any{"kind": libcni.CNICacheV1, "containerId": s.id,
		"ifName": ifName, "networkName": s.list.Name, "result": conf.PrevResult})
	if err == nil {
		err = cmp.Or(os.MkdirAll(filepath.Dir(path), 0o700),
			durable.Replace(path, bytes.NewReader(cached), 0o600))
	}
	return err
}

// runner runs plugins. After a timeout, unlike libcni, it sends the plugin SIGTERM first. Then it
// kills the plugin and its children.
type runner struct {
	invoke.DefaultExec
	space *space
}

func (r *runner) ExecPlugin(ctx context.Context, path string, stdin []byte, env []string) (
	[]byte, error,
) {
	if slices.Contains(env, "CNI_COMMAND=ADD") {
		if err := r.space.keepResult(stdin); err != nil {
			return nil, err
		}
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, bytes.NewReader(stdin), &stdout, &stderr
	cmd.ExtraFiles, cmd.WaitDelay = []*os.File{r.space.lock}, stopWithin
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	err := cmd.Run()
	if ctx.Err() != nil && cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	var said types.Error
	switch parseErr := json.Unmarshal(stdout.Bytes(), &said); {
	case err == nil:
		return stdout.Bytes(), nil
	case parseErr == nil && said.Msg != "":
		err = &said
	case stderr.Len() > 0:
		err = fmt.Errorf("%w: %s", err, term.OneLine(stderr.String()))
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("%s did not end within %s: %w", filepath.Base(path), r.space.Timeout, err)
	}
	return nil, err
}
