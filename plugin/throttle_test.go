package plugin

import (
	"fmt"
	"testing"
)

// These are those of the code, for any DEL that fails.
const (
	often  = 20
	probes = 3
)

// TestPace: a STATUS tries a few of the failing DELs, the longest untried first; GC tries all. Once
// the plugin works again, a few STATUSes undo all, also those whose backoff lasts for minutes yet.
func TestPace(t *testing.T) {
	const pods = 40
	stories(t, fmt.Sprintf(`
	patient; conf logLevel; owes a %d; drop a; copies a %d
	status; times %[3]d DEL p1; status; times %[4]d DEL p1; status; times %[5]d DEL p1; different
	forgets; tries gc; times %[6]d DEL p1
	now a; plan; status`, often+10, pods-1, probes, 2*probes, 3*probes, pods), owing(), acts{
		"different": func(s *story, _ []string) {
			tried := map[string]bool{}
			for _, l := range s.callLog() {
				tried[l.ContainerID] = true
			}
			s.want(len(tried) == 3*probes, "%d attachments had their turn", len(tried))
		},
	})
}
