package main

import (
	"bytes"
	"cmp"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"

	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
)

// manualEnv names the directory in which TestManual leaves the man pages: make man.
const manualEnv = "UNWIND_MANUAL"

// commands returns the program and its commands, of which documents speak.
func commands() (root *cobra.Command, all []*cobra.Command) {
	root = rootCommand()
	root.DisableAutoGenTag = true
	root.CompletionOptions.HiddenDefaultCmd = true
	all = []*cobra.Command{root}
	for _, cmd := range root.Commands() {
		if cmd.IsAvailableCommand() {
			all = append(all, cmd)
		}
	}
	for _, cmd := range all { // indented lines stay lines
		cmd.Long = strings.TrimSpace(indented.ReplaceAllStringFunc(cmd.Long, func(lines string) string {
			return "\n    " + strings.ReplaceAll(strings.TrimSuffix(lines, "\n"), "\n", "\n    ") + "\n"
		}))
	}
	return root, all
}

var indented = regexp.MustCompile(`(?m)(^  .*(\n|$))+`)

// TestManual: each command has a man page, with its examples.
func TestManual(t *testing.T) {
	dir := os.Getenv(manualEnv)
	if dir == "" {
		dir = t.TempDir()
	}
	root, all := commands()
	header := &doc.GenManHeader{Section: "8", Source: "unwind", Manual: "unwind"}
	check(t, errors.Join(os.MkdirAll(dir, 0o755), doc.GenManTree(root, header, dir)))
	for _, cmd := range all {
		if !strings.Contains(cmd.Example, cmd.Name()) {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
		page, err := os.ReadFile(filepath.Join(dir, strings.ReplaceAll(cmd.CommandPath(), " ", "-")+".8"))
		if err != nil || !bytes.Contains(page, []byte(".SH EXAMPLE")) {
			t.Errorf("%s: %v\n%s", cmd.CommandPath(), err, page)
		}
	}
}

// TestReadmeSession: the commands in README.md print the output that it shows. "…" stands for anything,
// and spaces for as many as there are: a table is wider where an age has one digit more. At the end, a
// sweep frees the address that the session leaks, which is older than the grace period.
func TestReadmeSession(t *testing.T) {
	if !apart(t) || !onOldMachine(t) {
		return
	}
	n := newMachine(t)
	readme, err := os.ReadFile("../../README.md")
	check(t, errors.Join(err, os.Symlink(n.bin, n.dir+"/bin"), os.Symlink(n.tools, n.dir+"/.tools")))
	var session, shown string
	for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```").FindAllSubmatch(readme, -1) {
		session += string(block[1])
	}
	for _, line := range regexp.MustCompile("(?m)^#> (.*)").FindAllStringSubmatch(session, -1) {
		words := strings.Join(strings.Fields(regexp.QuoteMeta(line[1])), " +")
		shown += ".*^ *" + strings.ReplaceAll(words, "…", ".*") + "$"
	}
	cmd := exec.CommandContext(t.Context(), "bash")
	cmd.Dir, cmd.Stdin = n.dir, strings.NewReader(session)
	out, err := cmd.CombinedOutput()
	if err != nil || shown == "" || !regexp.MustCompile("(?ms)"+shown).Match(out) {
		t.Errorf("%v\n%s\ndoes not match\n%s", err, out, shown)
	}
}

var (
	code     = regexp.MustCompile("(?ms)^ *```.*?^ *```|`[^`\n]+(?:\n[^`\n]+)?`")
	command  = regexp.MustCompile(`(?:^|[\s"'(` + "`" + `]|\s\.?/)(unwindctl|kubectl unwind|make)((?:[ \n]+[^\s` + "`" + `|#&;)]+)*)`)
	longFlag = regexp.MustCompile(`^--([a-z][a-z-]*)`)
)

// TestDocumentedCommands: each command of a document exists, with its flags: unwindctl's, those of
// kubectl unwind by the strings of its code, with unwindctl's after --, and make's targets.
func TestDocumentedCommands(t *testing.T) {
	t.Parallel()
	root, _ := commands()
	root.InitDefaultCompletionCmd()
	r := readRepository(t, "../..")
	var makefile []byte
	for _, name := range []string{"Makefile", "plugin/e2e/tools.mk", "scripts/release/release.mk"} {
		text, err := os.ReadFile("../../" + name)
		check(t, err)
		makefile = append(makefile, text...)
	}
	found := map[string]int{}
	for name := range r.documents {
		text, err := os.ReadFile("../../" + name)
		check(t, err)
		for _, block := range code.FindAllString(string(text), -1) {
			for _, m := range command.FindAllStringSubmatch(block, -1) {
				found[m[1]]++
				words := strings.Fields(m[2])
				var problem string
				switch m[1] {
				case "unwindctl":
					problem = unknownCommand(root, words)
				case "kubectl unwind":
					own, handedOn, _ := strings.Cut(m[2], " -- ")
					problem = cmp.Or(unknownWords(r.packages["kubectl-unwind"], r.words, strings.Fields(own)),
						unknownCommand(root, strings.Fields(handedOn)))
				case "make":
					if len(words) > 0 && !regexp.MustCompile(`(?m)^`+regexp.QuoteMeta(words[0])+`:`).Match(makefile) {
						problem = "target " + words[0]
					}
				}
				if problem != "" {
					t.Errorf("%s: %q has no %s", name, strings.TrimSpace(m[0]), problem)
				}
			}
		}
	}
	if found["unwindctl"] < 100 || found["kubectl unwind"] < 10 || found["make"] < 20 {
		t.Errorf("found %v", found)
	}
}

// unknownCommand returns the first word that is no command of root, or no flag of that command.
func unknownCommand(root *cobra.Command, words []string) string {
	cmd := root
	for _, word := range words {
		m := longFlag.FindStringSubmatch(word)
		switch {
		case m != nil && cmd.Flags().Lookup(m[1]) == nil && cmd.InheritedFlags().Lookup(m[1]) == nil &&
			cmd.PersistentFlags().Lookup(m[1]) == nil && m[1] != "help":
			return "flag " + word
		case m == nil && cmd == root && word != "COMMAND" && word != "POD":
			found, _, err := root.Find([]string{word})
			if err != nil || found == root {
				return "command " + word
			}
			cmd = found
		}
	}
	return ""
}

// unknownWords returns the first command or flag that is not a word of the code.
func unknownWords(identifiers, literals map[string]bool, words []string) string {
	for i, word := range words {
		if m := longFlag.FindStringSubmatch(word); m != nil {
			word = m[1]
		} else if i > 0 {
			continue
		}
		for _, part := range regexp.MustCompile(`[a-z]+`).FindAllString(word, -1) {
			if !identifiers[part] && !literals[part] {
				return word
			}
		}
	}
	return ""
}

// TestGlossary: each word that a command prints is explained, once for its kind, and nothing else is.
func TestGlossary(t *testing.T) {
	var reasons []string
	for _, r := range install.Reasons {
		reasons = append(reasons, string(r))
	}
	for kind, want := range map[string][]string{
		"state":  {string(journal.Adding), string(journal.Live), "recent", string(decide.Dead), string(journal.RollingBack), string(journal.Deleting), string(decide.Unknown), string(decide.Foreign)},
		"result": inspect.Results, "address": {"live", "recent", "leaked", "empty", "unknown", "free"}, "event": eventKinds, "status": reasons,
	} {
		var got []string
		for _, g := range glossary {
			if g.kind == kind {
				got = append(got, g.word)
			}
		}
		if want = slices.Clone(want); strings.Join(slices.Sorted(slices.Values(got)), ",") != strings.Join(slices.Sorted(slices.Values(want)), ",") {
			t.Errorf("%s: %q, want %q", kind, got, want)
		}
	}
}

// TestVocabulary: documents name each flag, key, metric, label, state and cause of the code, and no others.
func TestVocabulary(t *testing.T) {
	t.Parallel()
	read := func(pattern string) (text string) {
		files, err := filepath.Glob("../../" + pattern)
		for _, file := range files {
			data, missing := os.ReadFile(file)
			check(t, errors.Join(err, missing))
			if !strings.HasSuffix(file, "_test.go") {
				text += string(data)
			}
		}
		return text
	}
	find := func(text, pattern string, but ...string) (all []string) {
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(text, -1) {
			if !slices.Contains(but, m[1]) {
				all = append(all, m[1])
			}
		}
		slices.Sort(all)
		return slices.Compact(all)
	}
	var documents string
	for name := range readRepository(t, "../..").documents {
		documents += read(name)
	}
	operations := read("cmd/unwindctl/OPERATIONS.md")
	named, kubectl := find(documents, `--([a-z][a-z-]+)`), find(read("cmd/kubectl-unwind/*.go"), `"([a-z-]+)"`)
	flags := []string{"cleanup-config-on-exit", "config", "cri-socket", "ip-masq", "monitor", "multus-conf-file"} // of other programs
	root, all := commands()
	flags = append(flags, find(root.PersistentFlags().FlagUsages(), `--([a-z-]+)`)...)
	for _, cmd := range all {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			flags = append(flags, f.Name)
			if !slices.Contains(named, f.Name) && !slices.Contains([]string{"json", "output", "verbose", "version"}, f.Name) {
				t.Errorf("no document names the flag --%s of %s", f.Name, cmd.CommandPath())
			}
		})
	}
	for _, name := range find(documents, "`--([a-z-]+)") {
		if !slices.Contains(flags, name) && !slices.Contains(kubectl, name) {
			t.Errorf("a document names the flag --%s", name)
		}
	}

	_, keys, _ := strings.Cut(read("cmd/unwind/CONFIGURATION.md"), "## All keys")
	type words struct{ code, documents []string }
	vocabulary := map[string]words{
		"key": {find(read("plugin/netconf/conf.go"), `(?m)^\t\t"(\w+)": +\w+\(`, "cniVersion", "name", "prevResult", "runtimeConfig"),
			find(keys, "(?m)^\\| `(\\w+)` \\| [^|]* \\| [^|]* \\|$")},
	}
	values := map[string][]string{"rollbacks_total": {"complete", "pending"}, "ipam_addresses": {"none"}}
	for _, g := range glossary {
		metric := map[string]string{"address": "ipam_addresses", "status": "status", "state": "attachments"}[g.kind]
		values[metric] = append(values[metric], g.word)
	}
	values["waiting_deletes"] = find(read("journal/*.go"), `For\w+ +Why += "(\w+)"`, string(journal.ForBackoff))
	values["swept_attachments_total"] = find(read("plugin/decide/*.go"), `Reason\{"([a-z-]+)",`, decide.Superseded.Code, decide.WithinGrace.Code)
	values["degraded_operations_total"] = find(read("plugin/record/*.go"), `(?:\{|return )"([a-z-]+)"[,\n]`)
	for _, m := range regexp.MustCompile(`(?ms)^\t"(\w+)": \{(.*?)\},$`).FindAllStringSubmatch(read("cmd/unwindctl/internal/metrics/metrics.go"), -1) {
		labels := find(m[2], `"([a-z]+)"`)
		row := regexp.MustCompile("(?m)^\\| `unwind_" + m[1] + "` \\|([^|]*)\\|(.*)").FindStringSubmatch(operations)
		if row == nil {
			row = make([]string, 3)
		}
		slices.Sort(values[m[1]])
		vocabulary["label of "+m[1]] = words{labels, find(row[1], "`(\\w+)`")}
		vocabulary["value of "+m[1]] = words{values[m[1]], find(row[2], "`([a-z-]+)`", labels...)}
		vocabulary["metric"] = words{append(vocabulary["metric"].code, m[1]), find(documents, `\bunwind_([a-z_]+)`)}
	}
	slices.Sort(vocabulary["metric"].code)
	for kind, w := range vocabulary {
		if !slices.Equal(w.code, w.documents) {
			t.Errorf("%s: the code has\n%q, documents\n%q", kind, w.code, w.documents)
		}
	}
}
