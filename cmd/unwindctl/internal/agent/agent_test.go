package agent

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
)

// check fails the test at once if its error is not nil.
var check = nodetest.Check

// TestHealthz: /healthz fails if the sweeps or the installs hang. It does not fail if the agent
// only sweeps, or if there is a long interval between sweeps.
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

// TestAgentJournalDir: the agent uses the given state directory or, by default, the one that
// unwind's conflist names, even after the conflist was removed.
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

// TestReadyz: an agent that cannot install unwind is not ready, and /readyz explains why. An agent
// is ready if somebody switched unwind off, or if it only sweeps.
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

// TestCounted: each of the agent's counters starts at the number of its recent events in the
// history, or at 0 if the history has only older ones. Counters do not decrease when the history
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
	old := journal.Now()
	old.Wall = old.Wall.Add(-time.Hour)
	check(t, store.Record(journal.Event{At: old, Count: []string{"swept", "interrupted"}},
		journal.Event{At: old, Count: []string{"swept", "unlisted"}}))
	if got := (&sweeper{}).count(store.Dir); len(got) != 2 || got[0].Value != 2 || got[1].Value != 0 {
		t.Errorf("with old events, another agent counts %v", got)
	}
}

// TestDedupLogger: warnOnce logs an error when it begins and when it ends, but not while it lasts.
// Errors that differ only in numbers count as the same.
func TestDedupLogger(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	o := newDedupLogger(slog.New(slog.NewTextHandler(&log, nil)))
	for _, err := range []error{nil, fmt.Errorf("no a1"), fmt.Errorf("no a2"), fmt.Errorf("no b"), nil, nil, fmt.Errorf("no a3")} {
		o.warnOnce("thing", "looking", err)
	}
	var got []string
	for line := range strings.Lines(log.String()) {
		got = append(got, line[strings.Index(line, "level="):])
	}
	want := "level=WARN msg=looking err=\"no a1\"\nlevel=WARN msg=looking err=\"no b\"\nlevel=INFO msg=recovered was=looking\n" +
		"level=WARN msg=looking err=\"no a3\"\n"
	if strings.Join(got, "") != want {
		t.Errorf("got\n%s", strings.Join(got, ""))
	}
}

// TestDedupHandler: the handler drops a warning that the previous round also logged. Warnings with
// different attributes are different, even if the attributes come from the logger.
func TestDedupHandler(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	h := &dedupHandler{Handler: slog.NewTextHandler(&out, nil), rounds: &rounds{}}
	for _, lines := range []string{"ab", "abc", "c", "a"} {
		h.nextRound()
		for _, line := range lines {
			slog.New(h).With("of", string(line)).Warn("m", "n", 1)
			slog.New(h).Info("not a warning")
		}
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, line[strings.Index(line, "level="):])
	}
	const want = "level=WARN msg=m of=a n=1\nlevel=WARN msg=m of=b n=1\nlevel=WARN msg=m of=c n=1\nlevel=WARN msg=m of=a n=1\n"
	if strings.Join(got, "") != want {
		t.Errorf("got\n%s", strings.Join(got, ""))
	}
}

// TestCounts: the agent logs the counts of a sweep when they change, except if only the number of
// live attachments changes.
func TestCounts(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s := &sweeper{agent: &agent{log: newDedupLogger(slog.New(slog.NewTextHandler(&log, nil)))}}
	for _, words := range []map[string]int{
		{}, {"pending": 3}, {"pending": 3, "live": 1}, {"pending": 2, "released": 1}, {"pending": 2}, {},
	} {
		s.reportCounts(words)
	}
	var got []string
	for line := range strings.Lines(log.String()) {
		got = append(got, line[strings.Index(line, "msg="):])
	}
	want := "msg=swept pending=3 live=0\nmsg=swept released=1 pending=2 live=0\nmsg=swept pending=2 live=0\n"
	if strings.Join(got, "") != want {
		t.Errorf("got\n%s", strings.Join(got, ""))
	}
}

// TestServeIdle: the server soon closes a connection that sends no request, so even many idle
// connections do not block a probe for long.
func TestServeIdle(t *testing.T) {
	t.Parallel()
	const idle = mostConnections + 100
	var log bytes.Buffer
	a := &agent{Options: Options{Listen: "127.0.0.1:0"}, log: newDedupLogger(slog.New(slog.NewTextHandler(&log, nil)))}
	a.reconciling.beat()
	a.sweeping.beat()
	stop, err := (&server{agent: a}).serve(t.Context())
	check(t, err)
	defer stop()
	address := regexp.MustCompile(`address=(\S+)`).FindStringSubmatch(log.String())[1]
	var all []net.Conn
	for range idle {
		c, err := net.Dial("tcp", address)
		check(t, err)
		defer c.Close()
		all = append(all, c)
	}
	answer, err := http.Get("http://" + address + "/healthz") // accepted once idle connections end
	check(t, err)
	body, _ := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if answer.StatusCode != 200 || !answer.Close {
		t.Errorf("/healthz: %d, %s; it closes the connection: %t", answer.StatusCode, body, answer.Close)
	}
	last := all[idle-1]
	_ = last.SetReadDeadline(time.Now().Add(20 * toRead))
	if _, err := last.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the last one asks nothing and stays open: %v", err)
	}
}
