package main

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/journal"
	"cni-unwind/testdata/nodetest"
)

// TestNoCRI: a runtime that does not answer, or not well, has given no list, which is not an empty
// one: nothing is released for not being on it. What is dead by evidence is released all the same.
// One that never answers is waited for 10 s.
func TestNoCRI(t *testing.T) {
	t.Parallel()
	fails := func(err error) func(*testing.T) string {
		return func(t *testing.T) string {
			return nodetest.ServeCRI(t, func(context.Context) ([]*cri.PodSandbox, error) { return nil, err })
		}
	}
	n := newMachine(t)
	n.addAll([]string{"unlisted", "gone"})
	n.edit("unlisted", func(e *journal.Entry) { e.GracePeriod = 1 })
	n.drop("gone")
	t.Cleanup(func() {
		if out := n.sweep(home, "--cri", "/none"); out.code != 1 || !slices.Equal(n.ids(), []string{"unlisted"}) {
			t.Errorf("the journal has %v, want [unlisted]: %+v", n.ids(), out)
		}
	})
	for _, c := range []struct {
		name   string
		socket func(t *testing.T) string
		why    string
	}{
		{"it never answers", func(t *testing.T) string {
			return nodetest.ServeCRI(t, func(ctx context.Context) ([]*cri.PodSandbox, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			})
		}, "DeadlineExceeded"},
		{"it never says a word", func(t *testing.T) string {
			path, _ := nodetest.Listen(t)
			return path
		}, "DeadlineExceeded"},
		{"an error", fails(status.Error(codes.Internal, "the metadata cannot be read")), "the metadata cannot be read"},
		{"it does not know the call", fails(status.Error(codes.Unimplemented, "unknown service")), "unknown service"},
		{"it says that it lacks the time", fails(status.Error(codes.DeadlineExceeded, "containerd is overloaded")), "overloaded"},
		{"no socket", func(t *testing.T) string { return filepath.Join(t.TempDir(), "none.sock") }, "no such file or directory"},
		{"no one listens", func(t *testing.T) string {
			path, l := nodetest.Listen(t)
			l.(*net.UnixListener).SetUnlinkOnClose(false)
			_ = l.Close()
			return path
		}, "connection refused"},
		{"not a runtime", func(t *testing.T) string {
			path, l := nodetest.Listen(t)
			go func() {
				for c, err := l.Accept(); err == nil; c, err = l.Accept() {
					_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
					_ = c.Close()
				}
			}()
			return path
		}, ""},
		{"too big an answer", func(t *testing.T) string {
			big := nodetest.Sandbox("big", 0)
			big.Annotations = map[string]string{"a": strings.Repeat("x", 16<<20)}
			return nodetest.ServeSandboxes(t, big, nodetest.Sandbox("unlisted", 0))
		}, "larger than max"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			socket := c.socket(t)
			out := n.sweep(home, "--dry-run", "--cri", socket)
			if wait := "waiting for the runtime at " + socket + " (up to 10s)\n"; c.why == "DeadlineExceeded" {
				if !strings.HasPrefix(out.stderr, wait) || !strings.Contains(out.stderr, "\nhint: check the runtime: crictl ") {
					t.Errorf("no line that it waits, or no hint:\n%s", out.stderr)
				}
				out.stderr = strings.TrimPrefix(out.stderr, wait)
			}
			want := "error: the runtime at " + socket + " returned no list of pods; judging attachments without one: "
			if out.code != 1 || !strings.HasPrefix(out.stderr, want) || !strings.Contains(out.stderr, c.why) {
				t.Errorf("exit code %d, %s\nwant 1, %s… %s", out.code, out.stderr, want, c.why)
			}
			if !strings.HasSuffix(out.stdout, "2 attachments: 1 to be released, 1 live.\n") {
				t.Errorf("want one to be released:\n%s", out.stdout)
			}
		})
	}
}

// TestOrphanInContainer: an address whose owner the journal does not know is released by the list
// of a runtime in the namespaces of the sweep, though these are a container's, as those of this
// test. It is kept where the runtime is elsewhere.
func TestOrphanInContainer(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	confDir := n.crowd(0)
	pool := filepath.Join(n.dir, "ipam", network, "10.9.0.99")
	long := time.Now().Add(-time.Hour)
	check(t, os.Chtimes(pool, long, long))
	socket := nodetest.ServeSandboxes(t, nodetest.Sandbox("live", 0), nodetest.Sandbox("damaged", 0))
	for _, flags := range [][]string{{"--mount"}, {"--net"}, {"--pid"}, {"--mount", "--pid"}} {
		there := n.newPlace(flags, flags, "true")
		out := n.sweep(there, "--cri", socket, "--conf-dir", confDir)
		if !strings.Contains(out.stdout, "10.9.0.99: this process does not see what the runtime sees") {
			t.Errorf("%v: it may not be judged:\n%s%s", flags, out.stdout, out.stderr)
		}
	}
	out := n.sweep(home, "--conf-dir", confDir, "--cri", socket, "--dry-run")
	if !strings.Contains(out.stdout, "10.9.0.99: its owner is neither in the journal nor in the runtime's list") {
		t.Errorf("beside its runtime:\n%s%s", out.stdout, out.stderr)
	}
}
