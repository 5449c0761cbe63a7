// Package e2e tests the built binaries (bin/unwind, bin/unwindctl and the reference plugins) with
// real container runtimes. Each runtime runs on its own Node. `make e2e` builds the other programs
// that the tests need, in .tools/e2e.
//
// To a runtime, a Node is a machine: it has its own network, mount and PID namespaces, and its
// files are where a distribution puts them. A Node ends with the test that created it, and leaves
// nothing on the real machine. If the test process is killed, all processes of its nodes are
// killed, and the next test removes the nodes' disks.
package e2e

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// root is the root of the repository, relative to the directory in which the tests run.
const root = "../.."

// Path returns the absolute path of a file of the repository, and fails the test if the file does
// not exist.
func Path(t testing.TB, name string) string {
	t.Helper()
	path, err := filepath.Abs(filepath.Join(root, name))
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Fatalf("%v\nrun these tests with: make e2e", err)
	}
	return path
}

// tool returns the path of a program that `make e2e` or `make e2e-k8s` built.
func tool(t testing.TB, name string) string {
	t.Helper()
	return Path(t, filepath.Join(".tools/e2e", name))
}

// Eventually waits until holds returns true, and returns how long that took. If that takes longer
// than the given time, Eventually fails the test.
func Eventually(t testing.TB, within time.Duration, what string, holds func() bool) time.Duration {
	t.Helper()
	begin := time.Now()
	for !holds() {
		if time.Since(begin) > within {
			t.Fatalf("after %s still not: %s", within, what)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return time.Since(begin)
}

// Short reports whether to run shorter tests, as `make e2e SHORT=1` does.
func Short() bool { return os.Getenv("UNWIND_E2E_SHORT") != "" }

// Long skips a test in a short run.
func Long(t testing.TB) {
	t.Helper()
	if Short() {
		t.Skip("not part of a short run")
	}
}

// check ends the test if err is not nil.
func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
