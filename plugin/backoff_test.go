package plugin

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
)

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

// owing are statements about a DEL of p1 that has failed.
func owing() acts {
	step := func(s *story, name string, change func(*journal.Step)) {
		s.who(name).edit(func(g *journal.Entry) { change(&g.Steps[0]) })
	}
	return acts{
		// owes POD N [IN]: p1 has a pending DEL, which has failed N times and is tried again at this time
		"owes": func(s *story, w []string) {
			s.chain = []string{"p0", "p1"}
			s.tell("plan; add " + w[0] + "; plan p1 DEL fail; fails del " + w[0] + "; forgets")
			attempts, err := strconv.Atoi(w[1])
			s.must(err)
			retryAt := int64(0)
			if len(w) > 2 {
				in, err := time.ParseDuration(w[2])
				s.must(err)
				retryAt = journal.BootNanos() + int64(in)
			}
			step(s, w[0], func(step *journal.Step) { step.Tries, step.Wait.Until = attempts, retryAt })
		},
		"now": func(s *story, w []string) { step(s, w[0], func(step *journal.Step) { step.Wait.Until = 0 }) },
		// copies POD N [one in three]: N more such entries; with the words, the others are not to be tried yet
		"copies": func(s *story, w []string) {
			many, err := strconv.Atoi(w[1])
			s.must(err)
			s.who(w[0]).copies(many, func(i int, e *journal.Entry) {
				if len(w) > 2 && i%3 != 0 {
					e.Steps[0].Wait.Until = journal.BootNanos() + int64(25*time.Second)
				}
			})
		},
		"logs": func(s *story, w []string) { wantLog(s, filepath.Join(s.dir, "log"), listed(w)) },
	}
}

// TestCrashLoop: a pod has many old sandboxes, each with a failing DEL. An ADD of it runs those
// whose backoff is over, and the next ADDs run none.
func TestCrashLoop(t *testing.T) {
	stories(t, `
	patient; owes a 7; copies a 12 one in three
	sandbox a b; add b; times 5 DEL p1; forgets
	sandbox a c; add c; calls ADD p0, ADD p1
	sandbox a d; add d; calls ADD p0, ADD p1
	plan; del b c d; sweep`, owing())
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
func wantLog(t testing.TB, path string, want []string) {
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
	stories(t, `
	conf logLevel; conf logFile $dir/log; chain p0, "address": "$ip7/24" | p1 | p2
	add a; plan p1 DEL fail, p2 DEL fail; fails del a
	add b; lose $dir/log
	plan p2 DEL fail; tries gc; tries gc; tries gc; tries gc
	logs DEL waits: its address has another owner
	plan; del b`, owing())
}
