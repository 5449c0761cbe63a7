package alive

import (
	"fmt"
	"math/bits"
	"os"
	"slices"
	"strings"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/tristate"
)

// This file checks a model of the protocol: every interleaving of the verbs on two or three
// containers that share a pool of one or two addresses, with crashes, delegates that outlive their
// unwind, DELs that fail, and sandboxes that the runtime forgets. The chain is bridge, which gets
// an address by the container's ID, and firewall, which keys its rule by the address alone. The
// decisions are the code's own: Decide, HasOtherOwner, journal.CheckEdge and Claim.Receives. One
// step of the model is a transaction, a call of a delegate, or an action of the runtime.
//
// The model proves that these decisions, in this order, keep the invariants (see wrong). It does
// not prove that the code has this order: TestModel and TestStress run the code itself.
//
// In a trace, A, B and C are containers 0 to 2, and the verb that the runtime runs for each; "sweep" is
// the process that undoes any dead attachment.

const (
	maxC  = 3    // number of containers, at most
	maxA  = 2    // number of addresses, at most
	none  = -1   // no address, no process, no place to return to
	nSelf = maxC // the sweep; processes below it are the runtime's verbs, by container
)

// protocol is one run of the model: its budgets, the events that it allows, and the guards that it
// leaves out. TestProtocol expects a counterexample for each guard that is left out.
type protocol struct {
	three     bool // three containers, else two
	addresses int8 // the size of the pool
	crashes   int8 // how many processes may be killed
	faults    int8 // how many DELs may fail
	power     int8 // how many losses of power there may be
	// how many DELs of bridge may pass and free no address, or free it where its store is away, so that
	// nobody can tell
	lies int8

	reuse     bool // the runtime adds A's container ID once more
	unnamed   bool // unwind cannot read the IPAM plugin's files, so no file names an address's owner
	plain     bool // the plain chain adds the last container: unwind was switched off
	plainDEL  bool // the plain chain may delete a container that the journal has: unwind was switched off
	hides     bool // the path of a namespace may go while a process is in it
	off       bool // the plain chain may delete and add A, while unwind is switched off
	path      bool // B's namespace is at A's old path, and the runtime may send a second DEL of A
	elsewhere bool // where no file names an address's owner, an interface in another namespace does
	// bridge's DEL passes and does nothing where it is shown no namespace. Its provider frees the address
	// later, of sandboxes of which the runtime does not ask
	skips bool
	// the process of the delegate that comes next waits for its configuration while the step before is
	// written; it has the lock, and outlives an unwind that is killed
	early  bool
	blocks bool // that process may hold what the running delegate waits for
	slow   bool // a DEL may take longer than an ADD waits for another attachment's lock

	noLock       bool // work on an attachment needs its lock
	noWitness    bool // a missing path proves nothing while a process or the host's end is there
	noClaim      bool // ADD settles a dead attachment that claims its new address before firewall runs
	noParking    bool // firewall's DEL is not shown an address with another owner
	noRival      bool // another attachment's claim in the journal counts as another owner
	noTombstone  bool // a tombstone answers the runtime's late DEL
	noGeneration bool // a new ADD keeps the pending DELs of an earlier one
	noWriteAhead bool // the intent is written before bridge's ADD runs
	noLater      bool // a sweep looks for a later ADD that the journal has not seen
	noAgain      bool // a DEL undoes that later ADD too
	noAnswer     bool // a tombstone does not answer the DEL of an ADD that it does not stand for
	noProbe      bool // a DEL that passed counts once the store shows it
	noWait       bool // the next delegate's process gets its configuration only after the commit
	noPath       bool // the runtime's DEL is shown a path, although its namespace is gone
	noLeave      bool // a sweep leaves a DEL that would do nothing to the runtime, for the grace period
	noProof      bool // bridge's DEL enters a namespace only if it proves to be the ADD's
	noLease      bool // firewall's DEL ends before an ADD that claims its address stops waiting for it
	noEnd        bool // a process that has waited for too long is ended, and starts again in its turn
}

// The phases of a container, as the runtime sees it.
const (
	idle   = int8(iota)
	adds   // ADD runs
	failed // ADD failed, or was cut off
	up     // ADD succeeded
	dels   // DEL runs
	owed   // DEL failed, or was cut off
	over   // the runtime asks for nothing more
)

// sandboxed is a container, and the journal's entry of it.
type sandboxed struct {
	phase, adds   int8
	given         int8 // the address that the runtime knows, or none
	cached        int8 // the address in libcni's cache, for a DEL without an entry
	netns, inside bool // the path of the namespace exists; a process is in it

	// The journal's entry.
	state  journal.State
	steps  uint8 // pending DELs: bit 0 bridge, bit 1 firewall
	old    uint8 // pending DELs of an earlier generation; oldC is its claim
	claim  int8  // address claimed by the newest generation
	oldC   int8
	tomb   bool
	booted bool // it is of an earlier boot

	unseen  bool // the newest ADD is the plain chain's; the journal has another one, or none
	device  bool // the interface that bridge's ADD made exists
	told    bool // the newest generation comes from the runtime: its namespace is not on record
	twice   bool // the runtime's second DEL has come
	deleted bool // a DEL of the runtime has ended
	passed  bool // and passed
}

// process is a running verb, or the sweep.
type process struct {
	pc     int8
	on     int8  // the container whose entry it works on
	back   int8  // the step after the undoing; none: the process ends
	step   int8  // the delegate that runs: 0 is bridge, 1 is firewall; so are the bits of steps, old, tried
	old    bool  // it undoes the earlier generation
	tried  uint8 // DELs tried in this pass: bits as in steps, the earlier generation's from 2 on
	undone uint8 // those that are undone, which the journal does not know before the pass ends
	shows  int8  // the address that the delegate is shown
	parked bool  // that address is withheld
	failed bool

	settled uint8 // containers settled because of an address, a bit each
	blocked bool  // the process of the next delegate holds what the running one waits for
	inTurn  bool  // no process is started early any more
}

// The steps of a process; each is what happens next.
const (
	pEnded  = int8(iota) // nothing: the process is free
	pLock                // take the attachment's lock
	pFind                // look for an entry or a tombstone
	pIntent              // write the intent
	pAdd                 // run a delegate's ADD
	pCommit              // write its address and "live"
	pClaim               // settle another attachment that claims the address
	pPrint               // print success; nothing is written
	pMark                // write that the undoing begins, where it goes by more than the entry
	pNext                // choose the next DEL, and the address that it is shown
	pDel                 // run a delegate's DEL
	pFinish              // write what is left
)

// lostDelegate is a delegate whose unwind was killed. One that waits has no configuration: it reads
// an empty one, and ends.
type lostDelegate struct {
	there, add, waits bool
	step, on          int8
	shows             int8
}

// state is the whole state of a run.
type state struct {
	c       [maxC]sandboxed
	p       [maxC + 1]process
	lock    [maxC]int8 // the process that holds it, none, or lockOrphan
	orphan  [maxC]lostDelegate
	owner   [maxA]int8 // the owner in the IPAM's file, by address
	rules   [maxA]uint8
	crashes int8
	faults  int8
	lies    int8
	power   int8
	ended   bool // the grace period is over
	illegal bool // a change of state was taken that journal.CheckEdge refuses
}

const lockOrphan = int8(100)

// containers returns the number of containers.
func (m *protocol) containers() int8 {
	if m.three {
		return 3
	}
	return 2
}

func (m *protocol) first() state {
	s := state{crashes: m.crashes, faults: m.faults, lies: m.lies, power: m.power}
	for i := range s.c {
		s.c[i] = sandboxed{given: none, cached: none, claim: none, oldC: none}
		s.lock[i] = none
	}
	for i := range s.owner {
		s.owner[i] = none
	}
	return s
}

// move is a next state, and who does what to reach it.
type move struct {
	who int // as name takes it
	how string
	to  state
}

// moves returns all possible next states.
func (m *protocol) moves(s state) (all []move) {
	by := func(who int) func(string, state) {
		return func(how string, to state) { all = append(all, move{who, how, to}) }
	}
	for i := range m.containers() {
		m.runtime(s, i, by(int(i)))
		if o := s.orphan[i]; o.there {
			to := s
			to.orphan[i] = lostDelegate{}
			if !o.waits {
				m.effect(&to, o.add, o.step, o.on, o.shows)
				m.enter(&to, o.add, o.step, o.on)
			}
			if to.lock[i] == lockOrphan {
				to.lock[i] = none
			}
			by(int(i))("the delegate that outlived its unwind ends", to)
		}
	}
	for p := range s.p {
		if s.p[p].pc == pEnded {
			continue
		}
		m.step(s, p, by(p))
		if s.crashes > 0 {
			by(p)("killed", m.kill(s, p))
		}
	}
	if s.power > 0 {
		by(none)("a loss of power", s.reboot())
	}
	if s.p[nSelf].pc == pEnded {
		for i := range m.containers() {
			if s.c[i].state != journal.Gone && m.judge(&s, i, false).Releasable() && s.lock[i] == none {
				to := s
				m.take(&to, i, nSelf)
				to.p[nSelf] = process{pc: pMark, on: i, back: none}
				by(nSelf)("begins with "+name(int(i)), to)
			}
		}
	}
	return all
}

func name(p int) string {
	switch p {
	case nSelf:
		return "sweep"
	case none:
		return "the node"
	}
	return "ABC"[p : p+1]
}

// runtime calls to with each action that the runtime can take on a container.
func (m *protocol) runtime(s state, i int8, to func(string, state)) {
	c := s.c[i]
	free := s.p[i].pc == pEnded
	do := func(how string, change func(*state, *sandboxed)) {
		next := s
		change(&next, &next.c[i])
		to(how, next)
	}
	plain := m.plain && i == m.containers()-1
	if free && (c.phase == idle || m.reuse && c.phase == over && c.adds < 2 && i == 0) {
		switch a := s.free(m); {
		case !plain:
			do("ADD", func(n *state, c *sandboxed) {
				c.phase, c.netns, c.inside, c.given = adds, true, true, none
				c.adds++
				n.p[i] = process{pc: pLock, on: i, back: none}
			})
		case a != none && !s.atWork(): // an ADD of the plain chain does not wait for DELs of unwind
			do("ADD of the plain chain", func(n *state, c *sandboxed) {
				c.phase, c.netns, c.inside, c.given, c.adds, c.device = up, true, true, a, 1, true
				n.owner[a] = i
				n.rules[a] |= 1 << i
			})
		}
	}
	if plain || !free {
		return
	}
	m.unseen(s, i, do)
	if m.path && i == 0 && c.phase == over && c.cached != none && !c.twice {
		do("a second DEL", func(n *state, c *sandboxed) {
			c.phase, c.twice = dels, true
			n.p[i] = process{pc: pLock, on: i, back: none}
		})
	}
	if c.phase == up || c.phase == failed || c.phase == owed {
		do("DEL", func(n *state, c *sandboxed) {
			c.phase = dels
			n.p[i] = process{pc: pLock, on: i, back: none}
		})
		if c.netns {
			do("the sandbox is forgotten, and ends", func(_ *state, c *sandboxed) {
				c.netns, c.inside = false, false
				if c.phase != up {
					c.phase = over // no DEL comes any more
				}
			})
		}
		// A late DEL harms others, as the plain chain always has.
		if m.plainDEL && c.phase == up && c.netns {
			do("DEL of the plain chain", func(n *state, c *sandboxed) {
				m.effect(n, false, 1, i, c.given)
				m.effect(n, false, 0, i, none)
				c.phase, c.cached = over, none
			})
		}
		if m.hides && c.phase == up && c.netns {
			do("the path of the namespace goes", func(_ *state, c *sandboxed) { c.netns = false })
		}
		if m.hides && c.phase == up && !c.netns && c.inside {
			do("the last process of the namespace ends", func(_ *state, c *sandboxed) { c.inside = false })
		}
	}
}

// unseen calls do with the plain chain's actions on A while unwind is switched off and no process
// works: an ADD of the plain chain does not wait for DELs that unwind is running.
func (m *protocol) unseen(s state, i int8, do func(string, func(*state, *sandboxed))) {
	c := s.c[i]
	if !m.off || i != 0 || c.old != 0 || s.atWork() {
		return
	}
	if c.phase == up && s.owner[c.given] == i { // otherwise the plain chain's DEL is late
		do("DEL of the plain chain", func(n *state, c *sandboxed) {
			m.effect(n, false, 1, i, c.given)
			m.effect(n, false, 0, i, none)
			c.phase, c.given, c.cached, c.netns, c.inside, c.unseen = over, none, none, false, false, false
		})
	}
	if a := s.free(m); c.phase == over && c.adds == 1 && a != none {
		do("ADD of the plain chain", func(n *state, c *sandboxed) {
			c.phase, c.given, c.cached, c.netns, c.inside, c.unseen, c.device = up, a, a, true, true, true, true
			c.deleted = false
			c.adds++
			n.owner[a] = i
			n.rules[a] |= 1 << i
		})
	}
}

// atWork says whether a process, or a delegate that outlived its unwind, is at work.
func (s *state) atWork() bool {
	return slices.ContainsFunc(s.p[:], func(p process) bool { return p.pc != pEnded }) ||
		slices.ContainsFunc(s.orphan[:], func(o lostDelegate) bool { return o.there })
}

// takeLater adds to the entry the ADD that the runtime, or libcni's cache, knows and the journal
// does not.
func (c *sandboxed) takeLater() {
	c.old, c.oldC = c.steps, c.claim
	c.steps, c.claim, c.unseen, c.told = 3, c.cached, false, true
}

// free returns the lowest free address, or none.
func (s *state) free(m *protocol) int8 {
	return int8(slices.Index(s.owner[:m.addresses], none))
}

// effect applies the effect of a delegate's call.
func (m *protocol) effect(s *state, add bool, step, i, shows int8) {
	switch {
	case add && step == 0:
		if a := s.free(m); a != none {
			s.owner[a] = i
		}
	case add:
		s.rules[shows] |= 1 << i
	case step == 0: // by the container's ID
		for a := range s.owner {
			if s.owner[a] == i {
				s.owner[a] = none
			}
		}
	case shows != none: // whoever owns the rule
		s.rules[shows] = 0
	}
}

// enter applies bridge's effect in the namespace that it is shown: its ADD's, or, where none is on
// record, the one at the runtime's path, if it proves to be the ADD's.
func (m *protocol) enter(s *state, add bool, step, i int8) {
	if step != 0 {
		return
	}
	at := i
	if !add && s.c[i].told && m.path && i == 0 && !s.c[i].netns {
		if !m.noProof {
			return
		}
		at = 1
	}
	s.c[at].device = add
}

func (m *protocol) take(s *state, i int8, p int) {
	if !m.noLock {
		s.lock[i] = int8(p)
	}
}

func (s *state) drop(i int8, p int) {
	if s.lock[i] == int8(p) {
		s.lock[i] = none
	}
}

// has returns the address that a container has in the IPAM's file.
func (s *state) has(i int8) int8 { return int8(slices.Index(s.owner[:], i)) }

// judge calls Decide with the evidence that the state has.
func (m *protocol) judge(s *state, i int8, ours bool) Verdict {
	c := &s.c[i]
	answer := func(b bool) tristate.Value { return tristate.Of(b, nil) }
	there, inside := c.netns && !c.unseen, c.inside && !c.unseen // of the ADD on record
	ev := Evidence{
		State: c.state, Locked: answer(s.lock[i] != none && !ours), LockFile: tristate.Yes, SameNamespaces: tristate.Yes, SameBoot: answer(!c.booted), OtherHost: tristate.No,
		NetNS: answer(there), HasProcess: answer(inside), HostLink: answer(inside || there),
		AddedUnseen: answer(c.unseen && c.inside && !m.noLater),
	}
	if m.noWitness {
		ev.HasProcess, ev.HostLink = tristate.No, tristate.No
	}
	return Decide(ev)
}

// waiting returns the delegate whose process waits for its configuration while a process writes, or
// false. Without the guard it does not wait.
func (m *protocol) waiting(s *state, pr *process) (lostDelegate, bool) {
	d := lostDelegate{there: true, add: true, waits: !m.noWait, on: pr.on, shows: none}
	switch {
	case !m.early:
		return lostDelegate{}, false
	case pr.pc == pIntent:
	case pr.pc == pCommit && pr.step == 0, pr.pc == pClaim:
		d.step, d.shows = 1, s.has(pr.on)
	case pr.pc == pMark || pr.pc == pNext: // which DEL comes next, and what it is shown, is not chosen yet
		d.add, d.waits = false, true
	default:
		return lostDelegate{}, false
	}
	return d, true
}

// kill ends a process. A delegate that it runs goes on and keeps the lock.
func (m *protocol) kill(s state, p int) state {
	pr := s.p[p]
	s.crashes--
	s.p[p] = process{}
	held := pr.on
	waiting, waits := m.waiting(&s, &pr)
	for i := range m.containers() {
		s.drop(i, p)
	}
	if (pr.pc == pAdd || pr.pc == pDel) && !s.orphan[held].there {
		s.orphan[held] = lostDelegate{there: true, add: pr.pc == pAdd, step: pr.step, on: held, shows: pr.shows}
		if !m.noLock {
			s.lock[held] = lockOrphan
		}
	} else if waits && !s.orphan[held].there {
		s.orphan[held] = waiting
		if !m.noLock {
			s.lock[held] = lockOrphan
		}
	}
	if p != nSelf {
		switch s.c[p].phase {
		case adds:
			s.c[p].phase = failed
		case dels:
			s.c[p].phase = owed
		}
	}
	return s
}

// reboot ends all that the kernel has. The journal and the IPAM plugin's files stay.
func (s state) reboot() state {
	s.power--
	s.p, s.orphan, s.rules = [maxC + 1]process{}, [maxC]lostDelegate{}, [maxA]uint8{}
	for i := range s.c {
		c := &s.c[i]
		s.lock[i] = none
		c.netns, c.inside, c.device, c.booted = false, false, false, c.state != journal.Gone
		switch c.phase {
		case adds:
			c.phase = failed
		case dels:
			c.phase = owed
		}
	}
	return s
}

// set changes the state of an entry.
func (s *state) set(c *sandboxed, to journal.State) {
	s.illegal = s.illegal || journal.CheckEdge(c.state, to) != nil
	c.state = to
}

// step calls to with each possible next step of a process.
func (m *protocol) step(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	c := &s.c[pr.on]
	adding := p != nSelf && s.c[p].phase == adds
	if m.block(s, p, to); pr.blocked {
		return
	}
	switch pr.pc {
	case pLock:
		if s.lock[pr.on] != none {
			return
		}
		m.take(&s, pr.on, p)
		pr.pc = pFind
		to("takes its lock", s)
	case pFind:
		m.find(s, p, to)
	case pIntent:
		if !m.noWriteAhead {
			m.intent(c)
		}
		pr.pc, pr.step, pr.shows = pAdd, 0, none
		to("writes its intent", s)
	case pAdd:
		if pr.step == 0 && s.free(m) == none {
			if m.noWriteAhead {
				m.intent(c)
			}
			pr.pc, pr.back = pNext, none
			pr.tried, pr.undone = 2, 2 // firewall was not fed
			to("there is no address: bridge's ADD fails", s)
			return
		}
		if pr.step == 1 && s.faults > 0 {
			for _, has := range []bool{false, true} {
				failing := s
				failing.faults--
				if has {
					m.effect(&failing, true, pr.step, pr.on, pr.shows)
				}
				failing.p[p].pc, failing.p[p].back, failing.p[p].tried, failing.p[p].undone = pNext, none, 0, 0
				to("firewall's ADD fails", failing)
			}
		}
		m.effect(&s, true, pr.step, pr.on, pr.shows)
		m.enter(&s, true, pr.step, pr.on)
		pr.pc = pCommit
		to([]string{"bridge's ADD", "firewall's ADD"}[pr.step], s)
	case pCommit:
		m.commit(s, p, to)
	case pClaim:
		m.claim(s, p, to)
	case pPrint:
		s.c[p].given, s.c[p].cached, s.c[p].phase = c.claim, c.claim, up
		s.drop(pr.on, p)
		*pr = process{}
		to("prints the result", s)
	case pMark:
		if runtimes := p == int(pr.on); c.unseen && c.cached != none && (!runtimes || !m.noAgain) {
			c.takeLater()
		}
		switch c.state {
		case journal.Adding:
			s.set(c, journal.Unwinding)
		case journal.Live:
			s.set(c, journal.Removing)
		}
		if c.claim == none && c.steps&1 != 0 && !m.unnamed {
			c.claim = s.has(pr.on) // claimHeld
		}
		pr.pc, pr.tried, pr.undone, pr.failed = pNext, 0, 0, false
		to("writes that it undoes "+name(int(pr.on)), s)
	case pNext:
		m.next(s, p, to)
	case pDel:
		m.del(s, p, to)
	case pFinish:
		m.finish(s, p, adding, to)
	}
}

// block lets the process of the next delegate take what the running one waits for, and ends it then.
func (m *protocol) block(s state, p int, to func(string, state)) {
	switch pr := &s.p[p]; {
	case !m.blocks || pr.inTurn || pr.pc != pAdd && pr.pc != pDel:
	case !pr.blocked:
		pr.blocked = true
		to("the next delegate's process takes what the running one waits for", s)
	case !m.noEnd:
		pr.blocked, pr.inTurn = false, true
		to("the next delegate's process is ended", s)
	}
}

func (m *protocol) intent(c *sandboxed) {
	if c.state != journal.Gone && !m.noGeneration { // the pending DELs move onto the new entry
		c.old, c.oldC = c.steps|c.old, max(c.claim, c.oldC)
	}
	c.state, c.steps, c.claim, c.tomb, c.told, c.booted = journal.Adding, 3, none, false, false, false
}

// find is the first step of an ADD and a DEL under the lock.
func (m *protocol) find(s state, p int, to func(string, state)) {
	pr, c := &s.p[p], &s.c[p]
	adding := c.phase == adds
	switch {
	case adding && c.state == journal.Gone:
		pr.pc = pIntent
		to("finds nothing of before", s)
	case adding && m.noGeneration:
		pr.pc = pIntent
		to("passes over what was before", s)
	case adding:
		pr.pc, pr.back = pMark, pIntent
		to("settles what was before", s)
	case c.state == journal.Adding || c.state != journal.Gone && c.unseen && c.cached != none:
		pr.pc = pMark
		to("finds a part of its ADD", s)
	case c.state != journal.Gone:
		pr.pc, pr.tried, pr.undone, pr.failed = pNext, 0, 0, false
		to("finds its entry", s)
	case c.tomb && !m.noTombstone && (!c.unseen || m.noAnswer):
		c.phase, c.deleted, c.passed = over, true, m.skips
		s.drop(pr.on, p)
		*pr = process{}
		to("finds a tombstone", s)
	case c.cached == none: // the runtime has no result: the ADD never succeeded
		c.phase = over
		s.drop(pr.on, p)
		*pr = process{}
		to("finds nothing", s)
	default:
		s.set(c, journal.Removing)
		c.steps, c.claim, c.unseen, c.told = 3, c.cached, false, true
		pr.pc = pMark
		to("goes by what the runtime says", s)
	}
}

// commit writes a delegate's address and that the next delegate starts, or makes the attachment
// live.
func (m *protocol) commit(s state, p int, to func(string, state)) {
	pr, c := &s.p[p], &s.c[p]
	if pr.step == 1 {
		pr.pc = pPrint
		to("firewall's answer is there", s)
		return
	}
	if m.noWriteAhead {
		m.intent(c)
	}
	c.claim = s.has(pr.on)
	s.set(c, journal.Live)
	pr.step, pr.shows, pr.pc = 1, c.claim, pAdd
	for i := range m.containers() {
		if i != pr.on && s.claims(i, c.claim) && !m.noClaim {
			pr.pc = pClaim
		}
	}
	to(fmt.Sprintf("claims address %d", c.claim), s)
}

// claims reports whether the entry of a container claims an address.
func (s *state) claims(i, address int8) bool {
	c := &s.c[i]
	return c.state != journal.Gone && address != none && (c.claim == address || c.oldC == address && c.old != 0)
}

// claim settles another attachment that claims the address, if it is dead, before the next delegate
// runs.
func (m *protocol) claim(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	for other := range m.containers() {
		if int(other) == p || pr.settled&(1<<other) != 0 || !s.claims(other, s.c[p].claim) {
			continue
		}
		if s.lock[other] != none {
			m.outlast(s, p, other, to)
			return
		}
		pr.settled |= 1 << other
		if m.judge(&s, other, false).Releasable() {
			m.take(&s, other, p)
			pr.pc, pr.on, pr.back = pMark, other, pClaim
			to("settles another one that claims its address", s)
		} else {
			to("another one that claims its address lives", s)
		}
		return
	}
	*pr = process{pc: pAdd, on: int8(p), back: none, step: 1, shows: s.c[p].claim}
	to("no one else claims its address", s)
}

// outlast ends an ADD's wait for the lock of another attachment that claims its address, if a DEL is
// slow. The delegate of an unwind that was killed is ended by the ADD itself. A DEL that is shown the
// address has ended by then: its unwind no longer finds the address free, see undoing.whileFree.
func (m *protocol) outlast(s state, p int, other int8, to func(string, state)) {
	if !m.slow || s.lock[other] == lockOrphan {
		return
	}
	holder := &s.p[s.lock[other]]
	if holder.pc == pDel && holder.shows == s.c[p].claim && !m.noLease {
		holder.failed, holder.pc = true, pNext
		to("its claim ends a DEL that is shown the address", s)
		return
	}
	s.p[p].settled |= 1 << other
	to("waits no longer for another one that claims its address", s)
}

// next chooses the next DEL of a pass: the newest generation's first, in reverse order of the
// chain.
func (m *protocol) next(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	c := &s.c[pr.on]
	left := c.steps | c.old<<2
	for _, bit := range []uint8{1, 0, 3, 2} {
		if left&(1<<bit) == 0 || pr.tried&(1<<bit) != 0 {
			continue
		}
		pr.tried |= 1 << bit
		pr.step, pr.old = int8(bit&1), bit >= 2
		claim := c.claim
		if pr.old {
			claim = c.oldC
		}
		pr.shows = none
		if (journal.Claim{Step: 0}).Receives(int(pr.step)) {
			pr.shows = claim
		}
		pr.parked = false
		if pr.shows != none && !m.noParking && m.foreign(&s, p, pr.on, pr.shows) {
			pr.shows, pr.parked = none, true
		}
		pr.pc = pDel
		to(fmt.Sprintf("begins the DEL of %s for %s", []string{"bridge", "firewall"}[pr.step], name(int(pr.on))), s)
		return
	}
	pr.pc = pFinish
	to("has tried all", s)
}

// foreign calls HasOtherOwner with the evidence that the state has. When an ADD undoes another
// attachment, its own new address has no other owner by that ADD.
func (m *protocol) foreign(s *state, p int, i, address int8) bool {
	fresh := func(other int8) bool { return p != nSelf && other == int8(p) && s.p[p].back == pClaim }
	named, own := tristate.No, !m.unnamed && s.owner[address] == i
	if owner := s.owner[address]; !m.unnamed && owner != none && owner != i && !fresh(owner) {
		named = tristate.Yes
	}
	var rivals []OtherOwner
	for other := range m.containers() {
		if other == i || fresh(other) || !s.claims(other, address) {
			continue
		}
		undone := s.c[other].state == journal.Removing || s.c[other].state == journal.Unwinding
		// As for gaveBack: an interface has the address while host-local names its attachment.
		rivals = append(rivals, OtherOwner{BeingUndone: undone, GaveBack: own || m.noRival, Fate: m.judge(s, other, false).Fate})
	}
	if owner := s.owner[address]; m.elsewhere && m.unnamed && owner != none && owner != i && !fresh(owner) &&
		s.c[owner].device && s.c[owner].inside {
		return true
	}
	return HasOtherOwner(named, rivals)
}

// del runs a DEL, which passes or fails.
func (m *protocol) del(s state, p int, to func(string, state)) {
	what := fmt.Sprintf("DEL of %s for %s", []string{"bridge", "firewall"}[s.p[p].step], name(int(s.p[p].on)))
	if s.faults > 0 {
		failing := s
		failing.faults--
		failing.p[p].failed, failing.p[p].pc = true, pNext
		to(what+" fails", failing)
	}
	if s.lies > 0 && s.p[p].step == 0 {
		for _, frees := range []bool{false, true} {
			unproven := s
			unproven.lies--
			m.passes(&unproven, p, frees, m.noProbe)
			to(what+map[bool]string{false: " frees no address", true: "; its store is away"}[frees], unproven)
		}
	}
	m.passes(&s, p, true, true)
	to(what, s)
}

// passes applies a DEL that passed.
func (m *protocol) passes(s *state, p int, frees, counts bool) {
	pr := &s.p[p]
	c := &s.c[pr.on]
	own := p == int(pr.on)
	if m.skips && pr.step == 0 && !c.netns && (!own || m.noPath) {
		frees, counts = false, own || m.noLeave || s.ended
	}
	if frees {
		m.effect(s, false, pr.step, pr.on, pr.shows)
	}
	m.enter(s, false, pr.step, pr.on)
	pr.pc = pNext
	if counts && !(pr.parked && pr.step == 1) { // a DEL without the address does not count
		bit := pr.step
		if pr.old {
			bit += 2
		}
		pr.undone |= 1 << bit
	}
}

// finish writes what a pass left.
func (m *protocol) finish(s state, p int, adding bool, to func(string, state)) {
	pr := &s.p[p]
	c := &s.c[pr.on]
	runtimesDEL := p != nSelf && int8(p) == pr.on && !adding
	c.steps, c.old = c.steps&^(pr.undone&3), c.old&^(pr.undone>>2)
	switch {
	case c.steps|c.old == 0:
		s.set(c, journal.Gone)
		c.claim, c.oldC = none, none
		c.tomb = !runtimesDEL
	case c.state == journal.Adding:
		s.set(c, journal.Unwinding)
	case c.state == journal.Live:
		s.set(c, journal.Removing)
	}
	if pr.back == none || pr.on != int8(p) {
		s.drop(pr.on, p)
	}
	switch {
	case pr.back == pClaim:
		*pr = process{pc: pClaim, on: int8(p), back: none, settled: pr.settled}
	case pr.back == pIntent:
		*pr = process{pc: pIntent, on: int8(p), back: none}
	case p != nSelf:
		s.c[p].deleted, s.c[p].passed = !adding, m.skips && !adding && !pr.failed
		if s.c[p].phase = over; adding {
			s.c[p].phase = failed
		} else if pr.failed {
			s.c[p].phase = owed
		}
		*pr = process{}
	default:
		*pr = process{}
	}
	to("writes what is left", s)
}

// wrong names the invariant that a state breaks, or returns "".
func (m *protocol) wrong(s state) string {
	if s.illegal {
		return "two have worked on one attachment at once"
	}
	for i := range m.containers() {
		c := &s.c[i]
		if c.phase != up || c.given == none || !c.inside {
			continue
		}
		if s.owner[c.given] != i {
			return fmt.Sprintf("%c lives, and its address %d is not its own any more", 'A'+i, c.given)
		}
		if s.rules[c.given]&(1<<i) == 0 {
			return fmt.Sprintf("%c lives, and its rule is gone", 'A'+i)
		}
		if !c.device {
			return fmt.Sprintf("%c lives, and its interface is gone", 'A'+i)
		}
	}
	for p := range s.p {
		if waits := s.p[p].blocked; waits {
			if m.step(s, p, func(string, state) { waits = false }); waits {
				return name(p) + " waits for ever"
			}
		}
	}
	if s.atWork() {
		return ""
	}
	return m.converges(s)
}

// converges checks that, once every sandbox is gone and DELs pass, sweeps alone leave nothing.
func (m *protocol) converges(s state) string {
	s.faults, s.crashes, s.lies, s.power, s.ended = 0, 0, 0, 0, true
	for i := range s.c {
		if m.plain && int8(i) == m.containers()-1 {
			if s.c[i].phase == up { // the plain chain's own DEL
				m.effect(&s, false, 1, int8(i), s.c[i].given)
				m.effect(&s, false, 0, int8(i), none)
			}
		}
		// The leak is the plain chain's.
		if s.c[i].unseen && s.c[i].state == journal.Gone && !s.c[i].deleted {
			m.effect(&s, false, 1, int8(i), s.c[i].given)
			m.effect(&s, false, 0, int8(i), none)
		}
		s.c[i].netns, s.c[i].inside, s.c[i].phase = false, false, over
	}
	for range 3 * maxC {
		for i := range m.containers() {
			if s.c[i].state == journal.Gone || !m.judge(&s, i, false).Releasable() {
				continue
			}
			m.take(&s, i, nSelf)
			s.p[nSelf] = process{pc: pMark, on: i, back: none}
			for s.p[nSelf].pc != pEnded {
				m.step(s, nSelf, func(_ string, next state) { s = next })
			}
		}
	}
	for i := range s.c {
		if s.c[i].state != journal.Gone {
			return fmt.Sprintf("%c is never released", 'A'+i)
		}
		if m.skips && !s.c[i].passed { // the provider frees it
			m.effect(&s, false, 0, int8(i), none)
		}
	}
	for a := range s.owner {
		if s.owner[a] != none {
			return fmt.Sprintf("address %d of %c is leaked", a, 'A'+s.owner[a])
		}
		if s.rules[a] != 0 {
			return fmt.Sprintf("a rule for address %d of %c is leaked", a, 'A'+bits.TrailingZeros8(s.rules[a]))
		}
	}
	return ""
}

// check visits every reachable state, the nearest first. It returns their number, and the trace to
// one that is wrong.
func (m *protocol) check() (states int, trace []string) {
	type origin struct {
		from int // index of the state before
		move
	}
	found := []origin{{none, move{to: m.first()}}}
	seen := map[state]bool{found[0].to: true}
	for at := 0; at < len(found); at++ {
		for _, next := range m.moves(found[at].to) {
			if seen[next.to] {
				continue
			}
			seen[next.to] = true
			found = append(found, origin{at, next})
			if what := m.wrong(next.to); what != "" {
				trace = []string{what}
				for i := len(found) - 1; i > 0; i = found[i].from {
					trace = append(trace, name(found[i].who)+": "+found[i].how)
				}
				slices.Reverse(trace)
				return len(found), trace
			}
		}
	}
	return len(found), nil
}

// longEnv lets long tests run in full: make proof.
const longEnv = "UNWIND_TEST_LONG"

// TestProtocolAtLength checks models that are too large for a normal run.
func TestProtocolAtLength(t *testing.T) {
	if os.Getenv(longEnv) == "" {
		t.Skip("only with " + longEnv)
	}
	for _, model := range []protocol{
		{addresses: 2, power: 1, faults: 1},
		{addresses: 2, crashes: 1, faults: 1},
		{addresses: 1, crashes: 2, faults: 2},
		{addresses: 1, crashes: 2, faults: 2, early: true},
		{addresses: 1, crashes: 2, faults: 1, early: true, blocks: true},
		{addresses: 2, crashes: 1, faults: 1, lies: 1},
		{addresses: 1, crashes: 2, faults: 1, reuse: true, hides: true, early: true},
		{addresses: 2, crashes: 1, faults: 1, reuse: true},
		{addresses: 1, crashes: 2, faults: 1, reuse: true, hides: true},
		{addresses: 2, crashes: 2, faults: 1, unnamed: true},
		{three: true, addresses: 1, faults: 1},
		{three: true, addresses: 2},
		{addresses: 2, crashes: 1, faults: 1, off: true},
		{addresses: 2, crashes: 1, faults: 1, path: true},
		{addresses: 1, power: 1, crashes: 1},
		{addresses: 1, power: 1, unnamed: true, elsewhere: true, faults: 1},
		{addresses: 1, crashes: 1, faults: 1, plainDEL: true},
		{addresses: 1, crashes: 1, faults: 1, slow: true},
		{addresses: 1, faults: 2, unnamed: true, slow: true},
	} {
		states, trace := model.check()
		t.Logf("%+v: %d states", model, states)
		if trace != nil {
			t.Errorf("wrong:\n%s", strings.Join(trace, "\n"))
		}
	}
}

// TestProtocol: no interleaving breaks an invariant; without any one of the guards, some does. Of a
// model that is large, only a part is here, which still notices each guard that is missing;
// TestProtocolAtLength has all of it.
func TestProtocol(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		model protocol
		wrong string // the invariant that breaks; "" for none
	}{
		{"two addresses", protocol{addresses: 2, crashes: 1}, ""},
		{"one address, DELs fail", protocol{addresses: 1, faults: 2}, ""},
		{"one address, a crash and a DEL that fails", protocol{addresses: 1, crashes: 1, faults: 1}, ""},
		{"one address, an ID that is used again", protocol{addresses: 1, faults: 1, reuse: true}, ""},
		{"paths that hide", protocol{addresses: 1, hides: true}, ""},
		{"IPAM of which nothing is known", protocol{addresses: 1, unnamed: true, faults: 1}, ""},
		{"IPAM of which nothing is known, two DELs that fail", protocol{addresses: 1, unnamed: true, faults: 2}, ""},
		{"a loss of power", protocol{addresses: 1, power: 1}, ""},
		{"a loss of power, a DEL that fails", protocol{addresses: 1, power: 1, faults: 1}, ""},
		{"a loss of power, an ID that is used again", protocol{addresses: 1, power: 1, reuse: true}, ""},
		{"a loss of power, IPAM of which nothing is known", protocol{addresses: 1, power: 1, unnamed: true, elsewhere: true}, ""},
		{"switched off between", protocol{elsewhere: true, addresses: 1, unnamed: true, plain: true, crashes: 1}, ""},
		{"no look for who uses an address", protocol{addresses: 1, unnamed: true, plain: true, crashes: 1}, "its rule is gone"},
		{"deleted by the plain chain", protocol{addresses: 1, crashes: 1, plainDEL: true}, ""},
		{"three containers, one address", protocol{three: true, addresses: 1}, ""},

		{"added again without a journal entry", protocol{addresses: 2, off: true}, ""},
		{"added again without a journal entry, one address", protocol{addresses: 1, faults: 1, off: true}, ""},
		{"a path that is another's", protocol{addresses: 2, path: true}, ""},

		{"started early, a crash and a DEL that fails", protocol{addresses: 1, crashes: 1, faults: 1, early: true}, ""},
		{"started early, an ID that is used again", protocol{addresses: 1, crashes: 1, reuse: true, early: true}, ""},
		{"started early, switched off between", protocol{elsewhere: true, addresses: 1, crashes: 1, unnamed: true, plain: true, early: true}, ""},

		{"started early, and in the way", protocol{addresses: 1, crashes: 1, early: true, blocks: true}, ""},
		{"started early, and in the way, a DEL that fails", protocol{addresses: 1, faults: 1, early: true, blocks: true}, ""},

		{"DELs that lie", protocol{addresses: 1, lies: 2}, ""},
		{"DELs that lie, two addresses", protocol{addresses: 2, lies: 1}, ""},
		{"DELs that lie, an ID that is used again", protocol{addresses: 1, lies: 1, reuse: true}, ""},
		{"DELs that lie, and a crash", protocol{addresses: 1, lies: 1, crashes: 1}, ""},

		{"DELs without a namespace", protocol{addresses: 2, skips: true, faults: 1}, ""},
		{"DELs without a namespace, one address", protocol{addresses: 1, skips: true, faults: 1}, ""},

		{"slow DELs", protocol{addresses: 1, faults: 2, slow: true}, ""},
		{"slow DELs, no names", protocol{addresses: 1, faults: 1, unnamed: true, slow: true}, ""},

		{"no path", protocol{addresses: 2, skips: true, noPath: true}, "leaked"},
		{"no DEL left to the runtime", protocol{addresses: 2, skips: true, noLeave: true}, "leaked"},
		{"no lease", protocol{addresses: 1, faults: 1, slow: true, noLease: true}, "its rule is gone"},
		{"no probe", protocol{addresses: 2, lies: 1, noProbe: true}, "leaked"},
		{"no wait for the commit", protocol{addresses: 2, crashes: 1, early: true, noWait: true}, "leaked"},
		{"no end of a process that is in the way", protocol{addresses: 1, early: true, blocks: true, noEnd: true}, "waits for ever"},
		{"no look for a later ADD", protocol{addresses: 2, off: true, noLater: true}, "its rule is gone"},
		{"no undoing of the later ADD", protocol{addresses: 2, off: true, noAgain: true}, "leaked"},
		{"tombstones that answer all", protocol{addresses: 2, off: true, noAnswer: true}, "leaked"},
		{"no proof of a namespace", protocol{addresses: 2, path: true, noProof: true}, "its interface is gone"},
		{"no lock", protocol{addresses: 1, crashes: 1, noLock: true}, "two have worked on one attachment at once"},
		{"no second witness", protocol{addresses: 1, hides: true, noWitness: true}, "lives"},
		{"no claim by address", protocol{addresses: 1, unnamed: true, faults: 1, noClaim: true}, "its rule is gone"},
		{"no parking", protocol{addresses: 1, faults: 2, noParking: true}, "its rule is gone"},
		{"no rival", protocol{addresses: 1, unnamed: true, faults: 2, noRival: true}, "its rule is gone"},
		{"no tombstone", protocol{addresses: 1, unnamed: true, plain: true, noTombstone: true}, "its rule is gone"},
		{"no generation", protocol{addresses: 2, faults: 2, reuse: true, noGeneration: true}, "leaked"},
		{"no write-ahead", protocol{addresses: 1, crashes: 1, noWriteAhead: true}, "leaked"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if m := tt.model; testing.Short() && m.addresses == 2 && m.crashes > 0 && (m.faults > 0 || m.off) {
				t.Skip("half a million states: make test")
			}
			t.Parallel()
			states, trace := tt.model.check()
			t.Logf("%d states\n%s", states, strings.Join(trace, "\n"))
			switch {
			case tt.wrong == "" && trace != nil:
				t.Errorf("wrong")
			case tt.wrong != "" && (trace == nil || !strings.Contains(trace[len(trace)-1], tt.wrong)):
				t.Errorf("no counterexample with %q", tt.wrong)
			}
		})
	}
}
