package main

import (
	"fmt"
	"io"
	"os"
	"sync"
)

// progress counts the nodes that are done on one line of a terminal. Elsewhere it writes nothing.
type progress struct {
	out       io.Writer
	mu        sync.Mutex
	all, done int
	width     int // of the line that is there
}

// newProgress shows that none of all nodes is done, if out is a terminal. The null device passes
// for one, which does no harm.
func newProgress(out io.Writer, all int) *progress {
	p := &progress{out: io.Discard, all: all, done: -1}
	if f, is := out.(*os.File); is {
		if info, err := f.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
			p.out = out
		}
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

// clear leaves an empty line, and the cursor at its start. It does without escape sequences, which
// not each Windows console knows.
func (p *progress) clear() { fmt.Fprintf(p.out, "\r%*s\r", p.width, "") }
