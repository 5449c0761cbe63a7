package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
)

const criTimeout = 10 * time.Second

// maxCRIMessage bounds the runtime's answer, in bytes, as kubelet does.
const maxCRIMessage = 16 << 20

// CRISockets are the default sockets of the CRI runtimes: containerd (also on Talos), CRI-O, k3s
// and RKE2, k0s, MicroK8s, cri-dockerd.
var CRISockets = []string{
	containerdSocket, "/run/crio/crio.sock", k3sSocket, k0sSocket, microK8sSocket,
	"/run/cri-dockerd.sock",
}

// ErrNoRuntime means that no runtime listens. It is no error where a runtime need not be there.
var ErrNoRuntime = errors.New("found no container runtime; set its socket with --cri " +
	"SOCKET, or give a list with --valid-attachments FILE --network NAME")

// socketPath returns the path of a socket that may be written as a URL.
func socketPath(socket string) string { return strings.TrimPrefix(socket, "unix://") }

// waiting is what a command has seen of runtimes that do not answer.
type waiting struct {
	stderr io.Writer
	mu     sync.Mutex
	silent map[string]time.Time // sockets, since when
}

type waitingKey struct{}

// Waiting returns a context for one command: stderr tells for what it waits, and a runtime that has
// not answered is not asked again at once.
func Waiting(ctx context.Context, stderr io.Writer) context.Context {
	return context.WithValue(ctx, waitingKey{},
		&waiting{stderr: stderr, silent: map[string]time.Time{}})
}

// waitingFor reports whether to wait for a runtime. stop ends that.
func waitingFor(ctx context.Context, socket string, within time.Duration) (wait bool, stop func()) {
	w, _ := ctx.Value(waitingKey{}).(*waiting)
	if w == nil {
		return true, func() {}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.silent[socket]) < 3*time.Second { // a later look with --watch asks again
		return false, nil
	}
	notice := time.AfterFunc(time.Second, func() {
		fmt.Fprintf(w.stderr, "waiting for the runtime at %s (up to %s)\n", socket, within)
	})
	return true, func() {
		notice.Stop()
		w.mu.Lock()
		defer w.mu.Unlock()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			w.silent[socket] = time.Now()
		}
	}
}

func call[Q, A any](ctx context.Context, socket string, within time.Duration, question Q,
	method func(cri.RuntimeServiceClient, context.Context, Q, ...grpc.CallOption) (A, error),
) (answer A, err error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	wait, stop := waitingFor(ctx, socketPath(socket), within)
	if !wait {
		return answer, status.Error(codes.DeadlineExceeded, "skipped, because the runtime did not "+
			"answer the previous call in time")
	}
	defer stop()
	conn, err := grpc.NewClient("unix:"+socketPath(socket), // with two slashes, no relative path
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxCRIMessage)))
	if err != nil {
		return answer, err
	}
	defer conn.Close()
	return method(cri.NewRuntimeServiceClient(conn), ctx, question)
}

// PodSandboxes returns the sandboxes of a CRI runtime in any state: one that is not ready has its
// network until it is stopped. The list has all of its pods and none of its other containers.
func PodSandboxes(ctx context.Context, socket string) (*facts.List, error) {
	answer, err := call(ctx, socket, criTimeout, &cri.ListPodSandboxRequest{},
		cri.RuntimeServiceClient.ListPodSandbox)
	if err != nil {
		return nil, term.WithHint("check the runtime: crictl --runtime-endpoint unix://"+
			socketPath(socket)+" pods; or give a list: --valid-attachments FILE --network NAME",
			"the runtime at %s returned no list of pods; judging attachments without one: %w", socket, err)
	}
	list := facts.NewList("", nil)
	list.Pods = true
	list.Runtimes = []int{listener(ctx, socket)}
	for _, sandbox := range answer.GetItems() {
		id, of := sandbox.GetId(), sandbox.GetMetadata()
		list.Valid[netconf.Attachment{ContainerID: id}] = true
		list.Named[id] = journal.Pod{Namespace: of.GetNamespace(), Name: of.GetName()}
	}
	return list, nil
}

// listener returns the process that listens at a socket (SO_PEERCRED), 0 if this process does not
// see it: it is in a PID namespace above this one, or beside it.
func listener(ctx context.Context, socket string) (pid int) {
	conn, err := new(net.Dialer).DialUnix(ctx, "unix", nil,
		&net.UnixAddr{Net: "unix", Name: socketPath(socket)})
	if err != nil {
		return 0
	}
	defer func() { _ = conn.Close() }()
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(peer.Pid)
		}
	})
	return pid
}

// versionTimeout bounds the question for the version of a runtime, on which nothing depends.
const versionTimeout = 2 * time.Second

// runtimeVersion asks a runtime for the first two numbers of its version; 0, 0 is no answer.
func runtimeVersion(ctx context.Context, socket string) (major, minor int) {
	answer, err := call(ctx, socket, versionTimeout, &cri.VersionRequest{},
		cri.RuntimeServiceClient.Version)
	if err != nil {
		return 0, 0
	}
	text := strings.TrimPrefix(answer.GetRuntimeVersion(), "v")
	if n, _ := fmt.Sscanf(text, "%d.%d", &major, &minor); n < 2 {
		return 0, 0
	}
	return major, minor
}

// FindPodSandboxes returns the sandboxes of all runtimes that listen on one of the sockets. If one
// of them does not answer there is no list, for its pods would be missing. A containerd without
// CRI, such as Docker's, has no pods.
func FindPodSandboxes(ctx context.Context, sockets []string) (all *facts.List, err error) {
	for _, socket := range sockets {
		if _, err := os.Stat(socket); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		list, err := PodSandboxes(ctx, socket)
		switch {
		case status.Code(err) == codes.Unimplemented:
		case err != nil:
			return nil, err
		case all == nil:
			all = list
		default:
			maps.Copy(all.Valid, list.Valid)
			maps.Copy(all.Named, list.Named)
			all.Runtimes = append(all.Runtimes, list.Runtimes...)
		}
	}
	if all == nil {
		return nil, ErrNoRuntime
	}
	return all, nil
}

// ask takes the directories from what the runtime answers to CRI's Status(verbose), and reports
// whether it told them. All containerd releases with CRI v1 do: "cniconfig" is what go-cni uses,
// "config" the CRI plugin's configuration with imports and defaults (containerd 1.6.20
// pkg/cri/server/status.go, 2.3 internal/cri/server/status.go; go-cni 1.1.14 cni.go GetConfig). The
// keys in them are no API; an answer without them tells nothing, as CRI-O's (cri-o
// server/runtime_status.go createRuntimeInfo).
//
// containerd 2 asks the network for its STATUS before it answers, as it does for each question of a
// kubelet.
func (r *Runtime) ask(ctx context.Context, root string) bool {
	if r.Socket == "" {
		return false
	}
	answer, err := call(ctx, filepath.Join(root, socketPath(r.Socket)), criTimeout,
		&cri.StatusRequest{Verbose: true}, cri.RuntimeServiceClient.Status)
	if err != nil {
		return false
	}
	var cni struct {
		PluginConfDir    string
		PluginDirs       []string
		PluginMaxConfNum int
	}
	_ = json.Unmarshal([]byte(answer.GetInfo()["cniconfig"]), &cni)
	if cni.PluginConfDir == "" || len(cni.PluginDirs) == 0 {
		return false
	}
	r.Config, r.ConfDir, r.BinDirs = r.Socket, cni.PluginConfDir, cni.PluginDirs
	r.MaxConfs, r.Problems = cni.PluginMaxConfNum, nil
	r.clean()
	var config struct { // which may hold secrets
		Containerd struct {
			Runtimes map[string]struct {
				ConfDir string `json:"cniConfDir"`
			} `json:"runtimes"`
		} `json:"containerd"`
	}
	_ = json.Unmarshal([]byte(answer.GetInfo()["config"]), &config)
	handlers := config.Containerd.Runtimes
	for _, handler := range slices.Sorted(maps.Keys(handlers)) {
		if dir := handlers[handler].ConfDir; dir != "" && filepath.Clean(dir) != r.ConfDir {
			r.Notes = append(r.Notes,
				fmt.Sprintf("pods of the runtime class handler %q have their conflists in %s and bypass unwind",
					handler, dir))
		}
	}
	return true
}
