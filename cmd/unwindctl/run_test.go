package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// fakePlugin is a plugin to install that says it is unwind.
const fakePlugin = `#!/bin/sh
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}' ;;
*) echo "unwind under test" >&2 ;;
esac
exit 0
`

func (n *node) confDir() string        { return filepath.Join(n.dir, "net.d") }
func (n *node) binDir() string         { return filepath.Join(n.dir, "plugins") }
func (n *node) own() string            { return filepath.Join(n.confDir(), ownFile) }
func (n *node) inConf(f string) string { return filepath.Join(n.confDir(), f) }

// newAgentNode is a node with a runtime's folders, a plugin to install, and a provider's file.
func newAgentNode(t *testing.T) *node {
	t.Helper()
	n := newNode(t)
	for _, dir := range []string{n.confDir(), n.binDir()} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.write(filepath.Join(n.dir, "unwind"), fakePlugin)
	n.write(n.inConf("10-bridge.conflist"), conflistOf(network, "portMappings"))
	return n
}

func (n *node) write(path, content string) {
	n.Helper()
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		n.Fatal(err)
	}
}

// rename puts a file in place as a careful provider does.
func (n *node) rename(path, content string) {
	n.Helper()
	n.write(path+".new", content)
	if err := os.Rename(path+".new", path); err != nil {
		n.Fatal(err)
	}
}

func (n *node) remove(path string) {
	n.Helper()
	if err := os.Remove(path); err != nil {
		n.Fatal(err)
	}
}

// conflistOf is a provider's file of a network, whose chain has these capabilities.
func conflistOf(name string, capabilities ...string) string {
	has := map[string]bool{}
	for _, c := range capabilities {
		has[c] = true
	}
	return string(raw(map[string]any{"cniVersion": "1.0.0", "name": name, "plugins": []any{
		map[string]any{"type": "bridge", "bridge": "unwindctl1", "password": secret},
		map[string]any{"type": "portmap", "capabilities": has},
	}})) + strings.Repeat(" ", 100) + "\n"
}

// installed says what our conflist is of: NETWORK of FILE with CAPABILITIES, or "" if it is not there.
func (n *node) installed() string {
	n.Helper()
	data, err := os.ReadFile(n.own())
	if os.IsNotExist(err) {
		return ""
	}
	var list struct {
		Name    string
		Plugins []struct {
			Type         string
			Capabilities map[string]bool
			ChainFile    string
		}
	}
	if err := json.Unmarshal(data, &list); err != nil || len(list.Plugins) != 1 || list.Plugins[0].Type != plugin.Name {
		return fmt.Sprintf("%v in %s", err, data)
	}
	p := list.Plugins[0]
	return fmt.Sprintf("%s of %s with %s", list.Name, filepath.Base(p.ChainFile), raw(p.Capabilities))
}

const first = `podnet of 10-bridge.conflist with {"portMappings":true}`

// await waits until our conflist is as it should be.
func (n *node) await(want string) {
	n.Helper()
	eventually(n, want, func() bool { return n.installed() == want })
}

// running is a program that runs.
type running struct {
	*node
	cmd   *exec.Cmd
	ended chan struct{}

	mu     sync.Mutex
	stderr bytes.Buffer
}

func (r *running) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stderr.Write(p)
}

func (r *running) log() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stderr.String()
}

// says counts the lines of the log that have a text.
func (r *running) says(text string) int { return strings.Count(r.log(), text) }

// start starts a program that is killed when the test ends.
func (n *node) start(cmd *exec.Cmd) *running {
	n.Helper()
	r := &running{node: n, cmd: cmd, ended: make(chan struct{})}
	cmd.Stderr = r
	if err := cmd.Start(); err != nil {
		n.Fatal(err)
	}
	go func() {
		_ = cmd.Wait()
		close(r.ended)
	}()
	n.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-r.ended
		if strings.Contains(r.log(), secret) {
			n.Error("a secret is in the log")
		}
		if n.Failed() {
			n.Logf("%v:\n%s", cmd.Args, r.log())
		}
	})
	return r
}

// signal sends a signal, and returns the exit code if the program ends in time, else -2.
func (r *running) signal(sig os.Signal, within time.Duration) (code int) {
	r.Helper()
	if err := r.cmd.Process.Signal(sig); err != nil {
		r.Fatal(err)
	}
	select {
	case <-r.ended:
		return r.cmd.ProcessState.ExitCode()
	case <-time.After(within):
		return -2
	}
}

// agentArgs are those of an agent that looks each second, and serves nothing.
func (n *node) agentArgs(more ...string) []string {
	return append([]string{"run", "--conf-dir", n.confDir(), "--bin-dir", n.binDir(), "--state-dir", n.state, "--cri", "none",
		"--binary", filepath.Join(n.dir, "unwind"), "--interval", "1s", "--listen", ""}, more...)
}

func (n *node) agent(where place, args ...string) *running {
	n.Helper()
	return n.start(where.command(n, filepath.Join(n.bin, "unwindctl"), n.agentArgs(args...)...))
}

// addDead adds an attachment whose network namespace is gone then.
func (n *node) addDead(id string) {
	n.Helper()
	n.netns(id)
	n.add(home, id, n.pin(id))
	n.drop(id)
}

func (n *node) awaitReleased(id string) {
	n.Helper()
	eventually(n, id+" released", func() bool { return !strings.Contains(fmt.Sprint(n.ids()), id) })
}

// TestRun: what the agent does on a node where all is well, and what it leaves.
func TestRun(t *testing.T) {
	t.Parallel()
	n := newAgentNode(t)
	n.addDead("before")
	r := n.agent(home, "--listen", "127.0.0.1:0")
	n.await(first)
	n.awaitReleased("before")
	if got, err := os.ReadFile(filepath.Join(n.binDir(), plugin.Name)); err != nil || string(got) != fakePlugin {
		t.Errorf("the plugin is %d bytes (%v)", len(got), err)
	}
	n.addDead("after")
	n.awaitReleased("after")

	address := regexp.MustCompile(`address=(\S+)`).FindStringSubmatch(r.log())
	if address == nil {
		t.Fatal("it does not say where it serves")
	}
	for path, want := range map[string]string{"/metrics": "\nunwind_build_info{", "/healthz": "ok\n"} {
		answer, err := http.Get("http://" + address[1] + path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(answer.Body)
		_ = answer.Body.Close()
		if err != nil || answer.StatusCode != 200 || !strings.Contains(string(body), want) {
			t.Errorf("%s: %d, %s (%v)", path, answer.StatusCode, body, err)
		}
	}
	if code := r.signal(syscall.SIGTERM, 20*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	if n.installed() != first || !exists(filepath.Join(n.binDir(), plugin.Name)) {
		t.Error("something was removed at the end")
	}
	if r.says("msg=installed ") != 1 || r.says("msg=released ") != 2 || r.says("level=WARN") != 0 {
		t.Error("not each thing was said once")
	}
}

// TestRunListen: what is served, and where.
func TestRunListen(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	n := newAgentNode(t)
	for _, c := range []struct {
		args  []string
		code  int
		words string
	}{
		{[]string{"--listen", l.Addr().String()}, 1, "error: --listen: listen tcp " + l.Addr().String() + ": bind: address already in use\n"},
		{[]string{"--listen", "nowhere"}, 1, "error: --listen: listen tcp: address nowhere: missing port in address\n"},
		{[]string{"--interval", "0"}, 2, "error: --interval 0s is less than a second\n"},
		{[]string{"--file", "unwind"}, 2, `error: --file "unwind" is not the name of a .conflist` + "\n"},
		{[]string{"--no-install", "--file", "unwind"}, 2, `error: --file "unwind" is not the name of a .conflist` + "\n"},
	} {
		out := n.run(home.command(n, filepath.Join(n.bin, "unwindctl"), n.agentArgs(c.args...)...))
		if out.code != c.code || !strings.HasPrefix(out.stderr, c.words) {
			t.Errorf("%v: exit code %d, %s", c.args, out.code, out.stderr)
		}
		if n.installed() != "" {
			t.Errorf("%v: it has installed", c.args)
		}
	}
	r := n.agent(home)
	n.await(first)
	if r.says("msg=serving") != 0 || n.run(home.command(n, "ss", "-Hltnp")).says(fmt.Sprintf("pid=%d,", r.cmd.Process.Pid)) {
		t.Error("it serves something")
	}
}

func (o outcome) says(text string) bool { return strings.Contains(o.stdout+o.stderr, text) }

// TestRunFollows: our conflist follows what the provider makes of its file, and is there, and whole, at every moment.
func TestRunFollows(t *testing.T) {
	t.Parallel()
	next := conflistOf(network, "portMappings", "bandwidth")
	const want = `podnet of 10-bridge.conflist with {"bandwidth":true,"portMappings":true}`
	for _, c := range []struct {
		name   string
		change func(n *node, path string)
		warns  int // -1: it may be seen half written
	}{
		{"renamed into place", func(n *node, path string) { n.rename(path, next) }, 0},
		{"written in place", func(n *node, path string) { n.write(path, next) }, -1},
		{"removed, and made again", func(n *node, path string) {
			n.remove(path)
			time.Sleep(2 * time.Second)
			n.write(path, next)
		}, 0},
		{"half written for a while", func(n *node, path string) {
			for _, cut := range []int{0, 60, 120} {
				n.write(path, next[:cut])
				time.Sleep(600 * time.Millisecond)
				if got := n.installed(); got != first {
					n.Errorf("meanwhile: %s", got)
				}
			}
			n.write(path, next)
		}, 1},
		{"not readable as a chain for a while", func(n *node, path string) {
			n.write(path, `{"cniVersion": "1.0.0", "name": "podnet", "plugins": [{"type": "", "password": "`+secret+`"}]}`)
			time.Sleep(600 * time.Millisecond)
			n.rename(path, next)
		}, 1},
		{"among changes that never end", func(n *node, path string) {
			n.rename(path, next)
			for end := time.Now().Add(2 * time.Second); time.Now().Before(end) && n.installed() == first; time.Sleep(20 * time.Millisecond) {
				n.rename(n.inConf("other"), "")
			}
			if n.installed() != want {
				n.Errorf("meanwhile: %s", n.installed())
			}
		}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newAgentNode(t)
			r := n.agent(home, "--interval", "1h")
			n.await(first)
			stop := n.alwaysThere()
			time.Sleep(settle) // what it has written itself is looked at
			c.change(n, n.inConf("10-bridge.conflist"))
			begin := time.Now()
			n.await(want)
			if took := time.Since(begin); took > 10*time.Second {
				t.Errorf("after %s", took)
			}
			stop()
			if got := min(r.says("level=WARN"), 1); got != c.warns && c.warns >= 0 {
				t.Errorf("%d warnings", got)
			}
			eventually(t, "that it is over", func() bool { return r.says(`msg="in order again"`) == min(r.says("level=WARN"), 1) })
		})
	}
}

// TestRunConf: a provider's file outside of the folder is followed as well.
func TestRunConf(t *testing.T) {
	t.Parallel()
	n := newAgentNode(t)
	path := filepath.Join(n.dir, "mine.conflist")
	n.write(path, conflistOf("mine"))
	n.agent(home, "--interval", "1h", "--conf", path)
	n.await("mine of mine.conflist with null")
	time.Sleep(2 * settle)
	n.rename(path, conflistOf("mine", "bandwidth"))
	n.await(`mine of mine.conflist with {"bandwidth":true}`)
}

// alwaysThere looks at our conflist all the time until it is stopped: it is there, and whole.
func (n *node) alwaysThere() (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			default:
			}
			paths, err := plugin.Conflists(n.confDir())
			if err != nil || len(paths) == 0 || paths[0] != n.own() {
				n.Errorf("the first of %v is not ours (%v)", paths, err)
				return
			}
			if c, err := plugin.ReadConflist(n.own()); err != nil || !ours(c) {
				n.Errorf("ours is not whole: %v", err)
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	var once sync.Once
	stop = func() { once.Do(func() { close(done) }); <-ended }
	n.Cleanup(stop)
	return stop
}

// TestRunFolder: a folder of conflists that comes after the agent, or is made anew, is looked after as any other.
func TestRunFolder(t *testing.T) {
	t.Parallel()
	n := newAgentNode(t)
	if err := os.RemoveAll(n.confDir()); err != nil {
		t.Fatal(err)
	}
	r := n.agent(home)
	eventually(t, "a warning", func() bool { return r.says("there is no folder") > 0 })
	for range 2 {
		if err := os.Mkdir(n.confDir(), 0o755); err != nil {
			t.Fatal(err)
		}
		n.write(n.inConf("10-bridge.conflist"), conflistOf(network, "portMappings"))
		n.await(first)
		if err := os.RemoveAll(n.confDir()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRunSignals: a DEL that is under way at the signal comes to its end; while it is, our conflist is looked after.
func TestRunSignals(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		again  bool // the second signal
		code   int
		left   string
		called string // lines of the delegate's log
	}{
		{"one", false, 0, "[]", "end"},
		{"two", true, -1, "[a]", "start"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newAgentNode(t)
			n.addDead("a")
			n.plan(map[string]string{"DEL": "hold-effect"})
			r := n.agent(home, "--interval", "1h")
			held := filepath.Join(n.dir, "held", "DEL.a.p")
			eventually(t, "a DEL under way", func() bool { return exists(held) })
			n.await(first)
			n.write(n.inConf("10-bridge.conflist"), conflistOf(network, "bandwidth"))
			n.await(`podnet of 10-bridge.conflist with {"bandwidth":true}`)

			if code := r.signal(syscall.SIGTERM, 500*time.Millisecond); code != -2 {
				t.Fatalf("it ended with code %d while the DEL was under way", code)
			}
			if c.again {
				if code := r.signal(syscall.SIGTERM, 20*time.Second); code != c.code {
					t.Errorf("exit code %d, want %d", code, c.code)
				}
			}
			n.remove(held)
			select {
			case <-r.ended:
			case <-time.After(30 * time.Second):
				t.Fatal("it does not end")
			}
			if code := r.cmd.ProcessState.ExitCode(); code != c.code || fmt.Sprint(n.ids()) != c.left || n.calls("DEL") != 1 {
				t.Errorf("exit code %d, want %d; the journal has %v, want %s; %d DELs", code, c.code, n.ids(), c.left, n.calls("DEL"))
			}
			if c.again {
				n.plan(nil)
				n.agent(home)
				n.awaitReleased("a")
			}
		})
	}
}

// TestRunKilled: SIGKILL, at moments at which something is being written, leaves each file whole or not there.
func TestRunKilled(t *testing.T) {
	t.Parallel()
	big := fakePlugin + strings.Repeat("#\n", 8<<20)
	for i := range 3 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			n := newAgentNode(t)
			n.write(filepath.Join(n.dir, "unwind"), big)
			r := n.agent(home)
			for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Microsecond) {
				if files, _ := os.ReadDir(n.binDir()); len(files) > 0 || exists(n.own()) {
					break
				}
			}
			time.Sleep(time.Duration(i) * 2 * time.Millisecond)
			r.signal(syscall.SIGKILL, 20*time.Second)
			got, err := os.ReadFile(filepath.Join(n.binDir(), plugin.Name))
			if err == nil && string(got) != big {
				t.Errorf("the plugin has %d bytes of %d", len(got), len(big))
			}
			if got := n.installed(); got != "" && (got != first || err != nil) {
				t.Errorf("the conflist is %s; the plugin: %v", got, err)
			}
			n.agent(home)
			n.await(first)
			got, err = os.ReadFile(filepath.Join(n.binDir(), plugin.Name))
			if err != nil || string(got) != big {
				t.Errorf("the plugin has %d bytes of %d (%v)", len(got), len(big), err)
			}
		})
	}
}

// TestRunObserves: with --observe nothing is released, and it is said once what would be; without it later, all is.
func TestRunObserves(t *testing.T) {
	t.Parallel()
	n := newAgentNode(t)
	n.addDead("dead")
	r := n.agent(home, "--observe")
	n.await(first)
	eventually(t, "what would be released", func() bool { return r.says(`msg="to be released"`) > 0 })
	n.addDead("later")
	eventually(t, "what else would be released", func() bool { return r.says(`msg="to be released"`) > 1 })
	time.Sleep(2500 * time.Millisecond)
	if fmt.Sprint(n.ids()) != "[dead later]" || r.says(`msg="to be released"`) != 2 || r.says("msg=swept") != 2 || n.asked("DEL") {
		t.Errorf("the journal has %v", n.ids())
	}
	if entry := n.ownEntry(); string(entry["sweepOnStatus"]) != "false" || string(entry["disableGC"]) != "true" {
		t.Errorf("the conflist is %s", entry)
	}
	if code := r.signal(syscall.SIGTERM, 20*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
	n.agent(home)
	n.awaitReleased("dead")
	n.awaitReleased("later")
	eventually(t, "no such keys", func() bool { e := n.ownEntry(); return e["sweepOnStatus"] == nil && e["disableGC"] == nil })
}

// asked says whether the faulty plugin was asked something, if it was asked anything.
func (n *node) asked(command string) bool { return n.calls(command) > 0 }

// ownEntry is unwind's in our conflist.
func (n *node) ownEntry() map[string]json.RawMessage {
	n.Helper()
	var list struct{ Plugins []map[string]json.RawMessage }
	data, err := os.ReadFile(n.own())
	if err == nil {
		err = json.Unmarshal(data, &list)
	}
	if err != nil {
		n.Fatal(err)
	}
	return list.Plugins[0]
}

// TestRunCRI: with the runtime's list what it does not have is released, if nobody is inside and it is old enough.
func TestRunCRI(t *testing.T) {
	t.Parallel()
	n := newAgentNode(t)
	n.netns("listed", "unlisted", "young", "inside")
	for _, id := range []string{"listed", "unlisted", "young", "inside"} {
		n.add(home, id, n.pin(id))
		if id != "young" {
			n.edit(id, func(e *journal.Entry) { e.Newest().GracePeriod = 1 })
		}
	}
	pid, _ := n.process(nil, "nsenter", "--net="+n.pin("inside"), "sleep", "300")
	n.awaitInside(pid, n.pin("inside"))
	r := n.agent(home, "--cri", serveThese(t, sandboxOf("listed", cri.PodSandboxState_SANDBOX_READY)))
	n.awaitReleased("unlisted")
	n.sweptTwice()
	if got := fmt.Sprint(n.ids()); got != "[inside listed young]" {
		t.Errorf("the journal has %s", got)
	}
	if r.says("though the runtime does not list it") != 1 {
		t.Error("that a process is inside is not said once")
	}
}

// sweptTwice waits until two sweeps have come to their end, of which the second began after now.
func (n *node) sweptTwice() {
	n.Helper()
	for _, id := range []string{"dead1", "dead2"} {
		n.addDead(id)
		n.awaitReleased(id)
	}
}

// TestRunNoCRI: without an answer of the runtime nothing that lives is released, and that is said once. The conflist is looked
// after, and the agent ends, while it waits for one.
func TestRunNoCRI(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		cri  func(context.Context) ([]*cri.PodSandbox, error)
	}{
		{"hangs", func(ctx context.Context) ([]*cri.PodSandbox, error) { <-ctx.Done(); return nil, ctx.Err() }},
		{"fails", func(context.Context) ([]*cri.PodSandbox, error) { return nil, fmt.Errorf("attempt %s", time.Now()) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newAgentNode(t)
			n.netns("live")
			n.add(home, "live", n.pin("live"))
			n.edit("live", func(e *journal.Entry) { e.Newest().GracePeriod = 1 })
			r := n.agent(home, "--cri", serve(t, c.cri))
			n.await(first)
			n.write(n.inConf("10-bridge.conflist"), conflistOf(network, "bandwidth"))
			n.await(`podnet of 10-bridge.conflist with {"bandwidth":true}`)
			if c.name == "fails" {
				n.sweptTwice()
				if r.says("asking the runtime for its pods") != 1 {
					t.Error("that the runtime gives no list is not said once")
				}
			}
			if code := r.signal(syscall.SIGTERM, 6*time.Second); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if got := fmt.Sprint(n.ids()); got != "[live]" {
				t.Errorf("the journal has %s", got)
			}
		})
	}
}

// TestRunElsewhere: from a container nothing can be told. That is said once, and nothing is done.
func TestRunElsewhere(t *testing.T) {
	t.Parallel()
	n := newAgentNode(t)
	n.netns("there")
	n.addDead("gone")
	n.add(home, "there", n.pin("there"))
	before := n.file()
	flags := []string{"--mount"}
	there := n.newPlace(flags, flags, "umount -l "+filepath.Join(n.dir, "netns")+"/*")
	r := n.agent(there, "--no-install")
	eventually(t, "nothing can be told", func() bool { return r.says("nothing can be told of any attachment") > 0 })
	time.Sleep(2500 * time.Millisecond)
	if r.says("nothing can be told of any attachment") != 1 || !bytes.Equal(n.file(), before) || n.asked("DEL") {
		t.Error("it is not said once, or something was done")
	}
	if n.installed() != "" {
		t.Error("it has installed")
	}
}
