package main

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/nodetest"
	"cni-unwind/plugin/netconf"
)

// TestRunOff: what a person removes stays removed whatever is started anew, until somebody says
// otherwise, which the agent sees at once. So it does that the plugin is gone.
func TestRunOff(t *testing.T) {
	t.Parallel()
	n := newAgentMachine(t)
	args := []string{"--interval", "1h", "--program-dir", filepath.Join(n.dir, "programs")}
	if err := os.Mkdir(filepath.Join(n.dir, "programs"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, plugin := range []string{"bridge", "portmap"} { // of the provider's chain
		n.Write(filepath.Join(n.BinDir(), plugin), nodetest.FakePlugin)
	}
	r := n.agent(home, args...)
	n.await(nodetest.First)
	unwindctl := filepath.Join(n.dir, "programs", "unwindctl")
	plugin := filepath.Join(n.BinDir(), netconf.Name)
	time.Sleep(time.Second) // it has looked at its own changes
	n.Remove(plugin)
	eventually(t, "the plugin is back", func() bool { return durable.Exists(plugin) })

	at := []string{"--conf-dir", n.ConfDir(), "--bin-dir", n.BinDir(), "--state-dir", n.state}
	ctl := func(verb string, more ...string) outcome {
		return n.run(home.command(n, unwindctl, append(append([]string{verb}, at...), more...)...))
	}
	offs := func() string {
		if off := install.ReadOff(n.state); off != nil {
			return off.By
		}
		return ""
	}
	n.Remove(n.Own())
	eventually(t, "that is on record", func() bool { return offs() == "rm "+n.Own() })
	r.signal(syscall.SIGKILL, 20*time.Second)
	for _, flags := range [][]string{nil, {"--off"}} {
		r = n.agent(home, append(args, flags...)...)
		eventually(t, "off is seen", func() bool { return r.says("unwind has been switched off since") == 1 })
		if n.Installed() != "" || offs() != "rm "+n.Own() {
			t.Errorf("%q: %q is installed, and off is by %q", flags, n.Installed(), offs())
		}
		r.signal(syscall.SIGTERM, 20*time.Second)
	}

	// An agent that is started with --off does the same, until one is started without.
	if out := ctl("on", "--binary", filepath.Join(n.dir, "unwind")); out.code != 0 || n.Installed() != nodetest.First {
		t.Errorf("on, without an agent: %+v", out)
	}
	// A removal that the agent has no time to look at is on record, too.
	n.Remove(plugin)
	r = n.agent(home, args...)
	eventually(t, "it has looked", func() bool { return r.says("msg=installed") == 1 })
	n.Remove(n.Own())
	r.signal(syscall.SIGTERM, 20*time.Second)
	if offs() != "rm "+n.Own() {
		t.Errorf("at the agent's end off is by %q", offs())
	}
	if out := ctl("on", "--binary", filepath.Join(n.dir, "unwind")); out.code != 0 {
		t.Errorf("on: %+v", out)
	}
	r = n.agent(home, append(args, "--off")...)
	n.await("")
	r.signal(syscall.SIGTERM, 20*time.Second)
	n.agent(home, args...)
	n.await(nodetest.First)

	if out := ctl("off", "--by", "ann"); out.code != 0 || n.Installed() != "" || offs() != "ann" {
		t.Errorf("off: %+v", out)
	}
	if out := ctl("uninstall", "--purge", "--program-dir="); out.code != 1 || !out.says("and would install again") {
		t.Errorf("purge beside an agent: %+v", out)
	}
	out := ctl("on", "-o", "json")
	if out.code != 0 || n.Installed() != nodetest.First || !strings.Contains(out.stdout, "by ann") {
		t.Errorf("on: %+v", out)
	}
}
