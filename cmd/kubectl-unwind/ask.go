package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"cni-unwind/cmd/internal/term"
)

const mostAtOnce = 512

type answer struct {
	Node string `json:"node"`
	Pod  string `json:"pod,omitempty"`
	// Error is the reason why the result is missing or incomplete.
	Error    string          `json:"error,omitempty"`
	ExitCode int             `json:"exitCode,omitempty"` // unwindctl's exit code
	Result   json.RawMessage `json:"result,omitempty"`   // the object that unwindctl printed

	report report // Result, parsed; nil if there is none
}

// askAll runs a command on all nodes and returns an answer for each, in the order of agents. A node
// that does not respond occupies a slot until the timeout.
func askAll(ctx context.Context, o *options, v *view, args []string, agents []agent,
	stderr io.Writer) []answer {
	g, shut := o.openGate(ctx)
	defer shut()
	answers := make([]answer, len(agents))
	if v.timeout > 0 && !o.flags.Changed("timeout") {
		o.timeout = v.timeout
	}
	slots := make(chan struct{}, cmp.Or(v.atOnce, mostAtOnce))
	shown := newProgress(stderr, len(agents))
	defer shown.clear()
	var all sync.WaitGroup
	for i, a := range agents {
		answers[i] = answer{Node: a.node, Pod: a.pod, Error: a.why}
		if a.why != "" {
			shown.add()
			continue
		}
		slots <- struct{}{}
		all.Go(func() {
			answers[i].ask(ctx, g, o, v, args)
			shown.add()
			<-slots
		})
	}
	all.Wait()
	return answers
}

// ask runs a command in the agent's pod: through the gate (a kubectl proxy), or with kubectl exec
// if the gate is nil or closed. The answer contains both a result and an error if unwindctl printed
// an object and failed.
func (a *answer) ask(ctx context.Context, g *gate, o *options, v *view, args []string) {
	command := slices.Concat([]string{"/unwindctl", "--host"}, args, []string{"-o", "json"})
	out, err := []byte(nil), errClosed
	if g != nil {
		out, err = g.run(ctx, a.Pod, command)
	}
	if errors.Is(err, errClosed) {
		out, err = o.run(ctx, append([]string{"exec", "pod/" + a.Pod,
			"--container=" + container, "--"}, command...)...)
	}
	var ended *refused
	if errors.As(err, &ended) {
		a.ExitCode = ended.code
	}
	if len(out) > 0 {
		report, wrong := v.read(out)
		switch {
		case wrong == nil:
			a.Result, a.report = out, report
			if ended != nil && v.fine != nil && v.fine(ended.code, report) {
				err = nil
			}
		case err == nil:
			err = wrong
		}
	} else if err == nil {
		err = errors.New("unwindctl printed nothing")
	}
	if err != nil {
		a.Error = err.Error()
	}
}

func (v *view) read(data []byte) (report, error) {
	var object map[string]json.RawMessage
	var version int
	if err := json.Unmarshal(data, &object); err != nil {
		return nil, fmt.Errorf("unwindctl printed invalid JSON: %w", err)
	}
	err := json.Unmarshal(object["version"], &version)
	if err != nil || version != term.FormatVersion {
		return nil, fmt.Errorf("unwindctl prints format version %.20q, but this program reads "+
			"version %d; install kubectl-unwind from the agent's release",
			object["version"], term.FormatVersion)
	}
	var r report = &items{}
	if v.report != nil {
		r = v.report()
	}
	list := object[v.key]
	switch {
	case v.key == "":
		list = slices.Concat([]byte("["), data, []byte("]"))
	case len(list) == 0 || list[0] != '[':
		return nil, fmt.Errorf("unwindctl printed an object without the list %q", v.key)
	case v.whole:
		list = data
	}
	if err := json.Unmarshal(list, r); err != nil {
		return nil, fmt.Errorf("unwindctl printed an unexpected object: %w", err)
	}
	return r, nil
}

// progress counts the finished nodes on one line of a terminal. It writes nothing to other files.
type progress struct {
	out       io.Writer
	mu        sync.Mutex
	all, done int
	width     int // width of the current line
}

// newProgress returns a progress with 0 nodes done, and shows it if out is a terminal.
func newProgress(out io.Writer, all int) *progress {
	p := &progress{out: io.Discard, all: all, done: -1}
	if _, terminal := term.OnTerminal(out); terminal {
		p.out = out
	}
	p.add()
	return p
}

func (p *progress) add() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done++
	p.width, _ = fmt.Fprintf(p.out, "\r%d of %s done", p.done, nodes(p.all))
}

// clear empties the line and moves the cursor to its start. It uses no escape sequences, because
// some Windows consoles do not support them.
func (p *progress) clear() { fmt.Fprintf(p.out, "\r%*s\r", p.width, "") }
