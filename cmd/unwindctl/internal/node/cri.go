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

// The time limits of a CRI query. The commands "sweep", "install" and "on" use ActTimeout, and most
// other commands LookTimeout. These three wait longer for a busy runtime: without the list of pods,
// a sweep releases less, and without the runtime's directories, an install fails.
const (
	LookTimeout = 2 * time.Second
	ActTimeout  = 10 * time.Second
)

// criTimeout is the timeout of a query whose context is not from Waiting. A CRI Status query always
// has at least this timeout, because the runtime may run CNI's STATUS first. Tests increase it.
var criTimeout = ActTimeout

// maxCRIMessage is the maximum size of the runtime's response in bytes, as in the kubelet.
const maxCRIMessage = 16 << 20

// CRISockets are the default sockets of the CRI runtimes: containerd (also on Talos), CRI-O, k3s
// and RKE2, k0s, MicroK8s, cri-dockerd.
var CRISockets = []string{
	containerdSocket, "/run/crio/crio.sock", k3sSocket, k0sSocket, microK8sSocket,
	"/run/cri-dockerd.sock",
}

// WithoutRuntime is the message of a sweep that finds no CRI runtime.
const WithoutRuntime = "found no CRI runtime, so sweeps have no list of pods; if the node has " +
	"a runtime, set its socket with --cri"

// ErrNoRuntime means that no runtime listens on the sockets. A sweep also works without a runtime.
var ErrNoRuntime = errors.New("found no container runtime; set its socket with --cri " +
	"SOCKET, or pass a list with --valid-attachments FILE --network NAME")

// socketPath returns the path of a socket that may be written as a URL.
func socketPath(socket string) string { return strings.TrimPrefix(socket, "unix://") }

// waiting contains the limits of one command's queries, and the runtimes that did not respond.
type waiting struct {
	stderr io.Writer
	within time.Duration
	only   string // the only socket to query; "" for all
	mu     sync.Mutex
	silent map[string]time.Time // by socket: when its last call timed out
}

type waitingKey struct{}

// Waiting returns a context for one command's queries. The parameter within is their timeout; that
// of Status is at least criTimeout. If only is not "", queries to other sockets fail. A query that
// takes longer than LookTimeout names its socket on stderr. For 3 s after a timeout, queries to the
// same socket fail immediately.
func Waiting(
	ctx context.Context, stderr io.Writer, within time.Duration, only string,
) context.Context {
	return context.WithValue(ctx, waitingKey{}, &waiting{stderr: stderr, within: within,
		only: only, silent: map[string]time.Time{}})
}

// errNotAsked means that a command skipped a runtime.
var errNotAsked = errors.New("not queried, because --cri names another runtime")

// sameSocket reports whether two paths lead to the same socket.
func sameSocket(a, b string) bool {
	inA, errA := os.Stat(socketPath(a))
	inB, errB := os.Stat(socketPath(b))
	return a == b || errA == nil && errB == nil && os.SameFile(inA, inB)
}

// waitingFor returns an error if the command must not query a runtime. Otherwise, the caller must
// call stop after the query.
func (w *waiting) waitingFor(
	ctx context.Context, socket string, within time.Duration,
) (stop func(), err error) {
	if w == nil {
		return func() {}, nil
	} else if w.only != "" && !sameSocket(socket, w.only) {
		return nil, errNotAsked
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.silent[socket]) < 3*time.Second { // a later round of --watch tries again
		return nil, status.Error(codes.DeadlineExceeded, noAnswer(within))
	}
	notice := time.AfterFunc(LookTimeout, func() {
		if within <= LookTimeout {
			return
		}
		fmt.Fprintf(w.stderr, "waiting for the runtime at %s (up to %s)\n", socket, within)
	})
	return func() {
		notice.Stop()
		w.mu.Lock()
		defer w.mu.Unlock()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			w.silent[socket] = time.Now()
		}
	}, nil
}

// criError is the error of a query, without gRPC's own words in the text. It wraps gRPC's status.
type criError struct {
	text   string
	status error
}

func (e *criError) Error() string { return e.text }

func (e *criError) Unwrap() error { return e.status }

// call queries a runtime. In a context from Waiting, the timeout is the one passed to Waiting, but
// at least the duration least. In any other context, the timeout is criTimeout.
func call[Q, A any](ctx context.Context, socket string, least time.Duration, question Q,
	method func(cri.RuntimeServiceClient, context.Context, Q, ...grpc.CallOption) (A, error),
) (answer A, err error) {
	within := criTimeout
	w, _ := ctx.Value(waitingKey{}).(*waiting)
	if w != nil {
		within = max(w.within, least)
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	stop, err := w.waitingFor(ctx, socketPath(socket), within)
	if err == nil {
		defer stop()
		answer, err = callNow(ctx, socket, question, method)
	}
	switch as, is := status.FromError(err); {
	case err == nil || !is:
		return answer, err
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return answer, &criError{noAnswer(within), err}
	case as.Code() == codes.Unavailable:
		return answer, &criError{"the connection was closed; perhaps no CRI runtime listens there", err}
	default:
		return answer, &criError{as.Message(), err}
	}
}

func noAnswer(within time.Duration) string { return fmt.Sprintf("no answer within %s", within) }

func callNow[Q, A any](ctx context.Context, socket string, question Q,
	method func(cri.RuntimeServiceClient, context.Context, Q, ...grpc.CallOption) (A, error),
) (answer A, err error) {
	first, err := dial(ctx, socket) // gRPC would hide why this fails
	if err != nil {
		return answer, err
	}
	_ = first.Close()
	conn, err := grpc.NewClient("unix:"+socketPath(socket), // two slashes would exclude relative paths
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxCRIMessage)))
	if err != nil {
		return answer, err
	}
	defer conn.Close()
	return method(cri.NewRuntimeServiceClient(conn), ctx, question)
}

// dial connects to a socket. The error is that of connect(2).
func dial(ctx context.Context, socket string) (*net.UnixConn, error) {
	conn, err := new(net.Dialer).DialUnix(ctx, "unix", nil,
		&net.UnixAddr{Net: "unix", Name: socketPath(socket)})
	var failed *os.SyscallError
	if errors.As(err, &failed) {
		err = failed.Err
	}
	return conn, err
}

// PodSandboxes returns a CRI runtime's sandboxes in any state: a sandbox that is not ready keeps
// its network until it is stopped. The list contains all pods, but no containers outside pods.
func PodSandboxes(ctx context.Context, socket string) (*facts.List, error) {
	answer, err := call(ctx, socket, 0, &cri.ListPodSandboxRequest{},
		cri.RuntimeServiceClient.ListPodSandbox)
	if err != nil {
		hint := "check the runtime with crictl --runtime-endpoint unix://" + socketPath(socket) +
			" pods, or run unwindctl sweep --valid-attachments FILE --network NAME"
		if errors.Is(err, fs.ErrPermission) {
			hint = "run this as root"
		}
		return nil, term.WithHint(hint,
			"the runtime at %s returned no list of pods, so only other evidence counts: %w",
			socket, err)
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

// listener returns the ID of the process that listens at a socket (SO_PEERCRED). It returns 0 if
// that process is not visible in this process's PID namespace.
func listener(ctx context.Context, socket string) (pid int) {
	conn, err := dial(ctx, socket)
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

func askVersion(ctx context.Context, socket string) (*cri.VersionResponse, error) {
	return call(ctx, socket, 0, &cri.VersionRequest{}, cri.RuntimeServiceClient.Version)
}

// Release returns the name and version that the runtime reports, or why it reports none.
func (r Runtime) Release(ctx context.Context) string {
	answer, err := askVersion(ctx, r.Socket)
	if err != nil {
		return status.Convert(err).Message()
	}
	return answer.GetRuntimeName() + " " + answer.GetRuntimeVersion()
}

// runtimeVersion returns the first two numbers of a runtime's version, or 0, 0 if it is unknown.
func runtimeVersion(ctx context.Context, socket string) (major, minor int) {
	if socket == "" {
		return 0, 0
	}
	answer, err := askVersion(ctx, socket)
	if err != nil {
		return 0, 0
	}
	text := strings.TrimPrefix(answer.GetRuntimeVersion(), "v")
	if n, _ := fmt.Sscanf(text, "%d.%d", &major, &minor); n < 2 {
		return 0, 0
	}
	return major, minor
}

// FindPodSandboxes returns the sandboxes of all runtimes that listen on the sockets. If one runtime
// does not respond, FindPodSandboxes returns an error, because the list would lack that runtime's
// pods. It ignores a containerd without CRI, such as Docker's, which has no pods.
func FindPodSandboxes(ctx context.Context, sockets []string) (all *facts.List, err error) {
	for i, socket := range sockets {
		_, err := os.Stat(socket)
		if errors.Is(err, fs.ErrNotExist) || slices.Contains(sockets[:i], socket) {
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

// ask replaces r's directories with those that the runtime reports in its response to CRI's
// Status(verbose). Every containerd with CRI v1 reports them: the key "cniconfig" contains go-cni's
// configuration, and "config" contains the CRI plugin's configuration, with imports and defaults
// (containerd 1.6.20 pkg/cri/server/status.go, 2.3 internal/cri/server/status.go; go-cni 1.1.14
// cni.go GetConfig). The keys are not an API. CRI-O's response has neither (cri-o
// server/runtime_status.go createRuntimeInfo), so its directories come from configuration files.
//
// containerd 2 runs CNI's STATUS before it responds, so Status may be slow, and has a long timeout.
// ask queries the version first, and skips Status if that query times out. ask returns false for a
// containerd without CRI, such as Docker's, which runs no pods.
func (r *Runtime) ask(ctx context.Context, root string) bool {
	socket := filepath.Join(root, socketPath(r.Socket))
	var answer *cri.StatusResponse
	_, err := askVersion(ctx, socket)
	if status.Code(err) != codes.DeadlineExceeded {
		answer, err = call(ctx, socket, criTimeout, &cri.StatusRequest{Verbose: true},
			cri.RuntimeServiceClient.Status)
	}
	if status.Code(err) == codes.Unimplemented {
		return false
	}
	r.responds = err == nil
	var cni struct {
		PluginConfDir    string
		PluginDirs       []string
		PluginMaxConfNum int
	}
	_ = json.Unmarshal([]byte(answer.GetInfo()["cniconfig"]), &cni)
	if cni.PluginConfDir == "" || len(cni.PluginDirs) == 0 {
		if r.Name != crio {
			r.Problems = append(r.Problems, fmt.Sprintf("cannot confirm the runtime's CNI directories, "+
				"because %s at %s did not report them: %s, or set --conf-dir and --cni-bin-dir", r.Name,
				r.Socket, whyUntold(err)))
		}
		return true
	}
	r.Config, r.ConfDir, r.BinDirs = r.Socket, cni.PluginConfDir, cni.PluginDirs
	r.MaxConfs = cni.PluginMaxConfNum
	r.clean()
	var config struct { // only these keys, because others may contain secrets
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
				fmt.Sprintf("pods with the runtime handler %q use the conflists in %s, so they bypass unwind",
					handler, dir))
		}
	}
	return true
}

// whyUntold returns why a runtime's response contains no directories: "PROBLEM; REMEDY".
func whyUntold(err error) string {
	switch {
	case err == nil:
		return "its response does not contain them; check its version"
	case errors.Is(err, fs.ErrPermission):
		return fmt.Sprintf("%v; run this as root", err)
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
		return fmt.Sprintf("it is not running (%v); start it, choose another runtime with --runtime", err)
	}
	return fmt.Sprintf("%v; find out why, for example with crictl info", err)
}
