package plugin

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
)

// whole returns everything that is visible of an added pod: its traces, sorted.
func (p *pod) whole(m marks) string {
	traces := p.traces(m)
	slices.Sort(traces)
	return strings.Join(traces, "\n")
}

// edit changes the pod's entry in the journal, past the rules for a change of state.
func (p *pod) edit(change func(*journal.Entry)) {
	p.Helper()
	err := p.store.Update(context.Background(), func(tx *journal.Tx) error {
		e, err := tx.Get(p.key())
		if err != nil {
			return err
		}
		if err := tx.Delete(e); err != nil {
			return err
		}
		change(e)
		e.Number = 0
		for _, e.Undo.State = range []journal.State{journal.Adding, e.Undo.State} {
			if err := tx.Put(e); err != nil {
				return err
			}
		}
		return nil
	})
	must(p, err)
}

// again returns the pod with a new network namespace under the same container ID, as nerdctl,
// podman and Nomad do.
func (p *pod) again() *pod {
	p.Helper()
	next := &pod{p.node, p.RuntimeConf}
	next.NetNS = p.netns(p.ContainerID + "-again")
	return next
}

// earlier is the ID of the boot before this one.
const earlier = "11111111-2222-3333-4444-555555555555"

// ofEarlierBoot moves the pod's entry to an earlier boot.
func (p *pod) ofEarlierBoot() { p.edit(func(e *journal.Entry) { e.Added.Host.BootID = earlier }) }

// spawn starts a process. It returns a function that ends it, as the end of the test does.
func (n *node) spawn(cmd *exec.Cmd) (end func()) {
	n.Helper()
	must(n, cmd.Start())
	end = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	n.Cleanup(end)
	return end
}

// processInside starts a process in the pod's network namespace.
func (p *pod) processInside() *os.Process {
	p.Helper()
	own, err := facts.Look(p.NetNS, "")
	must(p, err)
	cmd := exec.Command("nsenter", "--net="+p.NetNS, "sleep", "60")
	p.spawn(cmd)
	eventually(p, "a process inside", func() bool {
		there, err := facts.Look(netnsOf(cmd.Process), "")
		return err == nil && there.Netns.Same(own.Netns)
	})
	return cmd.Process
}

// end ends a process and waits until it is gone.
func (p *pod) end(process *os.Process) {
	p.Helper()
	_ = process.Kill()
	eventually(p, "the process gone", func() bool { return ended(process) })
}

// ended reports whether the first thread of a process is gone, or a zombie.
func ended(p *os.Process) bool {
	_, err := os.Readlink(netnsOf(p))
	return err != nil
}

func netnsOf(p *os.Process) string { return fmt.Sprintf("/proc/%d/ns/net", p.Pid) }

// open reports whether the firewall accepts traffic of an address.
func (n *node) open(address string) bool {
	n.Helper()
	switch rules := n.rules(" " + address + "/32 "); len(rules) {
	case 0:
		return false
	case 2:
		return true
	default:
		n.Fatalf("half open: %q", rules)
		return false
	}
}

// second is another attachment of the pod to the same network.
func (p *pod) second() *pod {
	second := &pod{p.node, p.RuntimeConf}
	second.IfName = "net1"
	return second
}

func read(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return string(data)
}

// records returns the records of all ADDs of the pod that are not undone, newest first.
func (p *pod) records() (all []*journal.Entry) {
	p.Helper()
	for _, e := range p.entries() {
		if e.Key == p.key() {
			all = append([]*journal.Entry{e}, all...)
		}
	}
	return all
}
