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

// What a runtime asks of unwind. A verb has to pass; that of a name with "try" may fail.

// wrapped is the present chain of the pod's network, through unwind.
func (p *pod) wrapped() *libcni.NetworkConfigList {
	p.Helper()
	return p.unwind(p.plugins()...)
}

// unwrapped is the present chain of the pod's network itself.
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

// addBy adds the pod and notes the result.
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

// Past unwind, the plain chain does it, and the journal cannot see it.

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

// addPast makes a pod and adds it past unwind.
func (n *node) addPast(name string) *pod {
	n.Helper()
	p := n.newPod(name)
	p.addPast()
	return p
}

// tryGC runs a GC with these keys of unwind's entry, such as a list: see valid.
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

// tryLibcniGC runs a GC by libcni, whose list has these pods, without a cache, for which libcni
// would run DELs.
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

// agentSweep runs the agent's sweep.
func (n *node) agentSweep() {
	n.Helper()
	_, err := n.plugin().Sweep(n.Context(), n.stateDir, sweep.Options{})
	must(n, err)
}

// tryGiveUp has an operator forget the pod.
func (p *pod) tryGiveUp() error {
	p.Helper()
	return p.plugin().Forget(p.Context(), p.stateDir, p.key(), "an operator")
}

func (p *pod) giveUp() {
	p.Helper()
	must(p, p.tryGiveUp())
}

// given is how an input differs from that of a runtime.
type given struct {
	keys   keys              // of unwind's entry; nil removes one
	env    map[string]string // "" removes one
	varLib string            // a directory that is /var/lib to unwind
	first  string            // a shell's commands before unwind
}

// tryGive runs a verb with an input that no runtime would give.
func (p *pod) tryGive(verb string, g given) error {
	p.Helper()
	in := p.input(verb, p.entryOf(p.chainOf(p.plugins()...), g.keys))
	in.more = p.env // where libcni's cache is
	if g.varLib != "" {
		p.mkdir(g.varLib)
		in.first, in.more = fmt.Sprintf("mount --bind %s /var/lib", g.varLib), nil // with the cache
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

// prevResult is a key with the result that the pod's last ADD of give printed, if there is one.
func (p *pod) prevResult() any {
	if p.printed == "" {
		return nil
	}
	return json.RawMessage(p.printed)
}

// underWay is a verb that runs beside others.
type underWay struct {
	*node
	done chan error
}

// begin runs a verb beside others. What it reads of the test must be ready.
func (n *node) begin(verb func() error) *underWay {
	u := &underWay{n, make(chan error, 1)}
	go func() { u.done <- verb() }()
	return u
}

// wait waits for the end of the verb.
func (u *underWay) wait() error { return <-u.done }

// passes waits for the end of the verb, which has to pass.
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

// kill runs a verb in which unwind kills itself at the n-th point of a name, of any name if that is
// "", if it comes there. Otherwise the verb has to pass.
func (n *node) kill(point string, nth int, verb func() error) (killed bool) {
	n.Helper()
	killed, err := n.tryKill(point, nth, verb)
	n.want(killed || err == nil, "%v", err)
	return killed
}

// tryKill is kill of a verb that may fail.
func (n *node) tryKill(point string, nth int, verb func() error) (killed bool, err error) {
	n.Helper()
	err = n.first.killedAtPoint(point, nth, verb)
	return wasKilled(err), err
}

// mustKill is kill of a verb that comes to the point.
func (n *node) mustKill(point string, nth int, verb func() error) {
	n.Helper()
	n.want(n.kill(point, nth, verb), "it was not killed")
}

// until repeats a verb until the journal has so many records, since a DEL may have to wait.
func (n *node) until(records int, verb func()) {
	n.Helper()
	eventually(n, fmt.Sprint(records, " records"), func() bool {
		verb()
		return len(n.records()) == records
	})
}

// afterEachSweep checks something after a sweep, after a GC and after a STATUS.
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

// wantKilled checks that the plan killed unwind in a verb.
func (n *node) wantKilled(err error) {
	n.Helper()
	n.want(wasKilled(err), "%v", err)
}
