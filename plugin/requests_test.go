package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/plugin/sweep"
)

// The methods below send a runtime's requests to unwind. If a request fails, the test fails, unless
// the method's name begins with "try".

// wrapped returns a conflist that runs the present chain of the pod's network through unwind.
func (p *pod) wrapped() *libcni.NetworkConfigList {
	p.Helper()
	return p.unwind(p.plugins()...)
}

// unwrapped returns a conflist that runs the present chain of the pod's network without unwind.
func (p *pod) unwrapped() *libcni.NetworkConfigList {
	p.Helper()
	return p.plain(p.plugins()...)
}

func (p *pod) tryAdd() error {
	p.Helper()
	return p.addBy(p.wrapped())
}

func (p *pod) add() {
	p.Helper()
	must(p, p.tryAdd())
}

// addBy adds the pod with a conflist, and stores the result in the pod.
func (p *pod) addBy(list *libcni.NetworkConfigList) error {
	p.Helper()
	r, err := p.addWith(list)
	if err != nil {
		return err
	}
	p.added = r
	data, err := json.Marshal(r)
	must(p, err)
	if strings.Contains(string(data), `"address"`) {
		p.address = address(p, r)
	}
	return nil
}

func (p *pod) tryDel() error {
	p.Helper()
	return p.delWith(p.wrapped())
}

func (p *pod) del() {
	p.Helper()
	must(p, p.tryDel())
}

func (p *pod) tryCheck() error {
	p.Helper()
	return p.checkWith(p.wrapped())
}

func (p *pod) check() {
	p.Helper()
	must(p, p.tryCheck())
}

// The methods with "Past" in their names run the chain without unwind, so the journal does not
// record their requests.

func (p *pod) tryAddPast() error {
	p.Helper()
	return p.addBy(p.unwrapped())
}

func (p *pod) addPast() {
	p.Helper()
	must(p, p.tryAddPast())
}

func (p *pod) tryDelPast() error {
	p.Helper()
	return p.delWith(p.unwrapped())
}

func (p *pod) delPast() {
	p.Helper()
	must(p, p.tryDelPast())
}

// addPast creates a pod and adds it without unwind.
func (n *node) addPast(name string) *pod {
	n.Helper()
	p := n.newPod(name)
	p.addPast()
	return p
}

// tryGC runs a GC with changes to unwind's entry, such as a list of valid attachments (see valid).
func (n *node) tryGC(changes ...keys) error {
	n.Helper()
	return n.request("GC", changes)
}

func (n *node) gc(changes ...keys) {
	n.Helper()
	must(n, n.tryGC(changes...))
}

// tryStatus runs a STATUS, and waits for the sweep that it starts.
func (n *node) tryStatus(changes ...keys) error {
	n.Helper()
	return n.request("STATUS", changes)
}

func (n *node) status(changes ...keys) {
	n.Helper()
	must(n, n.tryStatus(changes...))
}

func (n *node) request(command string, changes []keys) error {
	n.Helper()
	all := keys{}
	for _, some := range changes {
		maps.Copy(all, some)
	}
	n.said = n.ask(command, all, n.plugins()...)
	err := n.said.err()
	n.want(err != nil || n.said.stdout == "", "%s printed %s", command, n.said.stdout)
	return err
}

// tryLibcniGC runs a GC through libcni with a list of these pods. It first deletes libcni's cache,
// because libcni would run a DEL for each cached attachment that the list lacks.
func (n *node) tryLibcniGC(pods ...*pod) error {
	n.Helper()
	must(n, os.RemoveAll(n.cacheDir()))
	var listed []types.GCAttachment
	for _, p := range pods {
		listed = append(listed, types.GCAttachment{ContainerID: p.ContainerID, IfName: p.IfName})
	}
	args := &libcni.GCArgs{ValidAttachments: listed}
	return n.cni.GCNetworkList(n.Context(), n.unwind(n.plugins()...), args)
}

func (n *node) libcniGC(pods ...*pod) {
	n.Helper()
	must(n, n.tryLibcniGC(pods...))
}

func (n *node) tryLibcniStatus() error {
	n.Helper()
	return n.cni.GetStatusNetworkList(n.Context(), n.unwind(n.plugins()...))
}

func (n *node) libcniStatus() {
	n.Helper()
	must(n, n.tryLibcniStatus())
}

// agentSweep runs a sweep as the agent does, but also retries DELs whose pause is not over.
func (n *node) agentSweep() {
	n.Helper()
	_, err := n.plugin().Sweep(n.Context(), n.stateDir, sweep.Options{})
	must(n, err)
}

// tryGiveUp forgets the pod's attachment, as an operator does with unwindctl forget.
func (p *pod) tryGiveUp() error {
	p.Helper()
	return p.plugin().Forget(p.Context(), p.stateDir, p.key(), "an operator")
}

func (p *pod) giveUp() {
	p.Helper()
	must(p, p.tryGiveUp())
}

// given describes how an input differs from a runtime's.
type given struct {
	keys   keys              // in unwind's entry; nil removes a key
	env    map[string]string // "" removes a variable
	varLib string            // a directory to mount at /var/lib for unwind
	first  string            // shell commands to run before unwind
}

// tryGive runs a verb with a runtime's input for the pod, changed by g.
func (p *pod) tryGive(verb string, g given) error {
	p.Helper()
	in := p.input(verb, p.entryOf(p.chainOf(p.plugins()...), g.keys))
	in.more = p.env // contains the path of libcni's cache
	if g.varLib != "" {
		p.mkdir(g.varLib)
		// libcni's cache is below varLib, so unwind finds it without p.env
		in.first, in.more = fmt.Sprintf("mount --bind %s /var/lib", g.varLib), nil
	}
	if g.first != "" {
		in.first, in.mute = g.first, strings.HasPrefix(g.first, "exec ")
	}
	for name, value := range g.env {
		in.env[name] = value
		if value == "" {
			delete(in.env, name)
		}
	}
	p.said = p.start(in)
	if p.said.code == 0 && verb == "ADD" {
		p.printed = p.said.stdout
	}
	return p.said.err()
}

func (p *pod) give(verb string, g given) {
	p.Helper()
	must(p, p.tryGive(verb, g))
}

// prevResult returns the result that the last ADD by pod.give printed, or nil if there is none.
func (p *pod) prevResult() any {
	if p.printed == "" {
		return nil
	}
	return json.RawMessage(p.printed)
}

// underWay is a verb that runs in the background.
type underWay struct {
	*node
	done chan error
}

// begin starts a verb in the background. The verb must not read data that the test changes later.
func (n *node) begin(verb func() error) *underWay {
	u := &underWay{n, make(chan error, 1)}
	go func() { u.done <- verb() }()
	return u
}

// wait waits until the verb ends, and returns its error.
func (u *underWay) wait() error { return <-u.done }

// passes waits until the verb ends, and checks that it succeeded.
func (u *underWay) passes() {
	u.Helper()
	must(u, u.wait())
}

func (p *pod) beginAdd() *underWay {
	p.Helper()
	list := p.wrapped()
	return p.begin(func() error { _, err := p.addWith(list); return err })
}

func (p *pod) beginAddPast() *underWay {
	p.Helper()
	list := p.unwrapped()
	return p.begin(func() error { _, err := p.addWith(list); return err })
}

func (p *pod) beginDel() *underWay {
	p.Helper()
	list := p.wrapped()
	return p.begin(func() error { return p.delWith(list) })
}

func (p *pod) beginCheck() *underWay {
	p.Helper()
	list := p.wrapped()
	return p.begin(func() error { return p.checkWith(list) })
}

func (n *node) beginSweep() *underWay {
	return n.begin(func() error { n.sweep(); return nil })
}

func (n *node) beginGC() *underWay {
	n.Helper()
	chain := n.plugins()
	return n.begin(func() error { return n.ask("GC", nil, chain...).err() })
}

func (n *node) beginStatus() *underWay {
	n.Helper()
	chain := n.plugins()
	return n.begin(func() error { return n.ask("STATUS", nil, chain...).err() })
}

// kill runs a verb in which unwind kills itself at a crash point: at the nth with this name or, if
// the name is "", at the nth of all. If the verb ends before that crash point, it must succeed.
func (n *node) kill(point string, nth int, verb func() error) (killed bool) {
	n.Helper()
	killed, err := n.tryKill(point, nth, verb)
	n.want(killed || err == nil, "%v", err)
	return killed
}

// tryKill is like kill, but the verb may fail.
func (n *node) tryKill(point string, nth int, verb func() error) (killed bool, err error) {
	n.Helper()
	err = n.first.killedAtPoint(point, nth, verb)
	return wasKilled(err), err
}

// mustKill is like kill, but the verb must reach the crash point.
func (n *node) mustKill(point string, nth int, verb func() error) {
	n.Helper()
	n.want(n.kill(point, nth, verb), "it was not killed")
}

// until repeats a verb until the journal has this number of records. One call may be too few,
// because a pending DEL may have to wait (see journal.Next).
func (n *node) until(records int, verb func()) {
	n.Helper()
	eventually(n, fmt.Sprint(records, " records"), func() bool {
		verb()
		return len(n.records()) == records
	})
}

// afterEachSweep runs a check after a sweep, after a GC and after a STATUS.
func (n *node) afterEachSweep(check func()) {
	n.Helper()
	n.sweep()
	check()
	n.gc()
	check()
	n.status()
	check()
}

// wantError checks that a verb failed, with these texts in its error.
func (n *node) wantError(err error, texts ...string) {
	n.Helper()
	n.want(err != nil, "it passed")
	for _, text := range texts {
		n.want(err == nil || strings.Contains(err.Error(), text), "no %q in %v", text, err)
	}
}

// wantCode checks that a verb failed with this code, and with these texts in its error.
func (n *node) wantCode(err error, code uint, texts ...string) {
	n.Helper()
	n.wantError(err, texts...)
	var said *types.Error
	n.want(errors.As(err, &said) && said.Code == code, "not code %d: %v", code, err)
}

// wantKilled checks that a verb failed because a faulty plugin killed unwind.
func (n *node) wantKilled(err error) {
	n.Helper()
	n.want(wasKilled(err), "%v", err)
}
