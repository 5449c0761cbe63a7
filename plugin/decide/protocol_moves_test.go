package decide

import (
	"fmt"
	"slices"
)

// move is a transition: the process that acts, a description of its action, and the next state.
type move struct {
	who int // the process (see name)
	how string
	to  state
}

var delegates = [...]string{"bridge", "firewall", "portmap"}

func name(p int) string {
	switch p {
	case nSelf:
		return "sweep"
	case nOld:
		return "A's old ADD"
	case none:
		return "the node"
	}
	return "ABC"[p : p+1]
}

// moves returns all possible next states.
func (m *protocol) moves(s state) (all []move) {
	by := func(who int) func(string, state) {
		return func(how string, to state) { all = append(all, move{who, how, to}) }
	}
	for i := range m.containers() {
		m.runtime(s, i, by(int(i)))
		m.node(s, i, by(none))
	}
	for p := range s.p {
		if s.p[p].pc == pEnded {
			continue
		}
		m.step(s, p, by(p))
		if s.left.crashes > 0 {
			by(p)("killed", m.kill(s, p))
		}
	}
	if s.left.power > 0 {
		by(none)("a power loss", s.reboot())
	}
	if next := s; s.left.losses > 0 && m.loses(&next) {
		by(none)("the journal is lost", next)
	}
	return all
}

// node calls to() for each event that concerns a container, but that the runtime does not cause: an
// orphaned delegate ends, the IPAM plugin's GC releases an address, or a sweep begins.
func (m *protocol) node(s state, i int8, to func(string, state)) {
	what := func(format string) string { return fmt.Sprintf(format, name(int(i))) }
	if o := s.orphan[i]; o.there {
		next := s
		m.effect(&next, o)
		next.orphan[i] = lostDelegate{}
		if next.lock[i] == lockOrphan {
			next.lock[i] = none
		}
		to(what("the delegate of %s that outlived its unwind process ends"), next)
	}
	recorded := slices.ContainsFunc(s.c[i].r[:], func(r record) bool { return r.pending() && !r.memory })
	if a := s.has(i); m.collects && a != none && (!recorded || m.without == handsOn) {
		next := s
		next.owner[a], next.made[a] = none, 0
		to(what("the IPAM plugin's GC releases the address of %s"), next)
	}
	if s.p[nSelf].pc != pEnded || s.lock[i] != none {
		return
	}
	if next := s; m.reconstruct(&next, i) {
		to(what("a sweep reconstructs a record of %s"), next)
	}
	for at := range s.c[i].r {
		if r := &s.c[i].r[at]; r.pending() && !r.memory && m.judge(&s, i, r).Releasable() {
			next := s
			m.sweep(&next, i, r.n)
			to(what("a sweep begins with %s"), next)
		}
	}
}

// reconstruct creates a record from the host-local address of a dead container, and starts the
// sweep of that record. It returns false if the container has no such address, or already has a
// record of it.
func (m *protocol) reconstruct(s *state, i int8) bool {
	c, a := &s.c[i], s.has(i)
	if !m.lists || m.unnamed || a == none || !c.unlisted() {
		return false
	}
	for _, r := range c.r {
		if r.pending() && (r.n == s.made[a] || r.memory) {
			return false
		}
	}
	c.push(record{n: s.made[a], claim: a, steps: m.chain(), told: true, memory: true})
	s.set(&c.r[0], deleting)
	m.sweep(s, i, s.made[a])
	return true
}

// sweep starts the sweep of a record.
func (m *protocol) sweep(s *state, i, n int8) {
	m.take(s, i, nSelf)
	s.p[nSelf] = process{pc: pMark, on: i, n: n, back: none}
}

// runtime calls to() for each action that the runtime can take on a container.
func (m *protocol) runtime(s state, i int8, to func(string, state)) {
	c := s.c[i]
	do := func(how string, change func(*state, *sandboxed)) {
		next := s
		change(&next, &next.c[i])
		to(how, next)
	}
	del := func(n *state, c *sandboxed) {
		c.phase, c.given = dels, none
		n.p[i] = process{pc: pLock, on: i, back: none}
	}
	if m.impatient && i == 0 && c.phase == adds && s.p[i].add && s.p[nOld].pc == pEnded {
		do("gives up its ADD and sends the DEL", func(n *state, c *sandboxed) {
			n.p[nOld] = n.p[i]
			for at := range n.lock {
				if n.lock[at] == i {
					n.lock[at] = nOld
				}
			}
			del(n, c)
		})
	}
	plain := m.plain && i == m.containers()-1
	if s.p[i].pc != pEnded {
		return
	}
	if m.mayAdd(&s, i) {
		switch a := s.free(m); {
		case !plain:
			do("ADD", func(n *state, c *sandboxed) {
				c.phase, c.netns, c.inside, c.given, c.device = adds, true, true, none, false
				c.took = m.path && i == 1 && n.c[0].adds != 0 && !n.c[0].netns && n.c[0].phase != dels
				c.adds++
				n.p[i] = process{pc: pLock, add: true, on: i, back: none, claim: none}
			})
		case a != none && !s.atWork(): // in reality, such an ADD waits for no DEL (cmd/unwind/LIMITS.md)
			do("ADD of the plain chain", func(n *state, c *sandboxed) { m.plainADD(n, i, a) })
		}
	}
	if plain {
		return
	}
	m.unseen(s, i, do)
	if m.path && i == 0 && c.phase == over && c.cached != none && !c.twice {
		do("a second DEL", func(n *state, c *sandboxed) {
			c.twice = true
			del(n, c)
		})
	}
	if c.phase != up && c.phase != failed && c.phase != owed {
		return
	}
	do("DEL", del)
	if c.netns {
		do("the sandbox is forgotten, and ends", func(_ *state, c *sandboxed) {
			c.netns, c.inside, c.device = false, false, false
			if c.phase != up {
				c.phase = over // the runtime sends no more DELs
			}
		})
	}
	// The plain chain's DEL runs only while the namespace exists: later, the address may be another
	// container's.
	if m.plainDEL && c.phase == up && c.netns {
		do("DEL of the plain chain", func(n *state, c *sandboxed) { m.plainDELs(n, i) })
	}
	if m.hides && c.phase == up && c.netns {
		do("the path of the namespace disappears", func(_ *state, c *sandboxed) { c.netns = false })
	}
	if m.hides && c.phase == up && !c.netns && c.inside {
		do("the last process of the namespace ends", func(_ *state, c *sandboxed) { c.inside, c.device = false, false })
	}
}

// mayAdd reports whether the runtime may send an ADD of a container. The runtime adds a pod's next
// sandbox only after it has sent the last verb of the previous sandbox.
func (m *protocol) mayAdd(s *state, i int8) bool {
	c := &s.c[i]
	switch {
	case m.pod && i == 0 && s.c[1].phase != idle, m.pod && i == 1 && s.c[0].phase != over:
		return false
	case c.phase == idle:
		return true
	}
	ended := c.phase == failed || c.phase == up && !c.inside
	return i == 0 && (m.reuse && c.phase == over && c.adds < 2 || m.again && ended && c.adds < 4 && !c.r[1].pending())
}

func (m *protocol) plainADD(s *state, i, a int8) {
	m.plainBridge(s, i, a)
	c := &s.c[i]
	c.phase, c.plain, c.given, c.cached, c.cachedN = up, true, a, a, c.adds
	s.rules[c.given] |= 1 << i
	if m.ports {
		s.forwards[c.given] |= 1 << i
	}
}

func (m *protocol) plainBridge(s *state, i, a int8) {
	c := &s.c[i]
	c.adds++
	c.netns, c.inside, c.device = true, true, true
	s.owner[a], s.made[a] = i, c.adds
}

func (m *protocol) plainDELs(s *state, i int8) {
	c := &s.c[i]
	if c.given != none {
		m.effect(s, lostDelegate{step: 1, on: i, shows: c.given})
	}
	m.effect(s, lostDelegate{on: i})
	m.effect(s, lostDelegate{step: 2, on: i})
	c.phase, c.cached, c.cachedN, c.plain = over, none, 0, false
}

// unseen calls do() for each verb that the runtime may run for A while unwind is off. Such a verb
// could run during unwind's own DELs, but the model leaves that out: unseen does nothing while a
// process of unwind runs. Only the result in libcni's cache shows that an ADD without unwind ran.
func (m *protocol) unseen(s state, i int8, do func(string, func(*state, *sandboxed))) {
	c := s.c[i]
	if !m.off || i != 0 || s.atWork() {
		return
	}
	if c.phase == up && s.owner[c.given] == i { // otherwise, this late DEL could harm a new owner
		do("DEL of the plain chain", func(n *state, c *sandboxed) {
			m.plainDELs(n, i)
			c.given, c.netns, c.inside = none, false, false
		})
	}
	a := s.free(m)
	if c.phase != over || c.adds != 1 || a == none {
		return
	}
	do("ADD of the plain chain", func(n *state, c *sandboxed) { m.plainADD(n, i, a) })
	do("ADD of the plain chain is interrupted", func(n *state, c *sandboxed) {
		m.plainBridge(n, i, a)
		c.phase, c.given, c.bare = failed, none, true
	})
}

// kill kills a process. If the process's delegate hangs, the delegate ends, too. Otherwise, the
// delegate keeps running and holds the lock.
func (m *protocol) kill(s state, p int) state {
	pr := s.p[p]
	s.left.crashes--
	runs := (pr.pc == pAdd || pr.pc == pDel) && !pr.hangs
	m.end(&s, p)
	if runs && !s.orphan[pr.on].there {
		s.orphan[pr.on] = pr.delegate()
		if m.without != locks && m.without != inherited {
			s.lock[pr.on] = lockOrphan
		}
	}
	if p < maxC {
		switch s.c[p].phase {
		case adds:
			s.c[p].phase = failed
		case dels:
			s.c[p].phase = owed
			if m.once {
				s.c[p].phase = over
			}
		}
	}
	return s
}

// end ends a process, releases its locks, and drops the record that is only in its memory.
func (m *protocol) end(s *state, p int) {
	for i := range m.containers() {
		s.drop(i, p)
	}
	if i := s.p[p].on; (s.p[p].add && of(p) == i || p == nSelf) && s.c[i].r[0].memory {
		s.c[i].forgets()
	}
	s.p[p] = process{}
}

// forgets models the death of an ADD or a sweep that could not write its record to the journal: the
// newest record existed only in its memory, and is lost.
func (c *sandboxed) forgets() { c.r[0], c.r[1], c.bare = c.r[1], record{}, true }

// delegate returns the delegate call that a process is running.
func (pr *process) delegate() lostDelegate {
	return lostDelegate{there: true, add: pr.pc == pAdd, step: pr.step, on: pr.on, n: pr.n, shows: pr.shows, place: pr.place}
}

// loses empties the journal, and reports whether the model allows this loss. Each running process
// must be an ADD that works on its own record, because this record is in memory, too. Every other
// record must be live, because a record that is being undone would lose its pending DELs.
func (m *protocol) loses(s *state) bool {
	s.left.losses--
	for i := range s.c {
		c, pr := &s.c[i], &s.p[i]
		for at := range c.r {
			switch r := &c.r[at]; {
			case r.state == gone:
			case at == 0 && pr.pc != pEnded && r.n == c.adds:
				r.memory = true
			case r.pending() && r.state != live_:
				return false
			default:
				c.bare = c.bare || r.pending()
				*r = record{}
			}
		}
	}
	return !slices.ContainsFunc(s.p[:], func(p process) bool {
		return p.pc != pEnded && (!p.add || p.back != none || p.pc == pMark)
	})
}

// reboot drops all state of the kernel: processes, locks, namespaces and rules. The journal and the
// IPAM plugin's files remain.
func (s state) reboot() state {
	s.left.power--
	for i := range s.c {
		c := &s.c[i]
		if c.r[0].memory {
			c.forgets()
		}
		s.lock[i] = none
		c.netns, c.inside, c.device = false, false, false
		for at := range c.r {
			c.r[at].booted = c.r[at].pending()
		}
		switch c.phase {
		case adds:
			c.phase = failed
		case dels:
			c.phase = owed
		}
	}
	s.p, s.orphan = [maxC + 2]process{}, [maxC]lostDelegate{}
	s.rules, s.forwards, s.stays = [maxA]uint8{}, [maxA]uint8{}, [maxA]uint8{}
	return s
}
