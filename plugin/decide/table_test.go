package decide

import (
	"fmt"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest"
)

// TestVerdictTables keeps the tables of verdicts in README.md in step with Decide and DecideStray.
// Each row changes the evidence that decided the row above, so it must have a new reason (see
// verdictTable).
func TestVerdictTables(t *testing.T) {
	const readme = "README.md"
	table := &verdictTable{T: t, reasons: map[string]bool{}}
	ev := Evidence{State: journal.Live, Locked: True}
	row := func(words string, change func()) {
		change()
		table.add(words, Decide(ev))
	}
	row("another process holds the attachment's lock", func() {})
	row("unwind cannot determine whether another process holds the attachment's lock", func() { ev.Locked = Unclear })
	row("unwind runs in namespaces other than those of the ADD, so it [may not judge](../README.md#who-may-judge) the attachment", func() {
		ev.Locked, ev.AddedUnseen = False, False
	})
	row("the ADD ran in another boot, and unwind cannot prove that it was on this machine, so a sweep removes only host-local's files", func() {
		ev.SameNamespaces, ev.SameBoot, ev.OtherHost = True, False, True
	})
	row("the ADD failed", func() { ev.State, ev.SameBoot = journal.RollingBack, Unclear })
	row("the runtime sent a DEL", func() { ev.State = journal.Deleting })
	row("the ADD ran before this boot", func() { ev.State, ev.SameBoot, ev.OtherHost = journal.Live, False, False })
	row("unwind cannot determine in which boot the ADD ran", func() { ev.SameBoot = Unclear })
	row("the state is `adding`, and nobody holds the lock, so the ADD was killed before it printed success", func() {
		ev.SameBoot, ev.State = True, journal.Adding
	})
	row("the namespace has no mount and no process, the host end of the interface is gone, and no list contains the attachment", func() {
		ev.State, ev.NetNS, ev.HasProcess, ev.HostLink = journal.Live, False, False, False
	})
	row("a list lacks the attachment, but a process is in the attachment's namespace", func() {
		ev.Listed, ev.NetNS, ev.HasProcess = False, True, True
	})
	row("a list lacks the attachment, and unwind cannot determine whether a process is in the attachment's namespace", func() { ev.HasProcess = Unclear })
	row("a list lacks the attachment, no process is in its namespace, and unwind does not know when the ADD ran", func() { ev.HasProcess = False })
	row("a list lacks the attachment, no process is in its namespace, and the attachment is younger than `gracePeriod`", func() { ev.PastGracePeriod = False })
	row("a list lacks the attachment, no process is in its namespace, and the attachment is older than `gracePeriod`", func() { ev.PastGracePeriod = True })
	row("the namespace exists at its path, or is mounted elsewhere", func() { ev.Listed = Unclear })
	row("a list contains the attachment", func() { ev.Listed, ev.NetNS = True, False })
	row("a process is in the namespace", func() { ev.Listed, ev.HasProcess = Unclear, True })
	row("the host end of the interface exists", func() { ev.HasProcess, ev.HostLink = False, True })
	row("anything else", func() { ev.HostLink = Unclear })
	plugintest.Table(t, readme, "verdicts", table.text)

	table = &verdictTable{T: t, reasons: map[string]bool{}}
	var o Stray
	stray := func(words string, change func()) {
		change()
		table.add(words, DecideStray(o))
	}
	stray("unwind runs in namespaces other than the runtime's", func() {})
	stray("no list covers the owner, but the cgroup path of a process contains the container ID",
		func() { o.SameNamespaces, o.Runs = True, True })
	stray("no list covers the owner, but an interface in some namespace has the address",
		func() { o.Runs, o.InUse = False, True })
	stray("no list covers the owner, and unwind finds neither a process of the container nor an interface with the address", func() { o.InUse = False })
	stray("a list contains the container, with any interface", func() { o.Listed = True })
	stray("unwind does not know when the address was allocated", func() { o.Listed = False })
	stray("the address is younger than `gracePeriod` (on a node without unwind, 10 minutes), so its ADD may still be running ([whereabouts#207][207])",
		func() { o.PastGracePeriod = False })
	stray("the clock was set in this boot, and the address is from before the boot or from the future, so its age is unknown, and `--grace-period` is not given",
		func() { o.Undated = true })
	stray("unwind cannot read libcni's cache", func() { o.PastGracePeriod, o.Undated = True, false })
	stray("libcni's cache has an entry for the owner, and the entry names an existing network namespace or none", func() { o.Cached = True })
	stray("the cgroup path of a process contains the container ID, as in `…/cri-containerd-ID.scope`",
		func() { o.Cached, o.Runs = False, True })
	stray("an interface in some namespace has the address", func() { o.Runs, o.InUse = False, True })
	stray("unwind cannot inspect some process or network namespace", func() { o.InUse = Unclear })
	stray("anything else", func() { o.InUse = False })
	plugintest.Table(t, readme, "strays", table.text)
}

// verdictTable collects the rows of a table. No two rows may have the same reason.
type verdictTable struct {
	*testing.T
	text    string
	reasons map[string]bool
}

func (table *verdictTable) add(words string, v Judgment) {
	if table.text == "" {
		table.text = "| evidence | verdict |\n|---|---|\n"
	}
	if table.reasons[v.Reason.Text] {
		table.Errorf("%s: an earlier row has the same reason, %q", words, v.Reason)
	}
	table.reasons[v.Reason.Text] = true
	verdict := string(v.Verdict)
	if v.Releasable() && v.Reason.Code != string(v.Verdict) {
		verdict += " (`" + v.Reason.Code + "`)"
	}
	if v.Warn {
		verdict += ", with a warning"
	}
	table.text += fmt.Sprintf("| %s | %s |\n", words, verdict)
}
