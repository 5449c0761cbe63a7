package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	_ "cni-unwind/plugin" // see underTest
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// TestMain runs the tests in namespaces of their own, or the program that writes records, if this
// program was started under its name.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "puts" {
		putThree(os.Args[1], os.Args[2])
		os.Exit(0)
	}
	code := sandbox.Run(m) // --host goes to process 1, and so does a sweep after a boot
	_ = os.RemoveAll(built)
	os.Exit(code)
}

// programsEnv is the environment variable with the directory of the programs under test.
const programsEnv = "UNWIND_TEST_PROGRAMS"

// built is the directory of the programs that this process has built, or "".
var built string

// underTest builds, once, unwindctl and the plugin, and returns their directory. Tests start them
// thousands of times, and a test binary takes two or three times as long to start. unwindctl's
// default of --install-dir is empty, so that nothing goes into the machine's own. go test does not
// see what this build reads: it runs the tests again if a package that they import has changed, or a
// file that they open.
var underTest = sync.OnceValues(func() (dir string, err error) {
	if dir := os.Getenv(programsEnv); dir != "" { // of the process that runs this one: see apart
		return dir, nil
	}
	const plugin = "../../testdata/unwind"
	for _, file := range []string{plugin + "/main.go", "../../plugin/plugintest/env/env.go"} {
		if _, err := os.ReadFile(file); err != nil {
			return "", err
		}
	}
	if built, err = os.MkdirTemp("", "under-test-"); err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-buildvcs=false", "-ldflags", "-s -w -X main.programDir=", "-o", built, ".", plugin)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", cmd.Args, err, out)
	}
	return built, os.Setenv(programsEnv, built)
})

// programs returns a directory with the programs under test, and puts.
func programs(t testing.TB) string {
	t.Helper()
	from, err := underTest()
	check(t, err)
	self, err := os.Executable()
	dir := t.TempDir()
	for name, program := range map[string]string{"unwindctl": filepath.Join(from, "unwindctl"),
		netconf.Name: filepath.Join(from, netconf.Name), "puts": self} {
		err = errors.Join(err, os.Symlink(program, filepath.Join(dir, name)))
	}
	check(t, err)
	return dir
}

// apart is sandbox.Apart, for tests of the programs under test, which are built once for all.
func apart(t *testing.T) bool {
	t.Helper()
	sandbox.Need(t)
	_, err := underTest()
	check(t, err)
	return sandbox.Apart(t)
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
