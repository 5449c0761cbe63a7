package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// chainFile makes the file from which unwind reads its chain, and returns its path. With content ""
// it makes none.
func (n *node) chainFile(name, content string) string {
	n.Helper()
	path := filepath.Join(n.dir, "net.d", name)
	n.mkdir(filepath.Dir(path))
	if content != "" {
		n.write(path, content)
	}
	n.conf["chain"], n.conf["chainFile"] = nil, path
	return path
}

func (n *node) write(path, content string) {
	n.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		n.Fatal(err)
	}
}

// wantCalls checks the calls of the faulty plugins since the last check.
func (n *node) wantCalls(what string, want ...string) {
	n.Helper()
	if got := n.calls(); !slices.Equal(got, want) {
		n.Errorf("%s: %q, want %q", what, got, want)
	}
	n.forgetCalls()
}

// TestChainFileIsReadAtEachADD: after the file's owner rewrites it, the next ADD uses the new
// chain. The DEL of the first pod uses its own, even when the file is gone.
func TestChainFileIsReadAtEachADD(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	conflist := func(instance string) string {
		return fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "loadOnlyInlinedPlugins": true, "plugins": [%s]}`, n.network, n.faulty(instance, ""))
	}
	path := n.chainFile("10-provider.conflist", conflist("old"))
	list := n.unwind()
	a, b := n.pod("a"), n.pod("b")
	a.mustAdd(list)
	n.write(path, conflist("new"))
	b.mustAdd(list)
	n.wantCalls("two ADDs", "ADD old", "ADD new")
	a.mustDel(list)
	n.wantCalls("the DEL of the first", "DEL old")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := b.check(list); err != nil {
		t.Errorf("CHECK without the file: %v", err)
	}
	b.mustDel(list)
	n.wantCalls("CHECK and DEL of the second", "CHECK new", "DEL new")
	n.nothingLeft()
}

// TestChainFileForms: for every form of file that libcni reads, unwind runs the chain that libcni
// would run.
func TestChainFileForms(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		content string            // P0, P1: delegates, NET: the network
		folder  map[string]string // files in the directory of the network's name beside it
		want    []string
	}{
		{"inlined only", `{"cniVersion": "1.0.0", "loadOnlyInlinedPlugins": true, "plugins": [P0]}`,
			map[string]string{"10.conf": `P1`}, []string{"p0"}},
		{"inlined only, as a string", `{"cniVersion": "1.0.0", "loadOnlyInlinedPlugins": "True", "plugins": [P0]}`,
			map[string]string{"10.conf": `P1`}, []string{"p0"}},
		{"with a folder", `{"cniVersion": "1.0.0", "name": "NET", "plugins": [P1]}`,
			map[string]string{"20.conf": `P1`, "10.conf": `P0`, "15.json": `P1`, "README": "text"}, []string{"p1", "p0", "p1"}},
		{"a folder alone", `{"cniVersion": "1.0.0", "loadOnlyInlinedPlugins": false}`,
			map[string]string{"10.conf": `P0`}, []string{"p0"}},
		{"a folder without files", `{"cniVersion": "1.0.0", "plugins": [P0]}`, nil, []string{"p0"}},
		{"one plugin", `P0`, map[string]string{"10.conf": `P1`}, []string{"p0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			fill := strings.NewReplacer("NET", n.network,
				"P0", n.faulty("p0", fmt.Sprintf(`, "cniVersion": "1.0.0", "name": %q`, n.network)), "P1", n.faulty("p1", "")).Replace
			path := n.chainFile("net.conflist", fill(c.content))
			for name, content := range c.folder {
				n.mkdir(filepath.Join(filepath.Dir(path), n.network))
				n.write(filepath.Join(filepath.Dir(path), n.network, name), fill(content))
			}
			list := n.unwind()
			p := n.pod("a")
			p.mustAdd(list)
			p.mustDel(list)
			var want []string
			for _, instance := range c.want {
				want = append(want, "ADD "+instance)
			}
			for _, instance := range slices.Backward(c.want) {
				want = append(want, "DEL "+instance)
			}
			n.wantCalls("ADD and DEL", want...)
			n.nothingLeft()
		})
	}
}

// TestChainFileLink: unwind follows a symbolic link only in a directory that none but its owner can
// write to.
func TestChainFileLink(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		mode os.FileMode
		ok   bool
	}{
		{"0755", 0o755, true},
		{"0775", 0o775, false},
		{"1777", 0o777 | os.ModeSticky, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			path := n.chainFile("net.conflist", "")
			target := filepath.Join(n.dir, "target")
			n.write(target, fmt.Sprintf(`{"cniVersion": "1.0.0", "plugins": [%s]}`, n.faulty("p0", "")))
			if err := os.Symlink(target, path); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(filepath.Dir(path), c.mode); err != nil {
				t.Fatal(err)
			}
			list := n.unwind()
			p := n.pod("a")
			_, err := p.add(list)
			switch {
			case c.ok && err != nil:
				t.Error(err)
			case !c.ok && (err == nil || !strings.Contains(err.Error(), "chainFile "+path)):
				t.Errorf("ADD: %v", err)
			}
			p.mustDel(list)
			n.nothingLeft()
		})
	}
}

// TestChainFileUnusable: ADD refuses a file that is no chain, names it and the fault, and starts
// nothing. A DEL of a pod that the journal does not know succeeds if the runtime has no result of
// an ADD either; otherwise it is an error too.
func TestChainFileUnusable(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		make func(n *node, path string) error
		want string
	}{
		{"gone", func(*node, string) error { return nil }, "no such file or directory"},
		{"truncated", content(`{"cniVersion": "1.0.0", "plugins": [{"type": "fau`), "not valid JSON"},
		{"empty", content(``), "not valid JSON"},
		{"no plugins", content(`{"cniVersion": "1.0.0", "plugins": []}`), `"plugins" is empty`},
		{"unwind in it", content(`{"cniVersion": "1.0.0", "plugins": [{"type": "unwind"}]}`), "unwind cannot run"},
		{"another name", content(`{"cniVersion": "1.0.0", "name": "other", "plugins": [{"type": "faulty"}]}`), `key "name" is "other"`},
		{"unknown version", content(`{"cniVersion": "0.5.0", "plugins": [{"type": "faulty"}]}`), `cniVersion "0.5.0"`},
		{"a FIFO", func(_ *node, path string) error { return unix.Mkfifo(path, 0o600) }, "not a regular file"},
		{"a directory", func(_ *node, path string) error { return os.Mkdir(path, 0o755) }, "not a regular file"},
		{"a device", func(_ *node, path string) error { return os.Symlink("/dev/zero", path) }, "not a regular file"},
		{"a dangling link", func(_ *node, path string) error { return os.Symlink("/nowhere", path) }, "no such file or directory"},
		{"a loop of links", func(_ *node, path string) error { return os.Symlink(path, path) }, "too many levels"},
		{"unreadable", func(_ *node, path string) error { return os.Symlink("/proc/self/mem", path) }, "input/output error"},
		{"huge", func(_ *node, path string) error {
			return os.WriteFile(path, []byte(strings.Repeat(" ", netconf.MaxConfig+1)), 0o600)
		}, "more than"},
		{"a plugin's file broken", func(n *node, path string) error {
			// A directory is no file.
			n.mkdir(filepath.Join(filepath.Dir(path), n.network, "10.conf"))
			n.write(filepath.Join(filepath.Dir(path), n.network, "20.conf"), `{"type"`)
			return content(`{"cniVersion": "1.0.0", "plugins": [{"type": "faulty"}]}`)(n, path)
		}, "plugins[1]: not valid JSON"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			path := n.chainFile("net.conflist", "")
			if err := c.make(n, path); err != nil {
				t.Fatal(err)
			}
			list := n.unwind()
			p := n.pod("a")
			_, err := p.add(list)
			n.wantFileError("ADD", err, path, c.want)
			p.mustDel(list)

			// The plain chain added the pod, so the runtime knows it and the journal does not.
			plain := n.plain(n.faulty("p0", ""))
			p.mustAdd(plain)
			n.forgetCalls()
			n.wantFileError("DEL", p.del(list), path, c.want)
			n.wantCalls("unwind")
			p.mustDel(plain)
			n.nothingLeft()
		})
	}
}

func content(text string) func(*node, string) error {
	return func(_ *node, path string) error { return os.WriteFile(path, []byte(text), 0o600) }
}

func (n *node) wantFileError(verb string, err error, path, want string) {
	n.Helper()
	if err == nil {
		n.Fatalf("%s succeeded", verb)
	}
	for _, part := range []string{"unwind: ", "chainFile " + path + ": ", want} {
		if !strings.Contains(err.Error(), part) {
			n.Errorf("%s: %v: nothing about %q", verb, err, part)
		}
	}
}

// TestChainFileGoneOldRuntime: a DEL without an entry is an error if the runtime's version gives no
// result with a DEL, since the missing result then says nothing.
func TestChainFileGoneOldRuntime(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outer = "0.3.1"
	path := n.chainFile("net.conflist", "")
	list := n.unwind()
	n.wantFileError("DEL", n.pod("a").del(list), path, "no such file or directory")
	n.nothingLeft()
}

// TestChainFileIsLookedForAgain: an ADD and a STATUS wait for a provider that is just rewriting its
// file.
func TestChainFileIsLookedForAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, meanwhile string }{
		{"away", ""},
		{"half written", `{"cniVersion": "1.0.0", "plug`},
		{"empty", " "},
	} {
		for _, verb := range []string{"ADD", "STATUS"} {
			t.Run(c.name+", "+verb, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				path := n.chainFile("net.conflist", c.meanwhile)
				whole := fmt.Sprintf(`{"cniVersion": "1.0.0", "plugins": [%s]}`, n.faulty("p0", ""))
				n.write(path+".new", whole)
				back := time.AfterFunc(200*time.Millisecond, func() { _ = os.Rename(path+".new", path) })
				defer back.Stop()
				if verb == "STATUS" {
					n.wantStatus(verb, n.ask(verb, "", keys{"chain": nil, "chainFile": path}), 0, "")
					return
				}
				p := n.pod("a")
				p.mustAdd(n.unwind())
				p.mustDel(n.unwind())
				n.nothingLeft()
			})
		}
	}
}

// TestChainIsNotLookedForAgain: a STATUS waits for another program's file, but not for an error in
// unwind's own entry.
func TestChainIsNotLookedForAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	took := func(changes keys) time.Duration {
		began := time.Now()
		if out := n.status("1.1.0", changes); out.said.Code != 50 {
			t.Errorf("STATUS: %s", out.stdout)
		}
		return time.Since(began)
	}
	file := took(keys{"chain": nil, "chainFile": n.dir + "/none"})
	if file < time.Second {
		t.Errorf("a file that is away was looked for for %s", file)
	}
	for _, own := range []keys{
		{"chain": keys{"plugins": []string{}}}, {"chain": nil}, {"chainFile": n.dir + "/none"},
	} {
		if took := took(own); took >= file {
			t.Errorf("%v took %s, a file that is away %s", own, took, file)
		}
	}
}

// hang covers a directory with a file system whose server never answers.
func (n *node) hang(dir string) {
	n.Helper()
	server, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		n.Skip(err)
	}
	n.Cleanup(func() {
		_ = unix.Close(server) // ends all that wait for it
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server)
	if err := unix.Mount("hangs", dir, "fuse", unix.MS_NODEV|unix.MS_NOSUID, options); err != nil {
		n.Fatal(err)
	}
}

// TestChainFileHangs: a DEL that the journal knows does without the file. A verb that looks into it
// gives up in time, and says which file it is; the DEL of a delegate that rejects its configuration
// stays pending.
func TestChainFileHangs(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	path := n.chainFile("net.conflist", fmt.Sprintf(`{"cniVersion": "1.0.0", "plugins": [%s]}`, n.faulty("p0", `, "code": 7`)))
	list := n.unwind()
	n.plan(map[string]map[string]string{"pod:rejected": {"DEL": "fail"}})
	known, rejected, looked, unknown := n.pod("known"), n.pod("rejected"), n.pod("looked"), n.pod("unknown")
	for _, p := range []*pod{known, rejected, looked} {
		p.mustAdd(list)
	}
	unknown.mustAdd(n.plain(n.faulty("p0", "")))
	n.hang(filepath.Dir(path))
	known.mustDel(list)

	const hangs = "not read within 10s"
	var verbs sync.WaitGroup
	verbs.Go(func() {
		_, err := n.pod("new").add(list)
		n.wantFileError("ADD", err, path, hangs)
	})
	verbs.Go(func() { n.wantFileError("DEL", unknown.del(list), path, hangs) })
	verbs.Go(func() {
		if err := rejected.del(list); err == nil || !strings.Contains(err.Error(), "p0") && !strings.Contains(err.Error(), "code 7") {
			t.Errorf("DEL of what is rejected: %v", err)
		}
	})
	verbs.Go(func() {
		if err := looked.check(list); err != nil {
			t.Errorf("CHECK: %v", err)
		}
	})
	verbs.Go(func() {
		n.wantStatus("STATUS", n.ask("STATUS", "", keys{"chain": nil, "chainFile": path}), 50,
			"unwind: STATUS timed out: a delegate or a configuration file hangs")
	})
	verbs.Wait()
	if left := rejected.entry(); left == nil || len(undo.PendingSteps(left)) != 1 {
		t.Errorf("the entry of what is rejected: %+v", left)
	}
}

// TestKnownDELReadsNoFile: a DEL that the journal knows opens nothing beside chainFile.
func TestKnownDELReadsNoFile(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	path := n.chainFile("net.conflist", fmt.Sprintf(`{"cniVersion": "1.0.0", "plugins": [%s]}`, n.faulty("p0", "")))
	list, p := n.unwind(), n.pod("a")
	opened := n.opened(filepath.Dir(path))
	if p.mustAdd(list); !opened() {
		t.Fatal("the ADD did not open it")
	}
	if p.mustDel(list); opened() {
		t.Error("the DEL opened it")
	}
	n.nothingLeft()
}

// opened returns a function that says whether a file in a directory was opened since its last call.
func (n *node) opened(dir string) func() bool {
	n.Helper()
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		n.Fatal(err)
	}
	n.Cleanup(func() { _ = unix.Close(fd) })
	if _, err := unix.InotifyAddWatch(fd, dir, unix.IN_OPEN); err != nil {
		n.Fatal(err)
	}
	return func() bool {
		got, err := unix.Read(fd, make([]byte, 64<<10))
		return err == nil && got > 0
	}
}
