package plugin

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
)

// owing is a node with many attachments whose namespaces are gone. p1 has a pending DEL for each,
// which has failed this many times.
func owing(t *testing.T, many, attempts int) (n *node, p *pod, chain []string) {
	t.Helper()
	n = newNode(t)
	n.outer = "1.1.0"
	n.conf["logLevel"] = nil
	chain = []string{n.faulty("p0", ""), n.faulty("p1", "")}
	p = n.pod("a")
	p.owes(n.unwind(chain...), attempts, 0)
	p.dropNetNS()
	p.copies(many-1, func(int, *journal.Entry) {})
	return n, p, chain
}

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
	t.Parallel()
	const many = 40
	n, p, chain := owing(t, many, often+10)
	n.patient()
	tried := map[string]bool{}
	for range 3 {
		n.forgetCalls()
		n.ask("STATUS", "1.0.0", nil, chain...)
		if got := len(n.calls()); got != probes {
			t.Errorf("a STATUS ran %d DELs, want %d", got, probes)
		}
		for _, l := range n.callLog() {
			tried[l.ContainerID] = true
		}
	}
	if len(tried) != 3*probes {
		t.Errorf("%d attachments had their turn, want %d", len(tried), 3*probes)
	}
	waits := time.Duration(n.entries()[0].Newest().Steps[0].RetryAt - journal.BootNanos())
	if e := p.entry(); e.Newest().Steps[0].Attempts > often+10 {
		waits = time.Duration(e.Newest().Steps[0].RetryAt - journal.BootNanos())
	}
	if waits < maxBackoff || waits > longBackoff {
		t.Errorf("the next try is in %s", waits)
	}
	n.forgetCalls()
	n.ask("GC", "1.0.0", nil, chain...)
	if got := len(n.calls()); got != many {
		t.Errorf("a GC ran %d DELs, want %d", got, many)
	}
	p.edit(func(g *journal.Generation) { g.Steps[0].RetryAt = 0 }) // the others wait for minutes
	n.plan(nil)
	n.ask("STATUS", "1.0.0", nil, chain...)
	n.nothingLeft()
}

// TestPaceOfOthers: DELs that wait for a failing plugin delay neither another plugin's DELs nor one
// that was not tried yet.
func TestPaceOfOthers(t *testing.T) {
	t.Parallel()
	n, p, chain := owing(t, 2*probes, 7)
	n.patient()
	if err := os.Symlink(filepath.Join(n.path[2], "faulty"), filepath.Join(n.path[0], "other")); err != nil {
		t.Fatal(err)
	}
	other := strings.Replace(n.faulty("p2", ""), `"faulty"`, `"other"`, 1)
	n.plan(map[string]map[string]string{"p1": {"DEL": "fail"}, "p2": {"DEL": "fail"}})
	fresh, often := n.pod("fresh"), n.pod("often")
	fresh.mustAdd(n.unwind(chain...))
	often.mustAdd(n.unwind(other))
	if err := often.del(n.unwind(other)); err == nil {
		t.Error("the DEL succeeded")
	}
	fresh.dropNetNS()
	n.forgetCalls()
	n.ask("STATUS", "1.0.0", nil, chain...)
	if len(fresh.dels()) != 2 || len(often.dels()) != 1 || len(p.dels()) > 1 {
		t.Errorf("DELs: %q, %q, %q", fresh.dels(), often.dels(), p.dels())
	}
	n.plan(nil)
	n.ask("GC", "1.0.0", nil, chain...)
	n.nothingLeft()
}
