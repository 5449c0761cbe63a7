package plugin

import (
	"fmt"
	"math/bits"
	"os"
	"slices"
	"strings"
	"testing"

	"cni-unwind/journal"
)

// The protocol, checked: every interleaving of the verbs on two or three containers that share a pool of one or two addresses, with
// crashes, delegates that outlive their unwind, DELs that fail, and sandboxes that the runtime forgets. The chain is bridge,
// which gets an address by the container's ID, and firewall, which keys its rule by the address alone. What decides is
// the code's own: decide, isForeign, journal.CheckEdge and Claim.Receives. What is done one step at a time in the code is one step here:
// a transaction, a call of a delegate, an action of the runtime.
//
// It proves that these decisions, put together in this order, keep the invariants below. It does not prove that the code puts
// them together in this order: TestModel and TestStress run the code itself.

const (
	maxC  = 3 // containers
	maxA  = 2 // addresses
	none  = -1
	nSelf = maxC // the process that sweeps; the others are the runtime's verbs, by container
)

// protocol is one way to run the model.
type protocol struct {
	three     bool // containers; else two
	addresses int8
	crashes   int8
	faults    int8 // DELs that fail
	reuse     bool // the runtime adds a container ID once more
	unnamed   bool // the IPAM's files are not known: nothing names an address's owner
	plain     bool // the last container is added by the plain chain: unwind was switched off
	hides     bool // the path of a namespace may go while a process is in it

	// The guards that are left out.
	noLock, noWitness, noClaim, noParking, noTombstone, noGeneration, noWriteAhead bool
}

// phases of a container, as the runtime has it.
const (
	idle   = int8(iota)
	adds   // ADD runs
	failed // ADD failed, or was cut off
	up     // ADD succeeded
	dels   // DEL runs
	owed   // DEL failed, or was cut off
	over   // nothing is asked any more
)

// sandboxed is a container.
type sandboxed struct {
	phase, adds   int8
	given         int8 // the address that the runtime was told, or none
	cached        int8 // what libcni's cache has, for a DEL without an entry
	netns, inside bool // the path is there; a process is in it

	// The journal.
	state  journal.State
	steps  uint8 // owed a DEL: bit 0 bridge, bit 1 firewall
	old    uint8 // the same of an earlier generation
	claim  int8  // of the newest generation
	oldC   int8
	parked bool
	tomb   bool
}

// process is a verb, or the sweep, at work.
type process struct {
	pc     int8
	on     int8  // the container whose entry it works on
	back   int8  // where it goes on after undoing; none: it ends
	step   int8  // the delegate that runs
	old    bool  // of the earlier generation
	tried  uint8 // in this pass, bits as steps; those of the earlier generation from bit 2 on
	shows  int8  // the address that the DEL is shown
	failed bool

	settled uint8 // who were settled because of an address, bits by container
}

// where a process is.
const (
	pEnded = int8(iota)
	pLock  // for its lock
	pFind
	pIntent
	pAdd    // a delegate's ADD runs next
	pCommit // what it gave is written
	pClaim  // another one that claims the address is settled
	pLive
	pMark // undoing: it is written that it begins
	pNext // the next DEL is chosen, and what it is shown
	pDel  // a delegate's DEL runs next
	pFinish
)

// orphan is a delegate whose unwind was killed.
type lostDelegate struct {
	there, add bool
	step, on   int8
	shows      int8
}

// state is all there is.
type state struct {
	c       [maxC]sandboxed
	p       [maxC + 1]process
	lock    [maxC]int8 // the process that holds it, none, or lockOrphan
	orphan  [maxC]lostDelegate
	owner   [maxA]int8 // the IPAM's file
	rules   [maxA]uint8
	crashes int8
	faults  int8
	illegal bool // an edge that journal.CheckEdge refuses was taken
}

const lockOrphan = int8(100)

// containers returns how many there are.
func (m *protocol) containers() int8 {
	if m.three {
		return 3
	}
	return 2
}

func (m *protocol) first() state {
	s := state{crashes: m.crashes, faults: m.faults}
	for i := range s.c {
		s.c[i] = sandboxed{given: none, cached: none, claim: none, oldC: none}
		s.lock[i] = none
	}
	for i := range s.owner {
		s.owner[i] = none
	}
	return s
}

// move is a state that another one leads to, and how.
type move struct {
	how string
	to  state
}

// moves returns all that can happen next.
func (m *protocol) moves(s state) (all []move) {
	add := func(how string, args ...any) func(state) {
		return func(to state) { all = append(all, move{fmt.Sprintf(how, args...), to}) }
	}
	for i := range m.containers() {
		m.runtime(s, i, func(how string, to state) { add("%c: %s", 'A'+i, how)(to) })
		if o := s.orphan[i]; o.there {
			to := s
			to.orphan[i].there = false
			m.effect(&to, o.add, o.step, o.on, o.shows)
			if to.lock[i] == lockOrphan {
				to.lock[i] = none
			}
			add("%c: the delegate that outlived its unwind ends", 'A'+i)(to)
		}
	}
	for p := range s.p {
		if s.p[p].pc == pEnded {
			continue
		}
		m.step(s, p, func(how string, to state) { add("%s: %s", name(p), how)(to) })
		if s.crashes > 0 {
			add("%s: killed", name(p))(m.kill(s, p))
		}
	}
	if s.p[nSelf].pc == pEnded {
		for i := range m.containers() {
			if s.c[i].state != journal.Gone && m.judge(&s, i, false).ends() && s.lock[i] == none {
				to := s
				m.take(&to, i, nSelf)
				to.p[nSelf] = process{pc: pMark, on: i, back: none}
				add("sweep of %c begins", 'A'+i)(to)
			}
		}
	}
	return all
}

func name(p int) string {
	if p == nSelf {
		return "sweep"
	}
	return fmt.Sprintf("%c", 'A'+p)
}

// runtime is what the runtime does with a container.
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
		case a != none:
			do("ADD of the plain chain", func(n *state, c *sandboxed) {
				c.phase, c.netns, c.inside, c.given, c.adds = up, true, true, a, 1
				n.owner[a] = i
				n.rules[a] |= 1 << i
			})
		}
	}
	if plain || !free {
		return
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
		if m.hides && c.phase == up && c.netns {
			do("the path of the namespace goes", func(_ *state, c *sandboxed) { c.netns = false })
		}
		if m.hides && c.phase == up && !c.netns && c.inside {
			do("the last process of the namespace ends", func(_ *state, c *sandboxed) { c.inside = false })
		}
	}
}

// free returns the lowest address that no one has, or none.
func (s *state) free(m *protocol) int8 {
	return int8(slices.Index(s.owner[:m.addresses], none))
}

// effect is what a delegate does.
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
	case shows != none: // whoever's it is
		s.rules[shows] = 0
	}
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

// has is the address that a container holds in the IPAM's file.
func (s *state) has(i int8) int8 { return int8(slices.Index(s.owner[:], i)) }

// judge is decide, with what there is to see.
func (m *protocol) judge(s *state, i int8, ours bool) verdict {
	c := &s.c[i]
	answer := func(b bool) answer { return answerOf(b, nil) }
	ev := evidence{
		state: c.state, locked: answer(s.lock[i] != none && !ours), lockFile: yes, observer: yes, sameBoot: yes, otherHost: no,
		netns: answer(c.netns), inside: answer(c.inside), hostLink: answer(c.inside || c.netns),
	}
	if m.noWitness {
		ev.inside, ev.hostLink = no, no
	}
	return decide(ev)
}

// kill ends a process. A delegate that it runs goes on, with the lock.
func (m *protocol) kill(s state, p int) state {
	pr := s.p[p]
	s.crashes--
	s.p[p] = process{}
	held := pr.on
	for i := range m.containers() {
		s.drop(i, p)
	}
	if (pr.pc == pAdd || pr.pc == pDel) && !s.orphan[held].there {
		s.orphan[held] = lostDelegate{true, pr.pc == pAdd, pr.step, held, pr.shows}
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

// set changes the state of an entry.
func (s *state) set(c *sandboxed, to journal.State) {
	s.illegal = s.illegal || journal.CheckEdge(c.state, to) != nil
	c.state = to
}

// step is the next step of a process.
func (m *protocol) step(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	c := &s.c[pr.on]
	adding := p != nSelf && s.c[p].phase == adds
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
			pr.pc, pr.back = pMark, none
			to("there is no address: bridge's ADD fails", s)
			return
		}
		m.effect(&s, true, pr.step, pr.on, pr.shows)
		pr.pc = pCommit
		to([]string{"bridge's ADD", "firewall's ADD"}[pr.step], s)
	case pCommit:
		m.commit(s, p, to)
	case pClaim:
		m.claim(s, p, to)
	case pLive:
		s.set(c, journal.Live)
		s.c[p].given, s.c[p].cached, s.c[p].phase = c.claim, c.claim, up
		s.drop(pr.on, p)
		*pr = process{}
		to("is live, and says so", s)
	case pMark:
		switch c.state {
		case journal.Adding:
			s.set(c, journal.Unwinding)
		case journal.Live:
			s.set(c, journal.Removing)
		}
		if c.claim == none && c.steps&1 != 0 && !m.unnamed {
			c.claim = s.has(pr.on) // claimHeld
		}
		pr.pc, pr.tried, pr.failed = pNext, 0, false
		to("writes that it undoes "+name(int(pr.on)), s)
	case pNext:
		m.next(s, p, to)
	case pDel:
		m.del(s, p, to)
	case pFinish:
		m.finish(s, p, adding, to)
	}
}

func (m *protocol) intent(c *sandboxed) {
	if c.state != journal.Gone && !m.noGeneration { // what could not be undone moves onto the new entry
		c.old, c.oldC = c.steps|c.old, max(c.claim, c.oldC)
	}
	c.state, c.steps, c.claim, c.parked, c.tomb = journal.Adding, 1, none, false, false
}

// find is what an ADD and a DEL begin with.
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
	case c.state != journal.Gone:
		pr.pc = pMark
		to("finds its entry", s)
	case c.tomb && !m.noTombstone:
		c.phase, c.tomb = over, true
		s.drop(pr.on, p)
		*pr = process{}
		to("finds a tombstone", s)
	case c.cached == none: // the runtime has no result: it was never added
		c.phase = over
		s.drop(pr.on, p)
		*pr = process{}
		to("finds nothing", s)
	default:
		s.set(c, journal.Removing)
		c.steps, c.claim = 3, c.cached
		pr.pc = pMark
		to("goes by what the runtime says", s)
	}
}

// commit writes what a delegate gave, and that the next one is started; or that the attachment is live.
func (m *protocol) commit(s state, p int, to func(string, state)) {
	pr, c := &s.p[p], &s.c[p]
	if pr.step == 1 {
		pr.pc = pLive
		to("firewall's answer is there", s)
		return
	}
	if m.noWriteAhead {
		m.intent(c)
	}
	c.claim = s.has(pr.on)
	c.steps |= 2
	pr.step, pr.shows, pr.pc = 1, c.claim, pAdd
	for i := range m.containers() {
		if i != pr.on && s.claims(i, c.claim) && !m.noClaim {
			pr.pc = pClaim
		}
	}
	to(fmt.Sprintf("claims address %d", c.claim), s)
}

// claims says whether the entry of a container claims an address.
func (s *state) claims(i, address int8) bool {
	c := &s.c[i]
	return c.state != journal.Gone && address != none && (c.claim == address || c.oldC == address && c.old != 0)
}

// claim settles another attachment that claims the address, if it is dead, before the next delegate runs.
func (m *protocol) claim(s state, p int, to func(string, state)) {
	pr := &s.p[p]
	for other := range m.containers() {
		if int(other) == p || pr.settled&(1<<other) != 0 || !s.claims(other, s.c[p].claim) {
			continue
		}
		if s.lock[other] != none {
			return // it is waited for; see undoing.late
		}
		pr.settled |= 1 << other
		if m.judge(&s, other, false).ends() {
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

// next chooses the next DEL of a pass: the newest generation's first, each in reverse order.
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
		c.parked = false
		if pr.shows != none && !m.noParking && m.foreign(&s, p, pr.on, pr.shows) {
			pr.shows, c.parked = none, true
		}
		pr.pc = pDel
		to(fmt.Sprintf("begins the DEL of %s for %s", []string{"bridge", "firewall"}[pr.step], name(int(pr.on))), s)
		return
	}
	pr.pc = pFinish
	to("has tried all", s)
}

// foreign is isForeign, with what there is to see. Of an ADD that undoes another one, its own address is fresh.
func (m *protocol) foreign(s *state, p int, i, address int8) bool {
	fresh := func(other int8) bool { return p != nSelf && other == int8(p) && s.p[p].back == pClaim }
	named := no
	if owner := s.owner[address]; !m.unnamed && owner != none && owner != i && !fresh(owner) {
		named = yes
	}
	var rivals []rival
	for other := range m.containers() {
		if other == i || fresh(other) || !s.claims(other, address) {
			continue
		}
		undone := s.c[other].state == journal.Removing || s.c[other].state == journal.Unwinding
		rivals = append(rivals, rival{undone, m.judge(s, other, false).fate})
	}
	return isForeign(named, rivals)
}

// del runs a DEL: it passes, or fails.
func (m *protocol) del(s state, p int, to func(string, state)) {
	what := fmt.Sprintf("DEL of %s for %s", []string{"bridge", "firewall"}[s.p[p].step], name(int(s.p[p].on)))
	if s.faults > 0 {
		failing := s
		failing.faults--
		failing.p[p].failed, failing.p[p].pc = true, pNext
		to(what+" fails", failing)
	}
	pr := &s.p[p]
	c := &s.c[pr.on]
	m.effect(&s, false, pr.step, pr.on, pr.shows)
	pr.pc = pNext
	if !(c.parked && pr.step == 1) { // a DEL without the address does not count
		if pr.old {
			c.old &^= 1 << pr.step
		} else {
			c.steps &^= 1 << pr.step
		}
	}
	to(what, s)
}

// finish writes what a pass has left.
func (m *protocol) finish(s state, p int, adding bool, to func(string, state)) {
	pr := &s.p[p]
	c := &s.c[pr.on]
	runtimesDEL := p != nSelf && int8(p) == pr.on && !adding
	if c.steps|c.old == 0 {
		s.set(c, journal.Gone)
		c.claim, c.oldC, c.parked = none, none, false
		c.tomb = !runtimesDEL
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

// wrong says which invariant a state breaks, or nothing.
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
	}
	for p := range s.p {
		if s.p[p].pc != pEnded {
			return ""
		}
	}
	if slices.ContainsFunc(s.orphan[:], func(o lostDelegate) bool { return o.there }) {
		return ""
	}
	return m.converges(s)
}

// converges sees that, once every sandbox is gone and DELs pass, sweeps alone leave nothing.
func (m *protocol) converges(s state) string {
	s.faults, s.crashes = 0, 0
	for i := range s.c {
		if m.plain && int8(i) == m.containers()-1 {
			if s.c[i].phase == up { // the plain chain's own DEL
				m.effect(&s, false, 1, int8(i), s.c[i].given)
				m.effect(&s, false, 0, int8(i), none)
			}
		}
		s.c[i].netns, s.c[i].inside, s.c[i].phase = false, false, over
	}
	for range 3 * maxC {
		for i := range m.containers() {
			if s.c[i].state == journal.Gone || !m.judge(&s, i, false).ends() {
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

// check visits every state there can be, the nearest first. It returns how many, and the way to one that is wrong.
func (m *protocol) check() (states int, trace []string) {
	type origin struct {
		from state
		how  string
	}
	first := m.first()
	seen := map[state]origin{first: {}}
	queue := []state{first}
	for len(queue) > 0 {
		s := queue[0]
		queue = queue[1:]
		for _, next := range m.moves(s) {
			if _, is := seen[next.to]; is {
				continue
			}
			seen[next.to] = origin{s, next.how}
			queue = append(queue, next.to)
			if what := m.wrong(next.to); what != "" {
				trace = []string{what}
				for at := next.to; at != first; at = seen[at].from {
					trace = append(trace, seen[at].how)
				}
				slices.Reverse(trace)
				return len(seen), trace
			}
		}
	}
	return len(seen), nil
}

// longEnv has tests that can go on for long do so: make proof.
const longEnv = "UNWIND_TEST_LONG"

// TestProtocolAtLength has models that are too large for each day.
func TestProtocolAtLength(t *testing.T) {
	if os.Getenv(longEnv) == "" {
		t.Skip("only with " + longEnv)
	}
	for _, model := range []protocol{
		{addresses: 1, crashes: 2, faults: 2},
		{addresses: 2, crashes: 1, faults: 1, reuse: true},
		{addresses: 1, crashes: 2, faults: 1, reuse: true, hides: true},
		{addresses: 2, crashes: 2, faults: 1, unnamed: true},
		{three: true, addresses: 1, faults: 1},
		{three: true, addresses: 2},
	} {
		states, trace := model.check()
		t.Logf("%+v: %d states", model, states)
		if trace != nil {
			t.Errorf("wrong:\n%s", strings.Join(trace, "\n"))
		}
	}
}

// TestProtocol: no interleaving breaks an invariant; and without any one of the guards, some does.
func TestProtocol(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		model protocol
		wrong string // what is then; "" for nothing
	}{
		{"two addresses", protocol{addresses: 2, crashes: 1}, ""},
		{"one address, DELs fail", protocol{addresses: 1, faults: 2}, ""},
		{"one address, a crash and a DEL that fails", protocol{addresses: 1, crashes: 1, faults: 1}, ""},
		{"one address, two crashes", protocol{addresses: 1, crashes: 2}, ""},
		{"one address, an ID that is used again", protocol{addresses: 1, faults: 1, reuse: true}, ""},
		{"paths that hide", protocol{addresses: 1, hides: true}, ""},
		{"IPAM of which nothing is known", protocol{addresses: 1, unnamed: true, faults: 1}, ""},
		{"switched off between", protocol{addresses: 1, unnamed: true, plain: true}, ""},
		{"two addresses, a crash and a DEL that fails", protocol{addresses: 2, crashes: 1, faults: 1}, ""},
		{"three containers, one address", protocol{three: true, addresses: 1}, ""},

		{"no lock", protocol{addresses: 1, crashes: 1, noLock: true}, "two have worked on one attachment at once"},
		{"no second witness", protocol{addresses: 1, hides: true, noWitness: true}, "lives"},
		{"no claim by address", protocol{addresses: 1, unnamed: true, faults: 1, noClaim: true}, "its rule is gone"},
		{"no parking", protocol{addresses: 1, faults: 2, noParking: true}, "its rule is gone"},
		{"no tombstone", protocol{addresses: 1, unnamed: true, plain: true, noTombstone: true}, "its rule is gone"},
		{"no generation", protocol{addresses: 2, faults: 2, reuse: true, noGeneration: true}, "leaked"},
		{"no write-ahead", protocol{addresses: 1, crashes: 1, noWriteAhead: true}, "leaked"},
	} {
		t.Run(tt.name, func(t *testing.T) {
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
