package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/journal"
	"cni-unwind/plugin/undo"
)

// retries are the verbs that retry a pod's pending DELs. Eager ones ignore the backoff.
var retries = []struct {
	name  string
	eager bool
	try   func(p *pod, chain []string)
}{
	{"STATUS", false, func(p *pod, chain []string) { p.ask("STATUS", "1.0.0", nil, chain...) }},
	{"ADD of the next sandbox", false, func(p *pod, chain []string) { p.nextSandbox("next").mustAdd(p.unwind(chain...)) }},
	{"ADD of another pod that fails", false, func(p *pod, chain []string) {
		p.plan(map[string]map[string]string{"p0": {"ADD": "fail"}, "p1": {"DEL": "fail"}})
		if _, err := p.pod("other").add(p.unwind(chain...)); err == nil {
			p.Error("the ADD succeeded")
		}
	}},
	{"GC", true, func(p *pod, chain []string) { p.ask("GC", "1.0.0", nil, chain...) }},
	{"sweep", true, func(p *pod, _ []string) { p.sweep(undo.DefaultBudgets) }},
	{"DEL", true, func(p *pod, chain []string) {
		if err := p.del(p.unwind(chain...)); err == nil {
			p.Error("the DEL succeeded")
		}
	}},
}

// nextSandbox returns a new container of the same pod.
func (p *pod) nextSandbox(name string) *pod {
	p.Helper()
	next := p.pod(name)
	next.Args, next.CapabilityArgs = p.Args, p.CapabilityArgs
	return next
}

// dels returns the instances of the faulty plugin that got the pod's DEL.
func (p *pod) dels() (instances []string) {
	p.Helper()
	for _, l := range p.callLog() {
		if l.Command == "DEL" && l.ContainerID == p.ContainerID {
			instances = append(instances, l.Instance)
		}
	}
	return instances
}

// TestRetryOfDEL: a DEL failed many times. Every verb that may retry it does so once its backoff is
// over; before that only the verbs that the runtime or a person asks for. It fails again and stays
// pending, with its last error.
func TestRetryOfDEL(t *testing.T) {
	t.Parallel()
	for _, when := range []struct {
		name string
		in   time.Duration
		due  bool
	}{
		{"its time has come", -time.Second, true},
		{"not yet", 25 * time.Second, false},
		{"a time of another boot", time.Hour, true},
	} {
		for _, c := range retries {
			t.Run(when.name+", "+c.name, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				chain := []string{n.faulty("p0", ""), n.faulty("p1", "")}
				p := n.pod("a")
				p.owes(n.unwind(chain...), 1000, journal.BootNanos()+int64(when.in))
				c.try(p, chain)
				want := 0
				if when.due || c.eager {
					want = 1
				}
				for range 10 { // a STATUS may have no time to sweep
					if c.name == "STATUS" && len(p.dels()) < want {
						c.try(p, chain)
					}
				}
				if got := p.dels(); len(got) != want {
					t.Errorf("tried: %q, want %d", got, want)
				}
				wantOwed(p, 1000+want)
			})
		}
	}
}

// owes adds the pod and gives p1 a pending DEL with this many attempts.
func (p *pod) owes(list *libcni.NetworkConfigList, attempts int, retryAt int64) {
	p.Helper()
	p.plan(nil)
	p.mustAdd(list)
	p.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
	if err := p.del(list); err == nil {
		p.Fatal("the DEL succeeded")
	}
	p.edit(func(g *journal.Generation) { g.Steps[0].Attempts, g.Steps[0].RetryAt = attempts, retryAt })
	p.forgetCalls()
}

func wantOwed(p *pod, attempts int) {
	p.Helper()
	e := p.entry()
	if e == nil || e.Pending() != 1 || e.State != journal.Removing {
		p.Fatalf("the journal has %+v, want the step that is owed", e)
	}
	s := e.Newest().Steps[0]
	if s.Attempts != attempts || s.LastError != "faulty: p1 DEL refused" || s.LastCode != 999 {
		p.Errorf("%d attempts, code %d, %q; want %d", s.Attempts, s.LastCode, s.LastError, attempts)
	}
	waits := time.Duration(s.RetryAt - e.Updated.Boot)
	// Written a while after the attempt.
	if attempts > 1000 && (waits < 10*time.Second || waits > longBackoff) {
		p.Errorf("the next try is in %s", waits)
	}
}

// TestCrashLoop: a pod has many old sandboxes, each with a failing DEL. An ADD of it runs those
// whose backoff is over, and the next ADDs run none.
func TestCrashLoop(t *testing.T) {
	t.Parallel()
	const many = 12
	n := newNode(t)
	list := n.unwind(n.faulty("p0", ""), n.faulty("p1", ""))
	p := n.pod("a")
	p.owes(list, 7, 0)
	p.copies(many, func(i int, e *journal.Entry) {
		if i%3 != 0 {
			e.Newest().Steps[0].RetryAt = journal.BootNanos() + int64(25*time.Second)
		}
	})
	var later []*pod
	for i, want := range []int{1 + many/3, 0, 0} {
		n.forgetCalls()
		next := p.nextSandbox(fmt.Sprintf("next%d", i))
		next.mustAdd(list)
		if got := len(n.calls()) - 2; got != want {
			t.Errorf("ADD %d ran %d DELs, want %d: %q", i, got, want, n.calls())
		}
		later = append(later, next)
	}
	n.plan(nil)
	for _, next := range later {
		next.mustDel(list)
	}
	n.sweep(undo.DefaultBudgets)
	n.nothingLeft()
}

// TestQuiet: a DEL fails with another message each time, is retried often and passes at last. The
// log has one line for the first failure and one for the end, and stderr has the delegate's words
// once.
func TestQuiet(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, fails string
		want        []string // each is in one line of the log
	}{
		{"in other words", `echo "words $$" >&2; echo '{"code": 11, "msg": "'$$'"}'; exit 1`, []string{"DEL failed and is pending"}},
		{"on stderr only", `echo "words $$" >&2; exit 1`, []string{"DEL failed and is pending"}},
		{"killed", `echo "words $$" >&2; kill -9 $$`, []string{"DEL failed and is pending"}},
		{"with another code once", `echo "words $$" >&2; [ -e $0.code ] && code=12; touch $0.code
			echo '{"code": '${code:-11}'}'; exit 1`,
			[]string{"DEL failed and is pending", "DEL failed and is pending"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			log := filepath.Join(n.dir, "log")
			n.conf["logLevel"], n.conf["logFile"] = nil, log
			n.script("p1", `[ $CNI_COMMAND = ADD ] && exec cat $0.result; [ -e $0.well ] && exit; `+c.fails)
			n.write(filepath.Join(n.path[0], "p1.result"), `{"cniVersion": "1.0.0"}`)
			chain := []string{n.faulty("p0", ""), `{"type": "p1"}`}
			p := n.pod("a")
			p.mustAdd(n.unwind(chain...))
			words := 0
			out := n.start(p.input("DEL", n.entryOf(`{"plugins": [`+strings.Join(chain, ",")+`]}`, nil)))
			words += strings.Count(out.stderr, "words")
			for range 4 {
				words += strings.Count(n.ask("GC", "1.0.0", nil, chain...).stderr, "words")
			}
			n.write(filepath.Join(n.path[0], "p1.well"), "")
			if out := n.ask("GC", "1.0.0", nil, chain...); out.code != 0 {
				t.Errorf("GC: %s", out.stdout)
			}
			if words != 1 {
				t.Errorf("the delegate's stderr is shown %d times", words)
			}
			wantLog(t, log, append(c.want, "released"))
			n.nothingLeft()
		})
	}
}

// wantLog checks that a log has these messages and no others.
func wantLog(t *testing.T, path string, want []string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(string(data)) {
		_, msg, _ := strings.Cut(line, `msg=`)
		if msg, is := strings.CutPrefix(msg, `"`); is {
			line, _, _ = strings.Cut(msg, `"`)
		} else {
			line, _, _ = strings.Cut(msg, " ")
		}
		got = append(got, line)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the log has %q, want %q:\n%s", got, want, data)
	}
}

// TestQuietParking: one DEL of a pod is parked, and another one fails whenever both are tried. The
// log says once that the first is parked.
func TestQuietParking(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	log := filepath.Join(n.dir, "log")
	n.conf["logLevel"], n.conf["logFile"] = nil, log
	chain := []string{n.faulty("p0", `, "address": "192.0.2.7/24"`), n.faulty("p1", ""), n.faulty("p2", "")}
	list := n.unwind(chain...)
	a, b := n.pod("a"), n.pod("b")
	a.mustAdd(list)
	n.plan(map[string]map[string]string{"p1": {"DEL": "fail"}, "p2": {"DEL": "fail"}})
	if err := a.del(list); err == nil {
		t.Fatal("the DEL succeeded")
	}
	b.mustAdd(list)
	_ = os.Remove(log)
	n.plan(map[string]map[string]string{"p2": {"DEL": "fail"}})
	for range 4 {
		n.ask("GC", "1.0.0", nil, chain...)
	}
	wantLog(t, log, []string{"DEL parked: its address has another owner"})
	n.plan(nil)
	b.mustDel(list)
	n.nothingLeft()
}
