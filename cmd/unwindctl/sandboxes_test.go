package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cni-unwind/testdata/nodetest"
)

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
		if !strings.Contains(out.stdout, "10.9.0.99: this process does not run in the runtime's namespaces") {
			t.Errorf("%v: it may not be judged:\n%s%s", flags, out.stdout, out.stderr)
		}
	}
	out := n.sweep(home, "--conf-dir", confDir, "--cri", socket, "--dry-run")
	if !strings.Contains(out.stdout, "10.9.0.99: its owner is neither in the journal nor in the runtime's list") {
		t.Errorf("beside its runtime:\n%s%s", out.stdout, out.stderr)
	}
}
