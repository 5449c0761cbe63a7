package decide

import (
	"fmt"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/tristate"
	"cni-unwind/testdata/document"
)

// TestVerdictTables keeps the tables of verdicts in README.md in step with Decide and
// DecideOrphan. Each row changes what the row before it left undecided, so each has another reason.
func TestVerdictTables(t *testing.T) {
	const readme = "README.md"
	table := &verdictTable{T: t, reasons: map[string]bool{}}
	ev := Evidence{State: journal.Live, Locked: tristate.Yes}
	row := func(words string, change func()) {
		change()
		table.add(words, Decide(ev))
	}
	row("its lock is held: a verb is at work on it", func() {})
	row("it is unknown whether its lock is held", func() { ev.Locked = tristate.Unknown })
	row("this process [may not judge](../README.md#who-may-look): it is in other namespaces than the ADD was", func() {
		ev.Locked, ev.AddedUnseen = tristate.No, tristate.No
	})
	row("its ADD was on another machine; a sweep releases only host-local's files", func() {
		ev.SameNamespaces, ev.SameBoot, ev.OtherHost = tristate.Yes, tristate.No, tristate.Yes
	})
	row("its ADD failed", func() { ev.State, ev.OtherHost = journal.RollingBack, tristate.Unknown })
	row("the runtime asked for its DEL", func() { ev.State = journal.Deleting })
	row("its ADD was before this boot", func() { ev.State, ev.OtherHost = journal.Live, tristate.No })
	row("the boot or the machine of its ADD is unknown", func() { ev.SameBoot = tristate.Unknown })
	row("it is `adding` and its lock file is free: its ADD died before it printed success", func() {
		ev.SameBoot, ev.State, ev.LockFile = tristate.Yes, journal.Adding, tristate.Yes
	})
	row("its mounts, every process in its namespace and the host end of its interface are gone, and no list contains it", func() {
		ev.State, ev.NetNS, ev.HasProcess, ev.HostLink = journal.Live, tristate.No, tristate.No, tristate.No
	})
	row("a list lacks it, it is known whether its namespace exists, and a process is in it", func() {
		ev.Listed, ev.NetNS, ev.HasProcess = tristate.No, tristate.Yes, tristate.Yes
	})
	row("the same, but its processes are unknown", func() { ev.HasProcess = tristate.Unknown })
	row("the same, no process is in it, and its age is unknown", func() { ev.HasProcess = tristate.No })
	row("the same, and it is younger than `gracePeriod`", func() { ev.PastGracePeriod = tristate.No })
	row("the same, and it is older (by the boot clock, which nobody can set)", func() { ev.PastGracePeriod = tristate.Yes })
	row("its namespace is at its path, or mounted elsewhere", func() { ev.Listed = tristate.Unknown })
	row("a list contains it", func() { ev.Listed, ev.NetNS = tristate.Yes, tristate.No })
	row("a process is in its namespace", func() { ev.Listed, ev.HasProcess = tristate.Unknown, tristate.Yes })
	row("the host end of its interface exists", func() { ev.HasProcess, ev.HostLink = tristate.No, tristate.Yes })
	row("anything else", func() { ev.HostLink = tristate.Unknown })
	document.Table(t, readme, "verdicts", table.text)

	table = &verdictTable{T: t, reasons: map[string]bool{}}
	var o Orphan
	orphan := func(words string, change func()) {
		change()
		table.add(words, DecideOrphan(o))
	}
	orphan("this process runs in other namespaces than the runtime", func() {})
	orphan("no list covers the owner (there is none, it is for another network, or it lists only pods and the owner is a "+
		"nerdctl or podman container), and the cgroup of a process names the container",
		func() { o.SameNamespaces, o.Runs = tristate.Yes, tristate.Yes })
	orphan("the same, without such a process, and an interface in any namespace has the address",
		func() { o.Runs, o.InUse = tristate.No, tristate.Yes })
	orphan("the same, without such an interface", func() { o.InUse = tristate.No })
	orphan("the list contains the container, with any interface", func() { o.Listed = tristate.Yes })
	orphan("its age is unknown", func() { o.Listed = tristate.No })
	orphan("it is younger than `gracePeriod` (10 minutes without unwind): an ADD may be running ([whereabouts#162][162])",
		func() { o.PastGracePeriod = tristate.No })
	orphan("libcni's cache cannot be read", func() { o.PastGracePeriod = tristate.Yes })
	orphan("the cache has the owner, and its network namespace exists or is not named", func() { o.Cached = tristate.Yes })
	orphan("the cgroup of a process names the container: `…/ID`, `…/cri-containerd-ID.scope`",
		func() { o.Cached, o.Runs = tristate.No, tristate.Yes })
	orphan("an interface in any namespace has the address", func() { o.Runs, o.InUse = tristate.No, tristate.Yes })
	orphan("a process or a network namespace cannot be inspected", func() { o.InUse = tristate.Unknown })
	orphan("anything else", func() { o.InUse = tristate.No })
	document.Table(t, readme, "orphans", table.text)
}

// verdictTable collects rows; no two rows may have the same reason.
type verdictTable struct {
	*testing.T
	text    string
	reasons map[string]bool
}

func (table *verdictTable) add(words string, v Verdict) {
	if table.text == "" {
		table.text = "| evidence | verdict |\n|---|---|\n"
	}
	if table.reasons[v.Reason.Text] {
		table.Errorf("%s: no row of its own: %q", words, v.Reason)
	}
	table.reasons[v.Reason.Text] = true
	verdict := string(v.Fate)
	if v.Releasable() && v.Reason.Code != string(v.Fate) {
		verdict += ": `" + v.Reason.Code + "`"
	}
	if v.Warn {
		verdict += ", with a warning"
	}
	table.text += fmt.Sprintf("| %s | %s |\n", words, verdict)
}
