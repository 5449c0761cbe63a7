package node

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/cmd/unwindctl/internal/nodetest"
	"cni-unwind/plugin/netconf"
)

func serveVersion(t *testing.T, version string) string {
	return (&nodetest.FakeCRI{Release: version}).Serve(t)
}

// TestCalls has a person be told of the timer wherever the runtime does not have what is dead swept
// by itself.
func TestCalls(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		r     Runtime
		want  string
		timer bool
	}{
		{"containerd 2", Runtime{Name: "containerd", Socket: serveVersion(t, "v2.1.4"), Kubelet: true}, "containerd has what is dead swept", false},
		{"containerd 2 without a kubelet", Runtime{Name: "containerd", Socket: serveVersion(t, "v2.1.4")}, "No kubelet is on this machine", true},
		{"containerd 1", Runtime{Name: "containerd", Socket: serveVersion(t, "1.7.27")}, "containerd 1 calls neither", true},
		{"k3s", Runtime{Name: "k3s", Socket: serveVersion(t, "v1.7.23-k3s2"), Major: 2}, "containerd 1 calls neither", true},
		{"no answer", Runtime{Name: "containerd", Socket: "/none", Kubelet: true}, "containerd 2 and later", true},
		{"no answer, version 3 of the file", Runtime{Name: "containerd", Socket: "/none", Major: 2, Kubelet: true}, "containerd has what is dead swept", false},
		{"no version", Runtime{Name: "containerd", Socket: serveVersion(t, "unknown"), Kubelet: true}, "containerd 2 and later", true},
		{"CRI-O", Runtime{Name: "cri-o", Socket: "/none"}, "CRI-O has what is dead swept when it starts", true},
		{"CRI-O 1.36", Runtime{Name: "cri-o", Socket: serveVersion(t, "1.36.3")}, "CRI-O has what is dead swept when it starts", true},
		{"CRI-O 1.36 with a grace period", Runtime{Name: "cri-o", Socket: serveVersion(t, "1.36.3"), StatusGrace: true}, "CRI-O has what is dead swept every few seconds", false},
		{"CRI-O 1.35 with a grace period", Runtime{Name: "cri-o", Socket: serveVersion(t, "1.35.1"), StatusGrace: true}, "CRI-O has what is dead swept when it starts", true},
		{"Nomad", Runtime{Name: "nomad"}, "If the runtime is not", true},
		{"none", Runtime{}, "If the runtime is not", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if got := c.r.SweepAdvice(t.Context()); !strings.HasPrefix(got, c.want) || strings.Contains(got, "--systemd") != c.timer {
				t.Error(got)
			}
		})
	}
}

// TestCNIVersion has the version be the newest that the runtime's libcni speaks, and none be said of
// a runtime that does not tell its own.
func TestCNIVersion(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		r    Runtime
		want string
	}{
		{"containerd 1.7", Runtime{Name: "containerd", Socket: serveVersion(t, "1.7.27")}, "1.0.0"},
		{"containerd 2", Runtime{Name: "k3s", Socket: serveVersion(t, "v2.1.4-k3s1")}, "1.1.0"},
		{"containerd 1.7 with a newer file", Runtime{Name: "containerd", Socket: serveVersion(t, "1.7.27"), Major: 2}, "1.0.0"},
		{"containerd that is down, version 3 of the file", Runtime{Name: "containerd", Socket: "/none", Major: 2}, "1.1.0"},
		{"containerd that is down", Runtime{Name: "containerd", Socket: "/none"}, ""},
		{"CRI-O 1.30", Runtime{Name: "cri-o", Socket: serveVersion(t, "1.30.9")}, "1.0.0"},
		{"CRI-O 1.34", Runtime{Name: "cri-o", Socket: serveVersion(t, "1.34.11")}, "1.1.0"},
		{"podman", Runtime{Name: "podman"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if got := c.r.CNIVersion(t.Context()); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

// TestFindPodSandboxes: --cri auto has the pods of every runtime of the node. If one of them does
// not answer there is no list, for its pods would be missing; one that has no pods at all is passed
// over.
func TestFindPodSandboxes(t *testing.T) {
	t.Parallel()
	fails := func(code codes.Code) string {
		return nodetest.ServeCRI(t, func(context.Context) ([]*cri.PodSandbox, error) { return nil, status.Error(code, "no") })
	}
	one, two := nodetest.ServeSandboxes(t, nodetest.Sandbox("one", 0)), nodetest.ServeSandboxes(t, nodetest.Sandbox("two", cri.PodSandboxState_SANDBOX_NOTREADY))
	none, empty, docker := filepath.Join(t.TempDir(), "none.sock"), nodetest.ServeSandboxes(t), fails(codes.Unimplemented)
	deaf, l := nodetest.Listen(t)
	_ = l // which no one reads
	refusing := filepath.Join(t.TempDir(), "dead.sock")
	if fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0); err != nil {
		t.Fatal(err)
	} else if err := unix.Bind(fd, &unix.SockaddrUnix{Name: refusing}); err != nil {
		t.Skip(err) // a long path
	}
	for _, c := range []struct {
		name    string
		sockets []string
		want    []string // nil: no list
		err     string
	}{
		{"none", []string{none}, nil, "no runtime listens"},
		{"no sockets", nil, nil, "no runtime listens"},
		{"one", []string{none, one}, []string{"one"}, ""},
		{"two", []string{one, none, two}, []string{"one", "two"}, ""},
		{"one without pods", []string{empty}, []string{}, ""},
		{"two, one without pods", []string{empty, two}, []string{"two"}, ""},
		{"Docker's containerd", []string{docker}, nil, "no runtime listens"},
		{"Docker's containerd and another", []string{docker, one}, []string{"one"}, ""},
		{"another and Docker's containerd", []string{one, docker}, []string{"one"}, ""},
		{"one that fails", []string{one, fails(codes.Internal), two}, nil, "no"},
		{"one that is down", []string{one, refusing}, nil, "connection refused"},
		{"one that says nothing", []string{one, deaf}, nil, "DeadlineExceeded"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if testing.Short() && c.err == "DeadlineExceeded" {
				t.Skip("it waits 10 s")
			}
			list, err := FindPodSandboxes(t.Context(), c.sockets)
			if (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("%v, want %q", err, c.err)
			}
			if (list != nil) != (c.want != nil) || list != nil && (len(list.Valid) != len(c.want) || !list.Pods || list.Network != "") {
				t.Fatalf("%+v, want %v", list, c.want)
			}
			ours := func(pid int) bool { return pid == os.Getpid() }
			if list != nil && (len(list.Runtimes) < max(1, len(c.want)) || !slices.ContainsFunc(list.Runtimes, ours)) {
				t.Errorf("the list is of processes %v", list.Runtimes)
			}
			for _, id := range c.want {
				if !list.Valid[netconf.Attachment{ContainerID: id}] {
					t.Errorf("%v has not %s", list.Valid, id)
				}
			}
		})
	}
}
