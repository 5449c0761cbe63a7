package agent

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

const (
	eventsEach  = 10 * time.Second // between reads of the journal
	recent      = 5 * time.Minute  // older notices are not posted
	oneEach     = 10 * time.Minute // between two Events about one subject
	burst       = 10               // Events that this node may post without a pause
	refill      = 10 * time.Second // until this node may post one more
	mostMessage = 1024             // the maximum length of a message in bytes
)

// subject identifies a problem of a pod. The agent posts at most one Event about it per oneEach.
type subject struct {
	namespace, pod, uid, reason, plugin string
}

// notice is the content of an Event.
type notice struct {
	subject
	of      journal.Key
	at      time.Time
	message string
}

// events posts Kubernetes Events about pods with recent failed ADDs and pending DELs.
//
//  1. Every eventsEach it reads the failed ADDs and the pending DELs from the journal. The journal
//     is its queue; it has no queue of its own.
//  2. It leaves out notices that are older than recent, that follow another of the same subject
//     within oneEach, or that exceed the rate limit of the node.
//  3. It posts the rest, oldest first. If the API server does not respond, or returns 401, 429, or
//     502 and above, the round ends, and the next round retries. Any other response is final.
//
// The name of an Event is derived from its content, so the API server refuses a duplicate after a
// restart. Notices that were older than recent when the agent started count as posted.
type events struct {
	log   *dedupLogger
	api   cluster
	node  string
	began time.Time

	posted map[subject]time.Time // the time of the newest notice that was posted
	waits  map[subject]time.Time // the time of the newest notice that the rate limit holds back
	tokens float64
	filled time.Time // when tokens were last added

	mu     sync.Mutex
	counts map[string]uint64 // numbers of Events by result, for metrics
}

func newEvents(log *dedupLogger, api cluster, node string) *events {
	now := time.Now()
	return &events{log: log, api: api, node: node, began: now, posted: map[subject]time.Time{},
		waits: map[subject]time.Time{}, tokens: burst, filled: now,
		counts: map[string]uint64{"posted": 0, "dropped": 0, "failed": 0}}
}

func (e *events) run(ctx context.Context, stateDir func() string) {
	_, _, err := e.api.client()
	e.log.warnOnce("events", postingEvents, err)
	for ctx.Err() == nil {
		found, err := notices(ctx, stateDir())
		if ctx.Err() == nil {
			e.log.warnOnce("events journal", "cannot read the journal for Events", err)
		}
		e.round(ctx, found, time.Now())
		select {
		case <-ctx.Done():
		case <-time.After(eventsEach):
		}
	}
}

const postingEvents = "cannot post Events"

// notices returns the candidates for Events, pending DELs first, then oldest first.
func notices(ctx context.Context, stateDir string) (found []notice, err error) {
	add := func(k journal.Key, pod *journal.Pod, reason, plugin string, at time.Time, text string) {
		if pod == nil || !podName.MatchString(pod.Name) || !namespaceName.MatchString(pod.Namespace) {
			return // not a Kubernetes pod
		}
		text = fmt.Sprintf("%s of network %s: %s", k.IfName, k.Network, text)
		found = append(found, notice{subject{pod.Namespace, pod.Name, pod.UID, reason, plugin},
			k, at, netconf.Shorten(term.Printable(text), mostMessage)})
	}
	// damaged entries are left out: the sweep reports them
	s, err := inspect.ReadSnapshot(ctx, &journal.Store{Dir: stateDir}, nil)
	for _, h := range s.Events {
		if h.Kind == journal.RolledBack && len(h.Plugins) > 0 {
			add(h.Key, &h.Pod, "UnwindRolledBack", h.Plugins[0], h.At.Wall, fmt.Sprintf(
				"ADD of %s failed: %s. unwind has rolled it back as far as possible", h.Plugins[0],
				strings.TrimSuffix(h.Reason, ".")))
		}
	}
	for _, a := range s.Attachments {
		for _, s := range a.Steps {
			if why := whyPending(s); why != "" && a.PendingDEL() {
				add(a.Key, a.Pod, "UnwindDELPending", s.Plugin, a.Since,
					fmt.Sprintf("DEL of %s %s", s.Plugin, why))
			}
		}
	}
	slices.SortStableFunc(found, func(a, b notice) int {
		return cmp.Or(strings.Compare(a.reason, b.reason), a.at.Compare(b.at)) // DELPending first
	})
	return found, err
}

// The names that the API accepts (RFC 1123).
var (
	podName       = regexp.MustCompile(`^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$`)
	namespaceName = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
)

// whyPending returns the reason why a DEL is pending, or "" if it has not been tried yet.
func whyPending(s inspect.Step) string {
	switch {
	case s.WaitsFor == journal.ForOwner:
		return "waits: another pod now uses the address"
	case s.WaitsFor == journal.ForPort:
		return "waits: a host port may forward to the address"
	case s.Last == "":
		return ""
	}
	return fmt.Sprintf("failed: %s. unwind keeps retrying", strings.TrimSuffix(s.Last, "."))
}

// round posts the new notices, within the limits.
func (e *events) round(ctx context.Context, found []notice, now time.Time) {
	dropped := 0
	e.tokens = min(burst, e.tokens+now.Sub(e.filled).Seconds()/refill.Seconds())
	e.filled = now
	for i := range found {
		n := &found[i]
		last, known := e.posted[n.subject]
		switch {
		case known && n.at.Sub(last) < oneEach:
			continue
		case n.at.Before(now.Add(-recent)):
			if n.at.Before(e.began.Add(-recent)) {
				e.posted[n.subject] = n.at
			}
			if _, waits := e.waits[n.subject]; waits {
				delete(e.waits, n.subject)
				dropped++
				e.count("dropped")
			}
			continue
		case e.tokens < 1:
			e.waits[n.subject] = n.at
			continue
		}
		e.tokens--
		if !e.post(ctx, n) {
			return
		}
		e.posted[n.subject] = n.at
		delete(e.waits, n.subject)
	}
	old := func(_ subject, at time.Time) bool { return now.Sub(at).Abs() > oneEach }
	maps.DeleteFunc(e.posted, old)
	maps.DeleteFunc(e.waits, old)
	if dropped == 0 && e.tokens == burst {
		e.log.changed("events dropped", "")
	}
	if dropped > 0 && e.log.changed("events dropped", "some") {
		e.log.Warn("dropping Events because of the rate limit; unwindctl history lists all failed "+
			"ADDs, and unwindctl list all pending DELs", "dropped", dropped)
	}
}

// post posts one Event. It returns false if the API server returned no final response.
func (e *events) post(ctx context.Context, n *notice) bool {
	code, ending, err := e.api.create(ctx, "/api/v1/namespaces/"+n.namespace+"/events", e.event(n))
	result := "failed"
	switch {
	case ctx.Err() != nil:
		return false
	case err != nil:
	case code == http.StatusConflict: // an agent has already posted it
		e.tokens++
		result = ""
	case code/100 == 2:
		result = "posted"
	case ending || code == http.StatusNotFound: // the pod's namespace is, or will be, gone
	case code == http.StatusForbidden:
		err = errors.New("403 Forbidden: the service account may not create events; to grant this, set " +
			"the chart value events: true")
	default:
		err = fmt.Errorf("the API server returned %d %s", code, http.StatusText(code))
	}
	e.log.warnOnce("events", postingEvents, err)
	if result != "" {
		e.count(result)
	}
	return code != 0 && code != http.StatusUnauthorized && code != http.StatusTooManyRequests &&
		code < http.StatusBadGateway
}

// event returns the Event (core/v1). The same notice always gets the same name, so the API server
// answers a second post with 409 Conflict.
func (e *events) event(n *notice) any {
	type object = map[string]any
	sum := sha256.Sum256([]byte(strings.Join([]string{n.of.String(), n.uid, n.reason, n.plugin,
		n.at.UTC().Format(time.RFC3339Nano)}, " ")))
	pod := strings.TrimRight(n.pod[:min(len(n.pod), 200)], ".-")
	at := n.at.UTC().Format(time.RFC3339)
	return object{
		"apiVersion": "v1", "kind": "Event",
		"metadata": object{"namespace": n.namespace, "name": fmt.Sprintf("%s.%x", pod, sum[:8])},
		"involvedObject": object{"apiVersion": "v1", "kind": "Pod", "namespace": n.namespace,
			"name": n.pod, "uid": n.uid},
		"type": "Warning", "reason": n.reason, "message": n.message,
		"source":         object{"component": "unwind", "host": e.node},
		"firstTimestamp": at, "lastTimestamp": at, "count": 1,
	}
}

func (e *events) count(result string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.counts[result]++
}

// counted returns the number of Events by result, or nil if this agent posts no Events.
func (e *events) counted() map[string]uint64 {
	if e == nil {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return maps.Clone(e.counts)
}
