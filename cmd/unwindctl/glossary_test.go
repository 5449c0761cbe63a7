package main

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
)

// TestGlossary: for each kind of word, such as state or result, the glossary explains exactly the
// words that commands print, and each word once.
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

// TestVocabulary: the documents name exactly the flags (except common ones such as --json),
// configuration keys, environment variables, metrics, labels, label values and alerts in the code.
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
	flags := []string{"cleanup-config-on-exit", "config", "cri-socket", "ip-masq", "monitor", "multus-conf-file", "reset-then-reuse-values", "reuse-values"} // of other programs
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
	alerts := regexp.MustCompile(`(?s)- alert: (\w+)\n.*?severity: (\w+)`).ReplaceAllString(
		read("scripts/deploy/helm/unwind/alerts.yaml"), "- alert: $1 $2")
	rows := regexp.MustCompile("(?m)^\\| <a id=.*`(Unwind\\w+)` .* \\| (\\w+) \\|$").ReplaceAllString(operations, "- alert: $1 $2")
	vocabulary["alert"] = words{find(alerts, `(?m)^ *- alert: (\w+ \w+)$`), find(rows, `(?m)^- alert: (\w+ \w+)$`)}
	vocabulary["variable"] = words{slices.Sorted(maps.Values(dirEnv)), find(documents, `\b(UNWIND_\w+)`, "UNWIND_TEST_LONG")}
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
		if _, help, found := strings.Cut(m[2], "names the reason:"); found {
			vocabulary["help of "+m[1]] = words{find(help, `(\w+) "?[\s+"]*\((?:the|a|another)`), values[m[1]]}
		}
		vocabulary["metric"] = words{append(vocabulary["metric"].code, m[1]), find(documents, `\bunwind_([a-z_]+)`)}
	}
	slices.Sort(vocabulary["metric"].code)
	for kind, w := range vocabulary {
		if !slices.Equal(w.code, w.documents) {
			t.Errorf("%s: the code has\n%q, documents\n%q", kind, w.code, w.documents)
		}
	}
}
