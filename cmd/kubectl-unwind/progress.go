package main

import (
	"fmt"
	"io"
	"sync"

	"cni-unwind/cmd/internal/term"
)

// progress counts the finished nodes on one line of a terminal. It writes nothing to other files.
type progress struct {
	out       io.Writer
	mu        sync.Mutex
	all, done int
	width     int // of the current line
}

// newProgress returns a progress that shows 0 nodes done if out is a terminal.
func newProgress(out io.Writer, all int) *progress {
	p := &progress{out: io.Discard, all: all, done: -1}
	if _, terminal := term.OnTerminal(out); terminal {
		p.out = out
	}
	p.add()
	return p
}

// add counts a node.
func (p *progress) add() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done++
	p.width, _ = fmt.Fprintf(p.out, "\r%d of %s done", p.done, nodes(p.all))
}

// clear empties the line and moves the cursor to its start. It uses no escape sequences, because
// some Windows consoles do not support them.
func (p *progress) clear() { fmt.Fprintf(p.out, "\r%*s\r", p.width, "") }
