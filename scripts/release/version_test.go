// Package release tests the scripts in its directory, which `make release` runs. It also tests the
// versions and commands in the documents.
package release

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/mod/semver"

	"cni-unwind/plugin/plugintest/nodetest"
)

// project is a small Go module in a directory of its own.
type project struct {
	*testing.T
	dir string
}

func newProject(t *testing.T) project {
	t.Helper()
	p := project{t, t.TempDir()}
	p.write("go.mod", "module version\n\ngo 1.24\n")
	p.write("main.go", `package main

import "runtime/debug"

func main() {
	info, _ := debug.ReadBuildInfo()
	println(info.Main.Version)
}
`)
	return p
}

func (p project) write(name, text string) {
	p.Helper()
	nodetest.Check(p, os.WriteFile(filepath.Join(p.dir, name), []byte(text), 0o644))
}

// run runs a command that must succeed, and returns what it prints to stdout and stderr.
func (p project) run(name string, args ...string) string {
	p.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = p.dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "TZ=Asia/Kathmandu",
		"GIT_CONFIG_GLOBAL=/dev/null", "GIT_CEILING_DIRECTORIES="+filepath.Dir(p.dir),
		"GIT_AUTHOR_NAME=x", "GIT_AUTHOR_EMAIL=x", "GIT_COMMITTER_NAME=x", "GIT_COMMITTER_EMAIL=x")
	out, err := cmd.CombinedOutput()
	if err != nil {
		p.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out))
}

func (p project) version() string {
	p.Helper()
	script, err := filepath.Abs("version.sh")
	nodetest.Check(p, err)
	return p.run(script)
}

// commit creates the n-th commit, an hour after the previous one, and tags it.
func (p project) commit(n int, tags ...string) {
	p.Helper()
	p.write("text", strconv.Itoa(n))
	p.run("git", "add", "-A")
	date := fmt.Sprintf("GIT_COMMITTER_DATE=2026-01-02T%02d:30:00+05:45", 4+n)
	p.run("env", date, "git", "commit", "-q", "-m", "x")
	for _, tag := range tags {
		p.run("git", "tag", tag)
	}
}

// TestVersion: version.sh prints the version that go build stamps into a binary of the same commit.
// Each version, including those with uncommitted changes, sorts after the previous version.
func TestVersion(t *testing.T) {
	t.Parallel()
	p := newProject(t)
	if got := p.version(); got != "dev" {
		t.Errorf("without a repository: %s", got)
	}
	p.run("git", "init", "-q")
	if got := p.version(); got != "dev" {
		t.Errorf("without a commit: %s", got)
	}
	last := ""
	for n, step := range []struct {
		tag    string
		prefix string // the beginning of the version, up to the commit's hash
	}{
		{"", "v0.0.0-20260101224500-"},
		{"other", "v0.0.0-20260101234500-"},
		{"v1.9.9", "v1.9.9"},
		{"", "v1.9.10-0.20260102014500-"},
		{"v1.10.0-rc.1", "v1.10.0-rc.1"},
		{"", "v1.10.0-rc.1.0.20260102034500-"},
		{"v1.10.0", "v1.10.0"},
	} {
		if last != "" {
			p.write("text", "changed")
			dirty := p.version()
			if !strings.HasSuffix(dirty, "-dirty") || semver.Compare(last, dirty) >= 0 {
				t.Errorf("%s with a change: %s", last, dirty)
			}
			last = dirty
		}
		p.commit(n, strings.Fields(step.tag)...)
		got, gos := p.version(), p.run("go", "run", "-buildvcs=true", ".")
		if got != gos || !strings.HasPrefix(got, step.prefix) {
			t.Errorf("got %s, want %s…; go build stamps %s", got, step.prefix, gos)
		}
		if last != "" && semver.Compare(last, got) >= 0 {
			t.Errorf("%s does not sort after %s", got, last)
		}
		last = got
	}
}
