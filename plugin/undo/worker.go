// Package undo runs the pending DELs of a record. It decides their order, time, namespace and
// configuration, and whether each is done.
package undo

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"runtime/debug"
	"slices"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
)

// Env is common to all verbs of a process.
type Env struct {
	Stderr  io.Writer // also the delegates' standard error
	Budgets Budgets
	Runner  delegate.Runner // runs the delegates
	// Point is called with the name of each crash point: a place where a crash would leave a
	// different state. Tests set it.
	Point func(name string)
}

// At marks a crash point.
func (e *Env) At(point string) {
	if e.Point != nil {
		e.Point(point)
	}
}

// Worker runs pending DELs, one at a time, and decides on their outcome.
type Worker struct {
	Env  *Env
	Node *facts.Node
	Verb Verb
	// ChainOf returns the chain of a network other than the verb's, or nil if it is unknown. The
	// function may be nil.
	ChainOf func(network string) (*netconf.Chain, *netconf.Conf)
}

// Verb describes the verb in which the DELs run. Key is zero for a verb without an attachment, and
// for an operator's sweep.
type Verb struct {
	Key   journal.Key
	Netns string // CNI_NETNS
	Path  string // CNI_PATH
	Args  string // CNI_ARGS
	Conf  *netconf.Conf
	// Chain returns the verb's chain. It reads a chainFile once, at the first call. That read may
	// hang, so a verb that does not need the chain must not call Chain.
	Chain func() (*netconf.Chain, error)
	// Watch is called while a delegate runs in an ADD (see delegate.Call). It is nil in other verbs.
	Watch func()
}

// Spares reports whether a verb of the runtime must keep a dead attachment, because the network's
// configuration allows no sweep (see netconf.Conf.Observes). For the verb's own network, the
// present configuration counts; for all others, the configuration at the time of the ADD.
func (w *Worker) Spares(e *journal.Record) bool {
	if w.Verb.Conf.Name == e.Network {
		return w.Verb.Conf.Observes()
	}
	return w.Node.Invoked && e.Added.Observed
}

// Fork returns a copy of the worker for another goroutine. The copy has its own pending events, and
// doesn't call Watch.
func (w *Worker) Fork() *Worker {
	fork := *w
	fork.Node, fork.Verb.Watch = w.Node.Fork(), nil
	return &fork
}

// Degrade makes the verb continue without writing to the journal.
func (w *Worker) Degrade(verb string, err error) {
	w.Node.Journal.Degraded(verb, err)
	w.Node.Log.Error("continuing without the journal: a crash or a failed DEL can leak addresses",
		"attachment", w.Verb.Key.String(), "err", err)
	w.Node.Journal.Lost = err
}

// PanicError is a panic that Safely turned into an error.
type PanicError struct{ Value any }

func (e *PanicError) Error() string {
	return fmt.Sprintf("internal error: %v; please report this bug in unwind", e.Value)
}

// Safely turns a panic into an error.
func (w *Worker) Safely(do func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			w.Node.Log.Error("unwind panicked; please report this bug", "err", r, "stack",
				string(debug.Stack()))
			err = &PanicError{r}
		}
	}()
	return do()
}

// Budgets limit the time of a verb. CNI passes no deadline to a plugin, so Undo is the longest time
// limit that any runtime has for a DEL. A shorter budget would kill delegates that would have
// succeeded. If a runtime with a shorter limit kills a DEL, the journal still contains the pending
// DELs.
//
//	kubelet      2 min for StopPodSandbox: runtimeRequestTimeout, k8s.io/cri-client
//	             pkg/remote_runtime.go; containerd passes that context on, v2.2.0
//	             internal/cri/server/sandbox_stop.go
//	containerd   1 min after a RunPodSandbox that failed: DeferContext, internal/cri/util/util.go
//	CRI-O        1 min: networkStop, v1.34.0 server/sandbox_network.go
//	nerdctl      none
//
// Status is less than the 30 s after which the kubelet reports a node as not ready if the runtime
// has not responded (maxWaitForContainerRuntime, pkg/kubelet/kubelet.go). A plugin's STATUS
// may need several seconds on a busy node. Budgets.Status leaves it that time, as a runtime does
// without unwind.
type Budgets struct {
	Undo     time.Duration // a DEL, the rollback of an ADD, or the wait for the attachment's lock
	GC       time.Duration // a whole GC
	Status   time.Duration // a whole STATUS
	Behind   time.Duration // a STATUS's wait for the journal and for the sweep that it started
	Release  time.Duration // releasing other attachments during an ADD
	Step     time.Duration // the minimum for one DEL, and reserved for each later one
	Recorded time.Duration // a DEL or CHECK that the runtime would not run now; see undoing.del
	HostLink time.Duration // the wait until the host end disappears after its namespace
	Children time.Duration // the wait for children of a dead unwind's delegates; see journal.Patience
	Stop     time.Duration // the rollback of an ADD once a DEL waits for it
	Unread   time.Duration // the rest of an ADD once nobody can read its result
	Exchange time.Duration // the wait for a file or a plugin that its provider is replacing
}

// DefaultBudgets are the budgets on a real node. A DEL that is merely slow should not be killed,
// because it must then run again. So unwind starts no DEL with less time than Step, even in an ADD.
var DefaultBudgets = Budgets{
	Undo:     2 * time.Minute,
	GC:       25 * time.Second,
	Status:   20 * time.Second,
	Behind:   4 * time.Second,
	Release:  10 * time.Second,
	Step:     5 * time.Second,
	Recorded: 20 * time.Second,
	HostLink: time.Second,
	Children: 10 * time.Second,
	Stop:     8 * time.Second,
	Unread:   10 * time.Second,
	Exchange: time.Second,
}

// Present returns the configuration of a step's DEL for a retry. For decide.Present, this is the
// delegate's present configuration in the chain, with the runtime arguments of the ADD and any
// others that the runtime has sent with this verb. Present returns nil unless the chain and the
// record each contain the plugin exactly once.
func (w *Worker) Present(
	e *journal.Record, s *journal.Step, retry decide.Retry, sent map[string]json.RawMessage,
) json.RawMessage {
	chain, of := w.chainOf(e.Network)
	if chain == nil {
		return nil
	}
	i := chain.Only(s.Type)
	if i < 0 || slices.ContainsFunc(e.Steps,
		func(o journal.Step) bool { return o.Type == s.Type && o.Index != s.Index }) {
		return nil
	}
	if retry == decide.RecordedInNew {
		config := netconf.ObjectOf(s.Config)
		config["cniVersion"] = netconf.Marshal(chain.CNIVersion)
		return netconf.Marshal(config)
	}
	return chain.Config(i, confOf(e, s, of, sent))
}

// confOf returns a network's present configuration for a step, with the runtime arguments of the
// ADD, others that were sent, and the keys that Multus added to the step's configuration.
func confOf(
	e *journal.Record, s *journal.Step, of *netconf.Conf, sent map[string]json.RawMessage,
) *netconf.Conf {
	conf := *of
	conf.RuntimeConfig = map[string]json.RawMessage{}
	maps.Copy(conf.RuntimeConfig, sent)
	maps.Copy(conf.RuntimeConfig, netconf.ObjectOf(e.Added.RuntimeConfig))
	conf.Injected = netconf.ObjectOf(s.Config)
	maps.DeleteFunc(conf.Injected, func(key string, _ json.RawMessage) bool {
		return !slices.Contains(netconf.InjectedKeys, key)
	})
	return &conf
}

// HasLeft reports whether a step's plugin has left the chain of the record's network.
func (w *Worker) HasLeft(e *journal.Record, s *journal.Step) decide.Truth {
	chain, _ := w.chainOf(e.Network)
	return decide.TruthIf(chain != nil, chain != nil && !slices.ContainsFunc(chain.Delegates,
		func(d netconf.Delegate) bool { return d.Type == s.Type }))
}

// addSuccessors adds steps for the delegates of the present chain that the ADD's chain lacked.
// Without unwind, the runtime's DEL would run them. One of them may have replaced the plugin that
// has left the chain, and can then release what the old plugin's ADD created. While the old
// plugin's DEL fails, each DEL from the runtime adds these steps again. addSuccessors returns the
// indexes of the new steps in the order of their DELs.
func (u *undoing) addSuccessors(left *journal.Step) (order []int) {
	chain, of := u.chainOf(u.Record.Network)
	next := len(u.Record.Added.Plugins)
	for _, s := range u.Record.Steps {
		next = max(next, s.Index+1)
	}
	for _, c := range u.Record.Got.Claims { // a claim contains the index of its step
		next = max(next, c.Step+1)
	}
	had := slices.Concat(u.Record.Added.Plugins, u.tried)
	for _, s := range u.Record.Steps {
		had = append(had, s.Type)
	}
	for _, s := range chain.Steps(of) {
		if slices.Contains(had, s.Type) {
			continue
		}
		s.Index, s.ADD = next, left.ADD
		u.Record.Steps = append(u.Record.Steps, s)
		if decide.ByAddress(&s) {
			u.byAddress = append(u.byAddress, next)
		}
		order = slices.Insert(order, 0, next)
		next++
	}
	return order
}

// chainOf returns the chain of a network, or nil if it is unknown or cannot be read.
func (w *Worker) chainOf(network string) (*netconf.Chain, *netconf.Conf) {
	if w.Verb.Conf.Name == network {
		chain, _ := w.Verb.Chain() // nil after an error
		return chain, w.Verb.Conf
	}
	if w.ChainOf != nil {
		return w.ChainOf(network)
	}
	return nil, nil
}
