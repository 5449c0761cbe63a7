package plugin

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/plugintest/sandbox"
)

// pod is a container ID with a network namespace on a node.
type pod struct {
	*node
	libcni.RuntimeConf
	added   types.Result // the result of its last ADD
	address string       // the first address of that result
	printed string       // the result that the last ADD by pod.give printed
	seen    seen         // set by pod.remember
}

// pod creates a network namespace, and returns a pod that uses it.
func (n *node) pod(name string) *pod {
	n.Helper()
	return &pod{node: n, RuntimeConf: libcni.RuntimeConf{
		ContainerID: name, NetNS: n.netns(name), IfName: "eth0",
		Args: [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", name}},
	}}
}

// netns creates a network namespace that a mount keeps alive, and returns its path.
func (n *node) netns(name string) string {
	n.Helper()
	path := filepath.Join(n.dir, "netns", name)
	n.mkdir(filepath.Dir(path))
	must(n, os.WriteFile(path, nil, 0o600))
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with its goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err == nil {
			err = unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
		}
		done <- err
	}()
	must(n, <-done)
	n.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

// dropNetNS removes the pod's network namespace, as a runtime does, and waits until the host ends
// of its interfaces are gone.
func (p *pod) dropNetNS() {
	p.Helper()
	must(p, unix.Unmount(p.NetNS, unix.MNT_DETACH))
	must(p, os.Remove(p.NetNS))
	records := p.node.records()
	eventually(p, "host interfaces of "+p.ContainerID+" gone", func() bool {
		for _, e := range records {
			if e.ContainerID == p.ContainerID {
				if there, _ := facts.LinkThere(e.Got.HostLinks); there {
					return false
				}
			}
		}
		return true
	})
}

func (p *pod) addWith(list *libcni.NetworkConfigList) (types.Result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	return p.cni.AddNetworkList(ctx, list, &p.RuntimeConf)
}

func (p *pod) delWith(list *libcni.NetworkConfigList) error {
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	return p.cni.DelNetworkList(ctx, list, &p.RuntimeConf)
}

func (p *pod) checkWith(list *libcni.NetworkConfigList) error {
	ctx, cancel := context.WithTimeout(context.Background(), sandbox.Patience)
	defer cancel()
	return p.cni.CheckNetworkList(ctx, list, &p.RuntimeConf)
}

func (p *pod) mustAdd(list *libcni.NetworkConfigList) types.Result {
	p.Helper()
	r, err := p.addWith(list)
	if err != nil {
		p.Fatalf("ADD %s: %v", p.ContainerID, err)
	}
	return r
}

func (p *pod) mustDel(list *libcni.NetworkConfigList) {
	p.Helper()
	if err := p.delWith(list); err != nil {
		p.Fatalf("DEL %s: %v", p.ContainerID, err)
	}
}

// key returns the key of the pod's attachment.
func (p *pod) key() journal.Key {
	return journal.Key{Network: p.network, ContainerID: p.ContainerID, IfName: p.IfName}
}

// record returns the pod's newest record in the journal, or nil.
func (p *pod) record() *journal.Record {
	p.Helper()
	if all := p.records(); len(all) > 0 {
		return all[0]
	}
	return nil
}

// cacheFile is the path of libcni's cached result of the pod's ADD.
func (p *pod) cacheFile() string {
	return filepath.Join(p.cacheDir(), fmt.Sprintf("%s-%s-%s", p.network, p.ContainerID, p.IfName))
}

// whole returns the traces of an added pod, sorted, one per line.
func (p *pod) whole(m marks) string {
	traces := p.traces(m)
	slices.Sort(traces)
	return strings.Join(traces, "\n")
}

// edit changes the pod's newest record, even to a state that the journal would refuse.
func (p *pod) edit(change func(*journal.Record)) {
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
		for _, e.State = range []journal.State{journal.Adding, e.State} {
			if err := tx.Put(e); err != nil {
				return err
			}
		}
		return nil
	})
	must(p, err)
}

// again returns a pod with the same container ID and a new network namespace, as when nerdctl,
// podman or Nomad restarts a container.
func (p *pod) again() *pod {
	p.Helper()
	next := &pod{node: p.node, RuntimeConf: p.RuntimeConf}
	next.NetNS = p.netns(p.ContainerID + "-again")
	return next
}

// earlier is the ID of an earlier boot.
const earlier = "11111111-2222-3333-4444-555555555555"

// ofEarlierBoot changes the pod's newest record as if its ADD had run in an earlier boot.
func (p *pod) ofEarlierBoot() { p.edit(func(e *journal.Record) { e.Added.Host.BootID = earlier }) }

// spawn starts a process. end kills it. If the test does not call end, the process is killed when
// the test ends.
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
	own, err := facts.InterfaceAt(p.NetNS, "")
	must(p, err)
	cmd := exec.Command("nsenter", "--net="+p.NetNS, "sleep", "60")
	p.spawn(cmd)
	eventually(p, "a process inside", func() bool {
		there, err := facts.InterfaceAt(netnsOf(cmd.Process), "")
		return err == nil && there.Netns.Same(own.Netns)
	})
	return cmd.Process
}

// end kills a process and waits until it has ended.
func (p *pod) end(process *os.Process) {
	p.Helper()
	_ = process.Kill()
	eventually(p, "the process gone", func() bool { return ended(process) })
}

// ended reports whether a process's first thread has ended, even if that thread is still a zombie.
func ended(p *os.Process) bool {
	_, err := os.Readlink(netnsOf(p))
	return err != nil
}

func netnsOf(p *os.Process) string { return fmt.Sprintf("/proc/%d/ns/net", p.Pid) }

// open reports whether the firewall accepts the traffic of an address.
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

func read(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	must(t, err)
	return string(data)
}

// records returns the pod's records, newest first: one for each ADD that is not undone.
func (p *pod) records() (all []*journal.Record) {
	p.Helper()
	for _, e := range p.node.records() {
		if e.Key == p.key() {
			all = append([]*journal.Record{e}, all...)
		}
	}
	return all
}
