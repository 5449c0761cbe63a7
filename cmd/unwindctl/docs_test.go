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
	"strconv"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/cmd/unwindctl/internal/trial"
	"cni-unwind/plugin/netconf"
)

// manualEnv is the environment variable with the directory into which TestManual writes the man
// pages. `make man` sets it.
const manualEnv = "UNWIND_MANUAL"

// commands returns unwindctl's root command, and all of its visible commands, including the root.
// It formats their descriptions for man pages.
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
	for _, cmd := range all { // keep indented lines as they are; the exit codes get their own section
		cmd.Long = strings.Replace(cmd.Long, describeExits(cmd.Name()), "", 1)
		cmd.Long = strings.TrimSpace(indented.ReplaceAllStringFunc(cmd.Long, func(lines string) string {
			return "\n    " + strings.ReplaceAll(strings.TrimSuffix(lines, "\n"), "\n", "\n    ") + "\n"
		}))
	}
	return root, all
}

var indented = regexp.MustCompile(`(?m)(^  .*(\n|$))+`)

// onNode lists the commands that inspect or change the node.
const onNode = "unwindctl doctor check list show history ipam metrics report sweep forget install on off uninstall run"

// manualFiles lists the files and directories that commands use, with their default paths, for the
// section FILES of the man pages.
var manualFiles = []struct{ commands, path, meaning string }{
	{onNode, node.DefaultConfDir + "/00-unwind.json", "unwind's conflist, next to the provider's (--conf-dir)"},
	{"unwindctl install on off uninstall run", node.DefaultConfDir + "/00-unwind.json.off", "unwind's conflist while unwind is off"},
	{"unwindctl doctor check sweep install on off uninstall run", node.DefaultBinDir + "/unwind", "the plugin (--cni-bin-dir)"},
	{onNode, netconf.DefaultStateDir, "the journal (journal.db, locks/), the events (history.jsonl), and the file off (--state-dir)"},
	{"unwindctl doctor list show ipam metrics report sweep uninstall run", "/var/lib/cni/results", "libcni's cache"},
	{"unwindctl doctor list show ipam metrics report sweep run", "/var/lib/cni/networks", "the pools of host-local, unless a conflist sets dataDir"},
	{"unwindctl check", trial.WorkDir, "the files of a check, until it ends"},
	{"unwindctl install uninstall run", programDir + "/unwindctl", "this program, for the node (--install-dir)"},
	{"unwindctl install uninstall", install.DefaultUnitDir + "/unwind-*", "the systemd units (--systemd)"},
	{"unwindctl report", "unwind-report-HOST-DATE.tar.gz", "the report, in the working directory; with --host, in / (--output)"},
}

// addSections adds the sections EXIT STATUS and FILES to a man page.
func addSections(page []byte, command string) []byte {
	section := func(title string, rows [][2]string) (text string) {
		for _, row := range rows {
			text += ".TP\n\\fB" + strings.ReplaceAll(row[0], "-", `\-`) + "\\fP\n" + strings.ReplaceAll(row[1], "-", `\-`) + "\n"
		}
		if text != "" {
			text = ".SH " + title + "\n" + text + "\n"
		}
		return text
	}
	var codes, files [][2]string
	for _, e := range exitsOf(command) {
		codes = append(codes, [2]string{strconv.Itoa(e.code), e.meaning})
	}
	for _, f := range manualFiles {
		if slices.Contains(strings.Fields(f.commands), command) {
			files = append(files, [2]string{f.path, f.meaning})
		}
	}
	sections := section("EXIT STATUS", codes) + section("FILES", files)
	return bytes.Replace(page, []byte(".SH EXAMPLE"), []byte(sections+".SH EXAMPLE"), 1)
}

// TestManual: each command has a man page with an example, its exit codes and its files.
func TestManual(t *testing.T) {
	dir := os.Getenv(manualEnv)
	if dir == "" {
		dir = t.TempDir()
	}
	root, all := commands()
	header := &doc.GenManHeader{Section: "8", Source: "unwind", Manual: "unwind"}
	check(t, errors.Join(os.MkdirAll(dir, 0o755), doc.GenManTree(root, header, dir)))
	codes := map[string]string{"unwindctl": "0 1 2 3 4 5 6 130", "doctor": "0 1 2 3 4 130", "check": "0 1 2 3 4 130",
		"off": "0 1 2 5 130", "uninstall": "0 1 2 5 6 130"}
	names := map[string]bool{"": true}
	for _, cmd := range all {
		names[cmd.Name()] = true
		if !strings.Contains(cmd.Example, cmd.Name()) {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
		path := filepath.Join(dir, strings.ReplaceAll(cmd.CommandPath(), " ", "-")+".8")
		page, err := os.ReadFile(path)
		check(t, err)
		page = addSections(page, cmd.Name())
		check(t, os.WriteFile(path, page, 0o644))
		if !bytes.Contains(page, []byte(".SH EXAMPLE")) || bytes.Count(page, []byte("exit codes:")) > 0 {
			t.Errorf("%s: no example, or the exit codes in the description:\n%s", cmd.CommandPath(), page)
		}
		_, section, _ := strings.Cut(string(page), "\n.SH EXIT STATUS\n")
		section, files, hasFiles := strings.Cut(section, "\n.SH FILES\n")
		var got []string
		for _, m := range regexp.MustCompile(`(?m)^\\fB(\d+)\\fP\n\w`).FindAllStringSubmatch(section, -1) {
			got = append(got, m[1])
		}
		if want := cmp.Or(codes[cmd.Name()], "0 1 2 130"); strings.Join(got, " ") != want {
			t.Errorf("%s: exit codes %q, want %s", cmd.CommandPath(), got, want)
		}
		if isOnNode := slices.Contains(strings.Fields(onNode), cmd.Name()); hasFiles != isOnNode ||
			isOnNode && !strings.Contains(files, `\fB/etc/cni/net.d/00\-unwind.json\fP`) {
			t.Errorf("%s: files:\n%s", cmd.CommandPath(), files)
		}
	}
	for _, e := range exits {
		for name := range strings.FieldsSeq(e.commands) {
			if !names[name] {
				t.Errorf("no command %s, which has the exit code %d", name, e.code)
			}
		}
	}
}

// TestReadmeSession: the commands in README.md print the output that README.md shows. In that
// output, "…" stands for any text. A space stands for one or more spaces, because the widths of
// columns vary.
func TestReadmeSession(t *testing.T) {
	if !apart(t) {
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

// TestDocumentedCommands: the documents name only existing commands and flags of unwindctl, and
// existing targets of make. For `kubectl unwind`, the test only checks that the command and its
// flags occur in Go code, and that the unwindctl command after "--" exists.
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

// unknownCommand returns the command in a command line if unwindctl lacks it, or else the first
// flag that this command lacks, or else "".
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

// unknownWords returns the first command or flag with a part that does not occur in the code. The
// parts of --agent-selector are agent and selector.
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
