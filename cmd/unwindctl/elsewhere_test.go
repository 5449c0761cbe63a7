package main

import (
	"path/filepath"
	"testing"

	"cni-unwind/cmd/unwindctl/internal/install"
)

// TestSwitchesOffElsewhere: off and uninstall change nothing if their flags name another place than
// the one where unwind is in use, or a journal that it doesn't use. Else they would report that
// unwind is off, and uninstall would remove the plugin under a runtime that uses it.
func TestSwitchesOffElsewhere(t *testing.T) {
	t.Parallel()
	n := newMachine(t)
	plugin, other := "/opt/cni/bin/unwind", filepath.Join(n.dir, "state2")
	flags := []string{"--mount"}
	at := n.newPlace(flags, flags, `mount -t tmpfs etc /etc && mount -t tmpfs opt /opt && mkdir -p /etc/cni/net.d /etc/other /opt/cni/bin &&
		ln -s /bin/true /opt/cni/bin/bridge && cd /etc/cni/net.d &&
		echo '{"cniVersion": "1.0.0", "name": "podnet", "plugins": [{"type": "bridge"}]}' | tee 10-podnet.conflist >/etc/other/10-podnet.conflist`)
	ctl := func(args ...string) outcome {
		t.Helper()
		if args[0] == "uninstall" {
			args = append(args, "--cache-dir", "none")
		}
		return n.run(at.command(n, filepath.Join(n.bin, "unwindctl"), args...))
	}
	exists := func(path string) bool { return n.run(at.command(n, "test", "-e", path)).code == 0 }
	must := func(want string, args ...string) {
		t.Helper()
		if out := ctl(args...); out.code != 0 || !out.says(want) {
			t.Fatalf("%v: exit code %d, want %q\n%s%s", args, out.code, want, out.stdout, out.stderr)
		}
	}
	refused := func(in string) {
		t.Helper()
		const inUse = "error: nothing was changed: unwind's conflist is "
		for _, c := range []struct{ flag, value, want, hint string }{
			{"--conf-dir", "/etc/other", inUse + in + ", not /etc/other/00-unwind.conflist",
				"hint: use --conf-dir /etc/cni/net.d --unwind-file 00-unwind.conflist"},
			{"--unwind-file", "00-own.json", inUse + in + ", not /etc/cni/net.d/00-own.json", "hint: use --conf-dir /etc/cni/net.d "},
			{"--state-dir", other, "error: nothing was changed: unwind uses the journal in " + n.state + ", not in " + other, "hint: use --state-dir " + n.state},
		} {
			for _, command := range []string{"off", "uninstall"} {
				out := ctl(command, c.flag, c.value)
				if out.code != 1 || out.stdout != "" || !out.says(c.want) || !out.says(c.hint) {
					t.Errorf("%s %s: exit code %d, want %q, %q\n%s%s", command, c.flag, out.code, c.want, c.hint, out.stdout, out.stderr)
				}
			}
		}
		if !exists(in) || !exists(plugin) || install.ReadOff(other) != nil {
			t.Errorf("%s %t, the plugin %t", in, exists(in), exists(plugin))
		}
	}

	const conflist = "/etc/cni/net.d/00-unwind.conflist"
	must("written: ", "install", "--binary", filepath.Join(n.bin, "unwind"), "--state-dir", n.state)
	refused(conflist)
	must("off: ", "off", "--unwind-file", "00-unwind.json", "--state-dir", n.state+"/") // the other form of the name
	refused(conflist + ".off")
	if off := install.ReadOff(n.state); off == nil {
		t.Error("off did not use the journal that the conflist names")
	}

	// An agent's environment names the agent's journal, which the conflist may not name yet: off works there too.
	must("on: ", "on", "--binary", filepath.Join(n.bin, "unwind"))
	cmd := at.command(n, filepath.Join(n.bin, "unwindctl"), "off")
	cmd.Env = append(cmd.Env, "UNWIND_STATE_DIR="+other)
	n.must(cmd)
	if exists(conflist) || install.ReadOff(other) == nil {
		t.Errorf("off in an agent's environment: %s %t", conflist, exists(conflist))
	}

	// Both directories have it: the plugin stays until both have not.
	binary := filepath.Join(n.bin, "unwind")
	must("on: ", "on", "--binary", binary)
	must("written: ", "install", "--conf-dir", "/etc/other", "--binary", binary, "--state-dir", n.state)
	must("kept:      "+plugin+" (used by "+conflist+";", "uninstall", "--conf-dir", "/etc/other")
	must("removed:   "+plugin, "uninstall")
	must("off:       unwind is not in use", "uninstall", "--conf-dir", "/etc/cni/net.d")

	// One that unwindctl did not write runs it too.
	n.must(at.command(n, "sh", "-c", `echo '{"cniVersion": "1.0.0", "name": "podnet", "plugins": [{"type": "unwind", "chain": {"plugins": [{"type": "bridge"}]}}]}' >`+
		"/etc/cni/net.d/20-own.conflist"))
	if out := ctl("off"); out.code != 1 || !out.says("unwind's conflist is /etc/cni/net.d/20-own.conflist, not ") ||
		!out.says("hint: replace that file with the provider's conflist") {
		t.Errorf("off: exit code %d\n%s%s", out.code, out.stdout, out.stderr)
	}
}
