package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// phrases are what nobody says, with what is said instead. They were found in this repository.
var phrases = []struct{ not, but string }{
	{`in order again`, "recovered"},
	{`as soon as it can be`, "retries until it succeeds"},
	{`what (they|it) miss`, "missing dependencies"},
	{`with a remedy each`, "and how to fix them"},
	{`what is done was written`, "write-ahead"},
	{`loses none of it`, "SIGKILL loses nothing"},
	{`leaves nothing pending for ever`, "is never left pending"},
	{`nothing can be told|(cannot|can|could not) be told`, "unknown, cannot be determined"},
	{`[^a-z]ends? with 1\b`, "exits 1"},
	{`come no further|c[oa]me to its end`, "finished, failed"},
	{`^looking (for|through|at|up) `, "cannot list, cannot find"},
	{`no time was left`, "not attempted: out of time"},
	{`to its default|has its default`, "using defaults"},
	{`is another's`, "belongs to another attachment"},
	{`no DEL is shown`, "the DEL runs without the namespace"},
	{`outlived its unwind`, "orphaned delegate"},
	{`no program is there`, "not found"},
	{`come out as it is`, "cannot rewrite this without changing it"},
	{`is given, too`, "are mutually exclusive"},
	{`own no more`, "former owners"},
	{`word wins|'s word\b`, "record wins"},
	{`is being worked on`, "is in use"},
	{`cannot be looked at|looked through`, "cannot be read, cannot be inspected"},
	{`^it (printed|did|gave|holds|mixes) `, "the object first"},
	{`a person gave it up`, "given up by an operator"},
	{`went on without|goes? on without|going on without`, "continues without"},
}

// todo are the places that have yet to be read for such phrases. The list only gets shorter.
var todo = []string{
	"cmd/unwindctl/", "cmd/kubectl-unwind/", "plugin/sweep/",
}

// TestPhrases looks through all texts of the programs and all documents.
func TestPhrases(t *testing.T) {
	t.Chdir("../..")
	var texts []text
	for _, dir := range programs {
		found, err := read(dir)
		if err != nil {
			t.Fatal(err)
		}
		texts = append(texts, found...)
	}
	if len(texts) < 500 {
		t.Fatalf("only %d texts in the programs", len(texts))
	}
	for _, path := range documents(t) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		// A sentence may go on in the next line.
		words := strings.Join(strings.Fields(string(data)), " ")
		texts = append(texts, text{path, words})
	}
	left := map[string]int{}
	for _, p := range phrases {
		not := regexp.MustCompile(`(?i)` + p.not)
		for _, text := range texts {
			where := not.FindString(text.words)
			if where == "" {
				continue
			}
			if at := unread(text.place); at != "" {
				left[at]++
				continue
			}
			t.Errorf("%s: %q: write %q or the like", text.place, where, p.but)
		}
	}
	for _, place := range todo {
		t.Logf("to do: %s: %d phrases", place, left[place])
	}
}

// unread returns the part of todo that a place is in, or "".
func unread(place string) string {
	for _, dir := range todo {
		if strings.HasPrefix(place, dir) {
			return dir
		}
	}
	return ""
}

// documents returns the paths of all documents, and of the alerts.
func documents(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("git", "ls-files", "*.md", "scripts/deploy/helm/*.yaml").Output()
	if err != nil {
		t.Skip("no repository:", err)
	}
	return strings.Fields(filepath.ToSlash(string(out)))
}
