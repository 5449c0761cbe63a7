package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"cni-unwind/plugin"
)

// keeping is a keeper on a node, and what it logs.
type keeping struct {
	*node
	*keeper
	log *bytes.Buffer
}

func newKeeping(t *testing.T, change func(*keeper)) *keeping {
	k := &keeping{node: newAgentNode(t), log: &bytes.Buffer{}}
	k.again(change)
	return k
}

// again starts the keeper anew, as after the end of the agent.
func (k *keeping) again(change func(*keeper)) {
	log := slog.New(slog.NewTextHandler(k.log, nil))
	paths := runtimePaths{ConfDir: k.confDir(), BinDirs: []string{k.binDir()}, MaxConfs: 1}
	k.keeper = &keeper{
		installation: installation{ConfDir: k.confDir(), BinDir: k.binDir(), Binary: filepath.Join(k.dir, "unwind")},
		paths:        paths, interval: time.Hour, log: log, once: newOnce(log), beat: func() {},
		find: func() (runtimePaths, error) { return paths, nil }, verified: true,
	}
	if change != nil {
		change(k.keeper)
	}
}

// turns has the keeper look, and sees what is installed then.
func (k *keeping) turns(want string) {
	k.Helper()
	for range 3 { // what it finds again does not change what it does
		k.turn(context.Background())
	}
	if got := k.installed(); got != want {
		k.Errorf("got %q, want %q\n%s", got, want, k.log)
	}
}

func (k *keeping) later() { k.gone = k.gone.Add(-goneAfter) }

func (k *keeping) says(text string) int { return strings.Count(k.log.String(), text) }

// TestKeeperGone: a provider's file that is gone is waited for, and then ours goes too. The next one is taken up.
func TestKeeperGone(t *testing.T) {
	t.Parallel()
	k := newKeeping(t, nil)
	k.turns(first)
	k.remove(k.inConf("10-bridge.conflist"))
	k.turns(first)
	k.write(k.inConf("10-bridge.conflist"), conflistOf(network, "portMappings"))
	k.turns(first)
	k.remove(k.inConf("10-bridge.conflist"))
	if again := k.turn(context.Background()); again > goneAfter {
		t.Errorf("looked at again after %s", again)
	}
	k.turns(first)
	k.later()
	k.turns("")
	if k.says("the provider's file is gone") != 1 || k.says("level=WARN") != 1 {
		t.Errorf("not said once:\n%s", k.log)
	}
	k.write(k.inConf("20-other.conflist"), conflistOf("other"))
	k.turns("other of 20-other.conflist with null")
}

// TestKeeperNext: where another conflist is in the folder, it takes the place of one that is gone, without a moment without ours.
func TestKeeperNext(t *testing.T) {
	t.Parallel()
	k := newKeeping(t, nil)
	k.write(k.inConf("87-podman.conflist"), conflistOf("podman"))
	k.turns(first)
	stop := k.alwaysThere()
	k.remove(k.inConf("10-bridge.conflist"))
	k.turns(first)
	k.later()
	k.turns("podman of 87-podman.conflist with null")
	stop()
}

// TestKeeperFirst: what the runtime would take without us is what ours is of.
func TestKeeperFirst(t *testing.T) {
	t.Parallel()
	const pinned, before = "20-pinned.conflist", "05-before.conflist"
	for _, c := range []struct {
		name   string
		change func(*keeping) func(*keeper)
		want   string // once there is one that sorts before
	}{
		{"a new one", func(*keeping) func(*keeper) { return nil }, "before of 05-before.conflist with null"},
		{"--conf", func(k *keeping) func(*keeper) {
			return func(keeper *keeper) { keeper.conf = k.inConf("10-bridge.conflist") }
		}, first},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			k := newKeeping(t, nil)
			k.again(c.change(k))
			k.turns(first)
			k.write(k.inConf(before), `{"name": "before", "plugins": [`)
			k.turns(first)
			k.write(k.inConf(before), conflistOf("before"))
			k.turns(c.want)
		})
	}
	t.Run("install --conf of another folder", func(t *testing.T) {
		t.Parallel()
		k := newKeeping(t, nil)
		k.Source = filepath.Join(k.dir, "zone.conflist")
		k.write(k.Source, conflistOf("zone"))
		if _, err := k.writeConflist(); err != nil {
			t.Fatal(err)
		}
		k.turns("zone of zone.conflist with null")
		k.write(k.inConf(before), conflistOf("before"))
		k.turns("zone of zone.conflist with null")
	})
	t.Run("install --conf", func(t *testing.T) {
		t.Parallel()
		k := newKeeping(t, nil)
		k.write(k.inConf(pinned), conflistOf("pinned"))
		k.Source = k.inConf(pinned)
		if _, err := k.writeConflist(); err != nil {
			t.Fatal(err)
		}
		k.turns("pinned of 20-pinned.conflist with null")
		k.write(k.inConf(before), conflistOf("before"))
		k.turns("before of 05-before.conflist with null")
	})
}

// TestKeeperConf: a file that --conf names is the only one, also while it is not there.
func TestKeeperConf(t *testing.T) {
	t.Parallel()
	k := newKeeping(t, nil)
	path := filepath.Join(k.dir, "mine.conflist")
	k.again(func(keeper *keeper) { keeper.conf = path })
	k.turns("")
	k.later()
	k.turns("")
	if k.says("level=WARN") != 1 || k.says("mine.conflist") != 1 {
		t.Errorf("that it is not there is not said once:\n%s", k.log)
	}
	k.write(path, conflistOf("mine"))
	k.turns("mine of mine.conflist with null")
	k.remove(path)
	k.turns("mine of mine.conflist with null")
	k.later()
	k.turns("")
}

// TestKeeperSwitchedOff: what somebody else has removed is not written again, until ours is there again, or the agent is started
// anew. The binary is not either.
func TestKeeperSwitchedOff(t *testing.T) {
	t.Parallel()
	k := newKeeping(t, nil)
	binary := filepath.Join(k.binDir(), plugin.Name)
	off := func() {
		t.Helper()
		k.turns(first)
		k.remove(k.own())
		k.remove(binary)
		k.turns("")
		k.rename(k.inConf("10-bridge.conflist"), conflistOf(network, "bandwidth"))
		k.turns("")
		k.remove(k.inConf("10-bridge.conflist"))
		k.turns("")
		k.write(k.inConf("10-bridge.conflist"), conflistOf(network, "portMappings"))
		k.turns("")
		if exists(binary) {
			t.Error("the plugin was put back")
		}
	}
	off()
	if k.says("somebody has removed unwind's conflist") != 1 {
		t.Errorf("not said once:\n%s", k.log)
	}
	if _, err := k.writeConflist(); err != nil { // as unwindctl install does
		t.Fatal(err)
	}
	k.turns(first)
	if !exists(binary) {
		t.Error("the plugin was not put back")
	}
	off()
	k.again(nil)
	k.turns(first)
}

// TestKeeperFolderCleared: a provider that removes all that is in the folder, and then writes its own, has switched nothing off.
func TestKeeperFolderCleared(t *testing.T) {
	t.Parallel()
	for _, seen := range []bool{true, false} {
		k := newKeeping(t, nil)
		k.turns(first)
		k.remove(k.own())
		k.remove(k.inConf("10-bridge.conflist"))
		if seen {
			k.turns("")
		}
		k.rename(k.inConf("10-bridge.conflist"), conflistOf(network, "portMappings"))
		k.turns(first)
	}
}

// TestKeeperBinary: a plugin that is gone, another one or not to be executed is put back.
func TestKeeperBinary(t *testing.T) {
	t.Parallel()
	k := newKeeping(t, nil)
	binary := filepath.Join(k.binDir(), plugin.Name)
	for name, change := range map[string]func() error{
		"removed":            func() error { return os.Remove(binary) },
		"another":            func() error { return os.WriteFile(binary, []byte("x"), 0o755) },
		"not to be executed": func() error { return os.Chmod(binary, 0o600) },
	} {
		k.turns(first)
		if err := change(); err != nil {
			t.Fatal(err)
		}
		k.turns(first)
		info, err := os.Stat(binary)
		content, _ := os.ReadFile(binary)
		if err != nil || info.Mode().Perm() != 0o755 || string(content) != fakePlugin {
			t.Errorf("%s: it was not put back (%v)", name, err)
		}
	}
}

// TestKeeperTemporary: what the agent writes itself must not have it look again before it is in place, or on a full disk it would
// look without end.
func TestKeeperTemporary(t *testing.T) {
	t.Parallel()
	k := newKeeping(t, nil)
	for path, want := range map[string]bool{k.inConf("." + ownFile + ".123.tmp"): true, k.own(): false, k.inConf("10-bridge.conflist"): false} {
		if k.isTemporary(path) != want {
			t.Errorf("%s: %t", path, !want)
		}
	}
}

// TestKeeperOther: what is not the plugin is not installed.
func TestKeeperOther(t *testing.T) {
	t.Parallel()
	k := newKeeping(t, func(keeper *keeper) { keeper.verified = false })
	k.write(filepath.Join(k.dir, "unwind"), strings.ReplaceAll(fakePlugin, "unwind", "other"))
	k.turns("")
	if exists(filepath.Join(k.binDir(), plugin.Name)) || k.says("it is not unwind") != 1 {
		t.Errorf("it is installed, or that it is not is not said once:\n%s", k.log)
	}
}

// TestKeeperRefused: what is in the runtime's configuration against an install is said once, and counts no more once it is mended.
func TestKeeperRefused(t *testing.T) {
	t.Parallel()
	k := newKeeping(t, nil)
	paths := k.paths
	problem := []string{"max_conf_num is 2"}
	k.find = func() (runtimePaths, error) { p := paths; p.Problems = problem; return p, nil }
	k.turns("")
	if k.says("max_conf_num") != 1 {
		t.Errorf("not said once:\n%s", k.log)
	}
	problem = nil
	k.turns(first)
}

// TestAgentFlat: over many turns, sweeps and changes of the provider's file nothing accumulates.
func TestAgentFlat(t *testing.T) { // not parallel: it counts this process's goroutines
	n := newAgentNode(t)
	n.addDead("pending")
	n.plan(map[string]string{"DEL": "fail"})
	paths := runtimePaths{ConfDir: n.confDir(), BinDirs: []string{n.binDir()}, MaxConfs: 1}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	a := &agent{
		flags: runFlags{installFlags: installFlags{placeFlags: placeFlags{file: ownFile}, binary: filepath.Join(n.dir, "unwind"), stateDir: n.state},
			cri: "none", listen: "127.0.0.1:0", interval: 5 * time.Millisecond},
		log: log, once: newOnce(log), stderr: io.Discard, find: func() (runtimePaths, error) { return paths, nil },
	}
	before := runtime.NumGoroutine()
	fds := openDescriptors(t)
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() {
		if err := a.run(ctx); err != nil {
			t.Error(err)
		}
	})
	change := func(turns int) (goroutines, descriptors int, heap uint64) {
		for i := range turns {
			n.rename(n.inConf("10-bridge.conflist"), conflistOf(network, fmt.Sprintf("c%d", i%2)))
			time.Sleep(10 * time.Millisecond)
		}
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		goroutines, descriptors = runtime.NumGoroutine(), openDescriptors(t)
		for range 20 { // a sweep that is under way has some for a while
			time.Sleep(3 * time.Millisecond)
			goroutines, descriptors = min(goroutines, runtime.NumGoroutine()), min(descriptors, openDescriptors(t))
		}
		return goroutines, descriptors, m.HeapAlloc
	}
	g1, d1, h1 := change(20)
	g2, d2, h2 := change(100)
	if g2 > g1+8 || d2 > d1+8 || h2 > h1+4<<20 {
		t.Errorf("goroutines %d → %d, descriptors %d → %d, heap %d → %d", g1, g2, d1, d2, h1, h2)
	}
	if n.calls("DEL") < 20 {
		t.Errorf("%d sweeps", n.calls("DEL"))
	}
	cancel()
	ended.Wait()
	eventually(t, "as many goroutines and descriptors as before", func() bool {
		return runtime.NumGoroutine() <= before && openDescriptors(t) <= fds
	})
}

func openDescriptors(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

// TestHealthz: each of the two loops counts, and neither if it has nothing to do.
func TestHealthz(t *testing.T) {
	t.Parallel()
	hung := func(p *pulse) { p.last.Store(time.Now().Add(-patience - 2*time.Minute).UnixNano()) }
	for _, c := range []struct {
		name   string
		change func(*agent)
		code   int
	}{
		{"both turn", func(*agent) {}, 200},
		{"sweeps hang", func(a *agent) { hung(&a.sweeping) }, 503},
		{"the install hangs", func(a *agent) { hung(&a.keeping) }, 503},
		{"there is no install", func(a *agent) { hung(&a.keeping); a.flags.noInstall = true }, 200},
		{"a long interval", func(a *agent) { hung(&a.sweeping); a.flags.interval = time.Hour }, 200},
	} {
		a := &agent{flags: runFlags{interval: time.Minute}}
		a.keeping.beat()
		a.sweeping.beat()
		c.change(a)
		w := httptest.NewRecorder()
		a.healthz(w, nil)
		if w.Code != c.code {
			t.Errorf("%s: %d, want %d", c.name, w.Code, c.code)
		}
	}
}

// TestAgentJournalDir: the journal is where it is given, else where our conflist has it or had it.
func TestAgentJournalDir(t *testing.T) {
	t.Parallel()
	n := newAgentNode(t)
	inst := installation{ConfDir: n.confDir()}
	a := &agent{}
	if got := a.journalDir(inst); got != plugin.DefaultStateDir {
		t.Errorf("without a conflist: %s", got)
	}
	n.write(n.own(), strings.Replace(conflistOf(network), `"type":"bridge"`, `"type":"unwind","chainFile":"/x","stateDir":"/there"`, 1))
	for _, state := range []string{"with a conflist", "without it later"} {
		if got := a.journalDir(inst); got != "/there" {
			t.Errorf("%s: %s", state, got)
		}
		_ = os.Remove(n.own())
	}
	inst.StateDir = "/given"
	if got := a.journalDir(inst); got != "/given" {
		t.Errorf("given: %s", got)
	}
}

// TestOnce: a state is said when it begins.
func TestOnce(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	o := newOnce(slog.New(slog.NewTextHandler(&log, nil)))
	for _, err := range []error{nil, fmt.Errorf("no a1"), fmt.Errorf("no a2"), fmt.Errorf("no b"), nil, nil, fmt.Errorf("no a3")} {
		o.warn("thing", "looking", err)
	}
	var got []string
	for line := range strings.Lines(log.String()) {
		got = append(got, line[strings.Index(line, "level="):])
	}
	want := "level=WARN msg=looking err=\"no a1\"\nlevel=WARN msg=looking err=\"no b\"\nlevel=INFO msg=\"in order again\" was=looking\n" +
		"level=WARN msg=looking err=\"no a3\"\n"
	if strings.Join(got, "") != want {
		t.Errorf("got\n%s", strings.Join(got, ""))
	}
}

// TestUnrepeated: a line is passed on unless the turn before had it.
func TestUnrepeated(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	u := &unrepeated{to: &out}
	for i, lines := range []string{"ab", "abc", "c", "a"} {
		u.turn()
		for _, line := range lines {
			fmt.Fprintf(u, "time=%d msg=%c\n", i, line)
		}
	}
	if got, want := out.String(), "time=0 msg=a\ntime=0 msg=b\ntime=1 msg=c\ntime=3 msg=a\n"; got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}
