package decide

import (
	"encoding/json"
	"slices"

	"cni-unwind/journal"
)

// This file is a model of the protocol: every interleaving of the verbs on two or three containers
// that share a pool of one or two addresses, with crashes, delegates that outlive their unwind,
// DELs that fail or lie, commits of unknown outcome, and sandboxes that the runtime forgets. The
// chain is bridge, which gets an address by the container's ID, and firewall, which keys its rule by
// the address alone; some worlds add portmap, whose rule goes by the ID and forwards to the address.
// One step of the model is a transaction, a call of a delegate, or an action of the runtime.
//
// The decisions are the code's own: Decide, Owns, IsLate, DropsAddress, Due, Show, After,
// journal.CheckEdge and Claim.Receives. The model proves that these decisions, in this order, keep
// the invariants (see wrong). It does not prove that the code has this order: TestModel and TestSoak
// run the code.
//
// In a trace, A, B and C are containers 0 to 2, and the verb that the runtime runs for each; "sweep"
// is the process that undoes any dead attachment, and "A's old ADD" one that the runtime gave up.

const (
	maxC       = 3        // number of containers, at most
	maxA       = 2        // number of addresses, at most
	none       = -1       // no address, no process, no place to return to
	nSelf      = maxC     // the sweep; processes below it are the runtime's verbs, by container
	nOld       = maxC + 1 // A's ADD that the runtime has given up
	unnumbered = 3        // the number of a DEL's record while an ADD of its attachment may still write its own
)

// protocol is one run of the model: the world with its budgets, and the guard that it leaves out.
type protocol struct {
	three     bool // three containers, else two
	addresses int8 // the size of the pool
	crashes   int8 // how many processes may be killed
	faults    int8 // how many delegates may fail
	lies      int8 // how many DELs may pass without effect
	power     int8 // how many losses of power there may be
	commits   int8 // how many commits may fail; the transaction is there or not
	losses    int8 // how often the journal may be lost while ADDs run
	timeouts  int8 // how many late DELs may reach their time limit though nobody waits for them

	ports     bool // the chain has portmap
	partial   bool // portmap's ADD may fail and leave its rule
	reuse     bool // the runtime adds A's container ID once more
	again     bool // the runtime adds A again and again, without a DEL before
	unnamed   bool // unwind cannot read the IPAM plugin's files, so no file names an address's owner
	plain     bool // the plain chain adds the last container: unwind was switched off
	plainDEL  bool // the plain chain may delete a container that the journal has: unwind was switched off
	off       bool // the plain chain may delete and add A, while unwind is switched off
	nameless  bool // the runtime's DELs have no path, but that in the result which the runtime has
	hides     bool // the path of a namespace may go while a process is in it
	lists     bool // sweeps have a list of the runtime, and reconstruct what the journal does not know
	path      bool // B's namespace may be at A's old path, and the runtime may send a second DEL of A
	byName    bool // bridge is a plugin that is shown the path, since it does not open the namespace itself
	empty     bool // bridge is aws-cni: its DEL may pass and free nothing, but remove what is routed to the address
	prompt    bool // it opens the path as soon as it is shown
	skips     bool // bridge's DEL passes and does nothing where it is shown no path; its provider cleans up later
	slow      bool // a DEL may take longer than an ADD waits for another attachment's lock
	impatient bool // the runtime may give up A's ADD and send its DEL; a delegate of that ADD may hang
	agent     bool // a delegate that is killed has an agent behind it, which may finish the ADD
	pod       bool // A and B are sandboxes of one pod, and bridge's IPAM plugin frees by pod
	collects  bool // the IPAM plugin may release what is not on a GC's list, which no container is on

	without guard
}

// guard is a rule of the protocol. TestGuards has a counterexample for each.
type guard string

const (
	locks        guard = "work on an attachment needs its lock"
	inherited    guard = "a delegate that outlives its unwind has the lock"
	witness      guard = "a missing path proves nothing while a process or the host's end is there"
	ahead        guard = "the intent is written before bridge's ADD runs"
	looksAgain   guard = "an ADD whose intent's commit failed looks whether its record is there"
	noLate       guard = "an ADD fails if a later commit of it fails"
	rewrites     guard = "a record that the journal lost is written again as it is"
	claims       guard = "an ADD waits for whoever undoes an attachment that claims its new address"
	parking      guard = "firewall's DEL is not shown an address with another owner"
	rivals       guard = "another attachment's claim in the journal counts as another owner"
	cache        guard = "what libcni's cache has in a namespace that exists counts as another owner"
	reread       guard = "the claims and the file are read again before each late DEL"
	bound        guard = "a late DEL ends before an ADD stops waiting for it"
	port         guard = "no address is freed while the DEL of a host port is pending"
	leftover     guard = "what host-local's file still has after a DEL that passed is released"
	repeat       guard = "a DEL that may have freed nothing runs once more after the grace period"
	noRepeat     guard = "it does not, once an ADD has got its address"
	justAssigned guard = "another attachment's claim is no proof of that, since it may be from before"
	onlyFrees    guard = "the second DEL of a plugin that removes what is routed to an address is not shown it"
	records      guard = "a new ADD keeps the record of an earlier one"
	older        guard = "no step of the older record runs while the newer one lives"
	undones      guard = "an undone record answers the runtime's late DEL"
	ownNetNS     guard = "an undone record answers only the DEL of its own namespace"
	ownFile      guard = "an undone record answers only while host-local has nothing of the key"
	otherCache   guard = "a record is kept if libcni's cache names a namespace that exists and is no record's"
	anyState     guard = "so is one that is being undone"
	both         guard = "a DEL whose path is no record's undoes an ADD that the journal does not have, too"
	pinned       guard = "a sweep's DEL is shown the namespace that was opened when the facts were gathered"
	anothers     guard = "the runtime's DEL is shown no namespace of another attachment in the journal"
	ownPath      guard = "the runtime's DEL is shown a path, although its namespace is gone"
	waiting      guard = "a DEL that does nothing without a path waits for the runtime's, up to the grace period"
	ends         guard = "the runtime's DEL ends the ADD of its attachment"
	alone        guard = "no second verb runs delegates beside a living ADD"
	ownADD       guard = "a DEL ends no ADD of another attachment"
	makeSure     guard = "a delegate that was killed gets a second DEL after the grace period"
	onlyOnce     guard = "a plugin that frees by pod gets no second DEL after one that passed"
	podWait      guard = "an ADD waits, after its intent, for whoever undoes another sandbox of its pod"
	otherOfPod   guard = "a plugin that frees by pod gets no DEL while another sandbox of the pod is known"
	deadOfPod    guard = "a sandbox of the pod that is dead does not count"
	handsOn      guard = "the list of a GC has each record with a pending DEL"
)

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

// The states of a record. The zero record is none.
const (
	gone = int8(iota)
	adding
	live_
	rollingBack
	deleting
	undone // it only answers the runtime's DEL
)

var states = [...]journal.State{
	journal.Gone, journal.Adding, journal.Live, journal.RollingBack, journal.Deleting, journal.Undone,
}

// record is the journal's record of one ADD.
type record struct {
	n      int8 // the number of the ADD
	state  int8
	steps  uint8 // pending DELs, a bit each
	claim  int8  // the address, or none
	told   bool  // it comes from the runtime: its namespace is not on record
	booted bool  // it is of an earlier boot
	killed bool  // bridge's ADD was killed: its DEL is to pass twice
	passed bool  // bridge's DEL has passed, and may have freed nothing
	clean  bool  // portmap's ADD failed
	lates  int8  // how often firewall's DEL, being late, reached its time limit
	memory bool  // only a process knows it: it is not written, it is lost, or a sweep reconstructed it
}

func (r *record) pending() bool { return r.state != gone && r.state != undone }

// sandboxed is a container with its records, newest first. An ADD's number stands for its
// namespace.
type sandboxed struct {
	phase, adds   int8
	given         int8 // the address that the runtime knows, or none
	cached        int8 // the address in libcni's cache, or none
	cachedN       int8 // the ADD of which the cache has the namespace
	netns, inside bool // the path of the newest ADD's namespace exists; a process is in it
	device        bool // the interface of the newest ADD exists
	took          bool // its namespace is at the path that A's was
	twice         bool // the runtime's second DEL has come
	passed        bool // a DEL of bridge has passed of which its provider knows nothing more
	plain         bool // the newest ADD is the plain chain's
	bare          bool // an ADD without a record has ended, and no DEL has passed since
	agent         bool // the agent of a killed ADD may still finish it
	r             [2]record
}

// process is a running verb, or the sweep.
type process struct {
	pc      int8
	add     bool
	on      int8 // the container whose record it undoes, and that record
	n       int8
	back    int8  // the step after the undoing; none: the process ends
	seen    uint8 // records of its own container that it has been over, by number
	step    int8  // the delegate that runs: 0 is bridge, 1 firewall, 2 portmap; so are the bits of steps, tried
	tried   uint8 // DELs tried in this pass
	done    uint8 // those that are undone, which the journal does not know before the pass ends
	shows   int8  // the address that the delegate is shown
	place   int8  // the namespace that it is shown
	pin     bool  // the namespace was there when the facts were gathered
	others  bool  // the address had another owner when the facts were gathered
	late    bool  // the delegate is shown an address that is free
	parked  bool  // the address is withheld
	failed  bool
	passed  bool  // bridge's DEL has passed, and may have freed nothing
	bare    bool  // this ADD goes on without the journal
	claim   int8  // this ADD's address; the journal may not have it
	stop    bool  // it was asked to end
	hangs   bool  // its delegate never ends
	settled uint8 // containers settled because of an address, or of the pod, a bit each
}

// The steps of a process; each is what happens next.
const (
	pEnded  = int8(iota) // nothing: the process is free
	pLock                // take the attachment's lock
	pFind                // look for the next record
	pIntent              // write the intent
	pPod                 // wait for a DEL of another sandbox of the pod
	pAdd                 // run a delegate's ADD
	pCommit              // write its address and "live"
	pClaim               // settle another attachment that claims the address
	pPrint               // print success; nothing is written
	pMark                // gather, and write that the undoing begins, where it goes by more than the record
	pNext                // choose the next DEL, and what it is shown
	pDel                 // run a delegate's DEL
	pFinish              // write what is left
)

// The namespaces that a delegate is shown.
const (
	nowhere = int8(iota)
	itsOwn  // that of its ADD
	byPath  // whatever is at its path when it opens it
	noPath  // a path at which nothing ever is
)

// lostDelegate is a delegate whose unwind was killed.
type lostDelegate struct {
	there, add   bool
	step, on, n  int8
	shows, place int8
}

// state is the whole state of a run.
type state struct {
	c        [maxC]sandboxed
	p        [maxC + 2]process
	lock     [maxC]int8 // the process that holds it, none, or lockOrphan
	orphan   [maxC]lostDelegate
	owner    [maxA]int8 // the owner in the IPAM's file, by address
	made     [maxA]int8 // the ADD that made that file
	rules    [maxA]uint8
	forwards [maxA]uint8
	left     budgets
	grace    bool // the grace period of everything is over
	illegal  bool // two have worked on one record
	wronged  int8 // the container whose ADD was ended by another's DEL, or none
}

type budgets struct{ crashes, faults, lies, power, commits, losses, timeouts int8 }

const lockOrphan = int8(100)

// containers returns the number of containers.
func (m *protocol) containers() int8 {
	if m.three {
		return 3
	}
	return 2
}

// chain returns the bits of all delegates.
func (m *protocol) chain() uint8 {
	if m.ports {
		return 7
	}
	return 3
}

func (m *protocol) first() state {
	s := state{wronged: none, left: budgets{m.crashes, m.faults, m.lies, m.power, m.commits, m.losses, m.timeouts}}
	for i := range s.c {
		s.c[i] = sandboxed{given: none, cached: none}
		s.lock[i] = none
	}
	for i := range s.owner {
		s.owner[i] = none
	}
	return s
}

// of returns the container whose verb a process is, or none.
func of(p int) int8 {
	switch p {
	case nSelf:
		return none
	case nOld:
		return 0
	}
	return int8(p)
}

// record returns a record by its number. It is illegal to work on one that is gone.
func (s *state) record(i, n int8) *record {
	for at := range s.c[i].r {
		if r := &s.c[i].r[at]; r.n == n && r.state != gone {
			return r
		}
	}
	s.illegal = true
	return &record{n: n, claim: none}
}

// push adds the newest record. One that is undone makes way.
func (c *sandboxed) push(r record) {
	before := c.r[0]
	switch {
	case !before.pending():
		before = c.r[1]
	case c.r[1].pending():
		panic("a third record of one key")
	}
	c.r = [2]record{r, before}
}

// set changes the state of a record.
func (s *state) set(r *record, to int8) {
	s.illegal = s.illegal || journal.CheckEdge(states[r.state], states[to]) != nil
	r.state = to
}

// write changes the state of an ADD's record in the journal, which may have lost the record.
func (m *protocol) write(s *state, p int, r *record, to int8) {
	if r.memory && !s.p[p].bare && m.without != rewrites {
		r.memory, r.state = false, gone
	}
	s.set(r, to)
}

// free returns the address that the next ADD gets, or none: that which the pod has, or the lowest
// that is free.
func (s *state) free(m *protocol) int8 {
	if has := slices.IndexFunc(s.owner[:], ofPod); m.pod && has != none {
		return int8(has)
	}
	return int8(slices.Index(s.owner[:m.addresses], none))
}

func ofPod(owner int8) bool { return owner == 0 || owner == 1 }

// has returns the address that a container has in the IPAM's file, or none.
func (s *state) has(i int8) int8 { return int8(slices.Index(s.owner[:], i)) }

// atWork says whether a process, or a delegate that outlived its unwind, is at work.
func (s *state) atWork() bool {
	return slices.ContainsFunc(s.p[:], func(p process) bool { return p.pc != pEnded }) ||
		slices.ContainsFunc(s.orphan[:], func(o lostDelegate) bool { return o.there })
}

// effect applies the effect of a delegate's call.
func (m *protocol) effect(s *state, d lostDelegate) {
	c := &s.c[d.on]
	switch {
	case d.add && d.step == 0:
		if a := s.free(m); a != none {
			s.owner[a], s.made[a] = d.on, d.n
		}
		c.device = c.inside && (c.device || c.adds == d.n)
	case d.shows == none && (d.step == 1 || d.add && d.step == 2):
	case d.add && d.step == 1:
		s.rules[d.shows] |= 1 << d.on
	case d.add:
		s.forwards[d.shows] |= 1 << d.on
	case d.step == 0: // by the container's ID
		for a := range s.owner {
			if o := s.owner[a]; o == d.on || m.pod && ofPod(o) {
				s.owner[a], s.made[a] = none, 0
			}
		}
		m.enter(s, d)
	case d.step == 1: // whoever owns the rule
		s.rules[d.shows] = 0
	default:
		for a := range s.forwards {
			s.forwards[a] &^= 1 << d.on
		}
	}
}

// enter removes the interface in the namespace that bridge's DEL is shown.
func (m *protocol) enter(s *state, d lostDelegate) {
	c := &s.c[d.on]
	switch {
	case d.place == itsOwn && c.adds == d.n, d.place == byPath && c.adds == d.n && c.netns:
		c.device = false
	case d.place == byPath && d.on == 0 && s.c[1].took:
		s.c[1].device = false
	}
}

func (m *protocol) take(s *state, i int8, p int) {
	if m.without != locks {
		s.lock[i] = int8(p)
	}
}

func (s *state) drop(i int8, p int) {
	if s.lock[i] == int8(p) {
		s.lock[i] = none
	}
}

// judge calls Decide with the evidence that the state has on a record.
func (m *protocol) judge(s *state, i int8, r *record) Verdict {
	c := &s.c[i]
	answer := func(b bool) Truth { return TruthOf(b, nil) }
	its := r.n == c.adds // its namespace is that of the newest ADD
	there, inside := its && c.netns, its && c.inside
	ev := Evidence{
		State: states[r.state], Locked: answer(s.lock[i] != none),
		SameNamespaces: True, SameBoot: answer(!r.booted), OtherHost: False,
		NetNS: answer(there), HasProcess: answer(inside), HostLink: answer(inside || there),
		AddedUnseen: answer(m.addedAgain(s, i, r)),
	}
	if m.without == witness {
		ev.HasProcess, ev.HostLink = False, False
	}
	return Decide(ev)
}

// addedAgain reports whether libcni's cache names a namespace that exists, has the interface, and is no
// record's. The path of an earlier ADD's namespace leads nowhere.
func (m *protocol) addedAgain(s *state, i int8, r *record) bool {
	c := &s.c[i]
	if r.state != live_ && m.without == anyState || m.without == otherCache {
		return false
	}
	return c.cached != none && c.cachedN == c.adds && c.netns && c.device && !c.knows(c.cachedN)
}

// knows reports whether a container has a record of an ADD.
func (c *sandboxed) knows(n int8) bool {
	return slices.ContainsFunc(c.r[:], func(r record) bool { return n == r.n })
}

// unlisted reports whether a list of the runtime shows that a container is dead, whichever ADD it is of.
func (c *sandboxed) unlisted() bool {
	return !c.netns && !c.inside && c.phase != adds && c.phase != dels
}

// claims reports whether a record of a container claims an address.
func (s *state) claims(i, address int8) bool {
	return address != none && slices.ContainsFunc(s.c[i].r[:], func(r record) bool {
		return r.pending() && !r.memory && r.claim == address
	})
}

// pass returns what the code's decisions know of a record. The grace period is from 1 to 2.
func (m *protocol) pass(s *state, p int, r *record) Pass {
	pr := &s.p[p]
	no := func(*journal.Step) bool { return false }
	newer := &s.c[pr.on].r[0]
	now := int64(1)
	if s.grace {
		now = 2
	}
	facts := Pass{
		Now: now, Since: 1, GracePeriod: 1, SameBoot: !r.booted, Asked: of(p) == pr.on, IgnorePause: true,
		NoNetNS: pr.place == nowhere && m.without != waiting,
		NewerLives: newer.n != r.n && !newer.memory && (newer.state == live_ || newer.state == adding) &&
			m.without != older,
		ContainerLives: func() bool { return false },
		PodLives:       func() bool { return m.without != otherOfPod && m.lives(s, 1-pr.on) },
		Withheld:       no,
		Reassigned:     func(*journal.Step) bool { return m.without != noRepeat && m.reassigned(s, p, r) },
	}
	for step := range int8(3) {
		if r.steps&^pr.done&(1<<step) != 0 && m.without != port {
			facts.Steps = append(facts.Steps, m.journalled(r, step))
		}
	}
	if r.claim != none {
		facts.Claims = []journal.Claim{{Step: 0}}
	}
	return facts
}

// reassigned reports whether the ADD that undoes a record has got its address.
func (m *protocol) reassigned(s *state, p int, r *record) bool {
	pr := &s.p[p]
	claimed := slices.ContainsFunc(s.c[:], func(c sandboxed) bool {
		return slices.ContainsFunc(c.r[:], func(o record) bool {
			return o != *r && !o.memory && KeepsContainer(states[o.state]) && o.claim == r.claim
		})
	})
	return r.claim != none && (pr.back == pClaim && pr.claim == r.claim || claimed && m.without == justAssigned)
}

var (
	hostLocal  = json.RawMessage(`{"ipam": {"type": "host-local"}}`)
	hostPort   = json.RawMessage(`{"runtimeConfig": {"portMappings": [{"hostPort": 80}]}}`)
	spiderpool = json.RawMessage(`{"ipam": {"type": "spiderpool"}}`)
)

// journalled returns the step of a delegate as the code has it.
func (m *protocol) journalled(r *record, step int8) journal.Step {
	j := journal.Step{Index: int(step), Type: delegates[step]}
	switch {
	case step == 1:
		j.LateKills = int(r.lates)
		return j
	case step == 2:
		if j.Config = hostPort; r.clean {
			j.ADD = journal.AddFailed
		}
		return j
	case m.skips:
		j.Type = "kube-ovn"
	case m.byName:
		j.Type = "unknown"
	case m.empty && m.without != repeat:
		j.Type = "aws-cni"
	}
	if j.Config = hostLocal; m.pod && m.without != onlyOnce {
		j.Config = spiderpool
	}
	if r.killed && m.without != makeSure {
		j.ADD, j.Again = journal.AddKilled, 2
	}
	if r.passed {
		j.Again, j.Next = 2, journal.Next{At: 2, Why: journal.ForRepeat}
	}
	return j
}

// due asks Due whether a step of a record runs now.
func (m *protocol) due(s *state, p int, r *record, step int8) bool {
	j := m.journalled(r, step)
	if step == 0 && m.pod {
		j.Config = spiderpool
	}
	return Due(&j, m.pass(s, p, r)) == journal.Next{}
}

// isLate asks IsLate about firewall's DEL. The address of an IPAM plugin of which nothing is known counts
// as free once bridge's DEL is done. An ADD that has just got the address runs the DEL itself.
func (m *protocol) isLate(s *state, p int, r *record, step int8) bool {
	pr := &s.p[p]
	if r.claim == none || pr.back == pClaim {
		return false
	}
	free := s.owner[r.claim] != pr.on
	if m.unnamed {
		free = r.steps&^pr.done&1 == 0
	}
	j := m.journalled(r, step)
	return IsLate(&j, journal.Claim{Step: 0}, free)
}

// lives reports whether the journal has a record of a container that is not dead. One that is being
// undone does not count: two sandboxes of a pod would wait for each other.
func (m *protocol) lives(s *state, i int8) bool {
	r := &s.c[i].r[0]
	return r.pending() && !r.memory && (m.without == deadOfPod || !m.judge(s, i, r).Releasable())
}

// show asks Show which namespace bridge's DEL gets.
func (m *protocol) show(s *state, p int, r *record) int8 {
	c, pr := &s.c[s.p[p].on], &s.p[p]
	there := c.netns && r.n == c.adds // identified again, before each delegate
	runtimes := of(p) == pr.on
	found := pr.pin
	if r.told || runtimes {
		found = there
	}
	j := m.journalled(r, 0)
	other := &s.c[1].r[0]
	anothers := pr.on == 0 && s.c[1].took && other.pending() && !other.memory && m.without != anothers
	n := NetNS{Found: found, Interface: TruthOf(found, nil), Sent: runtimes && !m.nameless,
		Anothers: anothers}
	switch Show(&j, n) {
	case ShowPinned:
		if m.without == pinned {
			return byPath
		}
		return itsOwn
	case ShowPath:
		if runtimes || r.told {
			return itsOwn
		}
		if there {
			return byPath
		}
	case ShowSent:
		if m.without != ownPath {
			return byPath
		}
	case ShowNowhere:
		return noPath
	}
	return nowhere
}

// withhold calls Owns with the evidence that the state has on an address. When an ADD undoes
// another attachment that claims its new address, the address has no other owner by that ADD.
func (m *protocol) withhold(s *state, p int, i, address int8) bool {
	if m.without == parking {
		return false
	}
	fresh := func(other int8) bool { return s.p[p].back == pClaim && other == of(p) }
	owner := s.owner[address]
	if !m.unnamed && owner == i {
		return false // host-local's file is its own
	}
	if !m.unnamed && owner != none && !fresh(owner) {
		return true
	}
	for other := range m.containers() {
		if other == i || fresh(other) {
			continue
		}
		c := &s.c[other]
		if m.without != cache && c.cached == address && c.netns && !c.knows(c.cachedN) {
			return true
		}
		for at := range c.r {
			if r := &c.r[at]; m.without != rivals && r.pending() && !r.memory && r.claim == address &&
				Owns(r.state == deleting || r.state == rollingBack, m.judge(s, other, r).Fate) {
				return true
			}
		}
	}
	return false
}

// after asks After whether a DEL that passed is done.
func (m *protocol) after(s *state, p int, r *record) (done bool) {
	pr := &s.p[p]
	step, done := After(m.journalled(r, pr.step), Outcome{Withheld: pr.parked}, m.pass(s, p, r))
	pr.passed = pr.passed || m.empty && pr.step == 0 && step.Again != 0
	return done
}
