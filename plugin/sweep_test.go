package plugin

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/sandbox"
	"cni-unwind/testdata/unwind/env"
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

// worker is what sweeps in this process. It acts in the place of the runtime, since process 1 of the
// machine is in other namespaces than the tests: see facts.Node.SameNamespaces.
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
	return &Plugin{Env: undo.Env{Stderr: n.Output(), Budgets: env.BudgetsOf(strings.Join(n.budgets, " ")), Runner: &delegate.Processes{}}, Stdout: io.Discard,
		CacheDir: n.cacheDir()}
}

// TestSweepAfterReboot: there are many entries of an earlier boot. The ADD of a new sandbox settles
// what its own pod left, and no more. One sweep releases the rest: several attachments at once,
// each in the order of its chain, and no two DELs of one at once.
func TestSweepAfterReboot(t *testing.T) {
	stories(t, `
	chain p0, "delayMS": 20 | p1, "delayMS": 20
	add a; boot a; copies a 60 other; forgets; plan * DEL late
	sandbox a next; add next; calls DEL p1, DEL p0, ADD p0, ADD p1
	sweep; entries 1; entry next live; together 2; times 60 DEL p0; times 60 DEL p1; counters 'swept earlier-boot 61'
	del next`)
}

// tombstone returns the tombstone of an attachment, or nil.
func (n *node) tombstone(key journal.Key) (tomb *journal.Entry) {
	n.Helper()
	err := n.store.View(n.Context(), func(tx *journal.Tx) (err error) {
		all, err := tx.Records(key)
		for _, e := range all {
			if e.Undo.State == journal.Undone {
				tomb = e
			}
		}
		return journal.IgnoreDamaged(err)
	})
	must(n, err)
	return tomb
}

// TestTwoSweeps: two processes sweep at once. Each DEL runs once, and neither reports an error for
// what the other one does.
func TestTwoSweeps(t *testing.T) {
	stories(t, `
	chain p0, "delayMS": 20 | p1, "delayMS": 20
	add a; boot a; copies a 20; forgets; plan * DEL late
	gc-twice; together 1; times 21 DEL p0; times 21 DEL p1`, acts{"gc-twice": func(s *story, _ []string) {
		outs := make(chan outcome)
		for range 2 {
			go func() { outs <- s.ask("GC", "1.0.0", nil, s.plugins(s.node)...) }()
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
