package plugin

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"cni-unwind/journal"
	"cni-unwind/plugin/undo"
)

// General checks.

func (n *node) want(is bool, format string, a ...any) {
	n.Helper()
	if !is {
		n.Errorf(format, a...)
	}
}

func (n *node) wantCount(what string, got, want int) {
	n.Helper()
	n.want(got == want, "%s: there are %d, not %d", what, got, want)
}

func (n *node) wantEqual(what string, got, want []string) {
	n.Helper()
	n.want(slices.Equal(got, want), "%s: %q, not %q", what, got, want)
}

// wantClean checks that nothing is left in any network of the machine.
func (n *node) wantClean() {
	n.Helper()
	for _, one := range n.machine.networks {
		one.nothingLeft()
	}
}

// The checks below compare the calls of faulty plugins since the last forgetCalls. A call has the
// form "DEL p0".

// wantCalls checks that there were exactly these calls in this order, and forgets them.
func (n *node) wantCalls(calls ...string) {
	n.Helper()
	n.wantEqual("calls", n.calls(), calls)
	n.forgetCalls()
}

// wantCallsInAnyOrder checks that there were exactly these calls, given in sorted order.
func (n *node) wantCallsInAnyOrder(calls ...string) {
	n.Helper()
	got := n.calls()
	slices.Sort(got)
	n.wantEqual("calls", got, calls)
}

func (n *node) wantTimes(times int, call string) {
	n.Helper()
	others := func(c string) bool { return c != call }
	n.wantCount(call, len(slices.DeleteFunc(n.calls(), others)), times)
}

// wantBegan checks the first entries of the call log, such as "start ADD p0" and "end ADD p0".
func (n *node) wantBegan(phases ...string) {
	n.Helper()
	var got []string
	for _, l := range n.wholeLog() {
		got = append(got, fmt.Sprintf("%s %s %s", l.Phase, l.Command, l.Instance))
	}
	n.wantEqual("phases", got[:min(len(got), len(phases))], phases)
}

// wantEnded waits until the process of the first call of this form has ended.
func (n *node) wantEnded(call string) {
	n.Helper()
	pid := n.callLog()[slices.Index(n.calls(), call)].PID
	ended := func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }
	eventually(n, "the end of "+call, ended)
}

// wantPrevious checks that the prevResult of each DEL and CHECK contained exactly these addresses.
func (n *node) wantPrevious(addresses ...string) {
	n.Helper()
	for _, l := range n.callLog() {
		if l.Command != "ADD" {
			got, want := l.prevAddresses(n), strings.Join(addresses, " ")
			n.want(got == want, "%s had %s", l.Instance, got)
		}
	}
}

// wantStdin checks that each call of an instance got this value for a key on stdin.
func (n *node) wantStdin(instance, key, value string) {
	n.Helper()
	for _, l := range n.callLog() {
		got := string(l.Stdin[key])
		n.want(l.Instance != instance || got == value, "%s got %s", l.Command, got)
	}
}

// wantSameInput checks that the call log begins with this number of ADDs and ends with their DELs,
// in reverse order and with the same input, except for prevResult.
func (n *node) wantSameInput(count int) {
	n.Helper()
	all := n.callLog()
	for i, del := range all[len(all)-count:] {
		add := all[count-1-i]
		delete(add.Stdin, "prevResult")
		delete(del.Stdin, "prevResult")
		n.want(add.Command == "ADD" && del.Command == "DEL" && reflect.DeepEqual(add.Stdin, del.Stdin) &&
			add.Args == del.Args && add.NetNS == del.NetNS && add.Path == del.Path,
			"ADD %s had %.1000s, %.1000q; its DEL %.1000s, %.1000q",
			add.Instance, add.Stdin, add.Args, del.Stdin, del.Args)
	}
}

// wantShown checks that the i-th call got the network namespace of the i-th pod.
func (n *node) wantShown(pods ...*pod) {
	n.Helper()
	log := n.callLog()
	n.wantCount("calls", len(log), len(pods))
	for i, l := range log[:min(len(log), len(pods))] {
		n.want(l.NetNS == pods[i].NetNS && l.Args != "", "%+v", l)
	}
}

// wantTogether checks that the DELs of each attachment ran one after the other, p1's first. It also
// checks that DELs of at least the given number of attachments ran at the same time.
func (n *node) wantTogether(attachments int) {
	n.Helper()
	running, done, most := map[string]string{}, map[string]string{}, 0
	for _, l := range n.wholeLog() {
		if l.Phase == "end" {
			delete(running, l.ContainerID)
			continue
		}
		n.want(running[l.ContainerID] == "", "%s: two at once", l.ContainerID)
		running[l.ContainerID] = l.Instance
		done[l.ContainerID] += l.Instance
		most = max(most, len(running))
	}
	for id, instances := range done {
		n.want(instances == "p1p0", "%s: %s", id, instances)
	}
	n.want(most >= attachments, "%d attachments at once", most)
}

// wantDELs checks how many DELs for this pod the faulty plugins got.
func (p *pod) wantDELs(count int) {
	p.Helper()
	p.wantCount("DELs of "+p.ContainerID, len(p.dels()), count)
}

// Resources of faulty plugins, host-local and firewall.

// wantTaken checks that faulty plugins hold exactly these files (CONTAINER.INTERFACE.INSTANCE).
func (n *node) wantTaken(files ...string) {
	n.Helper()
	n.wantEqual("taken", n.taken(), files)
}

// wantRules checks that faulty plugins hold exactly these rules (ADDRESS.INSTANCE).
func (n *node) wantRules(rules ...string) {
	n.Helper()
	n.wantEqual("rules", n.addressRules(), rules)
}

// wantReserved checks how many addresses host-local has assigned in this network.
func (n *node) wantReserved(count int) {
	n.Helper()
	n.want(len(n.reserved()) == count, "reserved, not %d: %v", count, n.reserved())
}

// wantOwners checks that host-local has assigned exactly these addresses. Each owner has the form
// "ADDRESS CONTAINER INTERFACE".
func (n *node) wantOwners(owners ...string) {
	n.Helper()
	var got []string
	for address, owner := range n.reserved() {
		got = append(got, address+" "+owner)
	}
	slices.Sort(got)
	n.wantEqual("owners", got, owners)
}

// wantAddress checks the address that the pod's last ADD returned.
func (p *pod) wantAddress(address string) {
	p.Helper()
	if p.address != address {
		p.Fatalf("%s has %s, not %s", p.ContainerID, p.address, address)
	}
}

// wantHostPorts checks how many rules forward a host port to an address.
func (n *node) wantHostPorts(address string, count int) {
	n.Helper()
	n.wantCount("host ports", len(n.rules("--to-destination "+address+":80")), count)
}

func (n *node) wantOpen(address string) {
	n.Helper()
	n.want(n.open(address), "%s is closed", address)
}

func (n *node) wantClosed(address string) {
	n.Helper()
	n.want(!n.open(address), "%s is open", address)
}

// The journal.

// wantRecord checks the state of the pod's newest record. The optional counts are the number of
// pending DELs in all records of the pod, and the number of these records.
func (p *pod) wantRecord(state journal.State, counts ...int) {
	p.Helper()
	e, all, steps := p.record(), p.records(), 0
	if e == nil {
		p.Fatalf("%s has no record", p.ContainerID)
	}
	for _, one := range all {
		steps += len(one.Steps)
	}
	got := []int{steps, len(all)}[:len(counts)]
	p.want(e.State == state && slices.Equal(got, counts), "%s is %s, %v, not %s, %v: %s",
		p.ContainerID, e.State, got, state, counts, asJSON(p, e))
}

// wantKept checks that the pod has a record.
func (p *pod) wantKept() {
	p.Helper()
	if p.record() == nil {
		p.Fatalf("%s has no record", p.ContainerID)
	}
}

// wantGone checks that the pod has no record.
func (p *pod) wantGone() {
	p.Helper()
	if e := p.record(); e != nil {
		p.Errorf("kept: %s, %s, %v, %s", e.Key, e.State, undo.PendingSteps(e), e.Reason)
	}
}

// awaitGone waits until the sweep that a STATUS started has removed the pod's record.
func (p *pod) awaitGone() {
	p.Helper()
	eventually(p, "no record of "+p.ContainerID, func() bool { return p.record() == nil })
}

// wantPending checks which plugins have pending DELs: first those of the newest record, in the
// order of the chain.
func (p *pod) wantPending(plugins ...string) {
	p.Helper()
	var got []string
	for _, e := range p.records() {
		for _, step := range e.Steps {
			var conf struct{ Instance string }
			_ = json.Unmarshal(step.Config, &conf)
			got = append(got, cmp.Or(conf.Instance, step.Type))
		}
	}
	p.wantEqual("pending", got, plugins)
}

func (n *node) wantRecords(count int) {
	n.Helper()
	n.wantCount("records", len(n.records()), count)
}

// wantAttachments checks that exactly these attachments (CONTAINER.INTERFACE) are in the journal,
// and that p0 holds a file for each of them and for no other.
func (n *node) wantAttachments(want ...string) {
	n.Helper()
	var known, taken []string
	for _, e := range n.records() {
		known = append(known, e.ContainerID+"."+e.IfName)
	}
	for _, file := range n.taken() {
		taken = append(taken, strings.TrimSuffix(file, ".p0"))
	}
	slices.Sort(want)
	slices.Sort(known)
	slices.Sort(taken)
	n.want(slices.Equal(known, want) && slices.Equal(taken, want), "journal %q, taken %q", known, taken)
}

func (n *node) wantLocks(count int) {
	n.Helper()
	n.wantCount("locks", len(n.names(filepath.Join(n.stateDir, "locks"))), count)
}

// wantAbandoned checks that the pod has a record in state abandoned, as after "unwindctl forget".
func (p *pod) wantAbandoned() {
	p.Helper()
	p.want(p.abandoned(p.key()) != nil, "%s is not forgotten", p.ContainerID)
}

// wantUncached checks that libcni's cache has no result of the pod.
func (p *pod) wantUncached() {
	p.Helper()
	_, err := os.Stat(p.cacheFile())
	p.want(errors.Is(err, os.ErrNotExist), "%s: %v", p.ContainerID, err)
}

func (n *node) wantAbsent(path string) {
	n.Helper()
	_, err := os.Lstat(path)
	n.want(os.IsNotExist(err), "%v", err)
}

// The traces of a pod: see pod.traces.

// seen contains the traces that a pod had.
type seen struct {
	marks  marks
	traces string
}

// remember stores the traces that the pod has now.
func (p *pod) remember() {
	p.Helper()
	m := p.marks(p.added)
	p.seen = seen{m, p.whole(m)}
	p.want(strings.Count(p.seen.traces, "\n") > 0, "%s has only %q", p.ContainerID, p.seen.traces)
}

// wantUnchanged checks that the pod has exactly the traces that remember stored.
func (p *pod) wantUnchanged() {
	p.Helper()
	if got := p.whole(p.seen.marks); got != p.seen.traces {
		p.Fatalf("%s has\n%s\nand had\n%s", p.ContainerID, got, p.seen.traces)
	}
}

// wantVanished checks that none of the traces that remember stored exists.
func (p *pod) wantVanished() {
	p.Helper()
	left := p.whole(p.seen.marks)
	p.want(left == "", "left of %s:\n%s", p.ContainerID, left)
}

func (p *pod) wantPing() {
	p.Helper()
	p.pingsGateways(p.added)
}

// unwind's output and history.

// wantLogged checks that a verb that succeeded has logged this text.
func (n *node) wantLogged(text string) {
	n.Helper()
	n.want(strings.Contains(n.log(), text), "the log has no %q", text)
}

func (n *node) wantLoggedTimes(count int, text string) {
	n.Helper()
	n.wantCount(fmt.Sprintf("%q in the log", text), strings.Count(n.log(), text), count)
}

// wantWarned checks that unwind wrote this text to stderr in the last GC, STATUS or pod.give.
func (n *node) wantWarned(text string) {
	n.Helper()
	n.want(strings.Contains(n.said.stderr, text), "no %q in %s", text, n.said.stderr)
}

func (n *node) wantNotWarned(text string) {
	n.Helper()
	n.want(!strings.Contains(n.said.stderr, text), "%q in %s", text, n.said.stderr)
}

// wantDetails checks the details of the error that the last GC, STATUS or pod.give returned.
func (n *node) wantDetails(details string) {
	n.Helper()
	n.want(n.said.said.Details == details, "details %q, not %q", n.said.said.Details, details)
}

// wantEvents checks how each event in the history begins.
func (n *node) wantEvents(beginnings ...string) {
	n.Helper()
	n.want(slices.EqualFunc(n.events(), beginnings, strings.HasPrefix), "events: %q, not %q",
		n.events(), beginnings)
}

// wantCounters checks all counters that are not 0, in the form "NAME LABELS N".
func (n *node) wantCounters(counters ...string) {
	n.Helper()
	var got []string
	for name, count := range n.counters() {
		got = append(got, fmt.Sprint(name, " ", count))
	}
	slices.Sort(got)
	n.wantEqual("counters", got, counters)
}

// wantWithin checks that a function returns within this time.
func (n *node) wantWithin(most time.Duration, what func()) {
	n.Helper()
	began := time.Now()
	what()
	n.Logf("it took %s", time.Since(began))
	n.want(time.Since(began) < most, "it took %s", time.Since(began))
}

func asJSON(t testing.TB, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	must(t, err)
	return string(text)
}

// nothingLeft checks that no resource of the network is left, and that the journal is empty.
func (n *node) nothingLeft() {
	n.Helper()
	n.nothingOnDisk()
	// The kernel removes the ports of a deleted namespace with some delay.
	eventually(n, n.bridge+" has no ports", func() bool { return len(n.ports()) == 0 })
	n.noRules()
}

// ports returns the names of the bridge's ports.
func (n *node) ports() (names []string) {
	n.Helper()
	bridge, err := netlink.LinkByName(n.bridge)
	if err != nil {
		return nil
	}
	links, err := netlink.LinkList()
	for errors.Is(err, netlink.ErrDumpInterrupted) { // other tests create and remove interfaces
		links, err = netlink.LinkList()
	}
	must(n, err)
	for _, l := range links {
		if l.Attrs().MasterIndex == bridge.Attrs().Index {
			names = append(names, l.Attrs().Name)
		}
	}
	return names
}

// noRules checks that no firewall rule contains an address of the node's subnet, or the network's
// name in its comment.
func (n *node) noRules() {
	n.Helper()
	if !n.ruled.Load() {
		return
	}
	if rules := n.rules(strings.TrimSuffix(n.subnet, "0/24"), fmt.Sprintf(`name: \"%s\"`, n.network)); len(rules) > 0 {
		n.Errorf("rules are left:\n%s", strings.Join(rules, "\n"))
	}
}

// nothingOnDisk checks that faulty plugins and host-local hold nothing, and that the journal has no
// record and no lock file.
func (n *node) nothingOnDisk() {
	n.Helper()
	if taken := n.taken(); len(taken) > 0 {
		n.Errorf("faulty plugins still hold %v", taken)
	}
	if reserved := n.reserved(); len(reserved) > 0 {
		n.Errorf("host-local still holds %v", reserved)
	}
	for _, e := range n.records() {
		n.Errorf("the journal still has %s: %s, %v (%s)", e.Key, e.State, undo.PendingSteps(e), e.Reason)
	}
	if locks := n.names(filepath.Join(n.stateDir, "locks")); len(locks) > 0 {
		n.Errorf("%d lock files are left", len(locks))
	}
}
