package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"cni-unwind/plugin/plugintest/nodetest"
)

var (
	// software matches the names of software that documents mention with versions.
	software = `containerd|CRI-O|Kubernetes|podman|nerdctl|reference plugins|cnitool|aws-cni|cilium-cni|[Mm]ultus`

	// named matches a name of software and the versions that follow it: "containerd 2.4, 1.7 and 1.6",
	// "`cilium-cni` 1.19.6", "reference plugins of containernetworking (1.9.1".
	named = regexp.MustCompile(`\b(` + software + ")`?(?: of containernetworking)?" +
		` \(?v?(\d+\.\d+(?:\.\d+)?(?:(?:, | and | to )v?\d+\.\d+(?:\.\d+)?)*)`)
	number = regexp.MustCompile(`\d+\.\d+(?:\.\d+)?`)

	// wasRun matches a sentence that claims that software was tested. wasRead matches a sentence that
	// says that software was not tested.
	wasRun = regexp.MustCompile(`\*\*Tested\*\*|\b[Rr]uns? the (?:real|12 tests)\b|` +
		`\b(?:was|were|have) (?:\w+ )?(?:run|tested|measured)\b`)
	wasRead = regexp.MustCompile(`\bnot (?:run|tested)\b|\b[Ss]ource code read\b`)
	split   = regexp.MustCompile(`[.;] |\n\n|\n- |\|`)
)

// versions maps software to the versions that were tested.
type versions map[string][]string

func (v versions) add(name, text string) {
	name = strings.ToLower(name)
	v[name] = append(v[name], number.FindAllString(text, -1)...)
}

// unknown returns the versions in text that were not tested. 1.36 in text stands for any 1.36.x.
func (v versions) unknown(name, text string) (bad []string) {
	for _, version := range number.FindAllString(text, -1) {
		if !slices.ContainsFunc(v[strings.ToLower(name)], func(run string) bool {
			return run == version || strings.HasPrefix(run, version+".")
		}) {
			bad = append(bad, version)
		}
	}
	return bad
}

// claims returns a document's claims that software was tested, each as a name and its versions. A
// claim is a sentence, or a row of a table with a column "run" or "run in tests".
func claims(document string) (all [][2]string) {
	for _, sentence := range split.Split(document, -1) {
		if wasRun.MatchString(sentence) && !wasRead.MatchString(sentence) {
			for _, m := range named.FindAllStringSubmatch(strings.Join(strings.Fields(sentence), " "), -1) {
				all = append(all, [2]string{m[1], m[2]})
			}
		}
	}
	for _, table := range strings.Split(document, "\n\n") {
		lines := strings.Split(table, "\n")
		head := strings.Split(lines[0], "|")
		if len(head) < 4 || !strings.HasPrefix(strings.TrimSpace(head[2]), "run") {
			continue
		}
		for _, row := range lines[1:] {
			if cells := strings.Split(row, "|"); len(cells) > 3 && number.MatchString(cells[2]) {
				name := strings.TrimSuffix(strings.TrimSpace(cells[1]), " with CNI")
				all = append(all, [2]string{name, cells[2]})
			}
		}
	}
	return all
}

// TestVersions: the table "Versions" in testdata/README.md contains every version that, according
// to a document, was tested. The table also agrees with the Makefile and with hyperkube's go.mod.
func TestVersions(t *testing.T) {
	const table = "testdata/README.md"
	t.Chdir("../..")
	read := func(path string) string {
		text, err := os.ReadFile(path)
		nodetest.Check(t, err)
		return string(text)
	}
	_, section, _ := strings.Cut(read(table), "\n## Versions\n")
	section, _, _ = strings.Cut(section, "\n## ")
	run := versions{}
	for _, c := range claims(section) {
		run.add(c[0], c[1])
	}

	built := versions{}
	for name, find := range map[string][2]string{
		"containerd":        {"Makefile", `(?m)^CONTAINERD_VERSIONS := (.*)`},
		"reference plugins": {"Makefile", `(?m)^PLUGINS_(?:VERSION|BEFORE|CNI04) +:= (.*)`},
		"cnitool":           {"Makefile", `(?m)^CNITOOL_VERSION +:= (.*)`},
		"aws-cni":           {"Makefile", `(?m)^AWS_CNI_VERSION +:= (.*)`},
		"cilium-cni":        {"Makefile", `(?m)^CILIUM_VERSION +:= (.*)`},
		"multus":            {"Makefile", `(?m)^MULTUS_VERSION +:= (.*)`},
		"cri-o":             {"Makefile", `(?m)^CRIO_VERSION +:= (.*)`},
		"nerdctl":           {"Makefile", `(?m)^NERDCTL_VERSION +:= (.*)`},
		"kubernetes":        {"plugin/e2e/hyperkube/go.mod", `(?m)^require k8s.io/kubernetes (.*)`},
	} {
		lines := regexp.MustCompile(find[1]).FindAllStringSubmatch(read(find[0]), -1)
		if lines == nil {
			t.Fatalf("%s names no version of %s", find[0], name)
		}
		for _, m := range lines {
			built.add(name, m[1])
			if bad := run.unknown(name, m[1]); bad != nil {
				t.Errorf("%s names %s %q, which the table in %s lacks", find[0], name, bad, table)
			}
		}
		for _, version := range run[name] {
			const debian = "1.6.20"
			if !slices.Contains(built[name], version) && (name != "containerd" || version != debian) {
				t.Errorf("the table in %s names %s %s; %s names %q", table, name, version, find[0],
					built[name])
			}
		}
	}

	out, err := exec.Command("git", "ls-files", "*.md").Output()
	if err != nil {
		t.Skip("no repository:", err)
	}
	found := map[string]int{}
	for _, path := range strings.Fields(filepath.ToSlash(string(out))) {
		for _, c := range claims(read(path)) {
			found[path]++
			if bad := run.unknown(c[0], c[1]); bad != nil {
				t.Errorf("%s claims that %s %q was tested; the table in %s has %q", path, c[0], bad, table,
					run[strings.ToLower(c[0])])
			}
		}
	}
	for _, path := range []string{"README.md", "cmd/unwindctl/OPERATIONS.md", table, "scripts/providers/aws.md",
		"scripts/providers/cilium.md", "scripts/providers/multus.md", "scripts/bench/README.md"} {
		if found[path] == 0 {
			t.Errorf("%s: found no claim about tested versions", path)
		}
	}
}

// TestClaims: claims finds each form of a claim, and unknown finds the untested versions in it.
func TestClaims(t *testing.T) {
	t.Parallel()
	run := versions{}
	run.add("containerd", "2.4.2, 1.7.35")
	run.add("multus", "4.3.0")
	for text, want := range map[string]string{
		"**Tested** (2026-11): thin Multus 4.2.2.":              "4.2.2",
		"tests have run containerd 1.7 to\n2.5, under faults.":  "2.5",
		"It was run with containerd 2.4.2 and 1.6.":             "1.6",
		"| software | run |\n|---|---|\n| multus | 4.2.2 | |":   "4.2.2",
		"| x | run in tests | y |\n|-|-|-|\n| Multus | 5.0 | |": "5.0",
		"It was run with containerd 2.4. Multus 4.2.1 strips.":  "",
		"Source code read: Multus 4.2.1.":                       "",
	} {
		var bad []string
		for _, c := range claims(text) {
			bad = append(bad, run.unknown(c[0], c[1])...)
		}
		if got := strings.Join(bad, " "); got != want {
			t.Errorf("%q: found %q, want %q", text, got, want)
		}
	}
}

// TestFirstCommands: the section "Try it" of README.md lists exactly `make demo` and `make test`,
// and continuous integration runs both.
func TestFirstCommands(t *testing.T) {
	t.Parallel()
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join("../..", name))
		nodetest.Check(t, err)
		return string(data)
	}
	_, section, _ := strings.Cut(read("README.md"), "\n## Try it\n")
	section, _, _ = strings.Cut(section, "\n## ")
	var commands []string
	for _, m := range regexp.MustCompile(`(?m)^(make .*?) *(#.*)?$`).FindAllStringSubmatch(section, -1) {
		commands = append(commands, m[1])
	}
	if want := []string{"make demo", "make test"}; !slices.Equal(commands, want) {
		t.Errorf("README.md, Try it: %q, want %q", commands, want)
	}
	run := strings.Split(read(".ci/run"), "\n")
	for _, command := range commands {
		if !slices.Contains(run, "step "+command) {
			t.Errorf(".ci/run has no line \"step %s\"", command)
		}
	}
}

// TestHelp: `make` without arguments lists the commands of README.md's section "Try it" first, and
// then every other target that has a description. Each line fits into 80 columns.
func TestHelp(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("make", "--no-print-directory", "-C", "../..")
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=")
	out, err := cmd.CombinedOutput()
	nodetest.Check(t, err)
	var listed []string
	for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
		if target, is := strings.CutPrefix(line, "  "); is {
			listed = append(listed, strings.Fields(target)[0])
		}
		if len(line) > 80 {
			t.Errorf("%d columns: %s", len(line), line)
		}
	}
	if first := []string{"demo", "test"}; len(listed) < 2 || !slices.Equal(listed[:2], first) {
		t.Errorf("make lists first %q, want %q", listed[:min(2, len(listed))], first)
	}
	var makefile []byte
	for _, path := range []string{"Makefile", "plugin/e2e/tools.mk", "scripts/release/release.mk"} {
		text, err := os.ReadFile("../../" + path)
		nodetest.Check(t, err)
		makefile = append(makefile, text...)
	}
	all := []string{"help"}
	for _, m := range regexp.MustCompile(`(?m)^([a-z0-9-]+):.*## `).FindAllStringSubmatch(string(makefile), -1) {
		if !slices.Contains(all, m[1]) {
			all = append(all, m[1])
		}
	}
	listed = append(listed, "help")
	slices.Sort(all)
	slices.Sort(listed)
	if !slices.Equal(listed, all) {
		t.Errorf("make lists %q, the targets are %q", listed, all)
	}
}
