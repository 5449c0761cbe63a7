package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// phrases lists unidiomatic phrases that texts and documents must not contain, and better phrases.
var phrases = []struct{ not, but string }{
	{`in order again|\banew\b`, "recovered, again, restart"},
	{`as soon as it can be`, "retries until it succeeds"},
	{`as far as it (can|could) be`, "as far as possible"},
	{`what (they|it) miss`, "missing dependencies"},
	{`with a remedy each`, "and how to fix them"},
	{`what is done was written`, "write-ahead"},
	{`loses none of it`, "SIGKILL loses nothing"},
	{`leaves nothing pending for ever`, "is never left pending"},
	{`nothing can be told|(cannot|can|could not) be told`, "unknown, cannot be determined"},
	{`[^a-z](ends?|exits?) with [0-9]`, "exits 1"},
	{`come no further|c[oa]me to its end`, "finished, failed"},
	{`^looking (for|through|at|up) `, "cannot list, cannot find"},
	{`no time was left`, "not attempted: interrupted or out of time"},
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
	{`a person gave it up`, "forgotten by an operator"},
	{`went on without|goes? on without|going on without`, "continues without"},
	{`what is (dead|wrong)\b`, "dead attachments, problems"},
	{`out of the ordinary`, "unusual"},
	{`(nothing|none) is (locked|looked at)`, "read-only, takes no locks"},
	{`\bis none of`, "must be one of"},
	{`\beach (second|minute|hour|day)\b`, "every minute"},
	{`\b(is|are) in .?DIR\b`, "use the journal in DIR"},
	{`is not reached|was not reached|nodes? not reached`, "unreachable"},
	{`no pod with these`, "no pods match the selector"},
	{`nothing that is known|nothing had to be`, "nothing known, nothing to do"},
	{`\bownerless\b`, "empty reservation"},
	{`\bunproven\b`, "unverified"},
	{`DELs? (of \S+ )?(passes|passed|pass)\b`, "succeed"},
	{`\bcan(not| never)? pass\b`, "succeed"},
	{`\bgave no\b|\bgives no\b`, "returned no"},
	{`\bgive(s|n)? (it|them) up\b|\bgave up\b`, "forget, drop"},
	{`what (the runtime sends|unwind needs)`, "the runtime's configuration"},
}

// inDocuments lists words that documents must not use. The code may use them.
var inDocuments = []struct{ not, but string }{
	{`\bcrash.?loop`, "failed sandbox starts: CrashLoopBackOff makes no ADD"},
	{`\bplain chain\b`, "without unwind"},
	{`\bbeside\b`, "next to, in addition to"},
	{`\b(ownerless|parked|unproven)\b`, "empty, waiting, unverified"},
}

// TestPhrases checks that no text of the programs and no document contains one of the phrases.
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
	var pages []text
	for _, path := range documents(t) {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		// A sentence may continue on the next line.
		words := strings.Join(strings.Fields(string(data)), " ")
		pages = append(pages, text{path, words})
	}
	refuse(t, phrases, append(texts, pages...))
	refuse(t, inDocuments, pages)
}

// refuse reports each text that contains one of the phrases.
func refuse(t *testing.T, phrases []struct{ not, but string }, texts []text) {
	t.Helper()
	for _, p := range phrases {
		not := regexp.MustCompile(`(?i)` + p.not)
		for _, text := range texts {
			if where := not.FindString(text.words); where != "" {
				t.Errorf("%s: %q: write %q or the like", text.place, where, p.but)
			}
		}
	}
}

// documents returns the paths of all documents, and of the Helm chart's YAML files.
func documents(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("git", "ls-files", "*.md", "scripts/deploy/helm/*.yaml").Output()
	if err != nil {
		t.Skip("no repository:", err)
	}
	return strings.Fields(filepath.ToSlash(string(out)))
}
