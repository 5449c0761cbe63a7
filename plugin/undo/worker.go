// Package undo runs the pending DELs of an entry. It decides their order, time, namespace and
// configuration, and whether each is done. Nothing else changes the steps of an entry in the
// journal.
package undo

import (
	"fmt"
	"io"
	"runtime/debug"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
)

// Env is what the verbs need from their process.
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
	*Env
	*facts.Node
	Verb
	// ChainOf returns the chain of another network than the verb's, or nil if it is unknown. It may be
	// nil.
	ChainOf func(network string) (*netconf.Chain, *netconf.Conf)
}

// Verb describes the verb that a pass belongs to. Key is zero for a verb without an attachment, and
// for an operator's sweep.
type Verb struct {
	Key   journal.Key
	Netns string // CNI_NETNS
	Path  string // CNI_PATH
	Conf  *netconf.Conf
	// Chain returns the verb's chain. It reads a chainFile once, at the first call. That read may
	// hang, so a verb that does not need the chain must not call Chain.
	Chain func() (*netconf.Chain, error)
}

// Fork returns a copy of the worker for another goroutine. The copy has its own pending events.
func (w *Worker) Fork() *Worker {
	fork := *w
	fork.Node = w.Node.Fork()
	return &fork
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
			w.Log.Error("unwind panicked; please report this bug", "err", r, "stack", string(debug.Stack()))
			err = &PanicError{r}
		}
	}()
	return do()
}
