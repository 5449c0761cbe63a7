package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/journal"
)

// fakeCRI is the far side of --cri: a runtime that knows one call.
type fakeCRI struct {
	cri.UnimplementedRuntimeServiceServer
	list func(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error)
}

func (f *fakeCRI) ListPodSandbox(ctx context.Context, r *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	return f.list(ctx, r)
}

// listen makes a socket. Its path is short: a socket's may have no more than some hundred bytes.
func listen(t *testing.T) (path string, l net.Listener) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cri")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path = filepath.Join(dir, "cri.sock")
	if l, err = net.Listen("unix", path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return path, l
}

// serve runs a runtime that has these sandboxes, or that answers with an error, or never.
func serve(t *testing.T, list func(context.Context) ([]*cri.PodSandbox, error)) (socket string) {
	t.Helper()
	socket, l := listen(t)
	server := grpc.NewServer(grpc.MaxSendMsgSize(64 << 20))
	cri.RegisterRuntimeServiceServer(server, &fakeCRI{
		list: func(ctx context.Context, r *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
			if r.GetFilter() != nil {
				return nil, status.Error(codes.InvalidArgument, "a filter would hide sandboxes")
			}
			items, err := list(ctx)
			return &cri.ListPodSandboxResponse{Items: items}, err
		}})
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return socket
}

func serveThese(t *testing.T, sandboxes ...*cri.PodSandbox) (socket string) {
	return serve(t, func(context.Context) ([]*cri.PodSandbox, error) { return sandboxes, nil })
}

func sandboxOf(id string, state cri.PodSandboxState) *cri.PodSandbox {
	return &cri.PodSandbox{Id: id, State: state, Metadata: &cri.PodSandboxMetadata{Namespace: "default", Name: id}}
}

// manySandboxes have some 8 MB of annotations, twice what grpc takes unless it is told.
func manySandboxes(first ...*cri.PodSandbox) []*cri.PodSandbox {
	for i := range 1000 {
		s := sandboxOf(fmt.Sprintf("many-%d", i), cri.PodSandboxState_SANDBOX_READY)
		s.Annotations = map[string]string{"kubectl.kubernetes.io/last-applied-configuration": strings.Repeat("x", 8<<10)}
		first = append(first, s)
	}
	return first
}

// addPods adds what a list can be about, each with an empty network namespace of its own: two pods that are old enough, one
// that is not, and two containers that are no pod's.
func (n *node) addPods() {
	n.Helper()
	ids := []string{"ready", "notready", "young", "nerdctl", "podman"}
	n.netns(ids...)
	for _, id := range ids {
		n.add(home, id, n.pin(id))
		if id != "young" {
			n.edit(id, func(e *journal.Entry) { e.Newest().GracePeriod = 1 })
		}
	}
}

// TestNoCRI: a runtime that does not answer, or not well, has given no list, which is not an empty one: nothing is released
// for not being on it. What is dead by evidence is released all the same. One that never answers is waited for 10 s.
func TestNoCRI(t *testing.T) {
	t.Parallel()
	fails := func(err error) func(*testing.T) string {
		return func(t *testing.T) string {
			return serve(t, func(context.Context) ([]*cri.PodSandbox, error) { return nil, err })
		}
	}
	for _, c := range []struct {
		name   string
		socket func(t *testing.T) string
		why    string
	}{
		{"it never answers", func(t *testing.T) string {
			return serve(t, func(ctx context.Context) ([]*cri.PodSandbox, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			})
		}, "DeadlineExceeded"},
		{"it never says a word", func(t *testing.T) string {
			path, _ := listen(t)
			return path
		}, "DeadlineExceeded"},
		{"an error", fails(status.Error(codes.Internal, "the metadata cannot be read")), "the metadata cannot be read"},
		{"it does not know the call", fails(status.Error(codes.Unimplemented, "unknown service")), "unknown service"},
		{"it says that it lacks the time", fails(status.Error(codes.DeadlineExceeded, "containerd is overloaded")), "overloaded"},
		{"no socket", func(t *testing.T) string { return filepath.Join(t.TempDir(), "none.sock") }, "no such file or directory"},
		{"no one listens", func(t *testing.T) string {
			path, l := listen(t)
			l.(*net.UnixListener).SetUnlinkOnClose(false)
			_ = l.Close()
			return path
		}, "connection refused"},
		{"not a runtime", func(t *testing.T) string {
			path, l := listen(t)
			go func() {
				for c, err := l.Accept(); err == nil; c, err = l.Accept() {
					_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
					_ = c.Close()
				}
			}()
			return path
		}, ""},
		{"too big an answer", func(t *testing.T) string {
			big := sandboxOf("big", 0)
			big.Annotations = map[string]string{"a": strings.Repeat("x", maxCRIMessage)}
			return serveThese(t, big, sandboxOf("unlisted", 0))
		}, "larger than max"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.netns("unlisted", "gone")
			n.add(home, "unlisted", n.pin("unlisted"))
			n.add(home, "gone", n.pin("gone"))
			n.edit("unlisted", func(e *journal.Entry) { e.Newest().GracePeriod = 1 })
			n.drop("gone")
			socket := c.socket(t)
			out := n.sweep(home, "--cri", socket)
			want := "error: the runtime at " + socket + " gave no list, so attachments are judged without one: "
			if out.code != 1 || !strings.HasPrefix(out.stderr, want) || !strings.Contains(out.stderr, c.why) {
				t.Errorf("exit code %d, %s\nwant 1, %s… %s", out.code, out.stderr, want, c.why)
			}
			if ids := n.ids(); !slices.Equal(ids, []string{"unlisted"}) {
				t.Errorf("the journal has %v, want [unlisted]\n%s", ids, out.stdout)
			}
		})
	}
}

// TestCRI: the sandboxes of the runtime are a list of all pods, in whatever state they are, and of nothing else.
func TestCRI(t *testing.T) {
	t.Parallel()
	ready := sandboxOf("ready", cri.PodSandboxState_SANDBOX_READY)
	notready := sandboxOf("notready", cri.PodSandboxState_SANDBOX_NOTREADY)
	for _, c := range []struct {
		name string
		list []*cri.PodSandbox
		args func(socket string) []string // nil: --cri with the path of the socket
		left []string
	}{
		{"both listed", []*cri.PodSandbox{ready, notready}, nil, []string{"nerdctl", "notready", "podman", "ready", "young"}},
		{"one listed", []*cri.PodSandbox{notready}, nil, []string{"nerdctl", "notready", "podman", "young"}},
		{"others listed", []*cri.PodSandbox{sandboxOf("read", 0), sandboxOf("", 0), sandboxOf("ready2", 0)}, nil,
			[]string{"nerdctl", "podman", "young"}},
		{"none listed", nil, nil, []string{"nerdctl", "podman", "young"}},
		{"a thousand with big annotations", manySandboxes(ready), nil, []string{"nerdctl", "podman", "ready", "young"}},
		{"the socket as a URL", []*cri.PodSandbox{ready}, func(s string) []string { return []string{"--cri", "unix://" + s} },
			[]string{"nerdctl", "podman", "ready", "young"}},
		{"the socket as a relative path", []*cri.PodSandbox{ready}, func(s string) []string {
			wd, _ := os.Getwd()
			relative, _ := filepath.Rel(wd, s)
			return []string{"--cri", relative}
		}, []string{"nerdctl", "podman", "ready", "young"}},
		{"another network", nil, func(s string) []string { return []string{"--cri", s, "--network", "other"} },
			[]string{"nerdctl", "notready", "podman", "ready", "young"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.addPods()
			socket := serveThese(t, c.list...)
			args := []string{"--cri", socket}
			if c.args != nil {
				args = c.args(socket)
			}
			if out := n.sweep(home, args...); out.code != 0 || out.stderr != "" || !slices.Equal(n.ids(), c.left) {
				t.Errorf("the journal has %v, want %v; exit code %d\n%s%s", n.ids(), c.left, out.code, out.stdout, out.stderr)
			}
		})
	}
}
