package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/record"
	"cni-unwind/plugin/sweep"
)

// journal examines the journal's records, their attachments, dropped DELs and the last sweep.
func (e *examination) journal(found *inspect.Report) {
	path := (&journal.Store{Dir: e.StateDir}).Path()
	e.damaged(found.Damaged)
	switch err := errors.Join(found.JournalErr, found.HistoryErr); {
	case err != nil:
		text := err.Error()
		if !strings.Contains(text, path) {
			text = path + ": " + text
		}
		e.add("journal", Failure, inspect.HintFor(err), "%s", text)
		return
	case len(found.Damaged) == 0:
		e.add("journal", OK, "", "%s is intact", path)
	}
	e.attachments(found)
	e.dropped(found.Events)
	e.lastSweep(found)
}

// damaged reports the first damaged records, and the number of the others.
func (e *examination) damaged(all []error) {
	const most = 5
	for _, err := range all[:min(most, len(all))] {
		e.add("journal", Warning, inspect.HintFor(err), "%v", err)
	}
	if more := len(all) - most; more > 0 {
		e.add("journal", Warning, "unwindctl list names them", "%s damaged",
			term.Plural(more, "more record is", "more records are"))
	}
}

// degraded reports ADDs and DELs that continued without the journal, by verb and reason, if the
// last one is less than a day old.
func (e *examination) degraded(found *inspect.Report) {
	for _, c := range found.Counters {
		if c.Name != record.CountDegraded || len(c.Labels) != 2 || time.Since(c.Last) > lately {
			continue
		}
		e.add("journal", Warning, "unwind's log (logFile, or else the runtime's log) shows each error",
			"%s continued without the journal (reason: %s), the last one %s ago",
			term.Plural(int(c.Value), c.Labels[0], c.Labels[0]+"s"), c.Labels[1], term.Ago(c.Last))
	}
}

// doctor reports dropped DELs, and operations without the journal, for this long.
const lately = 24 * time.Hour

// sweptLately is the age from which doctor reports the last sweep as too old.
const sweptLately = 10 * time.Minute

func (e *examination) lastSweep(s *inspect.Report) {
	remedy := node.Timer + ", or run the agent (unwindctl run)"
	if e.agent != "" {
		remedy = "the agent's log explains why its sweeps do not finish"
	}
	old := func(a inspect.Attachment) bool { return time.Since(a.Created) > sweptLately }
	switch age := term.Ago(s.LastSweep); {
	case e.observe && s.LastSweep.IsZero(): // no sweep is expected
	case s.LastSweep.IsZero() && slices.ContainsFunc(s.Attachments, old):
		e.add("sweep", Warning, remedy, "no sweep has finished yet")
	case s.LastSweep.IsZero():
		e.add("sweep", OK, "", "no sweep has finished yet, but no attachment is older than 10m")
	case time.Since(s.LastSweep) > sweptLately:
		e.add("sweep", Warning, remedy, "no sweep has finished for %s", age)
	default:
		e.add("sweep", OK, "", "the last sweep finished %s ago", age)
	}
}

// doctor reports a DEL that has been pending for longer than pendingLong, and an ADD that has been
// running for longer than addingLong.
const pendingLong, addingLong = 15 * time.Minute, 2 * time.Minute

// countEvents counts the recent events of a kind by plugin, and returns each plugin's last reason.
func countEvents(events []journal.Event, kind journal.EventKind, within time.Duration) (
	count map[string]int, last map[string]string,
) {
	count, last = map[string]int{}, map[string]string{}
	for _, e := range events {
		if e.Kind == kind && time.Since(e.At.Wall) < within {
			count[term.Join(e.Plugins)]++
			last[term.Join(e.Plugins)] = e.Reason
		}
	}
	return count, last
}

// rollbacks reports plugins with recent failed ADDs, the most common reason why pods do not start.
func (e *examination) rollbacks(events []journal.Event) {
	count, last := countEvents(events, journal.RolledBack, pendingLong)
	for _, of := range slices.Sorted(maps.Keys(count)) {
		failed := "plugin " + of + " failed " + term.Plural(count[of], "ADD", "ADDs")
		if of == "-" { // the event names no plugin
			failed = term.Plural(count[of], "ADD", "ADDs") + " failed"
		}
		e.add("pods", Warning,
			"fix the cause of that error; unwindctl history --since 15m -o wide lists all errors",
			"%s in the last 15m; last error: %s", failed, last[of])
	}
}

func (e *examination) attachments(found *inspect.Report) {
	var long, held, gone, adding []string
	left := map[string]int{} // the number of DELs of each plugin that has left the chain
	for _, a := range found.Attachments {
		key, age := a.Key.String(), time.Since(a.Since)
		if a.Busy() && decide.KeepsContainer(a.State) && age > addingLong {
			// a DEL that has just begun may hold the lock of a live attachment, too
			if in := addProcesses(a.Key); len(in) > 0 {
				adding = append(adding, key+" in "+strings.Join(in, ", "))
			} else if a.State == journal.Adding {
				adding = append(adding, key)
			}
		}
		for _, step := range a.Steps {
			if step.LeftChain {
				left[step.Plugin]++
			}
		}
		if !a.PendingDEL() || age <= pendingLong {
			continue
		}
		if a.HasStep(journal.ForRules) {
			held = append(held, key)
		}
		if !slices.ContainsFunc(a.Steps, inspect.Step.Due) {
			continue
		}
		long = append(long, key)
		for _, step := range a.Steps {
			_, err := netconf.FindPlugin(step.Plugin, e.binPath)
			if err != nil && !step.LeftChain {
				gone = append(gone, step.Plugin+" of "+key)
			}
		}
	}
	some := func(all []string) string { return strings.Join(all[:min(3, len(all))], ", ") }
	if len(adding) > 0 {
		e.add("pods", Warning,
			"a plugin probably hangs: see its log, or kill its process; unwind then undoes the ADD",
			"%s run for more than 2m: %s", term.Plural(len(adding), "ADD has", "ADDs have"), some(adding))
	}
	if len(long) > 0 {
		e.add("attachments", Warning, "unwindctl show "+long[0]+" explains why",
			"%s pending DELs for more than 15m: %s",
			term.Plural(len(long), "attachment has had", "attachments have had"), some(long))
	}
	for _, plugin := range slices.Sorted(maps.Keys(left)) {
		e.add("attachments", OK, "", "plugin %s has left the chain with %s pending. You need not "+
			"act: pods terminate without an error, and unwind drops each of these DELs once it has "+
			"failed for about a day", plugin, term.Plural(left[plugin], "DEL", "DELs"))
	}
	if len(gone) > 0 {
		e.add("attachments", Warning, "reinstall these plugins; if their "+
			"provider was replaced, drop the DELs with unwindctl forget",
			"pending DELs need plugins that are not in %s: %s", e.binPath, some(gone))
	}
	if len(held) > 0 {
		e.add("attachments", Warning,
			"fix the plugin whose DEL fails (unwindctl show "+held[0]+" names it); a reboot also "+
				"releases the addresses",
			"%s reserved, because rules or host ports for these addresses may remain: %s",
			term.Plural(len(held), "dead attachment keeps its addresses",
				"dead attachments keep their addresses"), some(held))
	}
	if g := found.Guard; g != nil {
		e.add("attachments", Warning,
			"list these attachments with unwindctl sweep --dry-run --force; if they really are dead, "+
				"run unwindctl sweep --force",
			"sweeps keep %d of the %d attachments of this boot, because implausibly many seem dead",
			g.Dead, g.Live)
	}
	if all := found.Duplicates(); len(all) > 0 {
		e.add("attachments", Failure, "delete one of the two pods; then check for two networks with the "+
			"same range, and for a pool directory that was emptied or restored while pods ran",
			"%s assigned twice: %s", term.Plural(len(all), "address was", "addresses were"), some(all))
	}
	e.verdicts(found)
}

// addProcesses returns the processes of an attachment's ADD, except unwind's own: the running
// plugin, and the programs that it has started. Each has the CNI variables in its environment.
func addProcesses(k journal.Key) (processes []string) {
	environments, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range environments {
		data, _ := os.ReadFile(path) // empty if the process has ended, or may not be read
		vars, process := strings.Split(string(data), "\x00"), filepath.Dir(path)
		name, _ := os.ReadFile(filepath.Join(process, "comm"))
		program := strings.TrimSpace(string(name))
		if program != netconf.Name && slices.Contains(vars, "CNI_COMMAND=ADD") &&
			slices.Contains(vars, "CNI_CONTAINERID="+k.ContainerID) &&
			slices.Contains(vars, "CNI_IFNAME="+k.IfName) {
			processes = append(processes, fmt.Sprintf("%s (process %s)", program, filepath.Base(process)))
		}
	}
	return processes
}

// dropped reports the DELs that were dropped in the last day, by plugin. It omits those of plugins
// that had left the chain, which are not counted.
func (e *examination) dropped(events []journal.Event) {
	events = slices.DeleteFunc(slices.Clone(events),
		func(e journal.Event) bool { return len(e.Count) == 0 })
	count, last := countEvents(events, journal.Dropped, lately)
	for _, of := range slices.Sorted(maps.Keys(count)) {
		e.add("attachments", Warning, "check what the plugin may have left behind; unwindctl history "+
			"--kind dropped -o wide lists the DELs", "unwind dropped %s of plugin %s in the last day; last "+
			"reason: %s", term.Plural(count[of], "DEL", "DELs"), of, last[of])
	}
}

func (e *examination) verdicts(found *inspect.Report) {
	dead := len(inspect.Filter(found.Attachments, (*inspect.Attachment).Dead))
	all, elsewhere := 0, 0
	var unknown []sweep.Finding
	for _, f := range found.Findings {
		if len(f.Addresses) > 0 && !f.Cached {
			continue
		}
		all++
		if f.Elsewhere() {
			elsewhere++
		} else if f.Verdict == decide.Unknown && f.Err == nil {
			unknown = append(unknown, f)
		}
	}
	if elsewhere > 0 {
		e.add("attachments", Warning, "run doctor on the host, or as unwindctl --host doctor",
			"cannot tell from these namespaces whether %d of %s are live", elsewhere,
			term.Attachments(all))
	}
	if len(unknown) > 0 {
		e.add("attachments", Warning, "unwindctl show "+unknown[0].Key.String()+" shows the evidence",
			"unwind cannot tell whether %d of %s are live; first reason: %s", len(unknown),
			term.Attachments(all), unknown[0].Reason)
	}
	if elsewhere+len(unknown) == 0 {
		e.add("attachments", OK, "", "%s (%d dead)", term.Attachments(all), dead)
	}
}

// pools reports how full each range set of each pool is.
func (e *examination) pools(found *inspect.Report) {
	err := errors.Join(found.SweepErr, found.PoolErr)
	if err != nil && !slices.ContainsFunc(e.checks, func(c check) bool {
		return strings.Contains(c.Text, term.Printable(err.Error()))
	}) {
		e.add("pools", Warning, "", "%v", err)
	}
	for _, p := range found.Pools {
		name := fmt.Sprintf("%s (%s)", p.Network, p.Dir)
		if len(p.Sets) == 0 {
			e.add("pools", OK, "", "%s: no address is used, and the ranges are unknown", name)
		}
		if text, remedy := p.Lost(); len(p.Unreserved) > 0 {
			e.add("pools", Warning, remedy, "%s: %s", name, text)
		}
		for _, s := range p.Sets {
			e.set(name, s, found.Guard != nil)
		}
	}
}

func (e *examination) set(pool string, s *inspect.Set, guarded bool) {
	severity, remedy, full := OK, "", ""
	switch leaks := s.Leaked+s.Empty > 0; {
	case s.Full() && s.Live == s.Used:
		severity, remedy = Failure, "enlarge the pool, or run fewer pods on this node"
	case s.Full():
		severity, remedy = Failure, showOwners
	case s.NearlyFull():
		severity, remedy, full = Warning, showOwners, ": nearly full"
	case leaks && guarded:
		severity = Warning
		remedy = "list the leaked addresses with unwindctl sweep --dry-run --force; see the problem " +
			"of \"attachments\""
	case leaks:
		severity, remedy = Warning, "unwindctl sweep releases leaked and empty addresses"
	}
	e.add("pools", severity, remedy, "%s: %s (%d leaked, %d empty, %d unknown)%s", pool, s, s.Leaked,
		s.Empty, s.Unknown, full)
}

const showOwners = "unwindctl ipam -o wide shows each address's owner"

// doctor reports an error if the journal's disk has fewer than leastFree free bytes, or fewer than
// leastNodes free inodes. A journal takes a few MiB.
const (
	leastFree  = 64 << 20
	leastNodes = 100
)

// directory examines the state directory, and reports whether it contains a journal.
func (e *examination) directory(found *inspect.Report) bool {
	info, err := os.Stat(e.StateDir)
	if err == nil {
		e.files(info, found)
		_, err = os.Stat(filepath.Join(e.StateDir, "journal.db"))
	} else if errors.Is(err, fs.ErrNotExist) && found.Unwritable != nil {
		e.add("journal", Failure, "set stateDir in unwind's conflist to a directory that can be created",
			"%s does not exist and cannot be created: %v", e.StateDir, found.Unwritable)
		return false
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		e.add("journal", OK, "", "no journal in %s yet", e.StateDir)
	case err != nil:
		e.add("journal", Failure, inspect.HintFor(err), "%v", err)
	}
	return err == nil
}

// files examines the files in the state directory, and its disk.
func (e *examination) files(info fs.FileInfo, found *inspect.Report) {
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Mode&0o077 != 0 && info.IsDir() {
		severity := Warning
		if st.Mode&0o022 != 0 { // the plugin refuses such a directory
			severity = Failure
		}
		e.add("journal", severity, "if only unwind uses it, run chmod 0700 "+e.StateDir+"; otherwise, "+
			"install with another --state-dir",
			"%s has mode %04o: other users can access it", e.StateDir, st.Mode&0o7777)
	}
	if err := found.Unwritable; !e.disk() && err != nil {
		e.add("journal", Failure, term.HintOf(err),
			"the journal cannot be written, so ADDs and DELs are not recorded: %v", err)
	}
	for _, name := range []string{"journal.db", "journal.lock", "locks", "history.jsonl", "last-sweep",
		"sweep.lock", install.AgentLockName} {
		path, want := filepath.Join(e.StateDir, name), "regular file"
		info, err := os.Lstat(path)
		wrong := err == nil && !info.Mode().IsRegular()
		if name == "locks" {
			wrong, want = err == nil && !info.IsDir(), "directory"
		}
		if wrong {
			e.add("journal", Failure, "move it to another directory", "%s is not a %s", path, want)
		}
	}
	aside, _ := filepath.Glob(filepath.Join(e.StateDir, "journal.db.damaged-*"))
	if len(aside) > 0 {
		e.add("journal", Warning, "keep it until the cause is known, then remove it",
			"unwind set a damaged journal aside: %s", strings.Join(aside, ", "))
	}
	if e.agent != "" {
		e.add("agent", OK, "", "the agent runs as process %s", e.agent)
	}
}

// disk reports whether the state directory's disk is nearly full or read-only. It warns of a tmpfs.
func (e *examination) disk() (unwritable bool) {
	var st unix.Statfs_t
	if err := unix.Statfs(e.StateDir, &st); err != nil {
		return false
	}
	free := st.Bavail * uint64(st.Bsize)
	switch {
	case st.Flags&unix.ST_RDONLY != 0: // first, because such a file system may have no free space
		e.add("journal", Failure, "remount it read-write", "%s is on a read-only file system",
			e.StateDir)
		return true
	case free < leastFree:
		e.add("journal", Failure, "free disk space", "the disk of %s has only %d MiB left", e.StateDir,
			free>>20)
		return true
	case st.Files > 0 && st.Ffree < leastNodes:
		e.add("journal", Failure, "delete files that you don't need from that disk",
			"the disk of %s has only %d inodes left",
			e.StateDir, st.Ffree)
		return true
	case st.Type == unix.TMPFS_MAGIC:
		e.add("journal", Warning, "set stateDir in unwind's conflist to a directory on a disk",
			"%s is on tmpfs: a reboot deletes the journal, but not addresses that are stored on a disk",
			e.StateDir)
	}
	return false
}
