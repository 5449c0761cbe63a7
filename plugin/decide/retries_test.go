package decide

import (
	"fmt"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest"
)

const minute = int64(time.Minute)

// TestDueTable keeps the tables in README.md in step with Due and After. In the first table, each
// row removes the reason why the DEL in the row above waits.
func TestDueTable(t *testing.T) {
	const readme = "README.md"
	s := journal.Step{Type: "p", Tries: 1, Config: withIPAM("spiderpool")}
	p := pass()
	p.NewerLives, p.PodLives = true, true
	cell := func(p Pass) string {
		switch w := Due(&s, p); {
		case w.Why == journal.RunNow:
			return "now"
		case w.Why == journal.ForBackoff:
			return "after the pause"
		default:
			return fmt.Sprintf("waits (`%s`)", w.Why)
		}
	}
	table := "| state of the pending DEL | at STATUS, and in the agent | at GC, at the runtime's DEL, and in `unwindctl sweep` |\n|---|---|---|\n"
	row := func(words string, change func()) {
		change()
		asked := p
		asked.IgnorePause = true
		table += fmt.Sprintf("| %s | %s | %s |\n", words, cell(p), cell(asked))
	}
	row("a newer ADD of the attachment is live, or still running", func() {})
	row("the plugin releases addresses by pod (spiderpool), and another sandbox of the pod is live, or its ADD is still running", func() { p.NewerLives = false })
	row("the DEL releases an address, to which a host port may forward until the DEL of a later plugin (portmap) succeeds", func() {
		p.PodLives = false
		p.Claims, p.Steps = []journal.Claim{{}}, []journal.Step{{Index: 1, Type: "portmap", Config: withPorts}}
	})
	row("the DEL releases an address by which a later plugin (firewall) may remove rules; that plugin's DEL was tried less than twice, or its binary is missing", func() {
		p.Steps = []journal.Step{{Index: 1, Type: "firewall", Tries: 1}}
	})
	row("the DEL failed", func() {
		p.Steps, s.Next = nil, journal.Next{Why: journal.ForBackoff, At: now + minute}
	})
	row("the DEL was never tried, or the reason for its wait is over", func() { s.Next = journal.Next{} })
	plugintest.Table(t, readme, "due", table)

	table = "| outcome of the try | what follows |\n|---|---|\n"
	for _, tt := range afterRows {
		after, done := After(tt.step, tt.outcome, now)
		words := "unwind retries the DEL after a pause"
		switch {
		case done:
			words = "the DEL is done"
		case after.Next.Why.Blocked():
			words = fmt.Sprintf("the DEL waits (`%s`)", after.Next.Why)
		}
		table += fmt.Sprintf("| %s | %s |\n", tt.name, words)
	}
	plugintest.Table(t, readme, "after", table)
}

// afterRows lists the rows of the second table, each with an example.
var afterRows = []struct {
	name    string
	step    journal.Step
	outcome Outcome
}{
	{"the DEL failed for the 300th time after its pause, the namespace is gone, and no address can depend on the DEL",
		journal.Step{Failures: 299}, Outcome{Failed: true, NetNSGone: true}},
	{"the same, but an address may depend on the DEL, the chain lacked the plugin at 300 failures, and never contained it in between",
		journal.Step{Failures: 299, Absent: 299}, Outcome{Failed: true, NetNSGone: true, MayHold: true, Left: True}},
	{"the DEL failed", journal.Step{Failures: 299}, Outcome{Failed: true, NetNSGone: true, MayHold: true}},
	{"the DEL succeeded", journal.Step{}, Outcome{}},
}
