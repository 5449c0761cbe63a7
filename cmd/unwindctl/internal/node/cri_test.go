package node

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

func TestMain(m *testing.M) {
	criTimeout = sandbox.Patience
	_ = os.Unsetenv(podEnv)
	os.Exit(m.Run())
}

func serveVersion(t *testing.T, version string) string {
	return (&nodetest.FakeCRI{Release: version}).Serve(t)
}

// TestVersions: SweepAdvice recommends a systemd timer unless the runtime itself triggers sweeps.
// CNIVersion returns the newest CNI version that the runtime's libcni supports, or "" if the
// runtime does not report its own version.
func TestVersions(t *testing.T) {
	t.Parallel()
	const (
		each, start, unknown, one = "containerd triggers a sweep every", "CRI-O triggers a sweep only when it starts", "From version 2, containerd triggers a sweep every few seconds (STATUS)", "containerd 1 calls neither"
		none                      = "If the runtime is not"
	)
	containerd := func(version string) Runtime {
		return Runtime{Name: "containerd", Socket: serveVersion(t, version), Kubelet: true}
	}
	with := func(r Runtime, change func(*Runtime)) Runtime { change(&r); return r }
	down := Runtime{Name: "containerd", Socket: "/none", Kubelet: true}
	crio := func(version string, grace bool) Runtime {
		return Runtime{Name: "cri-o", Socket: serveVersion(t, version), StatusGrace: grace}
	}
	for _, c := range []struct {
		name   string
		r      Runtime
		advice string
		timer  bool
		cni    string
	}{
		{"containerd 2", containerd("v2.1.4"), each, false, "1.1.0"},
		{"containerd 2 without a kubelet", with(containerd("v2.1.4"), func(r *Runtime) { r.Kubelet = false }), "This machine has no kubelet", true, "1.1.0"},
		{"containerd 1", containerd("1.7.27"), one, true, "1.0.0"},
		{"k3s", with(containerd("v2.1.4-k3s1"), func(r *Runtime) { r.Name = "k3s" }), each, false, "1.1.0"},
		{"k3s, containerd 1", with(containerd("v1.7.23-k3s2"), func(r *Runtime) { r.Name = "k3s" }), one, true, "1.0.0"},
		{"no answer", down, unknown, true, ""},
		{"no version", containerd("unknown"), unknown, true, ""},
		{"CRI-O", Runtime{Name: "cri-o", Socket: "/none"}, start, true, ""},
		{"CRI-O 1.30", crio("1.30.9", false), start, true, "1.0.0"},
		{"CRI-O 1.34", crio("1.34.11", false), start, true, "1.1.0"},
		{"CRI-O 1.36", crio("1.36.3", false), start, true, "1.1.0"},
		{"CRI-O 1.36 with a grace period", crio("1.36.3", true), "CRI-O triggers a sweep every few seconds", false, "1.1.0"},
		{"CRI-O 1.35 with a grace period", crio("1.35.1", true), start, true, "1.1.0"},
		{"none", Runtime{}, none, true, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if got := c.r.SweepAdvice(t.Context()); !strings.HasPrefix(got, c.advice) || strings.Contains(got, "--systemd") != c.timer {
				t.Error(got)
			}
			if got := c.r.CNIVersion(t.Context()); got != c.cni {
				t.Errorf("%q, want %q", got, c.cni)
			}
		})
	}
}

// TestFindPodSandboxes: --cri auto lists the pods of all runtimes on the node. If one runtime fails
// to answer, there is no list, because the list would lack that runtime's pods. A runtime without
// CRI, such as Docker's containerd, is ignored.
func TestFindPodSandboxes(t *testing.T) {
	t.Parallel()
	fails := func(code codes.Code) string {
		return nodetest.ServeCRI(t, func(context.Context) ([]*cri.PodSandbox, error) { return nil, status.Error(code, "no") })
	}
	big := nodetest.Sandbox("big", 0)
	big.Annotations = map[string]string{"a": strings.Repeat("x", maxCRIMessage)}
	web, listener := nodetest.Listen(t)
	go func() {
		for c, err := listener.Accept(); err == nil; c, err = listener.Accept() {
			_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
			_ = c.Close()
		}
	}()
	one, two := nodetest.ServeSandboxes(t, nodetest.Sandbox("one", 0)), nodetest.ServeSandboxes(t, nodetest.Sandbox("two", cri.PodSandboxState_SANDBOX_NOTREADY))
	none, empty, docker := filepath.Join(t.TempDir(), "none.sock"), nodetest.ServeSandboxes(t), fails(codes.Unimplemented)
	deaf, l := nodetest.Listen(t)
	_ = l // nobody accepts its connections
	refusing := filepath.Join(t.TempDir(), "dead.sock")
	if fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0); err != nil {
		t.Fatal(err)
	} else if err := unix.Bind(fd, &unix.SockaddrUnix{Name: refusing}); err != nil {
		t.Skip(err) // the path is too long
	}
	if _, err := PodSandboxes(t.Context(), docker); status.Code(err) != codes.Unimplemented {
		t.Errorf("Docker's containerd, asked by name: %v", err)
	}
	for _, c := range []struct {
		name    string
		sockets []string
		want    []string // nil: no list
		err     string
	}{
		{"none", []string{none}, nil, "found no container runtime"},
		{"no sockets", nil, nil, "found no container runtime"},
		{"one", []string{none, one}, []string{"one"}, ""},
		{"two", []string{one, none, two}, []string{"one", "two"}, ""},
		{"one without pods", []string{empty}, []string{}, ""},
		{"two, one without pods", []string{empty, two}, []string{"two"}, ""},
		{"Docker's containerd", []string{docker}, nil, "found no container runtime"},
		{"Docker's containerd and another", []string{docker, one}, []string{"one"}, ""},
		{"another and Docker's containerd", []string{one, docker}, []string{"one"}, ""},
		{"one that fails", []string{one, fails(codes.Internal), two}, nil, "no"},
		{"one that is overloaded", []string{one, fails(codes.DeadlineExceeded)}, nil, "no"},
		{"one that answers too much", []string{one, nodetest.ServeSandboxes(t, big)}, nil, "larger than max"},
		{"one that is no runtime", []string{one, web}, nil, "returned no list of pods, so only other evidence counts: the connection was closed; "},
		{"one that is down", []string{one, refusing}, nil, "connection refused"},
		{"one that says nothing", []string{one, deaf}, nil, "no answer within 2s"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			if c.err == "no answer within 2s" {
				ctx = Waiting(ctx, io.Discard, LookTimeout, "")
			}
			list, err := FindPodSandboxes(ctx, c.sockets)
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
