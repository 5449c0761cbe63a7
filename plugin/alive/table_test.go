package alive

import (
	"fmt"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/tristate"
	"cni-unwind/testdata/document"
)

// TestVerdictTables keeps the tables of verdicts in plugin/README.md in step with Decide and
// DecideOrphan. Each row changes what the row before it left undecided, so each has another reason.
func TestVerdictTables(t *testing.T) {
	const readme = "../README.md"
	table := &verdictTable{T: t, reasons: map[string]bool{}}
	ev := Evidence{State: journal.Live, Locked: tristate.Yes}
	row := func(words string, change func()) {
		change()
		table.add(words, Decide(ev))
	}
	row("its lock is held", func() {})
	row("it is unknown whether its lock is held", func() { ev.Locked = tristate.Unknown })
	row("this process [may not judge](#who-may-look): it is in other namespaces than the ADD was", func() {
		ev.Locked, ev.AddedUnseen = tristate.No, tristate.No
	})
	row("it was made in another boot, of another machine; sweep releases host-local's files only", func() {
		ev.SameNamespaces, ev.SameBoot, ev.OtherHost = tristate.Yes, tristate.No, tristate.Yes
	})
	row("its ADD failed", func() { ev.State, ev.OtherHost = journal.Unwinding, tristate.Unknown })
	row("the runtime asked for its DEL", func() { ev.State = journal.Removing })
	row("it was made in an earlier boot of this machine", func() { ev.State, ev.OtherHost = journal.Live, tristate.No })
	row("the boot or the machine of its ADD is unknown", func() { ev.SameBoot = tristate.Unknown })
	row("it is `adding` and its lock file is free: its ADD died before it printed success", func() {
		ev.SameBoot, ev.State, ev.LockFile = tristate.Yes, journal.Adding, tristate.Yes
	})
	row("its mounts, every process in its namespace and the host end of its interface are gone, and no list has it", func() {
		ev.State, ev.NetNS, ev.HasProcess, ev.HostLink = journal.Live, tristate.No, tristate.No, tristate.No
	})
	row("a list lacks it, it is known whether its namespace exists, and a process is in it", func() {
		ev.Listed, ev.NetNS, ev.HasProcess = tristate.No, tristate.Yes, tristate.Yes
	})
	row("the same, but its processes are unknown", func() { ev.HasProcess = tristate.Unknown })
	row("the same, no process is in it, and its age is unknown", func() { ev.HasProcess = tristate.No })
	row("the same, and it is younger than `gracePeriod`", func() { ev.PastGracePeriod = tristate.No })
	row("the same, and it is older, by the boot clock, which nobody can set", func() { ev.PastGracePeriod = tristate.Yes })
	row("its namespace is at its path, or mounted at another one, even below another mount", func() { ev.Listed = tristate.Unknown })
	row("a list has it", func() { ev.Listed, ev.NetNS = tristate.Yes, tristate.No })
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
	orphan("this process does not see what the runtime sees", func() {})
	orphan("no list covers the owner (none is given, it is of another network, or it lists pods and the owner is none, such as a "+
		"container of nerdctl or podman), and an interface in any namespace has the address",
		func() { o.SameNamespaces, o.InUse = tristate.Yes, tristate.Yes })
	orphan("the same, without such an interface", func() { o.InUse = tristate.Unknown })
	orphan("the list has the container, under any interface", func() { o.Listed = tristate.Yes })
	orphan("its age is unknown", func() { o.Listed = tristate.No })
	orphan("it is younger than `gracePeriod` (10 minutes without unwind): an ADD may be running ([whereabouts#162][162])",
		func() { o.PastGracePeriod = tristate.No })
	orphan("libcni's cache cannot be read", func() { o.PastGracePeriod = tristate.Yes })
	orphan("the cache names a network namespace of it that exists, or names none", func() { o.Cached = tristate.Yes })
	orphan("a network namespace cannot be inspected", func() { o.Cached = tristate.No })
	orphan("an interface in any namespace has the address", func() { o.InUse = tristate.Yes })
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
