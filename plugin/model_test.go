package plugin

import (
	"encoding/json"
	cmdline "flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"pgregory.net/rapid"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/sandbox"
)

// TestModel runs random operations on a small node, and kills unwind at random crash points. After
// each operation, every live container must still have everything that its ADD allocated, and no
// other container may have its address. The journal must contain a DEL for everything that is
// allocated. At the end, all containers are removed, and the plugins work again. Then the runtime's
// DELs, or two GCs, must leave nothing. Every other subtest uses the real firewall plugin.
// -rapid.checks and -rapid.steps set the numbers of runs and operations; -rapid.seed repeats a
// failure.
func TestModel(t *testing.T) {
	t.Parallel()
	given := map[string]bool{}
	cmdline.Visit(func(f *cmdline.Flag) { given[f.Name] = true })
	for name, value := range map[string]string{"rapid.checks": strconv.Itoa(sandbox.Rounds(2, 3, 3)), "rapid.steps": "25", "rapid.nofailfile": "true"} {
		if _, env := os.LookupEnv(strings.ToUpper(strings.ReplaceAll(name, ".", "_"))); !env && !given[name] {
			must(t, cmdline.Set(name, value))
		}
	}
	for i := range sandbox.Rounds(2, 4, 4) {
		t.Run(fmt.Sprintf("world %d", i), func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, func(try *rapid.T) {
				w := newWorld(t, try, i%2 == 1)
				try.Repeat(map[string]func(*rapid.T){
					"":              func(*rapid.T) { w.invariants() },
					"ADD":           w.someADD,
					"ADD again":     w.someADD,
					"DEL":           w.someDEL,
					"DEL again":     w.someDEL,
					"namespace":     w.someNamespaceGoes,
					"process":       w.someProcess,
					"STATUS":        func(*rapid.T) { w.status() },
					"GC":            w.someGC,
					"plugin breaks": w.somethingBreaks,
					"plugins heal":  func(*rapid.T) { w.heal() },
					"kill":          func(try *rapid.T) { w.killAt = rapid.IntRange(1, 20).Draw(try, "at point") },
					"reboot":        func(*rapid.T) { w.reboot() },
				})
				w.end(rapid.Bool().Draw(try, "the runtime forgets"))
			})
		})
	}
}

// hit runs a verb. If w.killAt is set, hit kills unwind at that crash point. The result healthy is
// false if w.killAt was set, or if a plugin was set to fail.
func (w *world) hit(verb func() error) (healthy bool, err error) {
	healthy, at := w.healthy(), w.killAt
	if w.killAt = 0; at == 0 {
		err = verb()
	} else {
		err = w.killedAtPoint("", at, verb)
	}
	w.note("  killed at %d: %v", at, err)
	return healthy, err
}

// someADD adds a container, in its present network namespace or, like runtimes that reuse container
// IDs, in a new one.
func (w *world) someADD(try *rapid.T) {
	r := w.some(try)
	next, busy := *r.pod, r.process != nil
	same := r.there && !rapid.Bool().Draw(try, "in a new namespace")
	if !same {
		next.NetNS = w.netns(fmt.Sprintf("%s-%d", r.ContainerID, time.Now().UnixNano()))
	}
	// In a new namespace, the ADD must fail if a process in the old one proves the attachment live. In
	// the same namespace, the ADD may succeed: the test's plugins create no interface that would prove
	// the attachment live.
	r.live = r.live && busy && !same
	var address string
	w.note("ADD %s in %s, live %t", r.ContainerID, filepath.Base(next.NetNS), r.live)
	healthy, err := w.hit(func() (err error) { address, err = next.addressOfAdd(w.list); return err })
	if err != nil && healthy && !r.live && w.roomFor(&next) {
		w.note("ADD %s again", r.ContainerID)
		if address, err = next.addressOfAdd(w.list); err != nil {
			w.Errorf("ADD of %s, though there is room: %v", r.ContainerID, err)
		}
	}
	if r.live {
		if err == nil {
			w.Errorf("the ADD of %s succeeded, though it is live", r.ContainerID)
		}
		return
	}
	if !same {
		r.end()
		if r.there {
			r.earlier = append(r.earlier, r.pod)
		}
	}
	w.note("  %s", address)
	*r = resident{pod: &next, there: true, process: r.process, live: err == nil, address: address, earlier: r.earlier}
}

// addressOfAdd adds the pod and returns its address.
func (p *pod) addressOfAdd(list *libcni.NetworkConfigList) (string, error) {
	result, err := p.addWith(list)
	if err != nil {
		return "", err
	}
	return address(p, result), nil
}

// roomFor runs a GC without a list. It then reports whether an ADD of the pod must succeed: the pod
// is not live, and at most one other pod is, so one of the two addresses is free.
func (w *world) roomFor(p *pod) bool {
	w.locksFree()
	w.mustAsk("GC", nil)
	others := 0
	for _, e := range w.records() {
		switch {
		case e.State == journal.Live && e.Key == p.key():
			return false
		case e.State == journal.Live:
			others++
		}
	}
	return others < 2
}

// someDEL runs the runtime's DEL of a container, whether or not the container was added.
func (w *world) someDEL(try *rapid.T) {
	r := w.some(try)
	r.live = false
	w.note("DEL %s", r.ContainerID)
	healthy, err := w.hit(func() error { return r.delWith(w.list) })
	if !healthy {
		return
	}
	if err != nil {
		w.Errorf("DEL of %s: %v", r.ContainerID, err)
	}
	others := func(file string) bool { return !strings.HasPrefix(file, r.ContainerID+".") }
	if taken := slices.DeleteFunc(w.taken(), others); len(taken) > 0 {
		w.Errorf("after the DEL of %s, %v are taken", r.ContainerID, taken)
	}
}

// someNamespaceGoes removes a container's network namespace from its path. If a process is in the
// namespace, the namespace continues to exist.
func (w *world) someNamespaceGoes(try *rapid.T) {
	if r := w.some(try); r.there {
		w.note("namespace of %s goes", r.ContainerID)
		r.dropNetNS()
		r.there, r.live = false, r.live && r.process != nil
	}
}

// someProcess starts or ends a process in a container.
func (w *world) someProcess(try *rapid.T) {
	r := w.some(try)
	switch {
	case r.process != nil:
		w.note("process in %s ends", r.ContainerID)
		r.end()
		r.live = r.live && r.there
	case r.there:
		w.note("process in %s", r.ContainerID)
		r.process = r.processInside()
	}
}

func (r *resident) end() {
	if r.process != nil {
		r.pod.end(r.process)
		r.process = nil
	}
}

// status runs a STATUS. It ignores the error, because a loaded node may be too slow for a STATUS.
func (w *world) status() {
	w.note("STATUS")
	_, _ = w.hit(func() error { return w.ask("STATUS", nil) })
}

// someGC runs a GC with no list, a correct list or a wrong one. unwind may release a container that
// the list lacks, unless a process is in its namespace or its grace period is not over.
func (w *world) someGC(try *rapid.T) {
	changes := map[string]any{"gracePeriod": "0s"}
	if w.healthy() && rapid.Bool().Draw(try, "grace") {
		changes["gracePeriod"] = "10m"
	}
	kind := rapid.SampledFrom([]string{"none", "null", "empty", "right", "some"}).Draw(try, "list")
	listed := []*pod{}
	for _, r := range w.people {
		if kind == "right" && r.live || kind == "some" && rapid.Bool().Draw(try, r.ContainerID+" is listed") {
			listed = append(listed, r.pod)
		}
	}
	switch kind {
	case "none":
	case "null":
		changes[validKey] = json.RawMessage("null")
	default:
		changes[validKey] = listOf(listed...)
		for _, r := range w.people {
			if !slices.Contains(listed, r.pod) && r.process == nil && changes["gracePeriod"] == "0s" {
				r.live = false
			}
		}
	}
	w.note("GC %s", netconf.Marshal(changes))
	if healthy, err := w.hit(func() error { return w.ask("GC", changes) }); err != nil && healthy {
		w.Errorf("GC: %v", err)
	}
}

// ask runs a GC or a STATUS, and returns its error.
func (w *world) ask(command string, changes map[string]any) error {
	if out := w.node.ask(command, changes, w.plugins...); out.code != 0 {
		return fmt.Errorf("exit code %d: %s", out.code, out.stdout)
	}
	return nil
}

func (w *world) mustAsk(command string, changes map[string]any) {
	w.Helper()
	if err := w.ask(command, changes); err != nil {
		w.Errorf("%s: %v", command, err)
	}
}

// somethingBreaks makes a plugin fail its ADDs or its DELs from now on.
func (w *world) somethingBreaks(try *rapid.T) {
	instance := rapid.SampledFrom(w.instances()).Draw(try, "plugin")
	command := rapid.SampledFrom([]string{"ADD", "DEL"}).Draw(try, "command")
	modes := []string{"fail", "fail-effect", "stderr", "crash", "crash-effect", "kill-parent-effect", "orphan"}
	if command == "ADD" {
		modes = append(modes, "empty", "garbage")
	}
	if w.modes[instance] == nil {
		w.modes[instance] = map[string]string{}
	}
	w.modes[instance][command] = rapid.SampledFrom(modes).Draw(try, "mode")
	w.note("%s", netconf.Marshal(w.modes))
	w.setModes(w.modes)
}

func (w *world) heal() {
	w.note("heal")
	w.modes = map[string]map[string]string{}
	w.setModes(w.modes)
}
