package main

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"cni-unwind/cmd/unwindctl/internal/trial"
	"cni-unwind/plugin"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/env"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
	"cni-unwind/plugin/undo"
)

// TestMain runs the tests in namespaces of their own, or, where this program was started under the
// name of one of these programs, that: unwindctl itself, the plugin, and one that writes records.
func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case "unwindctl":
		programDir = "" // nothing goes into the machine's own
		main()
	case netconf.Name:
		runPlugin()
	case trial.PluginName:
		trial.Plugin()
	case "puts":
		putThree(os.Args[1], os.Args[2])
	default:
		if strings.HasPrefix(os.Args[0], "/proc/self/fd/") { // the plugin to install, which has no path on the host
			runPlugin()
		}
		os.Exit(sandbox.Run(m)) // --host goes to process 1, and so does a sweep after a boot
	}
	os.Exit(0)
}

func runPlugin() {
	p := &plugin.Plugin{Env: undo.Env{Stderr: os.Stderr, Budgets: env.Long, Runner: &delegate.Processes{}}, Stdout: os.Stdout}
	ctx, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	os.Exit(p.Main(ctx, "CNI plugin unwind dev: under test"))
}

// programs returns a directory with the programs that TestMain knows.
func programs(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	self, err := os.Executable()
	for _, name := range []string{"unwindctl", netconf.Name, "puts"} {
		err = errors.Join(err, os.Symlink(self, filepath.Join(dir, name)))
	}
	check(t, err)
	return dir
}

// noExitDelay has the race detector let a program exit at once, and not a second later.
const noExitDelay = "atexit_sleep_ms=0"

func TestScript(t *testing.T) {
	sandbox.Need(t)
	bin := programs(t)
	cmds := map[string]func(*testscript.TestScript, bool, []string){}
	for name, do := range verbs {
		cmds[name] = func(ts *testscript.TestScript, neg bool, args []string) { do(ts.Value("n").(*scripted), ts, neg, args) }
	}
	testscript.Run(t, testscript.Params{
		Dir: "../../testdata/script", RequireExplicitExec: true, Cmds: cmds,
		Setup: func(env *testscript.Env) error {
			n := newMachineAt(env.T().(testing.TB), env.WorkDir, bin)
			n.Dirs = &nodetest.Dirs{TB: n.TB, Dir: n.dir}
			env.Values["n"] = &scripted{machine: n}
			for name, value := range map[string]string{
				"PATH": bin + ":" + env.Getenv("PATH"), "TOOLS": n.tools, "PROGRAMS": bin, "PLUGIN": filepath.Join(bin, netconf.Name),
				"GORACE": noExitDelay, "FIRST": nodetest.First,
			} {
				env.Setenv(name, value)
			}
			env.Defer(func() { unmountAll(filepath.Join(env.WorkDir, "netns")) })
			return expandFiles(env)
		},
	})
}

// expandFiles has the files of a script name its directories.
func expandFiles(env *testscript.Env) error {
	return filepath.WalkDir(env.WorkDir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if expanded := bytes.ReplaceAll(data, []byte("$WORK"), []byte(env.WorkDir)); err == nil && !bytes.Equal(expanded, data) {
			err = os.WriteFile(path, expanded, 0o644)
		}
		return err
	})
}

// untilItSucceeds runs a program until its exit code is 0: eventually PROGRAM ARG….
func untilItSucceeds(ts *testscript.TestScript, _ bool, args []string) {
	for end := time.Now().Add(sandbox.Patience); ts.Exec(args[0], args[1:]...) != nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			ts.Fatalf("not in time: %v", args)
		}
	}
}

// unmountAll lets go of the network namespaces that are pinned in a directory.
func unmountAll(dir string) {
	pins, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, pin := range pins {
		_ = unix.Unmount(pin, unix.MNT_DETACH)
	}
}
