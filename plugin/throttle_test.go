package plugin

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
)

// These are those of the code, for any DEL that fails.
const (
	often       = 20
	probes      = 3
	maxBackoff  = 30 * time.Second
	longBackoff = 5 * time.Minute
)

// TestPace: a STATUS tries a few of the failing DELs, the longest untried first; GC tries all. Once
// the plugin works again, a few STATUSes undo all, also those whose backoff lasts for minutes yet.
func TestPace(t *testing.T) {
	const pods = 40
	stories(t, fmt.Sprintf(`
	patient; conf logLevel; owes a %d; drop a; copies a %d
	status; times %[3]d DEL p1; status; times %[4]d DEL p1; status; times %[5]d DEL p1; different
	forgets; waits; tries gc; times %[6]d DEL p1
	now a; plan; status`, often+10, pods-1, probes, 2*probes, 3*probes, pods), owing(), acts{
		"different": func(s *story, _ []string) {
			tried := map[string]bool{}
			for _, l := range s.callLog() {
				tried[l.ContainerID] = true
			}
			s.want(len(tried) == 3*probes, "%d attachments had their turn", len(tried))
		},
		"waits": func(s *story, _ []string) { // one that was tried
			all := s.entries()
			i := slices.IndexFunc(all, func(e *journal.Entry) bool { return e.Steps[0].Tries > often+10 })
			in := time.Duration(all[i].Steps[0].Wait.Until - journal.BootNanos())
			s.want(in >= maxBackoff && in <= longBackoff, "the next try is in %s", in)
		},
	})
}

// TestPaceOfOthers: DELs that wait for a failing plugin delay neither another plugin's DELs nor one
// that was not tried yet.
func TestPaceOfOthers(t *testing.T) {
	stories(t, fmt.Sprintf(`
	patient; owes a 7; drop a; copies a %d
	plan p1 DEL fail, p2 DEL fail
	add fresh; drop fresh
	other; add often; fails del often; forgets
	chain p0 | p1; status
	deleted fresh 2; deleted often 1; atMost
	plan; gc`, 2*probes-1), owing(), acts{
		"other": func(s *story, _ []string) { // a chain of another plugin
			s.link("other", filepath.Join(s.path[2], "faulty"))
			s.chain = []string{strings.Replace(s.faulty("p2", ""), `"faulty"`, `"other"`, 1)}
		},
		"atMost": func(s *story, _ []string) { s.want(len(s.who("a").dels()) <= 1, "%q", s.who("a").dels()) },
	})
}
