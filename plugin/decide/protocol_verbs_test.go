package decide

import (
	"fmt"
	"slices"

	"cni-unwind/journal"
)

// step calls to with each possible next step of a process.
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
	case pPod:
		if !m.pod || s.lock[1-pr.on] == none || m.slow || m.without == podWait {
			pr.pc = pAdd
			to("starts the chain", s)
		}
	case pAdd:
		m.add(s, p, to)
	case pCommit:
		m.commit(s, p, to)
	case pClaim:
		m.settle(s, p, to)
	case pPrint:
		c := &s.c[of(p)]
		if p != nOld {
			c.given, c.cached, c.cachedN, c.phase = pr.claim, pr.claim, c.adds, up
		}
		c.unlocked = pr.bare && m.without != lockFile
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

// takeLock takes the lock of a verb's attachment. A DEL that finds an ADD of the attachment asks it to
// stop, and ends it if that takes too long.
func (m *protocol) takeLock(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	if holder := s.lock[pr.on]; holder != none {
		if holder == lockOrphan || pr.add || m.without == ends {
			return
		}
		other := &s.p[holder]
		own := of(int(holder)) == pr.on
		switch {
		case m.without == alone && own:
		case !other.add || !own && m.without != ownADD:
			return
		case !other.stop:
			if other.stop = true; !own {
				s.wronged = of(int(holder))
			}
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
	s.c[pr.on].unlocked = false
	m.unhold(&s, pr.on)
	pr.pc = pFind
	to("takes its lock", s)
}

// stops lets an ADD that was asked to stop roll back. It reports whether that is its next step.
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
	case pPod, pCommit, pClaim:
		m.rollBack(&s, p)
		to("rolls back", s)
		return true
	}
	return false
}

// rollBack lets an ADD undo its own record. Delegates that were not started have nothing.
func (m *protocol) rollBack(s *state, p int) {
	pr := &s.p[p]
	unstarted := m.chain() &^ (1<<(pr.step+1) - 1)
	pr.pc, pr.on, pr.n, pr.back, pr.hangs, pr.pin = pNext, of(p), s.c[of(p)].adds, none, false, false
	pr.tried, pr.done, pr.failed = unstarted, unstarted, false
	if r := s.record(pr.on, pr.n); r.claim == none {
		r.claim = pr.claim
	}
}

// findADD looks for what an ADD settles first: earlier records of its key.
func (m *protocol) findADD(s state, p int, to func(string, state)) {
	pr, c := &s.p[p], &s.c[of(p)]
	for at := range c.r {
		r := &c.r[at]
		if r.pending() && pr.seen&(1<<r.n) == 0 && m.without != records && !m.addedAgain(&s, pr.on, r) {
			pr.seen |= 1 << r.n
			pr.pc, pr.n, pr.back = pMark, r.n, pFind
			to("settles what was before", s)
			return
		}
	}
	pr.pc = pIntent
	to("finds no more of before", s)
}

// findDEL looks for the next record of a DEL, newest first.
func (m *protocol) findDEL(s state, p int, to func(string, state)) {
	pr, c := &s.p[p], &s.c[p]
	if pr.seen == 0 && c.r[0].state == undone && !c.r[1].pending() && m.answers(&s, p) {
		bare := c.bare && s.has(int8(p)) == none // the rules of an ADD without a record stay
		m.answer(&s, p)
		s.c[p].bare = bare
		to("finds an undone record", s)
		return
	}
	if n, untold := m.untold(&s, int8(p)); pr.seen == 0 && untold {
		told := record{n: n, claim: c.cached, steps: m.chain(), told: true}
		if c.cachedN != n && c.knows(c.cachedN) { // the result is that record's
			told.claim = none
		}
		c.push(told)
		s.set(&c.r[0], deleting)
		pr.pc, pr.n, pr.back, pr.seen = pMark, n, pFind, 1<<n
		to("goes by what the runtime says", s)
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

// answer ends a DEL. libcni's cache forgets the result after one that passed.
func (m *protocol) answer(s *state, p int) {
	c := &s.c[p]
	if c.phase = owed; !s.p[p].failed {
		c.phase, c.bare, c.plain = over, false, false
		if !m.path {
			c.cached, c.cachedN = none, 0
		}
	}
	m.end(s, p)
}

// named returns the number of the ADD whose namespace the runtime's DEL names. Without a path, it is
// the one in the result that the runtime has; without that, there is none.
func (m *protocol) named(c *sandboxed) int8 {
	switch {
	case !m.nameless:
		return c.adds
	case c.cached != none:
		return c.cachedN
	}
	return 0
}

// untold returns the number of the ADD that the runtime's DEL is for, and whether no record of the
// container is of it.
func (m *protocol) untold(s *state, i int8) (n int8, is bool) {
	c := &s.c[i]
	if n = m.named(c); i == 0 && s.p[nOld].pc != pEnded {
		n = unnumbered
	}
	if !slices.ContainsFunc(c.r[:], func(r record) bool { return r.pending() }) {
		return max(n, c.adds), true
	}
	return n, n != 0 && n != unnumbered && !c.knows(n) && m.without != both
}

// answers reports whether an undone record answers a DEL.
func (m *protocol) answers(s *state, p int) bool {
	c := &s.c[p]
	r, n := &c.r[0], m.named(c)
	return m.without != undones && (n == 0 || n == r.n || m.without == ownNetNS) &&
		(m.unnamed || s.has(int8(p)) == none || m.without == ownFile)
}

// intends writes the intent of an ADD.
func (m *protocol) intends(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	pr.pc, pr.n, pr.step, pr.shows = pPod, s.c[pr.on].adds, 0, none
	if s.left.commits > 0 {
		next := s
		next.left.commits--
		next.p[p].bare = true
		m.intent(&next, pr.on)
		to("its intent fails, and is there", next)
		next.c[pr.on].r[0].memory = true
		to("its intent fails, and is not there", next)
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
			failing := s
			failing.left.faults--
			if has {
				m.effect(&failing, pr.delegate())
			}
			m.rollBack(&failing, p)
			if pr.step == 2 {
				failing.record(pr.on, pr.n).clean = true
			}
			to(delegates[pr.step]+"'s ADD fails", failing)
		}
	}
	m.effect(&s, pr.delegate())
	pr.pc = pCommit
	to(delegates[pr.step]+"'s ADD", s)
}

// commit writes a delegate's address and makes the attachment live, or goes on to the next delegate.
func (m *protocol) commit(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	if pr.step > 0 {
		if pr.step++; m.chain()&(1<<pr.step) == 0 {
			pr.pc = pPrint
		} else {
			pr.pc = pAdd
		}
		to(delegates[pr.step-1]+"'s answer is there", s)
		return
	}
	if m.without == ahead {
		m.intent(&s, pr.on)
	}
	pr.claim, pr.pc = s.has(pr.on), pClaim
	what := fmt.Sprintf("claims address %d", pr.claim)
	if s.left.commits > 0 && !s.record(pr.on, pr.n).memory {
		next := s
		next.left.commits--
		next.p[p].bare = true
		to(what+", but the commit fails, and is not there", next)
		s.p[p].bare = true
		m.goLive(&next, p)
		to(what+", but the commit fails, and is there", next)
		s.p[p].bare = false
	}
	m.goLive(&s, p)
	to(what, s)
}

func (m *protocol) goLive(s *state, p int) {
	pr := &s.p[p]
	r := s.record(pr.on, pr.n)
	r.claim = pr.claim
	s.set(r, live_)
}

// settle undoes another attachment that claims an ADD's address, if it is dead, before the next
// delegate runs.
func (m *protocol) settle(s state, p int, to func(string, state)) {
	pr, i := &s.p[p], of(p)
	for other := range m.containers() {
		if other == i || pr.settled&(1<<other) != 0 || !s.claims(other, pr.claim) || m.without == claims {
			continue
		}
		if s.lock[other] != none {
			m.outlast(s, p, other, to)
			return
		}
		pr.settled |= 1 << other
		for _, r := range s.c[other].r {
			if r.pending() && r.claim == pr.claim && m.judge(&s, other, &r).Releasable() {
				m.take(&s, other, p)
				pr.pc, pr.on, pr.n, pr.back = pMark, other, r.n, pClaim
				to("settles another one that claims its address", s)
				return
			}
		}
	}
	pr.pc, pr.on, pr.n, pr.step, pr.shows, pr.settled = pAdd, i, s.c[i].adds, 1, pr.claim, 0
	to("goes on to the next delegate", s)
}

// outlast ends an ADD's wait for the lock of another attachment that claims its address, if a DEL is
// slow. The delegate of an unwind that was killed is ended by the ADD itself.
func (m *protocol) outlast(s state, p int, other int8, to func(string, state)) {
	if !m.slow || s.lock[other] == lockOrphan {
		return
	}
	holder := &s.p[s.lock[other]]
	if holder.pc == pDel && holder.shows == s.p[p].claim && m.unnamed && m.without != bound {
		holder.failed, holder.pc = true, pNext
		to("a DEL that is shown its address runs out of time", s)
		return
	}
	s.p[p].settled |= 1 << other
	to("waits no longer for another one that claims its address", s)
}

// begin starts a pass over a record: facts are gathered.
func (m *protocol) begin(s *state, p int) {
	pr := &s.p[p]
	c := &s.c[pr.on]
	pr.pc, pr.tried, pr.done = pNext, 0, 0
	pr.pin = pr.n == c.adds && c.netns
	m.unhold(s, pr.on)
}

// mark begins a pass, and writes that the undoing begins.
func (m *protocol) mark(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	r, c := s.record(pr.on, pr.n), &s.c[pr.on]
	switch r.state {
	case adding:
		s.set(r, rollingBack)
	case live_:
		s.set(r, deleting)
	}
	if r.claim == none && r.steps&1 != 0 && !m.unnamed {
		r.claim = s.has(pr.on)
	}
	if r.claim == none && c.cached != none && c.cachedN == r.n && m.without != cachedResult {
		r.claim = c.cached
	}
	m.begin(&s, p)
	to("writes that it undoes "+name(int(pr.on)), s)
}

// next chooses the next DEL of a pass, in reverse order of the chain, and what it is shown.
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
		blind := false
		if step == 0 && s.left.blind > 0 {
			next := s
			if next.left.blind--; m.due(&next, p, r, step, true) {
				m.start(next, p, step, to)
			}
		}
		if pr.tried |= 1 << step; m.due(&s, p, r, step, blind) {
			m.start(s, p, step, to)
			return
		}
	}
	pr.pc = pFinish
	to("has tried all that is due", s)
}

// start starts a DEL.
func (m *protocol) start(s state, p int, step int8, to func(string, state)) {
	pr := &s.p[p]
	r := s.record(pr.on, pr.n)
	pr.step, pr.shows, pr.parked, pr.pc = step, none, false, pDel
	pr.tried |= 1 << step
	if (journal.Claim{Step: 0}).Receives(int(step)) {
		pr.shows = r.claim
	}
	if m.prompt && pr.place == byPath {
		m.enter(&s, pr.delegate())
		pr.place = noPath
	}
	switch {
	case pr.shows == none:
	case m.withhold(&s, p, pr.on, pr.shows):
		pr.shows, pr.parked = none, true
	case m.unnamed || s.owner[pr.shows] != none || m.without == holding:
	case r.memory: // no file is held without a record on the disk
		pr.shows, pr.parked = none, true
	default:
		s.owner[pr.shows], pr.holds = held+pr.on, true
	}
	to(fmt.Sprintf("begins the DEL of %s for %s", delegates[step], name(int(pr.on))), s)
}

// del runs a DEL, which passes or fails.
func (m *protocol) del(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	what := fmt.Sprintf("DEL of %s for %s", delegates[pr.step], name(int(pr.on)))
	if s.left.faults > 0 {
		failing := s
		failing.left.faults--
		m.ended(&failing, p, false, true)
		to(what+" fails", failing)
	}
	if s.left.lies > 0 && pr.step != 1 {
		lying := s
		lying.left.lies--
		m.passes(&lying, p, false, false)
		to(what+" passes, and frees nothing", lying)
	}
	m.passes(&s, p, true, false)
	to(what, s)
}

// passes applies a DEL that passed.
func (m *protocol) passes(s *state, p int, works, away bool) {
	pr := &s.p[p]
	r := s.record(pr.on, pr.n)
	if m.skips && pr.step == 0 && pr.place == nowhere {
		works, away = false, true
	}
	if m.skips && pr.step == 0 && (of(p) == pr.on || !s.grace && !r.booted) {
		s.c[pr.on].passed = true
	}
	if works {
		m.effect(s, pr.delegate())
	}
	done, fails := m.after(s, p, r, away)
	m.ended(s, p, done, fails)
}

// ended takes the outcome of a DEL.
func (m *protocol) ended(s *state, p int, done, fails bool) {
	pr := &s.p[p]
	if pr.holds {
		pr.holds = false
		s.release(pr.on)
	}
	if done {
		pr.done |= 1 << pr.step
	}
	pr.pc, pr.failed = pNext, pr.failed || fails
	pr.step, pr.shows, pr.place, pr.parked = 0, none, nowhere, false
}

// finish writes what a pass left.
func (m *protocol) finish(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	i, back := pr.on, pr.back
	if next := s; s.left.commits > 0 {
		next.left.commits--
		m.goOn(&next, p, back)
		to("what is left cannot be written", next)
	}
	r := s.record(i, pr.n)
	c := &s.c[i]
	switch r.steps &^= pr.done; {
	case r.memory && p == nSelf: // whatever the DELs said
		if a := r.claim; s.owner[a] == i && s.forwards[a] == 0 {
			s.owner[a], s.made[a] = none, 0
		}
		*r = record{}
	case r.steps == 0 && (p == int(i) && !pr.add || r.memory || m.without == undones):
		s.set(r, gone)
		*r = record{}
	case r.steps == 0:
		s.set(r, undone)
		*r = record{n: r.n, state: undone, claim: none}
	case r.state == adding:
		s.set(r, rollingBack)
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
	to("writes what is left", s)
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
			stop: pr.stop, settled: pr.settled, failed: failed}
		return
	}
	if p < maxC {
		s.c[p].phase = failed // the ADD
	}
	m.end(s, p)
}
