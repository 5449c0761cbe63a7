package decide

import (
	"fmt"
	"slices"
)

// step calls to() for each possible next step of a process.
func (m *protocol) step(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	if pr.stop && pr.add && m.stops(s, p, to) {
		return
	}
	switch pr.pc {
	case pLock:
		m.takeLock(s, p, to)
	case pFind:
		if pr.add {
			m.findADD(s, p, to)
		} else {
			m.findDEL(s, p, to)
		}
	case pIntent:
		m.intends(s, p, to)
	case pAdd:
		m.add(s, p, to)
	case pCommit:
		m.commit(s, p, to)
	case pPrint:
		c := &s.c[of(p)]
		if p != nOld {
			c.given, c.cached, c.cachedN, c.phase = pr.claim, pr.claim, c.adds, up
		}
		m.end(&s, p)
		to("prints the result", s)
	case pMark:
		m.mark(s, p, to)
	case pNext:
		m.next(s, p, to)
	case pDel:
		m.del(s, p, to)
	case pFinish:
		m.finish(s, p, to)
	}
}

// takeLock makes a verb take the lock of its attachment. If an ADD of the attachment holds the
// lock, a DEL asks the ADD to stop, and kills the ADD if it does not stop.
func (m *protocol) takeLock(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	if holder := s.lock[pr.on]; holder != none {
		if holder == lockOrphan || pr.add || m.without == ends {
			return
		}
		other := &s.p[holder]
		switch {
		case m.without == alone:
		case !other.add:
			return
		case !other.stop:
			other.stop = true
			to("asks an ADD to stop", s)
			return
		default:
			for _, has := range []bool{false, true} {
				next := s
				if runs := other.pc == pAdd || other.pc == pDel; has && runs {
					m.effect(&next, other.delegate())
				} else if has {
					continue
				}
				m.end(&next, int(holder))
				to("ends the ADD that did not stop, and its delegate", next)
			}
			return
		}
	}
	m.take(&s, pr.on, p)
	pr.pc = pFind
	to("takes its lock", s)
}

// stops ends or rolls back an ADD that was asked to stop. It returns false if the ADD has passed
// the point at which it can stop.
func (m *protocol) stops(s state, p int, to func(string, state)) bool {
	pr := &s.p[p]
	switch pr.pc {
	case pLock, pFind, pIntent:
		m.end(&s, p)
		to("stops", s)
		return true
	case pAdd:
		for _, has := range []bool{false, true} {
			next := s
			if has {
				m.effect(&next, pr.delegate())
			}
			m.rollBack(&next, p)
			to("ends its delegate, and rolls back", next)
		}
		return true
	case pCommit:
		m.rollBack(&s, p)
		to("rolls back", s)
		return true
	}
	return false
}

// rollBack makes an ADD undo its own record. The rollback skips delegates that were not started,
// because they created nothing.
func (m *protocol) rollBack(s *state, p int) {
	pr := &s.p[p]
	unstarted := m.chain() &^ (1<<(pr.step+1) - 1)
	pr.pc, pr.on, pr.n, pr.back, pr.hangs, pr.pin = pNext, of(p), s.c[of(p)].adds, none, false, false
	pr.tried, pr.done, pr.failed = unstarted, unstarted, false
	if r := s.record(pr.on, pr.n); r.claim == none {
		r.claim = pr.claim
	}
}

// findADD finds the next record that an ADD undoes before it starts delegates.
func (m *protocol) findADD(s state, p int, to func(string, state)) {
	pr, c := &s.p[p], &s.c[of(p)]
	for at := range c.r {
		r := &c.r[at]
		if r.pending() && pr.seen&(1<<r.n) == 0 && m.without != records && !m.addedAgain(&s, pr.on, r) {
			pr.seen |= 1 << r.n
			pr.pc, pr.n, pr.back = pMark, r.n, pFind
			to("undoes an earlier record", s)
			return
		}
	}
	if m.pod { // checking the pod's other sandboxes and writing the intent are one step
		if s.lock[1-pr.on] == none {
			m.intends(s, p, to)
		}
		return
	}
	pr.pc = pIntent
	to("finds no more earlier records", s)
}

// findDEL finds the next record that a DEL undoes, newest first.
func (m *protocol) findDEL(s state, p int, to func(string, state)) {
	pr, c := &s.p[p], &s.c[p]
	if n, untold := m.untold(&s, int8(p)); pr.seen == 0 && untold {
		told := record{n: n, claim: c.cached, steps: m.chain(), told: true}
		c.push(told)
		s.set(&c.r[0], deleting)
		pr.pc, pr.n, pr.back, pr.seen = pMark, n, pFind, 1<<n
		to("creates a record from the runtime's arguments", s)
		return
	}
	for at := range c.r {
		if r := &c.r[at]; r.pending() && pr.seen&(1<<r.n) == 0 {
			pr.seen |= 1 << r.n
			pr.n, pr.back = r.n, pFind
			m.begin(&s, p)
			if r.state == adding {
				pr.pc = pMark
			}
			to("finds a record", s)
			return
		}
	}
	m.answer(&s, p)
	to("answers the runtime", s)
}

// answer ends a DEL. After a successful DEL, libcni removes the result from its cache.
func (m *protocol) answer(s *state, p int) {
	c := &s.c[p]
	c.phase = owed
	if !s.p[p].failed {
		c.phase, c.bare, c.plain = over, false, false
		if !m.path {
			c.cached, c.cachedN = none, 0
		}
	}
	m.end(s, p)
}

// named returns the number of the ADD whose namespace the runtime's DEL names. If m.nameless is
// set, that is the namespace in libcni's cached result. Without a cached result, named returns 0.
func (m *protocol) named(c *sandboxed) int8 {
	switch {
	case !m.nameless:
		return c.adds
	case c.cached != none:
		return c.cachedN
	}
	return 0
}

// untold returns the number of the ADD that the runtime's DEL is for, and whether the journal lacks
// a record of that ADD.
func (m *protocol) untold(s *state, i int8) (n int8, is bool) {
	c := &s.c[i]
	n = m.named(c)
	if i == 0 && s.p[nOld].pc != pEnded {
		n = unnumbered
	}
	if !slices.ContainsFunc(c.r[:], func(r record) bool { return r.pending() }) {
		return max(n, c.adds), true
	}
	return n, n != 0 && n != unnumbered && !c.knows(n) && m.without != both
}

// intends writes the intent of an ADD.
func (m *protocol) intends(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	pr.pc, pr.n, pr.step, pr.shows = pAdd, s.c[pr.on].adds, 0, none
	if s.left.commits > 0 {
		next := s
		next.left.commits--
		m.intent(&next, pr.on)
		next.p[p].bare = m.without == looksAgain
		to("the commit of its intent fails, and the journal has the intent", next)
		next.p[p].bare = true
		next.c[pr.on].r[0].memory = true
		to("the commit of its intent fails, and the journal lacks the intent", next)
	}
	if m.without != ahead {
		m.intent(&s, pr.on)
	}
	to("writes its intent", s)
}

func (m *protocol) intent(s *state, i int8) {
	c := &s.c[i]
	if c.r[0].pending() && m.without == records {
		c.r[0] = record{}
	}
	r := record{n: c.adds, claim: none, steps: m.chain()}
	s.set(&r, adding)
	c.push(r)
}

// add runs a delegate's ADD.
func (m *protocol) add(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	if pr.hangs {
		return
	}
	if m.impatient && p == nOld {
		next := s
		next.p[p].hangs = true
		to(delegates[pr.step]+"'s ADD hangs", next)
	}
	if pr.step == 0 && s.free(m) == none {
		if m.without == ahead {
			m.intent(&s, pr.on)
		}
		m.rollBack(&s, p)
		to("there is no address: bridge's ADD fails", s)
		return
	}
	if pr.step > 0 && s.left.faults > 0 {
		for _, has := range []bool{false, true} {
			if has && pr.step == 2 && !m.partial {
				continue
			}
			failing := s
			failing.left.faults--
			if has {
				m.effect(&failing, pr.delegate())
			}
			m.rollBack(&failing, p)
			if r := failing.record(pr.on, pr.n); pr.step == 2 {
				r.clean = true
			} else {
				r.barred = true
			}
			to(delegates[pr.step]+"'s ADD fails", failing)
		}
	}
	m.effect(&s, pr.delegate())
	pr.pc = pCommit
	to(delegates[pr.step]+"'s ADD", s)
}

// commit continues after a delegate's ADD. After bridge's ADD, it writes the address and the state
// "live". After any other ADD, the next step is the next delegate's ADD, or printing the result.
func (m *protocol) commit(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	if pr.step > 0 {
		if pr.step++; m.chain()&(1<<pr.step) == 0 {
			pr.pc = pPrint
		} else {
			pr.pc = pAdd
		}
		to(delegates[pr.step-1]+"'s ADD has ended", s)
		return
	}
	if m.without == ahead {
		m.intent(&s, pr.on)
	}
	pr.claim, pr.pc, pr.step, pr.shows = s.has(pr.on), pAdd, 1, s.has(pr.on)
	what := fmt.Sprintf("claims address %d", pr.claim)
	if s.left.commits > 0 && !pr.bare {
		next := s
		next.left.commits--
		m.commitFails(next, p, what+", but the commit fails, and the journal lacks it", to)
		m.goLive(&next, p)
		m.commitFails(next, p, what+", but the commit fails, and the journal has it", to)
	}
	// If pr.bare is set, the ADD assumes that its intent is not in the journal, so it writes nothing
	// there. A record that is only in memory becomes live nevertheless.
	if !pr.bare || s.record(pr.on, pr.n).memory {
		m.goLive(&s, p)
	}
	to(what, s)
}

// commitFails rolls an ADD back after a failed commit.
func (m *protocol) commitFails(s state, p int, how string, to func(string, state)) {
	if m.without == noLate {
		s.p[p].bare = true
	} else {
		m.rollBack(&s, p)
	}
	to(how, s)
}

func (m *protocol) goLive(s *state, p int) {
	pr := &s.p[p]
	r := s.record(pr.on, pr.n)
	r.claim = pr.claim
	m.write(s, p, r, live_)
}

// begin gathers the facts for a pass over a record.
func (m *protocol) begin(s *state, p int) {
	pr := &s.p[p]
	c := &s.c[pr.on]
	pr.pc, pr.tried, pr.done = pNext, 0, 0
	pr.pin = pr.n == c.adds && c.netns
	pr.freed, pr.tries = false, 0
}

// mark begins a pass, and writes that the record is being undone.
func (m *protocol) mark(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	r := s.record(pr.on, pr.n)
	switch r.state {
	case adding:
		r.cut = true
		s.set(r, rollingBack)
	case live_:
		s.set(r, deleting)
	}
	if r.claim == none && r.steps&1 != 0 && !m.unnamed {
		r.claim = s.has(pr.on)
	}
	m.begin(&s, p)
	to("writes that it undoes "+name(int(pr.on)), s)
}

// next chooses the next DEL of a pass, in reverse order of the chain, and the namespace that it
// gets.
func (m *protocol) next(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	r := s.record(pr.on, pr.n)
	for step := int8(2); step >= 0; step-- {
		if r.steps&(1<<step) == 0 || pr.tried&(1<<step) != 0 {
			continue
		}
		pr.place = nowhere
		if step == 0 {
			pr.place = m.show(&s, p, r)
		}
		if pr.tried |= 1 << step; m.due(&s, p, r, step) {
			m.start(s, p, step, to)
			return
		}
	}
	pr.pc = pFinish
	m.releaseLeftover(&s, p, r)
	to("has tried all DELs that may run now", s)
}

// releaseLeftover removes host-local's file for an address if bridge's DEL succeeded, but left the
// file in place.
func (m *protocol) releaseLeftover(s *state, p int, r *record) {
	pr := &s.p[p]
	freed := (r.steps&^pr.done)&1 == 0
	again := slices.ContainsFunc(s.c[pr.on].r[:], func(o record) bool {
		return o.n != r.n && o.pending() && (o.claim == r.claim || KeepsContainer(states[o.state]))
	})
	if a := r.claim; a != none && freed && !again && !m.unnamed && s.owner[a] == pr.on && m.without != leftover {
		s.owner[a], s.made[a] = none, 0
	}
}

// start starts a DEL and chooses the address that it gets.
func (m *protocol) start(s state, p int, step int8, to func(string, state)) {
	pr := &s.p[p]
	r := s.record(pr.on, pr.n)
	pr.step, pr.shows, pr.pc = step, none, pDel
	pr.tried |= 1 << step
	switch {
	case m.gets(&s, p, r, step):
		pr.shows = r.claim
	case step == 1 && r.claim != none && !m.strict:
		s.stays[r.claim] |= 1 << pr.on
	}
	if step == 0 {
		pr.freed = true
	}
	if step == 0 && m.unnamed && m.without != noted { // this commit also writes the DELs done so far
		r.freed, r.steps, r.tries = true, r.steps&^pr.done, min(2, r.tries+pr.tries)
		pr.tries = 0
	}
	if m.prompt && pr.place == byPath {
		m.enter(&s, pr.delegate())
		pr.place = noPath
	}
	to(fmt.Sprintf("begins the DEL of %s for %s", delegates[step], name(int(pr.on))), s)
}

// del runs a DEL, which succeeds or fails.
func (m *protocol) del(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	what := fmt.Sprintf("DEL of %s for %s", delegates[pr.step], name(int(pr.on)))
	if s.left.faults > 0 {
		failing := s
		failing.left.faults--
		m.ended(&failing, p, false, true)
		to(what+" fails", failing)
		if pr.step == 0 {
			m.effect(&failing, pr.delegate())
			to(what+" frees everything, and fails", failing)
		}
	}
	if s.left.lies > 0 && pr.step != 1 {
		lying := s
		lying.left.lies--
		m.passes(&lying, p, false)
		to(what+" succeeds, and frees nothing", lying)
	}
	m.passes(&s, p, true)
	to(what, s)
}

// passes applies a DEL that exited 0. works says whether it freed anything.
func (m *protocol) passes(s *state, p int, works bool) {
	pr := &s.p[p]
	r := s.record(pr.on, pr.n)
	if works {
		m.effect(s, pr.delegate())
	}
	m.ended(s, p, m.after(s, p, r), false)
}

// ended records the outcome of a DEL in the process.
func (m *protocol) ended(s *state, p int, done, fails bool) {
	pr := &s.p[p]
	if done {
		pr.done |= 1 << pr.step
	}
	if fails && pr.step == 1 {
		pr.tries++
	}
	pr.pc, pr.failed = pNext, pr.failed || fails
	pr.step, pr.shows, pr.place = 0, none, nowhere
}

// finish writes which DELs are still pending after a pass, and removes a record that has none.
func (m *protocol) finish(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	i, back := pr.on, pr.back
	if next := s; s.left.commits > 0 {
		next.left.commits--
		m.goOn(&next, p, back)
		to("cannot write the outcome of its pass", next)
	}
	r := s.record(i, pr.n)
	c := &s.c[i]
	r.freed, r.tries = r.freed || pr.freed, min(2, r.tries+pr.tries)
	switch r.steps &^= pr.done; {
	case r.memory && p == nSelf: // a reconstructed record is dropped even if its DELs failed
		if a := r.claim; s.owner[a] == i && !PortPending(0, m.pass(&s, p, r)) {
			s.owner[a], s.made[a] = none, 0
		}
		*r = record{}
	case r.steps == 0:
		if p == nSelf && c.cachedN == r.n && c.cached == r.claim && m.without != uncached {
			c.cached, c.cachedN = none, 0
		}
		s.set(r, gone)
		*r = record{}
	case r.state == adding, pr.add && back == none:
		m.write(&s, p, r, rollingBack)
	case r.state == live_:
		s.set(r, deleting)
	}
	if !c.r[1].pending() {
		c.r[1] = record{}
	}
	if c.r[0].state == gone {
		c.r[0], c.r[1] = c.r[1], record{}
	}
	m.goOn(&s, p, back)
	to("writes the outcome of its pass", s)
}

// goOn continues after a pass.
func (m *protocol) goOn(s *state, p int, back int8) {
	pr := &s.p[p]
	if i := of(p); back != none {
		if pr.on != i {
			s.drop(pr.on, p)
		}
		failed := pr.failed && !pr.add
		*pr = process{pc: back, add: pr.add, on: i, back: none, seen: pr.seen, claim: pr.claim, bare: pr.bare,
			stop: pr.stop, failed: failed}
		return
	}
	if p < maxC {
		s.c[p].phase = failed // the ADD has failed, and its rollback ends
	}
	m.end(s, p)
}
