package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/journal"
)

const aToken = "the-first-token"

// apiServer is what the API server is to the agent, over TLS, with the files that a pod has for it.
// It refuses a name that it has.
type apiServer struct {
	*testing.T
	dir    string
	api    cluster
	answer func(w http.ResponseWriter, r *http.Request) bool // whether that was all; may be nil

	mu     sync.Mutex
	asked  int
	tokens []string
	events map[string]map[string]any
}

func newAPIServer(t *testing.T) *apiServer {
	s := &apiServer{T: t, dir: t.TempDir(), events: map[string]map[string]any{}}
	server := httptest.NewTLSServer(s)
	t.Cleanup(server.Close)
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	s.api = cluster{address: server.Listener.Addr().String(), dir: s.dir}
	s.rotate(aToken, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	return s
}

// rotate renews the files as the kubelet does: a new directory takes the place of the old one.
func (s *apiServer) rotate(token string, ca []byte) {
	s.Helper()
	generation := fmt.Sprintf("..%d", time.Now().UnixNano())
	at := filepath.Join(s.dir, generation)
	if ca == nil {
		ca, _ = os.ReadFile(filepath.Join(s.dir, "ca.crt"))
	}
	next := filepath.Join(s.dir, "..data_tmp")
	err := errors.Join(os.Mkdir(at, 0o700), os.WriteFile(filepath.Join(at, "token"), []byte(token+"\n"), 0o600),
		os.WriteFile(filepath.Join(at, "ca.crt"), ca, 0o600), os.Symlink(generation, next))
	before, _ := os.Readlink(filepath.Join(s.dir, "..data"))
	if before == "" {
		err = errors.Join(err, os.Symlink("..data/token", filepath.Join(s.dir, "token")), os.Symlink("..data/ca.crt", filepath.Join(s.dir, "ca.crt")))
	}
	if err = errors.Join(err, os.Rename(next, filepath.Join(s.dir, "..data"))); err == nil && before != "" {
		err = os.RemoveAll(filepath.Join(s.dir, before))
	}
	check(s, err)
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.asked++
	s.tokens = append(s.tokens, r.Header.Get("Authorization"))
	answer := s.answer
	s.mu.Unlock()
	if answer != nil && answer(w, r) {
		return
	}
	event := map[string]any{}
	err := json.NewDecoder(r.Body).Decode(&event)
	meta, _ := event["metadata"].(map[string]any)
	namespace, _ := meta["namespace"].(string)
	name, _ := meta["name"].(string)
	if err != nil || r.Method != http.MethodPost || r.URL.Path != "/api/v1/namespaces/"+namespace+"/events" {
		s.Errorf("%s %s: %v, %v", r.Method, r.URL, event, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.events[name] != nil {
		w.WriteHeader(http.StatusConflict)
		return
	}
	s.events[name] = event
	w.WriteHeader(http.StatusCreated)
}

// posting is an agent's Events, and what it logs.
type posting struct {
	*events
	text bytes.Buffer
}

func (s *apiServer) agent() *posting {
	p := &posting{}
	p.events = newEvents(newDedupLogger(slog.New(slog.NewTextHandler(&p.text, nil))), s.api, "node-a")
	s.Cleanup(func() {
		if strings.Contains(p.text.String(), aToken) {
			s.Error("the token is in the log")
		}
	})
	return p
}

// counts checks how many Events were posted, dropped, and failed.
func (p *posting) are(t *testing.T, posted, dropped, failed uint64) {
	t.Helper()
	want := map[string]uint64{"posted": posted, "dropped": dropped, "failed": failed}
	if diff := cmp.Diff(want, p.counted()); diff != "" {
		t.Errorf("-want +got:\n%s%s", diff, &p.text)
	}
}

// rolledBack is what there is to say of the pods, one failed ADD each.
func rolledBack(at time.Time, pods ...string) (found []notice) {
	for _, pod := range pods {
		found = append(found, notice{subject: subject{"default", pod, "u-" + pod, "UnwindRolledBack", "portmap"}, of: journal.Key{ContainerID: pod}, at: at, message: "m"})
	}
	return found
}

// eventful returns a journal with a failed ADD, a pending DEL, and much that is no news.
func eventful(t *testing.T) (stateDir string, rollback, deleting time.Time) {
	t.Helper()
	store := &journal.Store{Dir: filepath.Join(t.TempDir(), "state")}
	web := journal.Pod{Namespace: "default", Name: "web-0", UID: "u-1"}
	entry := func(id string, state journal.State, pod journal.Pod, steps ...journal.Step) *journal.Entry {
		for i := range steps {
			steps[i].Config = json.RawMessage(`{"password":"a-password"}`)
		}
		return &journal.Entry{Key: journal.Key{Network: "podnet", ContainerID: id, IfName: "eth0"}, Updated: journal.Now(), Undo: journal.Undo{State: state, Steps: steps, Since: journal.Now()}, Added: journal.Added{Pod: pod, Path: "/bin", CNIVersion: "1.0.0"}}
	}
	failed := func(pod journal.Pod) journal.Event {
		return journal.Event{Key: journal.Key{Network: "podnet", ContainerID: "a", IfName: "eth0"}, Kind: journal.RolledBack, Pod: pod,
			Plugins: []string{"portmap"}, Reason: "no\x1b[31m\nchain " + strings.Repeat("é", 2000)}
	}
	stuck := entry("b", journal.Deleting, web, journal.Step{Index: 1, Type: "bridge"},
		journal.Step{Index: 2, Type: "portmap", Last: "iptables:\tgone", Code: 11, Tries: 3})
	live := entry("c", journal.Adding, web, journal.Step{Type: "tuning", Last: "x", Code: 11})
	err := store.Update(context.Background(), func(tx *journal.Tx) error {
		return errors.Join(tx.Put(stuck),
			tx.Put(live),
			tx.Put(entry("d", journal.Deleting, journal.Pod{}, journal.Step{Type: "tuning", Last: "x", Code: 11})))
	})
	err = errors.Join(err, store.Record(failed(web), failed(journal.Pod{}), failed(journal.Pod{Namespace: "../x", Name: "y"}),
		journal.Event{Kind: journal.Swept, Pod: web, Plugins: []string{"tuning"}}))
	if err == nil {
		live.Undo.State = journal.Live
		err = store.Update(context.Background(), func(tx *journal.Tx) error { return tx.Put(live) })
	}
	found, noticesErr := notices(t.Context(), store.Dir)
	if err != nil || noticesErr != nil || len(found) != 2 {
		t.Fatalf("%+v: %v, %v", found, err, noticesErr)
	}
	return store.Dir, found[slices.IndexFunc(found, func(n notice) bool { return n.reason == "UnwindRolledBack" })].at, stuck.Undo.Since.Wall
}

// TestEvents: the failed ADD and the pending DEL of a journal are Events about their pod, with what
// failed, in one line, and nothing of a configuration.
func TestEvents(t *testing.T) {
	t.Parallel()
	s := newAPIServer(t)
	stateDir, rollback, deleting := eventful(t)
	p := s.agent()
	for range 3 {
		found, err := notices(t.Context(), stateDir)
		check(t, err)
		p.round(t.Context(), found, time.Now())
	}
	p.are(t, 2, 0, 0)
	type object = map[string]any
	want := func(reason string, at time.Time, message string) object {
		stamp := at.Format("2006-01-02T15:04:05Z")
		return object{"apiVersion": "v1", "kind": "Event", "type": "Warning", "reason": reason, "message": message, "count": 1.0,
			"involvedObject": object{"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "web-0", "uid": "u-1"},
			"source":         object{"component": "unwind", "host": "node-a"}, "firstTimestamp": stamp, "lastTimestamp": stamp}
	}
	failed := `eth0 of network podnet: ADD of portmap failed: no?[31m chain `
	wanted := []object{
		want("UnwindDELPending", deleting, "eth0 of network podnet: DEL of portmap failed: iptables: gone. unwind keeps retrying"),
		want("UnwindRolledBack", rollback, failed+strings.Repeat("é", (mostMessage-len("…")-len(failed))/2)+"…"),
	}
	var got []object
	for name, event := range s.events {
		meta := event["metadata"].(object)
		if meta["namespace"] != "default" || !strings.HasPrefix(name, "web-0.") || !podName.MatchString(name) {
			t.Errorf("metadata: %v", meta)
		}
		delete(event, "metadata")
		if message := event["message"].(string); len(message) > mostMessage || strings.Contains(message, "a-password") {
			t.Errorf("message of %d bytes: %s", len(message), message)
		}
		got = append(got, event)
	}
	slices.SortFunc(got, func(a, b object) int { return strings.Compare(a["reason"].(string), b["reason"].(string)) })
	if diff := cmp.Diff(wanted, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	if slices.ContainsFunc(s.tokens, func(token string) bool { return token != "Bearer "+aToken }) {
		t.Errorf("tokens: %v", s.tokens)
	}
}

// TestEventsAfterRestart: an agent that is started anew posts nothing twice, and no history.
func TestEventsAfterRestart(t *testing.T) {
	t.Parallel()
	s := newAPIServer(t)
	now := time.Now()
	found := slices.Concat(rolledBack(now.Add(-time.Hour), "old"), rolledBack(now.Add(-8*time.Minute), "loop"),
		rolledBack(now.Add(-2*time.Minute), "loop", "new"))
	for _, posted := range []uint64{1, 0, 0} {
		p := s.agent()
		p.round(t.Context(), found, now)
		if p.are(t, posted, 0, 0); math.Round(p.tokens) != burst-float64(posted) {
			t.Errorf("%v tokens are left", p.tokens)
		}
		if p.text.Len() > 0 {
			t.Errorf("log: %s", &p.text)
		}
	}
	if len(s.events) != 1 || s.asked != 3 {
		t.Errorf("%d requests: %v", s.asked, s.events)
	}
}

// TestEventsLimits: a pod that fails each minute gets an Event each oneEach; many pods at once get
// the node's burst, and then one each refill, as long as it is news. What was dropped is said once.
func TestEventsLimits(t *testing.T) {
	t.Parallel()
	s := newAPIServer(t)
	p := s.agent()
	now := time.Now()
	var found []notice
	for range 25 {
		now = now.Add(time.Minute)
		found = append(found, rolledBack(now, "loop")...)
		p.round(t.Context(), found, now)
	}
	p.are(t, 3, 0, 0)
	next := rolledBack(now, "loop")
	next[0].uid = "of the next pod of this name"
	p.round(t.Context(), next, now)
	p.are(t, 4, 0, 0)
	now = now.Add(refill)
	var many []string
	for i := range 30 {
		many = append(many, fmt.Sprintf("pod-%d", i))
	}
	found = rolledBack(now, many...)
	for range 3 {
		p.round(t.Context(), found, now)
	}
	p.are(t, 4+burst, 0, 0)
	now = now.Add(refill)
	p.round(t.Context(), found, now)
	p.are(t, 5+burst, 0, 0)
	now = now.Add(recent)
	for range 3 {
		p.round(t.Context(), found, now)
	}
	p.are(t, 5+burst, 19, 0)
	if got := strings.Count(p.text.String(), "\n"); got != 1 || !strings.Contains(p.text.String(), "dropped=19") {
		t.Errorf("log:\n%s", &p.text)
	}
	p.round(t.Context(), rolledBack(now, many...), now)
	if p.are(t, 5+2*burst, 19, 0); len(p.waits) != 9 {
		t.Errorf("%d wait", len(p.waits))
	}
	if p.round(t.Context(), nil, now.Add(time.Hour)); len(p.waits) > 0 {
		t.Errorf("wait for good: %v", p.waits)
	}
	if p.round(t.Context(), nil, now.Add(time.Hour)); len(p.posted) > 0 {
		t.Errorf("kept for good: %v", p.posted)
	}
}

// TestEventsAnswers: what the API's answers lead to. The log has each state once.
func TestEventsAnswers(t *testing.T) {
	t.Parallel()
	const ending = `{"kind":"Status","details":{"causes":[{"reason":"NamespaceTerminating"}]}}`
	for _, c := range []struct {
		code   int
		body   string
		tried  int // of two Events, in two rounds
		failed uint64
		log    string
	}{
		{403, "", 2, 2, "the service account may not create events; to grant this, set the chart value events: true"},
		{403, ending, 2, 2, ""},
		{404, "", 2, 2, ""},
		{422, strings.Repeat("x", 1<<20), 2, 2, "422 Unprocessable Entity"},
		{500, "", 2, 2, "500 Internal Server Error"},
		{401, "", 2, 2, "401 Unauthorized"}, // one a round
		{429, "", 2, 2, "429 Too Many Requests"},
		{503, "", 2, 2, "503 Service Unavailable"},
		{307, "", 2, 2, "307 Temporary Redirect"},
	} {
		t.Run(fmt.Sprint(c.code, len(c.body)), func(t *testing.T) {
			t.Parallel()
			s := newAPIServer(t)
			s.answer = func(w http.ResponseWriter, r *http.Request) bool {
				w.Header().Set("Location", r.URL.Path)
				w.WriteHeader(c.code)
				fmt.Fprint(w, c.body)
				return true
			}
			p := s.agent()
			now := time.Now()
			final := c.code != 401 && c.code != 429 && c.code < 502
			for round := 1; round <= 2; round++ {
				p.round(t.Context(), rolledBack(now, "a", "b"), now)
				if want := map[bool]int{true: 2, false: round}[final]; s.asked != want {
					t.Errorf("round %d: %d requests, want %d", round, s.asked, want)
				}
			}
			p.are(t, 0, 0, c.failed)
			if lines := strings.Count(p.text.String(), "\n"); !strings.Contains(p.text.String(), c.log) || lines != min(1, len(c.log)) {
				t.Errorf("log:\n%s", &p.text)
			}
		})
	}
}

// TestEventsSlowAPI: an API server that does not answer costs a round one timeout, and the Events
// come once it answers.
func TestEventsSlowAPI(t *testing.T) {
	t.Parallel()
	s := newAPIServer(t)
	s.answer = func(_ http.ResponseWriter, r *http.Request) bool {
		_, _ = io.Copy(io.Discard, r.Body) // else the server does not see that the client is gone
		<-r.Context().Done()
		return true
	}
	p := s.agent()
	now := time.Now()
	found := rolledBack(now, "a", "b", "c", "d", "e")
	p.round(t.Context(), found, now)
	if took := time.Since(now); s.asked != 1 || took < apiTimeout {
		t.Errorf("%d requests in %s", s.asked, took)
	}
	s.mu.Lock()
	s.answer = nil
	s.mu.Unlock()
	p.round(t.Context(), found, now)
	p.are(t, 5, 0, 1)

	s.api.address = "127.0.0.1:1"
	away := s.agent()
	for range 3 {
		away.round(t.Context(), found, now)
	}
	away.are(t, 0, 0, 3)
	away.round(t.Context(), found, now.Add(recent+time.Second)) // no news by now
	away.are(t, 0, 0, 3)
	if strings.Count(away.text.String(), "\n") != 1 {
		t.Errorf("log:\n%s", &away.text)
	}
}

// TestEventsToken: the token and the CA's certificates are those of the moment.
func TestEventsToken(t *testing.T) {
	t.Parallel()
	s := newAPIServer(t)
	p := s.agent()
	now := time.Now()
	ca, _ := os.ReadFile(filepath.Join(s.dir, "ca.crt"))
	p.round(t.Context(), rolledBack(now, "a"), now)
	s.rotate("second", nil)
	p.round(t.Context(), rolledBack(now, "b"), now)
	s.rotate("third", []byte("no certificate"))
	p.round(t.Context(), rolledBack(now, "c"), now)
	s.rotate("fourth", ca)
	p.round(t.Context(), rolledBack(now, "d"), now)
	if diff := cmp.Diff([]string{"Bearer " + aToken, "Bearer second", "Bearer fourth"}, s.tokens); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	p.are(t, 3, 0, 1)
	if got := p.text.String(); !strings.Contains(got, "ca.crt contains no certificate") || !strings.Contains(got, "recovered") {
		t.Errorf("log:\n%s", got)
	}
	check(t, os.Remove(filepath.Join(s.dir, "token")))
	p.round(t.Context(), rolledBack(now, "e"), now)
	if got := p.text.String(); !strings.Contains(got, "the pod has no service account token; set the chart value events: true") {
		t.Errorf("log:\n%s", got)
	}
	check(t, os.Symlink("..data/token", filepath.Join(s.dir, "token")))
	_, port, _ := strings.Cut(s.api.address, ":")
	s.api.address = "localhost:" + port // of which its certificate does not speak
	p = s.agent()
	p.round(t.Context(), rolledBack(now, "e"), now)
	if len(s.tokens) != 3 || !strings.Contains(p.text.String(), "certificate is valid for") {
		t.Errorf("%d requests; log:\n%s", len(s.tokens), &p.text)
	}
}

// TestEventsMetric: an agent with --events serves how many there were, another one has no such
// metric.
func TestEventsMetric(t *testing.T) {
	t.Parallel()
	p := newAPIServer(t).agent()
	p.round(t.Context(), rolledBack(time.Now(), "a"), time.Now())
	for _, c := range []struct {
		events *events
		want   []string
	}{
		{nil, nil},
		{p.events, []string{`{result="dropped"} 0`, `{result="failed"} 0`, `{result="posted"} 1`}},
	} {
		a := &agent{Options: Options{NoInstall: true}, events: c.events}
		setup := install.Setup{ConfDir: t.TempDir(), StateDir: t.TempDir()}
		var text bytes.Buffer
		_ = (&server{agent: a, setup: setup, found: func() status { return status{} }}).source().Print(t.Context(), &text)
		var got []string
		for line := range strings.Lines(text.String()) {
			if value, is := strings.CutPrefix(line, "unwind_events_total"); is {
				got = append(got, strings.TrimSpace(value))
			}
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	}
}
