// Package nodetest provides a fake container runtime, CNI directories and journals to the tests of
// several packages.
package nodetest

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// FakeCRI is a CRI server that returns the values of its fields. It implements only Version, Status
// and ListPodSandbox.
type FakeCRI struct {
	cri.UnimplementedRuntimeServiceServer
	List    func(context.Context) ([]*cri.PodSandbox, error)
	Release string            // the runtime's version
	Info    map[string]string // in the reply to a verbose Status
	Asked   atomic.Int64      // the number of Status calls so far
	Slow    atomic.Bool       // Version and ListPodSandbox take 3 s to reply, as on a busy node
}

func (f *FakeCRI) ListPodSandbox(ctx context.Context, r *cri.ListPodSandboxRequest) (
	*cri.ListPodSandboxResponse, error) {
	f.wait()
	switch {
	case f.List == nil:
		return nil, status.Error(codes.Unimplemented, "no pods")
	case r.GetFilter() != nil:
		return nil, status.Error(codes.InvalidArgument, "a filter would hide sandboxes")
	}
	items, err := f.List(ctx)
	return &cri.ListPodSandboxResponse{Items: items}, err
}

func (f *FakeCRI) wait() {
	if f.Slow.Load() {
		time.Sleep(3 * time.Second)
	}
}

func (f *FakeCRI) Version(context.Context, *cri.VersionRequest) (*cri.VersionResponse, error) {
	f.wait()
	return &cri.VersionResponse{RuntimeName: "fake", RuntimeVersion: f.Release}, nil
}

func (f *FakeCRI) Status(_ context.Context, r *cri.StatusRequest) (*cri.StatusResponse, error) {
	f.Asked.Add(1)
	if !r.GetVerbose() {
		return &cri.StatusResponse{}, nil
	}
	return &cri.StatusResponse{Info: f.Info}, nil
}

// Serve runs the server until the test ends.
func (f *FakeCRI) Serve(t testing.TB) (socket string) {
	t.Helper()
	socket, l := Listen(t)
	server := grpc.NewServer(grpc.MaxSendMsgSize(64 << 20))
	cri.RegisterRuntimeServiceServer(server, f)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	return socket
}

// Listen creates a socket with a short path, because Linux limits a socket's path to 107 bytes.
func Listen(t testing.TB) (path string, l net.Listener) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cri")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path = filepath.Join(dir, "cri.sock")
	if l, err = new(net.ListenConfig).Listen(t.Context(), "unix", path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return path, l
}

// ServeCRI runs a FakeCRI that gets its sandboxes from list. list may return an error or hang.
func ServeCRI(t testing.TB, list func(context.Context) ([]*cri.PodSandbox, error)) (socket string) {
	t.Helper()
	return (&FakeCRI{List: list}).Serve(t)
}

// ServeSandboxes runs a FakeCRI that lists the given sandboxes.
func ServeSandboxes(t testing.TB, sandboxes ...*cri.PodSandbox) (socket string) {
	return ServeCRI(t, func(context.Context) ([]*cri.PodSandbox, error) { return sandboxes, nil })
}

// Sandbox returns the sandbox of pod default/ID.
func Sandbox(id string, state cri.PodSandboxState) *cri.PodSandbox {
	return &cri.PodSandbox{Id: id, State: state,
		Metadata: &cri.PodSandboxMetadata{Namespace: "default", Name: id}}
}
