package plugin

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/env"
)

// The functions below prepare a node and its pods for a test, or change them during the test.

// keys are changes to unwind's entry. A nil value removes its key.
type keys = map[string]any

// hasty makes a plugin's deadline pass as soon as the plugin hangs, even in an ADD (see env.Hangs).
// It also shortens the wait for processes that a killed unwind left behind.
func (n *node) hasty() {
	n.Helper()
	n.conf["delegateTimeout"] = env.Long.Undo.String()
	n.mkdir(n.hangsDir())
	n.env = append(n.env, env.Hangs+"="+n.hangsDir())
	n.budget("Children=500ms")
}

// versions sets the cniVersion of unwind's conflist and of the chain.
func (n *node) versions(outer, inner string) { n.outer, n.inner = outer, inner }

// newNetwork adds a network to the machine. The new network gets the bridge, the subnet and the
// current chain of n.
func (n *node) newNetwork(name string) *node {
	other := *n
	other.network = n.first.network + "-" + name
	n.machine.networks = append(n.machine.networks, &other)
	return &other
}

// newNetworkOn returns another network with a bridge of its own.
func (n *node) newNetworkOn(bridgePrefix, name string) *node {
	other := n.newNetwork(name)
	other.bridge = bridgePrefix + n.bridge
	return other
}

// ip returns the address in the node's subnet whose last byte is host.
func (n *node) ip(host byte) string { return n.prefix(4, host).Addr().String() }

// poolFile is the path of one of host-local's files.
func (n *node) poolFile(name string) string { return filepath.Join(n.dataDir(), n.network, name) }

// reserve creates host-local's file for an address. owner is the container ID and perhaps the
// interface; without an owner, the file is empty.
func (n *node) reserve(address string, owner ...string) {
	n.Helper()
	n.mkdir(n.poolFile(""))
	n.write(n.poolFile(address), strings.Join(owner, "\r\n"))
}

// assignLowest makes host-local assign the lowest free address next.
func (n *node) assignLowest() {
	n.Helper()
	must(n, os.Remove(n.poolFile("last_reserved_ip.0")))
}

// loseReservation removes host-local's file of an address, so that host-local can assign it again.
func (n *node) loseReservation(address string) {
	n.Helper()
	must(n, os.Remove(n.poolFile(address)))
	n.assignLowest()
}

func (n *node) shell(format string, a ...any) {
	n.Helper()
	run(n, "sh", "-ec", fmt.Sprintf(format, a...))
}

// remove removes a file or a directory, if it exists.
func (n *node) remove(path string) {
	n.Helper()
	must(n, os.RemoveAll(path))
}

// awaitFile waits until a file exists.
func (n *node) awaitFile(path string) {
	n.Helper()
	eventually(n, path, func() bool { _, err := os.Lstat(path); return err == nil })
}

// heldFile is the path of the file that a faulty plugin creates when it holds a call. The call
// continues once the file is removed.
func (n *node) heldFile(verb, container, instance string) string {
	return filepath.Join(n.faultyDir(), "held", verb+"."+container+"."+instance)
}

// awaitHeld waits until a faulty plugin holds a call.
func (n *node) awaitHeld(verb, container, instance string) {
	n.Helper()
	n.awaitFile(n.heldFile(verb, container, instance))
}

// letGo releases a call that a faulty plugin holds.
func (n *node) letGo(verb, container, instance string) {
	n.Helper()
	n.remove(n.heldFile(verb, container, instance))
}

// awaitCall waits until a faulty plugin has logged a call, such as "ADD p0".
func (n *node) awaitCall(call string) {
	n.Helper()
	eventually(n, call, func() bool { return slices.Contains(n.calls(), call) })
}

// makeJournal creates an empty journal.
func (n *node) makeJournal() {
	n.Helper()
	must(n, n.store.Update(n.Context(), func(*journal.Tx) error { return nil }))
}

// breakPlugin makes the DELs of a plugin in CNI_PATH fail until repair is called.
func (n *node) breakPlugin(plugin string) (repair func()) {
	n.Helper()
	path, err := netconf.FindPlugin(plugin, strings.Join(n.path, ":"))
	must(n, err)
	flag := filepath.Join(n.dir, plugin+".broken")
	n.script(plugin, "[ $CNI_COMMAND = DEL ] && [ -e "+flag+" ] && exit 1\nexec "+path)
	n.write(flag, "")
	return func() { must(n, os.Remove(flag)) }
}

// pauseLast delays the DEL of Steps[0] in each of the journal's last records; count says how many.
func (n *node) pauseLast(count int, pause time.Duration) {
	n.Helper()
	all, until := n.records(), journal.BootNanos()+int64(pause)
	must(n, n.store.Update(n.Context(), func(tx *journal.Tx) (err error) {
		for _, e := range all[len(all)-count:] {
			e.Steps[0].Next.At = until
			err = errors.Join(err, tx.Put(e))
		}
		return err
	}))
}

// newPod creates a pod with a network namespace and a host port.
func (n *node) newPod(name string) *pod {
	n.Helper()
	p := n.pod(name)
	p.CapabilityArgs = map[string]any{"portMappings": []map[string]any{
		{"hostPort": 20000 + len(n.machine.pods), "containerPort": 80, "protocol": "tcp"}}}
	return p.known()
}

// known adds the pod to the machine's list of pods.
func (p *pod) known() *pod {
	p.machine.pods = append(p.machine.pods, p)
	return p
}

// add creates a pod and runs its ADD.
func (n *node) add(name string) *pod {
	n.Helper()
	p := n.newPod(name)
	p.add()
	return p
}

// crowd adds pods NAME00, NAME01, …, four at a time.
func (n *node) crowd(count int, name string) (all []*pod) {
	n.Helper()
	slots, errs := make(chan bool, 4), make(chan error)
	for i := range count {
		p := n.newPod(fmt.Sprintf("%s%02d", name, i))
		all = append(all, p)
		list := p.wrapped()
		go func() {
			slots <- true
			_, err := p.addWith(list)
			<-slots
			errs <- err
		}()
	}
	for range all {
		must(n, <-errs)
	}
	return all
}

// attachments returns the pods' attachments, as CONTAINER.INTERFACE.
func attachments(pods ...[]*pod) (all []string) {
	for _, p := range slices.Concat(pods...) {
		all = append(all, p.ContainerID+"."+p.IfName)
	}
	return all
}

// copies adds copies of the pod's record, for the containers ID-1, ID-2, …. The copies belong to
// the Kubernetes pod podName or, if that is "", to the original's pod.
func (p *pod) copies(count int, podName string) {
	p.Helper()
	name, taken := cmp.Or(podName, p.record().Added.Pod.Name), p.taken()
	must(p, p.store.Update(p.Context(), func(tx *journal.Tx) error {
		for i := range count {
			e, err := tx.Get(p.key())
			must(p, err)
			id, state := fmt.Sprintf("%s-%d", p.ContainerID, i+1), e.State
			e.ContainerID, e.Number, e.Added.Pod.Name = id, 0, name
			for _, e.State = range []journal.State{journal.Adding, state} {
				must(p, tx.Put(e))
			}
			for _, file := range taken { // what the faulty plugins allocated for the pod
				if rest, is := strings.CutPrefix(file, p.ContainerID+"."); is {
					p.write(filepath.Join(p.faultyDir(), "taken", id+"."+rest), "")
				}
			}
		}
		return nil
	}))
}

// damage makes the pod's record unreadable.
func (p *pod) damage() {
	p.Helper()
	p.editJournal(func(tx *bolt.Tx) error {
		entries, prefix := tx.Bucket([]byte("records")), []string{p.network, p.ContainerID, p.IfName}
		key, _ := entries.Cursor().Seek([]byte(strings.Join(prefix, "\x00")))
		return entries.Put(bytes.Clone(key), []byte(`{"network":`))
	})
}

// nextSandbox returns a new sandbox of the same Kubernetes pod, with this container ID.
func (p *pod) nextSandbox(container string) *pod {
	p.Helper()
	next := p.pod(container)
	next.Args, next.CapabilityArgs = p.Args, p.CapabilityArgs
	return next.known()
}

// second returns a second interface of the pod's container, in this network.
func (n *node) second(p *pod) *pod {
	second := &pod{node: n, RuntimeConf: p.RuntimeConf}
	second.IfName = "net1"
	return second.known()
}

// move gives the pod a new network namespace.
func (p *pod) move(name string) {
	p.Helper()
	p.NetNS = p.netns(name)
}

// unpin unmounts the pod's network namespace and leaves an empty file at its path.
func (p *pod) unpin() {
	p.Helper()
	must(p, unix.Unmount(p.NetNS, unix.MNT_DETACH))
}

// takePath mounts the pod's network namespace at another pod's former path.
func (p *pod) takePath(other *pod) {
	p.Helper()
	p.write(other.NetNS, "")
	p.mount(p.NetNS, other.NetNS, "", unix.MS_BIND, "")
	p.NetNS = other.NetNS
}

// keepCache runs a request, and then restores libcni's cached result of the pod.
func (p *pod) keepCache(request func()) {
	p.Helper()
	cached := read(p, p.cacheFile())
	request()
	p.write(p.cacheFile(), cached)
}

// lock acquires the attachment's lock.
func (p *pod) lock() (unlock func()) {
	p.Helper()
	lock, err := (&journal.Store{Dir: p.stateDir}).TryAcquire(p.key())
	must(p, err)
	p.Cleanup(lock.Release)
	return lock.Release
}

// awaitLock waits until nobody holds the attachment's lock.
func (p *pod) awaitLock() {
	p.Helper()
	eventually(p, "its lock is free", func() bool {
		lock, err := p.store.LookAtLock(p.key())
		return !lock.Held && err == nil
	})
}

// hold keeps the pod's network namespace open, in a process outside it, until end is called.
func (p *pod) hold() (end func()) {
	p.Helper()
	f, err := os.Open(p.NetNS)
	must(p, err)
	defer f.Close()
	cmd := exec.Command("sleep", "60")
	cmd.ExtraFiles = []*os.File{f}
	return p.spawn(cmd)
}

// reboot removes the pod's network namespace and moves its record to an earlier boot.
func (p *pod) reboot() {
	p.Helper()
	p.dropNetNS()
	p.ofEarlierBoot()
}

// seenElsewhere changes the pod's record as if its ADD had run in another mount namespace.
func (p *pod) seenElsewhere() {
	p.Helper()
	p.edit(func(e *journal.Record) { e.Added.Host.MountNS = "mnt:[1]" })
}

// ofAnotherMachine changes the pod's record as if this disk were a copy of another machine's.
func (p *pod) ofAnotherMachine() {
	p.Helper()
	kind, _, _ := strings.Cut(facts.This().Machine, ":")
	if kind == "" {
		p.Skip("this machine has no name")
	}
	p.edit(func(e *journal.Record) {
		e.Added.Host.BootID, e.Added.Host.Machine = earlier, kind+":another"
	})
}

func (p *pod) setState(state journal.State) {
	p.Helper()
	p.edit(func(e *journal.Record) { e.State = state })
}

// cutOff changes the pod's record as if unwind had been killed while the ADD's first plugin ran.
func (p *pod) cutOff() {
	p.Helper()
	must(p, os.RemoveAll(p.cacheFile()))
	p.edit(func(e *journal.Record) { e.State, e.Got = journal.Adding, journal.Got{} })
}

// rawJSON returns formatted JSON as the value of a key.
func rawJSON(format string, a ...any) json.RawMessage { return fmt.Appendf(nil, format, a...) }
