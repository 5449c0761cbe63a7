package decide

import (
	"fmt"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest"
)

const minute = int64(time.Minute)

func no() bool { return false }

// TestDueTable keeps the tables in README.md in step with Due and After. Each row
// of the first takes away what made the row before it wait, so the order of the rows is proven too.
func TestDueTable(t *testing.T) {
	const readme = "README.md"
	s := journal.Step{Type: "sriov", Tries: 1, Config: withIPAM("spiderpool"), Next: journal.Next{Why: journal.ForOwner}}
	p := pass()
	p.NewerLives, p.PodLives, p.ContainerLives, p.NoNetNS = true, yes, yes, true
	p.Withheld = func(*journal.Step) bool { return true }
	cell := func(p Pass) string {
		switch w := Due(&s, p); {
		case w.Why == journal.RunNow:
			return "now"
		case w.Why == journal.ForBackoff:
			return "after the pause"
		case w.At > now+minute:
			return fmt.Sprintf("waits until `gracePeriod` is over (`%s`)", w.Why)
		default:
			return fmt.Sprintf("waits (`%s`)", w.Why)
		}
	}
	table := "| state of the pending DEL | at STATUS, and in the agent | at GC, and in `unwindctl sweep` | at the runtime's DEL |\n|---|---|---|---|\n"
	row := func(words string, change func()) {
		change()
		sweep, asked := p, p
		sweep.IgnorePause, asked.IgnorePause, asked.Asked = true, true, true
		table += fmt.Sprintf("| %s | %s | %s | %s |\n", words, cell(p), cell(sweep), cell(asked))
	}
	row("the last try ran without the DEL's address, because another owner has that address", func() {})
	row("the DEL succeeded, and must run once more", func() {
		s.Next = journal.Next{Why: journal.ForRepeat, At: now + 5*minute}
	})
	row("a newer ADD of the attachment is live", func() { s.Next = journal.Next{} })
	row("the plugin releases addresses by pod (spiderpool), and another sandbox of the pod is live", func() { p.NewerLives = false })
	row("the DEL may have succeeded, the plugin releases addresses by container ID (whereabouts), and another live attachment has the same container ID", func() {
		p.PodLives, s.Config = no, withIPAM("whereabouts")
	})
	row("the plugin does nothing without CNI_NETNS (kube-ovn, sriov), the namespace is gone, and the machine has not booted since the ADD", func() { p.ContainerLives = no })
	row("a host port may forward to the address that the DEL releases, until the DEL of another plugin (portmap) succeeds", func() {
		p.NoNetNS = false
		p.Claims, p.Steps = []journal.Claim{{}}, []journal.Step{{Index: 1, Config: withPorts}}
	})
	row("the DEL failed", func() {
		p.Steps, s.Next = nil, journal.Next{Why: journal.ForBackoff, At: now + minute}
	})
	row("the DEL was never tried, or the reason for its wait is over", func() { s.Next = journal.Next{} })
	plugintest.Table(t, readme, "due", table)

	table = "| outcome of the try | what follows |\n|---|---|\n"
	for _, tt := range afterRows {
		after, done := After(tt.step, tt.outcome, tt.pass())
		words := "unwind retries the DEL after a pause"
		switch {
		case done:
			words = "the DEL is done"
		case after.Next.Why.Blocked():
			words = fmt.Sprintf("the DEL waits (`%s`)", after.Next.Why)
		}
		if after.Next.Why == journal.ForRepeat && !done {
			words = "unwind runs the DEL once more after `gracePeriod` (`repeat`)"
		}
		table += fmt.Sprintf("| %s | %s |\n", tt.name, words)
	}
	plugintest.Table(t, readme, "after", table)
}

func inAnotherBoot() Pass {
	p := pass()
	p.SameBoot = false
	return p
}

// afterRows are the rows of After, each with an example.
var afterRows = []struct {
	name    string
	step    journal.Step
	outcome Outcome
	pass    func() Pass
}{
	{"the plugin was killed", journal.Step{}, Outcome{Failed: true, Killed: true}, pass},
	{"the DEL failed for the 300th time after its pause, the namespace is gone, and no address can depend on the DEL",
		journal.Step{Failures: 299}, Outcome{Failed: true, NetNSGone: true}, pass},
	{"the same, an address may depend on the DEL, and the chain lacked the plugin at each of the last 300 tries",
		journal.Step{Failures: 299, Absent: 299}, Outcome{Failed: true, NetNSGone: true, MayHold: true, NotInChain: true}, pass},
	{"the DEL failed", journal.Step{Failures: 299}, Outcome{Failed: true, NetNSGone: true, MayHold: true}, pass},
	{"the DEL ran without an address that belongs to another owner, and succeeded, and the plugin may remove rules by address", journal.Step{}, Outcome{Withheld: true}, pass},
	{"the plugin was killed earlier, and the DEL succeeded within `gracePeriod` after that",
		journal.Step{ADD: journal.AddKilled, Again: now + minute}, Outcome{}, pass},
	{"the plugin was killed before the machine's last boot, and the DEL succeeded after that boot", journal.Step{ADD: journal.AddKilled, Again: now + minute}, Outcome{}, inAnotherBoot},
	{"the DEL of aws-cni or whereabouts succeeded, which proves nothing", journal.Step{Config: withIPAM("whereabouts")}, Outcome{}, pass},
	{"the DEL of aws-cni or whereabouts succeeded for the second time", journal.Step{Config: withIPAM("whereabouts"), Again: now}, Outcome{}, pass},
	{"the DEL succeeded, and the plugin releases addresses by pod (spiderpool), so a second DEL could release a newer sandbox's address",
		journal.Step{Config: withIPAM("spiderpool"), ADD: journal.AddKilled, Again: now + minute}, Outcome{}, pass},
	{"the DEL succeeded, in any other case", journal.Step{}, Outcome{}, pass},
}
