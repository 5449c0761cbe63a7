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
// The decisions are the code's own: Decide, Gets, Due, Reserved, Show, After and journal.CheckEdge. The model proves that these decisions, in this order, keep
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
	prompt    bool // it opens the path as soon as it is shown
	impatient bool // the runtime may give up A's ADD and send its DEL; a delegate of that ADD may hang
	strict    bool // firewall's rule may not stay
	once      bool // the runtime sends no second DEL
	pod       bool // A and B are sandboxes of one pod, and bridge's IPAM plugin frees by pod
	collects  bool // the IPAM plugin may release what is not on a GC's list, which no container is on

	without guard
}

// guard is a rule of the protocol. TestGuards has a counterexample for each.
type guard string

const (
	locks      guard = "work on an attachment needs its lock"
	inherited  guard = "a delegate that outlives its unwind has the lock"
	witness    guard = "a missing path proves nothing while a process or the host's end is there"
	ahead      guard = "the intent is written before bridge's ADD runs"
	looksAgain guard = "an ADD whose intent's commit failed looks whether its record is there"
	noLate     guard = "an ADD fails if a later commit of it fails"
	rewrites   guard = "a record that the journal lost is written again as it is"
	inFile     guard = "firewall's DEL is shown an address only while host-local's file names its container"
	freed      guard = "with another IPAM plugin, only until bridge's DEL is started"
	noted      guard = "which is written before"
	rivals     guard = "and only if no other record that lives claims the address"
	rules      guard = "bridge's DEL waits for two tries of firewall's"
	port       guard = "no address is freed while the DEL of a host port is pending"
	leftover   guard = "what host-local's file still has after a DEL that passed is released"
	records    guard = "a new ADD keeps the record of an earlier one"
	older      guard = "no step of the older record runs while the newer one lives"
	uncached   guard = "a sweep removes the ADD that it has undone from libcni's cache"
	otherCache guard = "a record is kept if libcni's cache names a namespace that exists and is no record's"
	anyState   guard = "so is one that is being undone"
	both       guard = "a DEL whose path is no record's undoes an ADD that the journal does not have, too"
	pinned     guard = "a sweep's DEL is shown the namespace that was opened when the facts were gathered"
	anothers   guard = "the runtime's DEL is shown no namespace of another attachment in the journal"
	ends       guard = "the runtime's DEL ends the ADD of its attachment"
	alone      guard = "no second verb runs delegates beside a living ADD"
	otherOfPod guard = "a plugin that frees by pod gets no DEL while another sandbox of the pod is known"
	deadOfPod  guard = "a sandbox of the pod that is dead does not count"
	handsOn    guard = "the list of a GC has each record with a pending DEL"
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
)

var states = [...]journal.State{
	journal.Gone, journal.Adding, journal.Live, journal.RollingBack, journal.Deleting,
}

// record is the journal's record of one ADD.
type record struct {
	n      int8 // the number of the ADD
	state  int8
	steps  uint8 // pending DELs, a bit each
	claim  int8  // the address, or none
	told   bool  // it comes from the runtime: its namespace is not on record
	booted bool  // it is of an earlier boot
	clean  bool  // portmap's ADD failed
	freed  bool  // bridge's DEL may have been started
	tries  int8  // how often firewall's DEL has failed
	barred bool  // firewall's ADD failed
	cut    bool  // the ADD was cut off, so it is unknown whether firewall's passed
	memory bool  // only a process knows it: it is not written, it is lost, or a sweep reconstructed it
}

func (r *record) pending() bool { return r.state != gone }

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
	plain         bool // the newest ADD is the plain chain's
	bare          bool // an ADD without a record has ended, and no DEL has passed since
	r             [2]record
}

// process is a running verb, or the sweep.
type process struct {
	pc     int8
	add    bool
	on     int8 // the container whose record it undoes, and that record
	n      int8
	back   int8  // the step after the undoing; none: the process ends
	seen   uint8 // records of its own container that it has been over, by number
	step   int8  // the delegate that runs: 0 is bridge, 1 firewall, 2 portmap; so are the bits of steps, tried
	tried  uint8 // DELs tried in this pass
	done   uint8 // those that are undone, which the journal does not know before the pass ends
	shows  int8  // the address that the delegate is shown
	place  int8  // the namespace that it is shown
	pin    bool  // the namespace was there when the facts were gathered
	failed bool
	bare   bool // this ADD goes on without the journal
	claim  int8 // this ADD's address; the journal may not have it
	stop   bool // it was asked to end
	hangs  bool // its delegate never ends
	freed  bool // this pass has started bridge's DEL
	tries  int8 // how often firewall's DEL has failed in this pass
}

// The steps of a process; each is what happens next.
const (
	pEnded  = int8(iota) // nothing: the process is free
	pLock                // take the attachment's lock
	pFind                // look for the next record
	pIntent              // write the intent
	pAdd                 // run a delegate's ADD
	pCommit              // write its address and "live"
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
	stays    [maxA]uint8 // rules of firewall whose address was freed, as LIMITS has it
	illegal  bool        // two have worked on one record
}

type budgets struct{ crashes, faults, lies, power, commits, losses int8 }

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
	s := state{left: budgets{m.crashes, m.faults, m.lies, m.power, m.commits, m.losses}}
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

// push adds the newest record.
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

// pass returns what the code's decisions know of a record.
func (m *protocol) pass(s *state, p int, r *record) Pass {
	pr := &s.p[p]
	newer := &s.c[pr.on].r[0]
	facts := Pass{
		Now: 1, SameBoot: !r.booted, IgnorePause: true,
		NewerLives: newer.n != r.n && !newer.memory && (newer.state == live_ || newer.state == adding) &&
			m.without != older,
		PodLives: m.without != otherOfPod && m.lives(s, 1-pr.on),
	}
	for step := range int8(3) {
		if r.steps&^pr.done&(1<<step) == 0 || step == 1 && m.without == rules || step == 2 && m.without == port {
			continue
		}
		facts.Steps = append(facts.Steps, m.journalled(s, p, r, step))
	}
	if r.claim != none {
		facts.Claims = []journal.Claim{{Step: 0}}
	}
	return facts
}

var (
	hostLocal  = json.RawMessage(`{"ipam": {"type": "host-local"}}`)
	hostPort   = json.RawMessage(`{"runtimeConfig": {"portMappings": [{"hostPort": 80}]}}`)
	spiderpool = json.RawMessage(`{"ipam": {"type": "spiderpool"}}`)
)

// journalled returns the step of a delegate as the code has it.
func (m *protocol) journalled(s *state, p int, r *record, step int8) journal.Step {
	j := journal.Step{Index: int(step), Type: delegates[step]}
	switch {
	case step == 1:
		j.Tries = int(r.tries + s.p[p].tries)
		if r.barred {
			j.ADD = journal.AddFailed
		} else if r.cut {
			j.ADD = journal.AddUnknown
		}
		return j
	case step == 2:
		j.Config = hostPort
		if r.clean {
			j.ADD = journal.AddFailed
		}
		return j
	case m.byName:
		j.Type = "unknown"
	}
	j.Config = hostLocal
	if m.pod {
		j.Config = spiderpool
	}
	return j
}

// due asks Due whether a step of a record runs now.
func (m *protocol) due(s *state, p int, r *record, step int8) bool {
	j := m.journalled(s, p, r, step)
	return Due(&j, m.pass(s, p, r)) == journal.Next{}
}

// gets asks Gets whether a delegate's DEL is shown the address of its record.
func (m *protocol) gets(s *state, p int, r *record, step int8) bool {
	if r.claim == none {
		return false
	}
	pr := &s.p[p]
	claim := journal.Claim{Step: 0, Pool: "pool"}
	if m.unnamed {
		claim.Pool = ""
	}
	o := Owner{
		InFile: s.owner[r.claim] == pr.on || m.without == inFile,
		Freed:  (r.steps&^pr.done&1 == 0 || r.freed || pr.freed) && m.without != freed,
	}
	for i := range m.containers() {
		for _, other := range s.c[i].r {
			o.Others = o.Others || i != pr.on && !other.memory && KeepsContainer(states[other.state]) &&
				other.claim == r.claim && m.without != rivals
		}
	}
	j := m.journalled(s, p, r, step)
	return Gets(&j, claim, o)
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
	j := m.journalled(s, p, r, 0)
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
		return byPath
	case ShowNowhere:
		return noPath
	}
	return nowhere
}

// after asks After whether a DEL that passed is done.
func (m *protocol) after(s *state, p int, r *record) (done bool) {
	pr := &s.p[p]
	_, done = After(m.journalled(s, p, r, pr.step), Outcome{}, 1)
	return done
}
