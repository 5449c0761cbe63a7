package plugin

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/env"
	"cni-unwind/plugin/plugintest/sandbox"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// sweep runs a person's sweep in this process.
func (n *node) sweep() []sweep.Finding {
	n.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	findings, err := sweep.New(n.worker(), sweep.Job{}).Run(ctx)
	if err != nil {
		n.Errorf("sweep: %v", err)
	}
	return findings
}

// worker is what sweeps in this process. It acts in the place of the runtime, since process 1 of
// the machine is in other namespaces than the tests: see facts.Node.SameNamespaces.
func (n *node) worker() *undo.Worker {
	conf := netconf.DefaultConf()
	conf.StateDir, conf.LogLevel = n.stateDir, slog.LevelWarn
	o, closeLog := n.plugin().newOp(&skel.CmdArgs{}, conf)
	n.Cleanup(closeLog)
	o.Invoked = true
	return o.Worker
}

// plugin is unwind in this process.
func (n *node) plugin() *Plugin {
	budgets := env.BudgetsOf(strings.Join(n.budgets, " "))
	return &Plugin{Env: undo.Env{Stderr: n.Output(), Budgets: budgets, Runner: &delegate.Processes{}},
		Stdout: io.Discard, CacheDir: n.cacheDir()}
}

// TestSweepAfterReboot: there are many entries of an earlier boot. The ADD of a new sandbox settles
// what its own pod left, and no more. One sweep releases the rest: several attachments at once,
// each in the order of its chain, and no two DELs of one at once.
func TestSweepAfterReboot(t *testing.T) {
	sandbox.Concurrent(t)
	stories(t, `
	chain p0, "delayMS": 20 | p1, "delayMS": 20
	add a; boot a; copies a 60 other; forgets; plan * DEL late
	sandbox a next; add next; calls DEL p1, DEL p0, ADD p0, ADD p1
	sweep; entries 1; entry next live; together 2; times 60 DEL p0; times 60 DEL p1; counters 'swept earlier-boot 61'
	del next`)
}

// abandoned returns the record of an attachment that an operator has forgotten, or nil.
func (n *node) abandoned(key journal.Key) (mark *journal.Entry) {
	n.Helper()
	err := n.store.View(n.Context(), func(tx *journal.Tx) (err error) {
		all, err := tx.Records(key)
		for _, e := range all {
			if e.Undo.State == journal.Abandoned {
				mark = e
			}
		}
		return journal.IgnoreDamaged(err)
	})
	must(n, err)
	return mark
}

// TestTwoSweeps: two processes sweep at once. Each DEL runs once, and neither reports an error for
// what the other one does.
func TestTwoSweeps(t *testing.T) {
	sandbox.Concurrent(t)
	stories(t, `
	chain p0, "delayMS": 20 | p1, "delayMS": 20
	add a; boot a; copies a 20; forgets; plan * DEL late
	gc-twice; together 1; times 21 DEL p0; times 21 DEL p1`, acts{"gc-twice": func(s *story, _ []string) {
		outs := make(chan outcome)
		for range 2 {
			go func() { outs <- s.ask("GC", nil, s.plugins(s.node)...) }()
		}
		for range 2 {
			out := <-outs
			s.want(out.code == 0, "%s", out.stdout)
		}
	}})
}

// TestRoomAfterFailedADD: a pool that is full of dead pods' addresses has room for the runtime's
// second try. The ADD leaves other networks alone.
func TestRoomAfterFailedADD(t *testing.T) {
	stories(t, `
	chain bridge; network other o; subnet 128/25; add elsewhere
	network; subnet 0/29; crowd 5; drop elsewhere $all
	fails add a 'no IP addresses available'; add a
	entries 2; entry elsewhere; reserved 1 elsewhere
	del a; sweep`, subnets)
}

var subnets = acts{"subnet": func(s *story, w []string) { s.node.subnet = strings.TrimSuffix(s.node.subnet, "0/24") + w[0] }}

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
				if step.Tries, step.Next.At = s.number(w[1]), 0; len(w) > 2 {
					step.Next.At = journal.BootNanos() + int64(s.duration(w[2]))
				}
			})
		},
		"now": func(s *story, w []string) { step(s, w[0], func(step *journal.Step) { step.Next.At = 0 }) },
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

// These are those of the code, for any DEL that fails.
const (
	often      = 20
	maxFailing = 20
)

// TestPace: a STATUS tries 20 of the attachments whose DELs fail, those with the fewest tries first; GC tries all.
func TestPace(t *testing.T) {
	sandbox.Concurrent(t)
	const pods = 40
	stories(t, fmt.Sprintf(`
	conf logLevel; owes a %d; drop a; copies a %d
	status; times %[3]d DEL p1; status; times %[4]d DEL p1; status; times %[4]d DEL p1; different
	forgets; tries gc; times %[4]d DEL p1
	plan; gc`, often+10, pods-1, maxFailing, pods), owing(), acts{
		"different": func(s *story, _ []string) {
			tried := map[string]bool{}
			for _, l := range s.callLog() {
				tried[l.ContainerID] = true
			}
			s.want(len(tried) == pods, "%d attachments had their turn", len(tried))
		},
	})
}

// TestAgentKeepsPauses: many DELs fail. A sweep of the agent, which nobody asked for, tries 20 of them, and
// none before its pause is over. A person's sweep tries all.
func TestAgentKeepsPauses(t *testing.T) {
	sandbox.Concurrent(t)
	stories(t, `
	owes a 2; drop a; copies a 24
	# One each minute: the pauses of the first 20 tries are over by then.
	pauses 25 0s; periodic 20; pauses 25 0s; periodic 20
	pauses 25 4m; periodic 0; sweep; times 25 DEL p1; plan
	pauses 25 0s; periodic 20; periodic 5; entries 0`, owing(), acts{
		"periodic": func(s *story, w []string) { // periodic N: the agent's sweep runs so many DELs
			s.forgetCalls()
			_, err := s.plugin().Sweep(s.Context(), s.stateDir, sweep.Job{Periodic: true})
			s.must(err)
			verbs["times"](s, []string{w[0], "DEL", "p1"})
			s.forgetCalls()
		},
	})
}

// TestForeign: the disk comes from another machine, as a clone or a backup. A sweep runs no DEL of its
// pods, since the original may use the addresses. It removes what host-local keeps on this disk for
// exactly these owners: $ip99 is in the form that old releases of host-local wrote. The runtime's own DEL
// runs, as without unwind.
func TestForeign(t *testing.T) {
	stories(t, `
	chain bridge | p1; let by gc
	either live, STATUS: let by status; add a
	or live, GC: add a
	or live, sweep: let by sweep; add a
	or DEL pending: add a; plan p1 DEL fail; fails del a
	or ADD failed: plan p1 ADD fail-effect, p1 DEL fail; fails add a
	or ADD cut off: plan p1 ADD kill-parent-effect; killed add a; free a
	plan; clone a; drop a
	reserve $ip100 a eth1; reserve $ip101 aa eth0; reserve $ip102 b eth0; reserve $ip99 a
	forgets; until 0 $by; calls
	owners '$ip100 a eth1' '$ip101 aa eth0' '$ip102 b eth0'
	entries 0; del a; calls DEL p1; locks 0; leaves`)
}

// TestForeignContainerIDAgain: this disk is a copy of a machine's, and a container ID of that
// machine is added here. No DEL of the original's runs; what host-local keeps for it on this disk
// goes.
func TestForeignContainerIDAgain(t *testing.T) {
	stories(t, `
	chain bridge | p1
	add a; clone a; drop a; forgets
	move a a; add a
	reserved 1; calls ADD p1; entry a live 2 1
	del a`)
}

// TestReboot: pods of an earlier boot have all that is on the disk, and their rules. Any sweep
// releases it, and removes it from libcni's cache. The runtime's DEL, which comes later, has no result.
func TestReboot(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true | firewall | portmap | last
	add a b; reboot a b; forgets
	either STATUS: until 0 status
	or GC: until 0 gc
	or sweep: until 0 sweep
	or GC of the network, renamed: network renamed; until 0 gc
	clean; calls DEL last, DEL last
	gone a b; uncached a b
	del a b; calls DEL last, DEL last; clean`)
}

// TestForget gives up a dead attachment: no DEL runs, what the delegate took stays, the runtime's
// DEL succeeds and runs nothing, and the container ID can be used again.
func TestForget(t *testing.T) {
	stories(t, `
	chain p0 | p1
	plan p1 ADD fail-effect, p1 DEL fail; fails add a
	either intact:
	or damaged: damage a
	forgets; giveup a
	events '' 'forgotten a '; abandoned a; locks 0
	del a; calls; taken a.eth0.p1
	fails giveup a '$network/a/eth0 is not in the journal'
	plan; add a; del a`)
}

// TestForgetRefuses: an attachment that lives, may live, or is being worked on stays unchanged.
func TestForgetRefuses(t *testing.T) {
	stories(t, `
	either live: chain p0; add a; let why is live, not dead (its network namespace exists)
	or dead, seen from elsewhere: let why is unknown, not dead (cannot judge it from these namespaces
	or dead, locked: let why its lock is held
	or dead, damaged and locked: let why its lock is held
	if dead: chain p0 | p1; plan p1 ADD fail-effect, p1 DEL fail; fails add a
	if damaged: damage a
	if locked: lock a
	if elsewhere: elsewhere a
	count; fails giveup a '$why'; count
	unless damaged: entry a
	leaves`, acts{
		"count": func(s *story, _ []string) { // the same as before
			s.steady("count", fmt.Sprint(len(s.node.events()), s.abandoned(s.who("a").key())))
		},
	})
}
