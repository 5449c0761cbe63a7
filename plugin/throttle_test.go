package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// TestPaceCost measures the processor time of a STATUS every five seconds, on a node where 150 DELs
// of bridge fail because host-local does.
func TestPaceCost(t *testing.T) {
	period, err := time.ParseDuration(os.Getenv("UNWIND_TEST_PACE"))
	if err != nil {
		t.Skip("set UNWIND_TEST_PACE to a duration, such as 60s")
	}
	n := newNode(t)
	n.outer = "1.1.0"
	n.conf["logLevel"] = nil
	broken := n.breakable("host-local")
	chain := []string{n.bridgePlugin(`, "ipMasq": true`), `{"type": "firewall"}`}
	p := n.pod("a")
	p.mustAdd(n.unwind(chain...))
	broken(true)
	if err := p.del(n.unwind(chain...)); err == nil {
		t.Fatal("the DEL succeeded")
	}
	p.dropNetNS()
	p.edit(func(g *journal.Generation) { g.Steps[0].Attempts, g.Steps[0].RetryAt = 7, 0 })
	p.copies(149, func(_ int, e *journal.Entry) { e.Newest().Claims = nil })
	for end := time.Now().Add(period); time.Now().Before(end); {
		next := time.Now().Add(5 * time.Second)
		before, began := processorTime(t), time.Now()
		n.ask("STATUS", "1.0.0", nil, chain...)
		took, used := time.Since(began), processorTime(t)-before
		t.Logf("%s, processor %s: %.1f %%", took.Round(time.Millisecond), used.Round(time.Millisecond),
			100*used.Seconds()/5)
		time.Sleep(time.Until(next))
	}
}

// These are those of the code, for any DEL that fails.
const (
	often       = 20
	probes      = 3
	maxBackoff  = 30 * time.Second
	longBackoff = 5 * time.Minute
)

// processorTime returns the processor time of the programs that have ended.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

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
			i := slices.IndexFunc(all, func(e *journal.Entry) bool { return e.Newest().Steps[0].Attempts > often+10 })
			in := time.Duration(all[i].Newest().Steps[0].RetryAt - journal.BootNanos())
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
