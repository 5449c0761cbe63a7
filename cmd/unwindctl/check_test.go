package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/journal/journaltest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// checkedNode is a node with unwind and a live pod. Its chain consists of reference plugins and the
// faulty plugin. Only one check can run on a node at a time, so each test uses namespaces of its
// own: see sandbox.Apart.
type checkedNode struct {
	*machine
	pool   string
	before []string      // what n.there returned before the first check
	took   time.Duration // the duration of an ADD
}

const checkBridge = "check0"

// newCheckedNode returns a node whose chain ends with the faulty plugin, which the method plan
// controls. last is the last address of the node's IPv4 pool.
func newCheckedNode(t *testing.T, last string) *checkedNode {
	t.Helper()
	n := &checkedNode{machine: newMachine(t)}
	n.pool = filepath.Join(n.dir, "ipam", network)
	n.chain = fmt.Sprintf(`{"type": "bridge", "bridge": %q, "isDefaultGateway": true, "ipMasq": true, "ipam": {"type": "host-local",
		"dataDir": %q, "ranges": [[{"subnet": "10.78.0.0/24", "rangeEnd": %q}], [{"subnet": "fd00:78::/64"}]]}},
		{"type": "portmap", "capabilities": {"portMappings": true}}, {"type": "firewall"}, %s`,
		checkBridge, filepath.Dir(n.pool), last, n.chain)
	check(t, os.MkdirAll(n.conf(""), 0o755))
	check(t, os.MkdirAll(n.plugin(""), 0o755))
	for _, path := range []string{"cni/bridge", "cni/host-local", "cni/portmap", "cni/firewall", "test/faulty"} {
		check(t, os.Symlink(filepath.Join(n.tools, path), n.plugin(filepath.Base(path))))
	}
	check(t, os.Symlink(filepath.Join(n.bin, "unwind"), n.plugin("unwind")))
	check(t, os.WriteFile(n.conf("10-podnet.conflist"),
		fmt.Appendf(nil, `{"cniVersion": "1.0.0", "name": %q, "plugins": [%s]}`, network, n.chain), 0o600))
	check(t, os.WriteFile(n.conf("00-unwind.json"), fmt.Appendf(nil, `{"cniVersion": "1.1.0", "name": %q, "type": "unwind",
		"stateDir": %q, "chainFile": %q, "gracePeriod": "1s"}`, network, n.state, n.conf("10-podnet.conflist")), 0o600))
	n.removeLink(checkBridge)
	n.netns("live")
	start := time.Now()
	n.add(home, "live", n.pin("live"))
	n.took = time.Since(start)
	n.before = n.there()
	t.Cleanup(func() {
		n.plan(nil)
		n.verb(home, "DEL", "live", n.pin("live"))
	})
	return n
}

func (n *checkedNode) conf(name string) string { return filepath.Join(n.dir, "net.d", name) }

func (n *checkedNode) plugin(name string) string { return filepath.Join(n.dir, "plugins", name) }

func (n *checkedNode) checkArgs(args ...string) []string {
	return append([]string{"check", "--conf-dir", n.conf(""), "--cni-bin-dir", n.plugin("")}, args...)
}

// there returns everything that the plugins, unwind and a check create: addresses, iptables rules,
// links, network namespaces, files of checks, journal records, and entries of libcni's cache.
func (n *checkedNode) there() (all []string) {
	n.Helper()
	for _, pattern := range []string{n.pool + "/[1-9f]*", "/run/netns/*", "/var/lib/cni/unwind-check*", "/var/lib/cni/results/*", n.dir + "/taken/*"} {
		found, err := filepath.Glob(pattern)
		check(n, err)
		all = append(all, found...)
	}
	for _, line := range strings.Split(n.must(home.command(n.machine, "iptables-save")), "\n") {
		if strings.Contains(line, "10.78.") {
			all = append(all, counters.ReplaceAllString(line, ""))
		}
	}
	for _, e := range n.entries() {
		all = append(all, fmt.Sprintf("%s %s %d", e.Key, e.State, len(e.Steps)))
	}
	for line := range strings.Lines(n.must(home.command(n.machine, "ip", "-o", "link", "show", "master", checkBridge))) {
		all = append(all, "link "+strings.Fields(line)[1])
	}
	return all
}

// nothingLeft checks that the same resources exist as before the first check, and that the live pod
// replies to ping.
func (n *checkedNode) nothingLeft() {
	n.Helper()
	if diff := cmp.Diff(n.before, n.there()); diff != "" {
		n.Errorf("-before +after:\n%s", diff)
	}
	n.must(home.command(n.machine, "ping", "-c1", "-W5", "10.78.0.2")) // the live pod's address
}

// TestCheck: on a node without problems, check succeeds and leaves nothing behind. It does not
// affect a live pod.
func TestCheck(t *testing.T) {
	if !apart(t) {
		return
	}
	n := newCheckedNode(t, "10.78.0.9")
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"unwind": {nil, `✓  configuration +[\d.]+s  network podnet in /\S+/00-unwind.json
✓  namespace +\S+  unwind-check-[0-9a-f]{8}
✓  ADD +\S+  bridge → portmap → firewall → faulty
✓  interface +\S+  eth0 is up, 10\.78\.0\.\d+/24, fd00:78::\w+/64, route to 0\.0\.0\.0/0, route to ::/0
✓  gateway +\S+  reply from 10\.78\.0\.1, fd00:78::1
✓  record +\S+  in the journal in \S+/state
✓  CHECK +\S+  bridge → portmap → firewall → faulty
✓  DEL +\S+  bridge → portmap → firewall → faulty
✓  nothing left +\S+  no address, no interface, no record
✓  namespace +\S+  unwind-check-[0-9a-f]{8}
✓  failing ADD +\S+  bridge → portmap → firewall → faulty → a plugin that fails
✓  rolled back +\S+  only the DEL of the failing plugin is pending
✓  swept +\S+  once the plugin was repaired
✓  nothing left +\S+  no address, no interface, no record
✓ the network works through unwind \(14 steps, \S+ s\)
`},
		"plain": {[]string{"--plain", "--network", network}, `✓  configuration .*
✓  namespace .*
✓  ADD .*
✓  interface .*
✓  gateway .*
✓  CHECK .*
✓  DEL .*
✓  nothing left +\S+  no address, no interface
✓ the network works without unwind \(8 steps, \S+ s\)
`},
	} {
		t.Run(name, func(t *testing.T) {
			out := n.run(n.unwindctl(n.checkArgs(tt.args...)...))
			if out.code != 0 || out.stderr != "" || !regexp.MustCompile(`\A`+tt.want+`\z`).MatchString(out.stdout) {
				t.Errorf("%d\n%s%s", out.code, out.stdout, out.stderr)
			}
			n.nothingLeft()
		})
	}
	var object struct {
		Version int
		Steps   []struct{ Step, Severity string }
	}
	out := n.must(n.unwindctl(n.checkArgs("-o", "json")...))
	if err := json.Unmarshal([]byte(out), &object); err != nil || object.Version != 1 || len(object.Steps) != 14 ||
		object.Steps[2].Step != "ADD" || object.Steps[2].Severity != "ok" {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestCheckFails: if a step fails, check reports the cause and a remedy. Whatever the check leaves
// behind is gone after the case's repair, such as a sweep or the next check.
func TestCheckFails(t *testing.T) {
	const tooSmall = "10.78.0.2" // the pool's only address, which the live pod has
	var record string            // the live pod's record
	for _, tt := range []struct {
		name, last string
		args       []string
		limited    bool // check gets a --timeout that only a hanging plugin exceeds
		broken     func(n *checkedNode)
		want       string
		code       int
		repaired   func(n *checkedNode)
	}{
		{
			name: "a plugin that hangs in ADD", limited: true,
			broken: func(n *checkedNode) { n.plan(map[string]string{"ADD": "hang"}) },
			want: `(?s)✗  ADD .* unwind did not end within [\dms.]+: plugin type="faulty" failed \(add\): killed because.*→ ` +
				`unwindctl check --plain shows.*✗ ADD failed `,
			code:     4,
			repaired: (*checkedNode).settle,
		},
		{
			name: "a plugin that hangs in ADD, plain", args: []string{"--plain"}, limited: true,
			broken: func(n *checkedNode) { n.plan(map[string]string{"ADD": "hang"}) },
			want:   `(?s)✗  ADD .* faulty did not end within [\dms.]+: .*✗ ADD failed, even without unwind: unwind is not the cause `, code: 4,
		},
		{
			name: "a full pool", last: tooSmall,
			want: `(?s)✗  ADD .* plugin type="bridge" failed \(add\): .*no IP addresses available.*→ unwindctl doctor reports pools: ` +
				`.*every ADD fails.*✓  nothing left .*\n✗ ADD failed \(`, code: 4,
		},
		{
			name: "a full pool, plain", last: tooSmall, args: []string{"--plain"},
			want: `(?s)✗  ADD .* plugin type="bridge" .*no IP addresses available.*✗ ADD failed, even without unwind: `, code: 4,
		},
		{
			name:   "a missing plugin",
			broken: func(n *checkedNode) { check(n, os.Remove(n.plugin("firewall"))) },
			want: `(?s)✗  ADD .* plugin type="firewall" failed \(add\): failed to find plugin "firewall" in path \[\S+/plugins\].*` +
				`→ unwindctl doctor reports plugins: firewall not found in .* install it;`, code: 4,
		},
		{
			name: "a missing plugin, plain: the next check deletes what libcni's DEL leaves", args: []string{"--plain"},
			broken: func(n *checkedNode) { check(n, os.Remove(n.plugin("firewall"))) },
			want:   `(?s)✗  ADD .*✗  DEL .*failed to find plugin "firewall".*!  clean-up .*→ the next check tries again`, code: 4,
			repaired: func(n *checkedNode) {
				check(n, os.Symlink(filepath.Join(n.tools, "cni", "firewall"), n.plugin("firewall")))
				if out := n.must(n.unwindctl(n.checkArgs()...)); !strings.Contains(out, "removed what 1 killed check left") {
					n.Errorf("the next check: %s", out)
				}
			},
		},
		{
			name:   "a full disk of the journal",
			broken: func(n *checkedNode) { n.fill(n.state) },
			want: `(?s)✓  ADD .*✗  record .*the ADD ran without the journal in .*→ unwindctl doctor reports journal: the disk of \S+ has ` +
				`only 0 MiB .*✓  DEL .*✗ record failed `, code: 4,
			repaired: func(n *checkedNode) { n.must(home.command(n.machine, "umount", "-l", n.state)) },
		},
		{
			name:   "a full disk of libcni's cache",
			broken: func(n *checkedNode) { n.fill("/var/lib/cni") },
			want:   `✗  namespace .*: no space left on device\n.*→ fix this first: libcni also`, code: 4,
			repaired: func(n *checkedNode) { n.must(home.command(n.machine, "umount", "-l", "/var/lib/cni")) },
		},
		{
			name:   "a plugin whose DEL fails",
			broken: func(n *checkedNode) { n.plan(map[string]string{"DEL": "fail"}) },
			want:   `(?s)✓  ADD .*✗  DEL .*; pending DELs: faulty: faulty: p DEL refused.*→ unwindctl show unwind-check-\w+ explains why.*!  clean-up .*✗ DEL failed`, code: 4,
			repaired: func(n *checkedNode) { n.plan(nil); n.must(n.unwindctl(n.checkArgs()...)) },
		},
		{
			name: "a plugin whose DEL does nothing, plain", args: []string{"--plain"},
			broken: func(n *checkedNode) {
				n.script("host-local", `[ $CNI_COMMAND = DEL ] || exec `+filepath.Join(n.tools, "cni", "host-local"))
			},
			want: `(?s)✓  DEL .*✗  nothing left .* \S+/ipam/podnet still contains 10\.78\.0\.3, fd00:78::3\n`, code: 4,
			repaired: func(n *checkedNode) {
				check(n, os.Remove(filepath.Join(n.pool, "10.78.0.3")))
				check(n, os.Remove(filepath.Join(n.pool, "fd00:78::3")))
			},
		},
		{
			name: "an unwind that does not notice a failure",
			broken: func(n *checkedNode) {
				n.script("unwind", `in=$(cat); case $CNI_COMMAND$in in ADD*unwind-check-fail*) echo '{"cniVersion": "1.1.0"}'; exit ;; esac
					echo "$in" | `+filepath.Join(n.bin, "unwind"))
			},
			want: `(?s)✓  nothing left .*✗  failing ADD .*the ADD succeeded, although its last plugin failed\n.*✗ failing ADD failed`, code: 4,
		},
		{
			name: "an unwind that does not roll back",
			broken: func(n *checkedNode) {
				n.script("unwind", `in=$(cat); case $CNI_COMMAND$in in ADD*unwind-check-fail*) echo '{"p": {"DEL": "fail"}}' >`+n.dir+
					`/plan.json; esac; echo "$in" | `+filepath.Join(n.bin, "unwind"))
			},
			want: `(?s)✓  failing ADD .*✗  rolled back .*besides the failing plugin's DEL, others are pending: faulty: faulty: p DEL refused; ` +
				`unwind-check-fail: .*→ fix the plugins`, code: 4,
			repaired: func(n *checkedNode) {
				n.plan(nil)
				check(n, os.Remove(n.plugin("unwind")))
				check(n, os.Symlink(filepath.Join(n.bin, "unwind"), n.plugin("unwind")))
				n.must(n.unwindctl(n.checkArgs()...))
			},
		},
		{
			name: "a gateway that does not reply",
			broken: func(n *checkedNode) {
				n.must(home.command(n.machine, "sysctl", "-w", "net.ipv4.icmp_echo_ignore_all=1"))
			},
			want: `(?s)!  gateway .*ping of 10\.78\.0\.1: no reply within 5s\n.*→ check the host's firewall; .*✓  swept .*` +
				`! the network works through unwind, with a warning: gateway \(`, code: 3,
			repaired: func(n *checkedNode) {
				n.must(home.command(n.machine, "sysctl", "-w", "net.ipv4.icmp_echo_ignore_all=0"))
			},
		},
		{
			name: "another attachment's record is damaged",
			broken: func(n *checkedNode) {
				check(n, journaltest.InFile(n.store, "records", "", func(_, value []byte) []byte {
					record = string(value)
					return []byte(`{"network":`)
				}))
			},
			repaired: func(n *checkedNode) {
				check(n, journaltest.InFile(n.store, "records", "", journaltest.Become(record)))
			},
			want: `✓ the network works through unwind \(14 steps`,
		},
		{
			name:   "another file is invalid",
			broken: func(n *checkedNode) { check(n, os.WriteFile(n.conf("20-other.conflist"), []byte("{"), 0o600)) },
			want:   `✓ the network works through unwind \(14 steps`,
		},
		{
			name:   "unwind is off",
			broken: func(n *checkedNode) { check(n, os.Remove(n.conf("00-unwind.json"))) },
			want:   `\A✗  configuration .*/10-podnet\.conflist does not run unwind\n +→ run unwindctl install; .*\n✗ configuration failed`, code: 4,
		},
		{
			name: "no network",
			args: []string{"--network", "other"},
			want: `✗  configuration .*no conflist of network other in .*\n.*→ the networks there: podnet\n`, code: 4,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if !apart(t) {
				return
			}
			last := tt.last
			if last == "" {
				last = "10.78.0.9"
			}
			n := newCheckedNode(t, last)
			if tt.broken != nil {
				tt.broken(n)
			}
			if tt.limited {
				tt.args = append(tt.args, "--timeout", fmt.Sprint((2*time.Second + 10*n.took).Round(time.Second)))
			}
			out := n.run(n.unwindctl(n.checkArgs(tt.args...)...))
			if out.code != tt.code || !regexp.MustCompile(tt.want).MatchString(out.stdout) {
				t.Errorf("%d\n%s%s", out.code, out.stdout, out.stderr)
			}
			if tt.repaired != nil {
				tt.repaired(n)
			}
			n.nothingLeft()
		})
	}
}

// script replaces a plugin with a shell script.
func (n *checkedNode) script(plugin, script string) {
	check(n, os.Remove(n.plugin(plugin)))
	check(n, os.WriteFile(n.plugin(plugin), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
}

// fill mounts a full file system over a directory.
func (n *checkedNode) fill(dir string) {
	n.must(home.command(n.machine, "mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "none", dir))
	n.Cleanup(func() { n.run(home.command(n.machine, "umount", "-l", dir)) })
	n.run(home.command(n.machine, "cp", "/dev/zero", filepath.Join(dir, "full")))
}

// TestCheckInterrupted: an interrupted check deletes its attachment, whichever verb was running.
func TestCheckInterrupted(t *testing.T) {
	if !apart(t) {
		return
	}
	n := newCheckedNode(t, "10.78.0.9")
	for _, verb := range []string{"ADD", "CHECK", "DEL"} {
		for _, args := range [][]string{nil, {"--plain"}} {
			t.Run(fmt.Sprint(verb, args), func(t *testing.T) {
				n.plan(map[string]string{verb: "hold"})
				r := n.start(n.unwindctl(n.checkArgs(args...)...))
				held := filepath.Join(n.dir, "held", verb+".unwind-check-*.p")
				eventually(t, verb+" runs", func() bool { return len(glob(t, held)) > 0 })
				check(t, r.cmd.Process.Signal(syscall.SIGINT))
				eventually(t, "it is interrupted", func() bool { return r.says("interrupt again to exit immediately") > 0 })
				n.plan(nil)
				check(t, os.Remove(glob(t, held)[0]))
				if code := r.wait(sandbox.Patience); code != 130 ||
					!strings.Contains(r.log(), "error: interrupted; check removed everything it created\n") {
					t.Errorf("exit code %d\n%s", code, r.log())
				}
				n.nothingLeft()
			})
		}
	}
}

// settle repairs the faulty plugin, and sweeps until only the live pod's record remains.
func (n *checkedNode) settle() {
	n.Helper()
	n.plan(nil)
	eventually(n, "nothing is pending", func() bool { return n.sweep(home).code == 0 && len(n.ids()) == 1 })
}

func glob(t testing.TB, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	check(t, err)
	return found
}

// TestCheckKilled: if SIGKILL ends a check at a random point, the next check removes everything
// that the killed check left.
func TestCheckKilled(t *testing.T) {
	if !apart(t) {
		return
	}
	n := newCheckedNode(t, "10.78.0.9")
	start := time.Now()
	n.must(n.unwindctl(n.checkArgs()...))
	took := time.Since(start)
	for i := range sandbox.Rounds(1, 20, 50) {
		args, span := n.checkArgs(), took
		if i%4 == 3 {
			args, span = n.checkArgs("--plain"), took/2
		}
		r := n.start(n.unwindctl(args...))
		time.Sleep(time.Duration(rand.Int64N(int64(span))))
		_ = r.cmd.Process.Kill()
		r.wait(sandbox.Patience)
		out := n.run(n.unwindctl(n.checkArgs()...))
		if out.code != 0 {
			t.Fatalf("%d: %s%s", i, out.stdout, out.stderr)
		}
		n.nothingLeft()
	}
}

// TestCheckKilledInVerb: if SIGKILL ends a check during a verb, the next check waits until the
// killed check's plugin has ended. After the next check and a sweep, nothing is left, not even the
// rules of an unfinished ADD.
func TestCheckKilledInVerb(t *testing.T) {
	if !apart(t) {
		return
	}
	n := newCheckedNode(t, "10.78.0.9")
	for _, verb := range []string{"ADD", "DEL"} {
		for _, args := range [][]string{nil, {"--plain"}} {
			t.Run(fmt.Sprint(verb, args), func(t *testing.T) {
				n.plan(map[string]string{verb: "hold"})
				r := n.start(n.unwindctl(n.checkArgs(args...)...))
				held := filepath.Join(n.dir, "held", verb+".unwind-check-*.p")
				eventually(t, verb+" runs", func() bool { return len(glob(t, held)) > 0 })
				check(t, r.cmd.Process.Kill())
				r.wait(sandbox.Patience)
				n.plan(nil)
				next := n.start(n.unwindctl(n.checkArgs()...))
				if code := next.wait(300 * time.Millisecond); code != -2 {
					t.Errorf("it did not wait: %d", code)
				}
				check(t, os.Remove(glob(t, held)[0]))
				if code := next.wait(sandbox.Patience); code != 0 {
					t.Errorf("exit code %d\n%s", code, next.log())
				}
				n.settle()
				n.nothingLeft()
			})
		}
	}
}

// TestCheckTwice: only one check runs at a time. A second one waits, and fails if its --timeout
// expires.
func TestCheckTwice(t *testing.T) {
	if !apart(t) {
		return
	}
	n := newCheckedNode(t, "10.78.0.3") // one address is free
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			if out := n.run(n.unwindctl(n.checkArgs()...)); out.code != 0 {
				t.Errorf("%+v", out)
			}
		})
	}
	both.Wait()
	n.plan(map[string]string{"ADD": "hold"})
	r := n.start(n.unwindctl(n.checkArgs()...))
	held := filepath.Join(n.dir, "held", "ADD.unwind-check-*.p")
	eventually(t, "ADD runs", func() bool { return len(glob(t, held)) > 0 })
	if out := n.run(n.unwindctl(n.checkArgs("--timeout", "1s")...)); out.code != 1 ||
		!strings.Contains(out.stderr, "error: another unwindctl check, or a plugin that it started, is still running\nhint: ") {
		t.Errorf("%+v", out)
	}
	n.plan(nil)
	check(t, os.Remove(glob(t, held)[0]))
	if code := r.wait(sandbox.Patience); code != 0 {
		t.Errorf("exit code %d\n%s", code, r.log())
	}
	n.nothingLeft()
}

// TestCheckOnHost: in a container, check requires --host.
func TestCheckOnHost(t *testing.T) {
	if !apart(t) {
		return
	}
	n := newCheckedNode(t, "10.78.0.9")
	c := n.newContainer("--mount", "--net")
	if out := n.run(c.command(n.machine, n.checkArgs()...)); out.code != 1 ||
		!strings.Contains(out.stderr, "hint: run this on the host, or as unwindctl --host check\n") {
		t.Errorf("%+v", out)
	}
	out := n.run(c.command(n.machine, append([]string{"--host"}, n.checkArgs()...)...))
	if out.code != 0 || !strings.Contains(out.stdout, "✓ the network works through unwind ") {
		t.Errorf("%+v", out)
	}
	n.nothingLeft()
	if durable.Exists("/var/lib/cni/unwind-check") {
		t.Error("the directory of checks is left")
	}
}
