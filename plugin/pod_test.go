package plugin

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
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

// breakable puts a program before a reference plugin, whose DEL fails while broken is set.
func (n *node) breakable(plugin string) (broken func(bool)) {
	n.Helper()
	real, err := netconf.FindPlugin(plugin, strings.Join(n.path, ":"))
	must(n, err)
	flag := filepath.Join(n.dir, plugin+".broken")
	n.script(plugin, fmt.Sprintf("[ \"$CNI_COMMAND\" = DEL ] && [ -e %s ] && exit 1\nexec %s", flag, real))
	return func(is bool) {
		if is {
			err = os.WriteFile(flag, nil, 0o600)
		} else {
			err = os.Remove(flag)
		}
		must(n, err)
	}
}

// cutOff gives the journal and libcni's cache the state of an ADD that was cut off in its first
// delegate.
func (p *pod) cutOff() {
	p.Helper()
	must(p, os.RemoveAll(p.cacheFile()))
	p.edit(func(e *journal.Entry) {
		e.Undo.State, e.Got.Result, e.Got.Claims, e.Got.HostLinks = journal.Adding, nil, nil, nil
	})
}

// earlier is the ID of the boot before this one.
const earlier = "11111111-2222-3333-4444-555555555555"

// ofEarlierBoot moves the pod's entry to an earlier boot.
func (p *pod) ofEarlierBoot() { p.edit(func(e *journal.Entry) { e.Added.Host.BootID = earlier }) }

// holder starts a process that has the pod's namespace open. It returns a function that ends it.
func (p *pod) holder() (end func()) {
	p.Helper()
	f, err := os.Open(p.NetNS)
	must(p, err)
	defer f.Close()
	cmd := exec.Command("sleep", "60")
	cmd.ExtraFiles = []*os.File{f}
	return p.spawn(cmd)
}

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

// forget removes host-local's reservation of an address, so that the next pod gets it.
func (n *node) forget(address string) {
	n.Helper()
	must(n, os.Remove(filepath.Join(n.dataDir(), n.network, address)))
	n.lowestNext()
}

// unpin unmounts the pod's network namespace from its path and leaves an empty file.
func (p *pod) unpin() {
	p.Helper()
	must(p, unix.Unmount(p.NetNS, unix.MNT_DETACH))
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

// lowestNext makes host-local give the lowest free address to the next pod.
func (n *node) lowestNext() {
	n.Helper()
	must(n, os.Remove(filepath.Join(n.dataDir(), n.network, "last_reserved_ip.0")))
}

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
