package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestHidden: the mount of a pod's network namespace is below another one, and nobody may make the
// mount namespace that it takes to look there. sweep, show and doctor name both mounts, and doctor
// does not send a person to the host.
func TestHidden(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	there := n.newPlace([]string{"--user", "--map-root-user", "--mount", "--pid", "--net"},
		[]string{"--user", "--preserve-credentials", "--mount", "--pid", "--net"},
		"mount -t proc proc /proc && echo 0 >/proc/sys/user/max_mnt_namespaces")
	pins := filepath.Join(n.dir, "netns")
	if err := os.WriteFile(n.pin("a"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	n.must(there.command(n, "unshare", "--net="+n.pin("a"), "true"))
	n.add(there, "a", n.pin("a"))
	n.must(there.command(n, "mount", "--bind", pins, pins))
	want := fmt.Sprintf("the mount at %s hides the network namespace at %s", pins, n.pin("a"))
	if r := n.sweep(there).results()["a"]; r[0] != "unknown" || !strings.Contains(r[1], want) {
		t.Errorf("sweep: %q, want unknown, %s", r, want)
	}
	for _, args := range [][]string{{"show", "a"}, {"doctor", "--conf-dir", n.dir, "--bin-dir", n.bin}} {
		out := n.run(there.command(n, filepath.Join(n.bin, "unwindctl"), append(args, "--state-dir", n.state, "--json")...))
		if !strings.Contains(out.stdout, want) || strings.Contains(out.stdout, "on the host, or with --host") {
			t.Errorf("%s does not say %q\n%s%s", args[0], want, out.stdout, out.stderr)
		}
	}
	n.must(there.command(n, "umount", pins))
	if r := n.sweep(there, network+"/a/eth0").results()["a"]; r[0] != "live" {
		t.Errorf("sweep: %q, want live", r)
	}
}
