package plugin

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
)

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

// message is that of a line of the log.
var message = regexp.MustCompile(` msg=(?:"([^"]*)"|(\S+))`)

// owing are statements about a DEL of p1 that has failed.
func owing() acts {
	step := func(s *story, name string, change func(*journal.Step)) {
		s.who(name).edit(func(e *journal.Entry) { change(&e.Undo.Steps[0]) })
	}
	return acts{
		// owes POD N [IN]: p1 has a pending DEL, which has failed N times and is tried again at this time
		"owes": func(s *story, w []string) {
			s.chain = []string{"p0", "p1"}
			s.tell("plan; add " + w[0] + "; plan p1 DEL fail; fails del " + w[0] + "; forgets")
			step(s, w[0], func(step *journal.Step) {
				if step.Tries, step.Wait.Until = s.number(w[1]), 0; len(w) > 2 {
					step.Wait.Until = journal.BootNanos() + int64(s.duration(w[2]))
				}
			})
		},
		"now": func(s *story, w []string) { step(s, w[0], func(step *journal.Step) { step.Wait.Until = 0 }) },
		// logs MESSAGE, …: just these
		"logs": func(s *story, w []string) {
			var got []string
			for _, m := range message.FindAllStringSubmatch(read(s, filepath.Join(s.dir, "log")), -1) {
				got = append(got, m[1]+m[2])
			}
			s.want(slices.Equal(got, listed(w)), "%q", got)
		},
	}
}

// TestCrashLoop: a pod has many old sandboxes, each with a failing DEL. An ADD of it runs those
// whose backoff is over, and the next ADDs run none.
func TestCrashLoop(t *testing.T) {
	stories(t, `
	owes a 7; copies a 12; pauses 8 25s
	sandbox a b; add b; times 5 DEL p1; forgets
	sandbox a c; add c; calls ADD p0, ADD p1
	sandbox a d; add d; calls ADD p0, ADD p1
	plan; del b c d; sweep`, owing())
}

// TestQuiet: a DEL fails with another message each time, is retried often and passes at last. The
// log has one line for the first failure and one for the end, and stderr has the delegate's words
// once; another code is worth another line.
func TestQuiet(t *testing.T) {
	stories(t, `
	conf logLevel; conf logFile $dir/log; let failure DEL failed and is pending; let logged $failure
	either on stdout: let fails 'echo words >&2; echo "{\"code\": 11, \"msg\": \"process $$\"}"; exit 1'
	or on stderr only: let fails 'echo "words $$" >&2; exit 1'
	or killed: let fails 'echo "words $$" >&2; kill -9 $$'
	or with another code once: let logged '$failure, $failure'
		let fails 'echo words >&2; [ -e $0.code ] && code=12; touch $0.code; echo "{\"code\": ${code:-11}}"; exit 1'
	script p1 '[ $CNI_COMMAND = ADD ] && echo "{\"cniVersion\": \"1.0.0\"}" && exit; [ -e $dir/well ] && exit; $fails'
	chain p0 | {"type": "p1"}; add a
	tries give del a; words 1; tries gc; words 0; tries gc; words 0; tries gc; words 0
	file $dir/well; gc; words 0; logs $logged, released`, owing(), acts{"words": func(s *story, w []string) {
		s.wantCount(strings.Count(s.said.stderr, "words"), w[0])
	}})
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
	plan; del b; sweep`, owing())
}

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
	conf logLevel; owes a %d; drop a; copies a %d
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

// TestAgentKeepsPauses: many DELs fail. A sweep of the agent, which nobody asked for, tries three of them, and
// none before its pause is over. A person's sweep tries all. Once the plugin works, one sweep of the agent
// releases all.
func TestAgentKeepsPauses(t *testing.T) {
	stories(t, `
	owes a 2; drop a; copies a 11
	# One each minute: the pauses of the first 20 tries are over by then.
	pauses 12 0s; periodic 3; pauses 12 0s; periodic 3; pauses 12 0s; periodic 3
	pauses 12 4m; periodic 0; sweep; times 12 DEL p1; plan
	pauses 12 0s; periodic 12; entries 0`, owing(), acts{
		"periodic": func(s *story, w []string) { // periodic N: the agent's sweep runs so many DELs
			s.forgetCalls()
			_, err := s.plugin().Sweep(s.Context(), s.stateDir, sweep.Job{Periodic: true})
			s.must(err)
			verbs["times"](s, []string{w[0], "DEL", "p1"})
			s.forgetCalls()
		},
	})
}
