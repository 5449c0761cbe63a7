package release

import (
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"cni-unwind/plugin/plugintest/nodetest"
)

// TestNotes: the notes of a version are the lines under its heading in CHANGELOG.md, each item on
// one line. If there are none, a pre-release or an untagged build gets the lines under
// "Unreleased", and notes.sh fails for a release.
func TestNotes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	script, err := os.ReadFile("notes.sh")
	nodetest.Check(t, err)
	p := project{t, dir}
	nodetest.Check(t, os.MkdirAll(filepath.Join(dir, "scripts/release"), 0o755))
	p.write("scripts/release/notes.sh", string(script))
	p.write("CHANGELOG.md", "# Changelog\n\n## Unreleased\n\n- new\n\n## v1.10.0\n\n- one,\n  of two lines\n- two\n\n"+
		"## v1.1.0\n\nWords.\n\n- old\n")
	for _, c := range []struct{ version, want string }{
		{"v1.10.0", "- one, of two lines\n- two\n"},
		{"v1.1.0", "Words.\n- old\n"},
		{"v2.0.0-rc.1", "- new\n"},
		{"dev", "- new\n"},
		{"v1.1", ""},
		{"v2.0.0", ""},
	} {
		var stderr strings.Builder
		cmd := exec.Command("bash", "scripts/release/notes.sh", c.version)
		cmd.Dir, cmd.Stderr = dir, &stderr
		out, err := cmd.Output()
		if string(out) != c.want || (err == nil) != (c.want != "") || (err != nil) != strings.Contains(stderr.String(), "no lines under "+c.version) {
			t.Errorf("%s: %q, %v, %s", c.version, out, err, &stderr)
		}
	}
}

// TestWorkflows checks the security of the workflows:
//
//   - Each action of another repository is pinned to a commit, because a tag may be moved.
//   - By default, jobs may only read the repository. A job with other permissions doesn't run make.
//   - actions/checkout leaves no token in .git.
//   - No workflow names a container registry. GitHub's repository variable REGISTRY does.
func TestWorkflows(t *testing.T) {
	t.Parallel()
	files, _ := filepath.Glob("../../.github/workflows/*.yml")
	if len(files) < 2 {
		t.Fatal(files)
	}
	uses := regexp.MustCompile(`(?m)\buses: (.*)$`)
	pinned := regexp.MustCompile(`^(\./.*|[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+)$`)
	registry := regexp.MustCompile(`\b(oci|docker)://[\w.-]|\b[\w-]+\.(io|dev)/`)
	for _, file := range files {
		data, err := os.ReadFile(file)
		nodetest.Check(t, err)
		for _, match := range uses.FindAllSubmatch(data, -1) {
			if !pinned.Match(match[1]) {
				t.Errorf("%s: %s", file, match[0])
			}
		}
		if host := registry.Find(data); host != nil {
			t.Errorf("%s: %s", file, host)
		}
		var workflow struct {
			Permissions map[string]string
			Jobs        map[string]struct {
				Permissions map[string]string
				Steps       []struct {
					Uses, Run string
					With      map[string]any
				}
			}
		}
		if err := yaml.Unmarshal(data, &workflow); err != nil || len(workflow.Permissions) != 1 ||
			workflow.Permissions["contents"] != "read" {
			t.Errorf("%s: permissions %v, %v", file, workflow.Permissions, err)
		}
		for name, job := range workflow.Jobs {
			for _, step := range job.Steps {
				if job.Permissions != nil && strings.Contains(step.Run, "make ") {
					t.Errorf("%s: %s has permissions of its own, and builds\n%s", file, name, step.Run)
				}
				if strings.HasPrefix(step.Uses, "actions/checkout@") && step.With["persist-credentials"] != false {
					t.Errorf("%s: checkout in %s leaves its token in .git", file, name)
				}
			}
		}
	}
}

// TestTag: the first step of the release workflow accepts only tags that are semantic versions,
// because these contain nothing that a shell or make would run.
func TestTag(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../.github/workflows/release.yml")
	nodetest.Check(t, err)
	var workflow struct {
		Jobs struct {
			Build struct{ Steps []struct{ Name, Run string } }
		}
	}
	if err := yaml.Unmarshal(data, &workflow); err != nil || len(workflow.Jobs.Build.Steps) == 0 ||
		workflow.Jobs.Build.Steps[0].Name != "check the tag" {
		t.Fatalf("%v: %+v", err, workflow)
	}
	for tag, want := range map[string]bool{
		"v1.2.3": true, "v0.10.0": true, "v1.0.0-rc.1": true, "v1.0.0-alpha-2": true,
		"v01.2.3": false, "v1.2": false, "v1.2.3-": false, "v1.2.3-rc..1": false, "v1.2.3+build": false, "v1.2.3-rc/1": false,
		"v1.2.3-;id": false, "v1.2.3-$(id)": false, "v1.2.3-`id`": false, "v1.2.3\nid": false, "v1.2.3-é": false,
	} {
		cmd := exec.Command("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", workflow.Jobs.Build.Steps[0].Run)
		cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "VERSION="+tag)
		out, err := cmd.CombinedOutput()
		if (err == nil) != want || want != (len(out) == 0) {
			t.Errorf("%q: %v, %s", tag, err, out)
		}
	}
}

// TestPostinstall: after the installation of a deb or rpm, its script restarts a running agent. It
// prints a line for each kind of file that takes precedence over the package's, and one if no agent
// runs. It succeeds even if systemctl fails.
func TestPostinstall(t *testing.T) {
	t.Parallel()
	const (
		system  = "run/systemd/system/"
		unit    = "etc/systemd/system/unwind-"
		program = "usr/local/bin/unwindctl"

		restarts = "daemon-reload\ntry-restart unwind-agent.service\n" +
			"is-active --quiet unwind-agent.service\n"
		inactive = "unwind: unwind-agent.service is not active; to install or update the plugin, " +
			"run unwindctl install (with the same flags as before)\n"
		oldProgram = "unwind: ROOT/usr/local/bin/unwindctl takes precedence over this package's " +
			"/usr/bin/unwindctl; remove it\n"
		oldUnits = "unwind: these units take precedence over this package's:%s; keep your changes with " +
			"systemctl edit, remove these files, then run systemctl daemon-reload and systemctl " +
			"try-restart unwind-agent.service\n"
	)
	type files []string // a path that ends in a slash is a directory
	for _, c := range []struct {
		name         string
		files        files
		active       int // the exit code of systemctl is-active
		called, want string
	}{
		{"agent", files{system}, 0, restarts, ""},
		{"no agent", files{system}, 3, restarts, inactive},
		{"no systemd", nil, 0, "", inactive},
		{"old unit", files{system, unit + "agent.service"}, 0, restarts,
			fmt.Sprintf(oldUnits, " ROOT/"+unit+"agent.service")},
		{"old units and program", files{system, unit + "sweep.service", unit + "sweep.timer",
			unit + "sweep-boot.service", program}, 3, restarts,
			fmt.Sprintf(oldUnits, " ROOT/"+unit+"sweep.service ROOT/"+unit+"sweep.timer ROOT/"+unit+
				"sweep-boot.service") + oldProgram + inactive},
		{"drop-in and old program", files{system, unit + "agent.service.d/", program}, 0, restarts,
			oldProgram},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			root, bin := t.TempDir(), t.TempDir()
			for _, file := range c.files {
				dir, name := path.Split(file)
				nodetest.Check(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
				if name != "" {
					nodetest.Check(t, os.WriteFile(filepath.Join(root, file), nil, 0o600))
				}
			}
			systemctl := fmt.Sprintf("#!/bin/sh\necho \"$*\" >>%s/called\n"+
				"[ \"$1\" != is-active ] || exit %d\nexit 1\n", bin, c.active)
			nodetest.Check(t, os.WriteFile(filepath.Join(bin, "systemctl"), []byte(systemctl), 0o700))
			cmd := exec.Command("sh", "postinstall.sh", "configure")
			cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "DPKG_ROOT="+root)
			out, err := cmd.CombinedOutput()
			called, _ := os.ReadFile(filepath.Join(bin, "called"))
			got := strings.ReplaceAll(string(out), root, "ROOT")
			if err != nil || string(called) != c.called || got != c.want {
				t.Errorf("%v, called\n%s\ngot  %s\nwant %s", err, called, got, c.want)
			}
		})
	}
}

// TestArchitectures: the DaemonSet runs agents only on nodes of the image's architectures.
func TestArchitectures(t *testing.T) {
	t.Parallel()
	find := func(path, line string) string {
		t.Helper()
		data, err := os.ReadFile(path)
		nodetest.Check(t, err)
		m := regexp.MustCompile(line).FindSubmatch(data)
		if m == nil {
			t.Fatalf("%s lacks a line %s", path, line)
		}
		return strings.ReplaceAll(string(m[1]), ",", "")
	}
	image := find("release.mk", `(?m)^ARCHES := (.*)$`)
	nodes := find("../deploy/daemonset.yaml",
		`(?m)\{key: kubernetes.io/arch, operator: In, values: \[(.*)\]\}$`)
	if nodes != image {
		t.Errorf("the DaemonSet selects nodes with %s, and the image is for %s", nodes, image)
	}
}

// TestArchiveLinks: each link in a document of a release's archive leads to a file or directory in
// the archive.
func TestArchiveLinks(t *testing.T) {
	t.Parallel()
	const root = "../.."
	data, err := os.ReadFile(filepath.Join(root, ".goreleaser.yaml"))
	nodetest.Check(t, err)
	var release struct {
		Archives []struct{ Files []struct{ Src string } }
	}
	nodetest.Check(t, yaml.Unmarshal(data, &release))
	has := map[string]bool{} // files and directories of the archive
	var documents []string
	for _, file := range release.Archives[0].Files {
		tree, below := strings.CutSuffix(file.Src, "/**/*")
		names, err := filepath.Glob(filepath.Join(root, tree))
		nodetest.Check(t, err)
		for i := 0; i < len(names); i++ {
			if info, err := os.Stat(names[i]); err == nil && info.IsDir() {
				if entries, _ := filepath.Glob(filepath.Join(names[i], "*")); below {
					names = append(names, entries...)
				}
				continue
			}
			name, _ := filepath.Rel(root, names[i])
			if path.Ext(name) == ".md" {
				documents = append(documents, name)
			}
			for ; name != "."; name = path.Dir(name) {
				has[name] = true
			}
		}
	}
	link := regexp.MustCompile(`\]\(([^)#: ]+)(#[^)]*)?\)`)
	for _, name := range documents {
		text, err := os.ReadFile(filepath.Join(root, name))
		nodetest.Check(t, err)
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if to := path.Join(path.Dir(name), m[1]); !has[to] {
				t.Errorf("%s links to %s, which is not in the archive", name, to)
			}
		}
	}
	if len(documents) < 15 {
		t.Errorf("documents: %q", documents)
	}
}
