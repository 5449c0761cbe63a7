package agent

import (
	"cmp"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
)

// check ends a test that has an error.
var check = nodetest.Check

// TestHealthz: each of the two loops counts, and neither if it has nothing to do.
func TestHealthz(t *testing.T) {
	t.Parallel()
	hung := func(h *heartbeat) { h.last.Store(time.Now().Add(-patience - 2*time.Minute).UnixNano()) }
	for _, c := range []struct {
		name   string
		change func(*agent)
		code   int
	}{
		{"both make progress", func(*agent) {}, 200},
		{"sweeps hang", func(a *agent) { hung(&a.sweeping) }, 503},
		{"the install hangs", func(a *agent) { hung(&a.reconciling) }, 503},
		{"there is no install", func(a *agent) { hung(&a.reconciling); a.NoInstall = true }, 200},
		{"a long interval", func(a *agent) { hung(&a.sweeping); a.Interval = time.Hour }, 200},
	} {
		a := &agent{Options: Options{Interval: time.Minute}}
		a.reconciling.beat()
		a.sweeping.beat()
		c.change(a)
		w := httptest.NewRecorder()
		(&server{agent: a}).healthz(w, nil)
		if w.Code != c.code {
			t.Errorf("%s: %d, want %d", c.name, w.Code, c.code)
		}
	}
}

// TestAgentJournalDir: the journal is where it is given, else where our conflist has it or had it.
func TestAgentJournalDir(t *testing.T) {
	t.Parallel()
	n := nodetest.NewDirs(t, t.TempDir())
	setup := install.Setup{ConfDir: n.ConfDir()}
	a := &agent{}
	if got := a.journalDir(setup); got != netconf.DefaultStateDir {
		t.Errorf("without a conflist: %s", got)
	}
	n.Write(n.Own(), strings.Replace(nodetest.Conflist("podnet"), `"type":"bridge"`, `"type":"unwind","chainFile":"/x","stateDir":"/there"`, 1))
	for _, state := range []string{"with a conflist", "without it later"} {
		if got := a.journalDir(setup); got != "/there" {
			t.Errorf("%s: %s", state, got)
		}
		_ = os.Remove(n.Own())
	}
	setup.StateDir = "/given"
	if got := a.journalDir(setup); got != "/given" {
		t.Errorf("given: %s", got)
	}
}

// TestReadyz: a version that cannot install is not ready; one that a person switched off is, and one
// that only sweeps. It says why, and what is left as it is.
func TestReadyz(t *testing.T) {
	t.Parallel()
	ready := map[install.Reason]int{install.On: 200, install.Off: 200, "": 200}
	for _, is := range append(install.Reasons, "") {
		w := httptest.NewRecorder()
		found := func() status { return status{Reason: is, why: "a word"} }
		(&server{agent: &agent{}, found: found}).readyz(w, nil)
		want := cmp.Or(ready[is], 503)
		if text := w.Body.String(); w.Code != want || !strings.HasSuffix(text, "a word\n") ||
			want == 503 && !strings.Contains(text, ": "+string(is)+": ") {
			t.Errorf("%q: %d, want %d: %s", is, w.Code, want, text)
		}
	}
}

// TestCounted: the agent's counters begin with what the history has, and do not become smaller when that
// drops its oldest events.
func TestCounted(t *testing.T) {
	store := &journal.Store{Dir: filepath.Join(t.TempDir(), "state")}
	path := filepath.Join(store.Dir, "history.jsonl")
	record := func() {
		t.Helper()
		check(t, store.Record(journal.Event{Count: []string{"swept", "interrupted"}}))
	}
	s := &sweeper{}
	for n := range uint64(4) {
		record()
		if got := s.count(store.Dir)[0].Value; got != n+1 {
			t.Errorf("%d, want %d", got, n+1)
		}
		check(t, os.Rename(path, path+".1"))
	}
	record()
	if got := (&sweeper{}).count(store.Dir)[0].Value; got != 2 {
		t.Errorf("another agent counts %d, want what the history has", got)
	}
}
