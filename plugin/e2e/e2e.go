// Package e2e runs real container runtimes on nodes of their own, to test the binaries as they are
// installed: bin/unwind, bin/unwindctl, the reference plugins, containerd. `make e2e` builds what
// it needs below .tools/e2e.
//
// To a runtime, a Node is a machine: it has network, mount and PID namespaces of its own, and its
// files are where a distribution puts them. It ends with the test that created it, or with the
// process that runs the tests, however that ends. Nothing of it remains on the machine.
package e2e

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// root is the repository, relative to this directory, where the tests run.
const root = "../.."

// Path returns the absolute path of a file of the repository, and fails the test if there is none.
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

// tool returns the path of a tool that make e2e built.
func tool(t testing.TB, name string) string {
	t.Helper()
	return Path(t, filepath.Join(".tools/e2e", name))
}

// Eventually waits until a condition holds, and fails the test if it takes longer than within. It
// returns how long it took.
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

// Short reports whether the tests should take less time: make e2e SHORT=1.
func Short() bool { return os.Getenv("UNWIND_E2E_SHORT") != "" }

// check ends the test if there is an error.
func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
