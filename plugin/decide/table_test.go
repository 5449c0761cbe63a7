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
	row("a verb holds the lock of the attachment", func() {})
	row("unwind cannot determine whether a verb holds that lock", func() { ev.Locked = tristate.Unknown })
	row("this process [may not judge](../README.md#who-may-look), because it runs in other namespaces than the ADD did", func() {
		ev.Locked, ev.AddedUnseen = tristate.No, tristate.No
	})
	row("the ADD ran on another machine; a sweep then removes only host-local's files", func() {
		ev.SameNamespaces, ev.SameBoot, ev.OtherHost = tristate.Yes, tristate.No, tristate.Yes
	})
	row("the ADD failed", func() { ev.State, ev.OtherHost = journal.RollingBack, tristate.Unknown })
	row("the runtime sent a DEL", func() { ev.State = journal.Deleting })
	row("the ADD ran before this boot", func() { ev.State, ev.OtherHost = journal.Live, tristate.No })
	row("unwind cannot determine the boot or the machine of the ADD", func() { ev.SameBoot = tristate.Unknown })
	row("the state is `adding`, and the lock is free: the ADD was killed before it printed success", func() {
		ev.SameBoot, ev.State, ev.LockFile = tristate.Yes, journal.Adding, tristate.Yes
	})
	row("the mounts of the namespace, the processes in it and the host end of the interface are gone, and no list contains the attachment", func() {
		ev.State, ev.NetNS, ev.HasProcess, ev.HostLink = journal.Live, tristate.No, tristate.No, tristate.No
	})
	row("a list does not contain the attachment, unwind knows whether the namespace exists, and a process is in that namespace", func() {
		ev.Listed, ev.NetNS, ev.HasProcess = tristate.No, tristate.Yes, tristate.Yes
	})
	row("the same, but unwind cannot determine whether a process is in the namespace", func() { ev.HasProcess = tristate.Unknown })
	row("the same, but no process is in the namespace, and the age of the attachment is unknown", func() { ev.HasProcess = tristate.No })
	row("the same, but the attachment is younger than `gracePeriod`", func() { ev.PastGracePeriod = tristate.No })
	row("the same, but the attachment is older (by the boot clock, which nobody can set)", func() { ev.PastGracePeriod = tristate.Yes })
	row("the namespace exists at its path, or is mounted elsewhere", func() { ev.Listed = tristate.Unknown })
	row("a list contains the attachment", func() { ev.Listed, ev.NetNS = tristate.Yes, tristate.No })
	row("a process is in the namespace", func() { ev.Listed, ev.HasProcess = tristate.Unknown, tristate.Yes })
	row("the host end of the interface exists", func() { ev.HasProcess, ev.HostLink = tristate.No, tristate.Yes })
	row("anything else", func() { ev.HostLink = tristate.Unknown })
	document.Table(t, readme, "verdicts", table.text)

	table = &verdictTable{T: t, reasons: map[string]bool{}}
	var o Orphan
	orphan := func(words string, change func()) {
		change()
		table.add(words, DecideOrphan(o))
	}
	orphan("this process runs in other namespaces than the runtime", func() {})
	orphan("no list covers the owner (there is no list, it is for another network, or it lists only pods and the owner is a "+
		"nerdctl or podman container), and the cgroup of a process names the container",
		func() { o.SameNamespaces, o.Runs = tristate.Yes, tristate.Yes })
	orphan("no list covers the owner, no cgroup names the container, and an interface in any namespace has the address",
		func() { o.Runs, o.InUse = tristate.No, tristate.Yes })
	orphan("no list covers the owner, in any other case", func() { o.InUse = tristate.No })
	orphan("the list contains any interface of the container", func() { o.Listed = tristate.Yes })
	orphan("the age of the address is unknown", func() { o.Listed = tristate.No })
	orphan("the address is younger than `gracePeriod` (10 minutes without unwind), so that an ADD may still be running ([whereabouts#162][162])",
		func() { o.PastGracePeriod = tristate.No })
	orphan("libcni's cache cannot be read", func() { o.PastGracePeriod = tristate.Yes })
	orphan("libcni's cache contains the owner, and names a network namespace that exists, or no namespace", func() { o.Cached = tristate.Yes })
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
