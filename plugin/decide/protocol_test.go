package decide

import (
	"encoding/json"
	"slices"

	"cni-unwind/journal"
)

// This file is a model of the protocol. It explores every interleaving of the verbs on two or three
// containers that share a pool of one or two addresses. Processes crash, delegates outlive the
// unwind process that started them, DELs fail or lie (exit 0 and free nothing), commits have an
// unknown outcome, and the runtime forgets sandboxes.
//
// The chain is bridge, which allocates an address by the container's ID, and firewall, which
// identifies its rule by the address alone. Some variants of the model add portmap, which
// identifies its rule by the container's ID; the rule forwards to the address. The "plain chain" is
// the same chain without unwind, as a runtime runs it while unwind is off. One step of the model is
// a transaction, a call of a delegate, or an action of the runtime.
//
// The model calls the product's own decisions: Decide, Gets, Due, Reserved, Show, After and
// journal.CheckEdge. It proves that these decisions, in the model's order, keep the invariants (see
// wrong). It does not prove that the product makes them in that order: TestModel and TestSoak run
// the product.
//
// In a trace, A, B and C are containers 0 to 2, and also the verb that the runtime runs for each.
// "sweep" is the process that undoes dead attachments. "A's old ADD" is an ADD that the runtime
// gave up.

const (
	maxC       = 3        // number of containers, at most
	maxA       = 2        // number of addresses, at most
	none       = -1       // no address, no process, or no pc to return to
	nSelf      = maxC     // the sweep's process; 0 to 2 are the runtime's verbs, by container
	nOld       = maxC + 1 // the process of A's ADD that the runtime has given up
	unnumbered = 3        // the number of a record that a DEL of A creates while A's old ADD runs
)

// protocol is one variant of the model. It determines how many faults may happen, how the runtime
// and the plugins may behave, and which guard of the protocol is left out.
type protocol struct {
	three     bool // three containers, else two
	addresses int8 // the size of the pool
	crashes   int8 // how many processes may be killed
	faults    int8 // how many delegates may fail
	lies      int8 // how many DELs may succeed without effect
	power     int8 // how many power losses there may be
	commits   int8 // how many commits may fail, with or without their transaction in the journal
	losses    int8 // how often the journal may be lost while ADDs run

	ports     bool // the chain has portmap
	partial   bool // portmap's ADD may fail and leave its rule
	reuse     bool // the runtime may add A's container ID a second time
	again     bool // the runtime may repeat A's ADD several times without a DEL in between
	unnamed   bool // unwind cannot read the IPAM plugin's files, so no file names an address's owner
	plain     bool // the last container's ADD runs without unwind
	plainDEL  bool // a DEL of a container in the journal may run without unwind
	off       bool // a DEL of A, and then its next ADD, may run without unwind
	nameless  bool // the runtime's DELs have no path except the one in the cached result
	hides     bool // the path of a namespace may disappear while a process is in the namespace
	lists     bool // sweeps get the runtime's list, and reconstruct records that the journal lacks
	path      bool // B's namespace may be at A's old path, and the runtime may send a second DEL of A
	byName    bool // bridge gets the path of the namespace instead of a pinned namespace
	prompt    bool // bridge opens the path of the namespace as soon as its DEL starts
	impatient bool // the runtime may give up A's ADD and send A's DEL; a delegate of that ADD may hang
	strict    bool // a rule whose DEL did not get the address counts as leaked, too
	once      bool // the runtime does not repeat a DEL that was killed
	pod       bool // A and B are sandboxes of one pod, and bridge's IPAM plugin frees by pod
	collects  bool // the IPAM plugin's own GC may release an address that has no record

	without guard
}

// guard is a rule of the protocol. If a guard is left out, TestGuards finds a counterexample.
type guard string

const (
	locks      guard = "work on an attachment needs its lock"
	inherited  guard = "a delegate that outlives its unwind process holds the lock"
	witness    guard = "a missing path proves nothing while a process or the host end of the interface exists"
	ahead      guard = "the intent is written before bridge's ADD runs"
	looksAgain guard = "an ADD checks whether its record exists if the commit of its intent failed"
	noLate     guard = "an ADD fails if a later commit fails"
	rewrites   guard = "an ADD writes its record again, unchanged, if the journal lost it"
	inFile     guard = "firewall's DEL gets an address only while host-local's file names the container"
	freed      guard = "with another IPAM plugin, firewall's DEL gets an address only until bridge's DEL starts"
	noted      guard = "the start of bridge's DEL is written before it runs"
	rivals     guard = "firewall's DEL gets no address that another live record claims"
	rules      guard = "bridge's DEL waits for two tries of firewall's DEL"
	port       guard = "no address is freed while the DEL of a host port is pending"
	leftover   guard = "after a successful DEL, host-local's file for the address is removed if it is left"
	records    guard = "a new ADD keeps the record of an earlier one"
	older      guard = "no step of an older record runs while a newer one is live"
	uncached   guard = "a sweep removes the ADD that it has undone from libcni's cache"
	otherCache guard = "a record is kept if libcni's cache names an existing namespace that is no record's"
	anyState   guard = "a record that is being undone is kept for the same reason"
	both       guard = "a DEL whose path is no record's also undoes an ADD that is not in the journal"
	pinned     guard = "a sweep's DEL gets the namespace that was opened when the facts were gathered"
	anothers   guard = "the runtime's DEL gets no namespace of another attachment in the journal"
	ends       guard = "the runtime's DEL ends the ADD of its attachment"
	alone      guard = "no second verb runs delegates while an ADD of the attachment is alive"
	otherOfPod guard = "a plugin that frees by pod gets no DEL while another sandbox of the pod is known"
	deadOfPod  guard = "a dead sandbox of the pod does not count"
	handsOn    guard = "a GC's list contains each record with a pending DEL"
)

// The phases of a container, as the runtime sees it.
const (
	idle   = int8(iota)
	adds   // ADD runs
	failed // ADD failed, or was interrupted
	up     // ADD succeeded
	dels   // DEL runs
	owed   // DEL failed, or was interrupted
	over   // the runtime sends nothing more
)

// The states of a record. A record that does not exist has the zero value, gone.
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
	steps  uint8 // pending DELs, one bit for each step
	claim  int8  // the address, or none
	told   bool  // a DEL or a sweep created it, not the ADD, so it has no namespace
	booted bool  // it is from an earlier boot
	clean  bool  // portmap's ADD failed
	freed  bool  // bridge's DEL may have been started
	tries  int8  // how often firewall's DEL has failed
	barred bool  // firewall's ADD failed
	cut    bool  // the ADD was interrupted, so the outcome of firewall's ADD is unknown
	memory bool  // it is not in the journal: not written, lost, or reconstructed by a sweep
}

func (r *record) pending() bool { return r.state != gone }

// sandboxed is a container with its records, newest first. The number of an ADD also identifies its
// namespace.
type sandboxed struct {
	phase, adds   int8
	given         int8 // the address that the runtime knows, or none
	cached        int8 // the address in libcni's cache, or none
	cachedN       int8 // the ADD whose namespace is in the cache
	netns, inside bool // the path of the newest ADD's namespace exists; a process is in the namespace
	device        bool // the interface of the newest ADD exists
	took          bool // its namespace is at the path where A's namespace was
	twice         bool // the runtime has sent a second DEL
	plain         bool // the newest ADD ran without unwind
	bare          bool // an ADD without a record has ended, and no DEL has succeeded since
	r             [2]record
}

// process is a running verb, or the sweep.
type process struct {
	pc     int8
	add    bool
	on     int8  // the container that it works on
	n      int8  // the number of the record that it undoes
	back   int8  // the pc after the record is undone, or none if the process then ends
	seen   uint8 // records of its own container that it has handled, one bit for each number
	step   int8  // the running delegate, and its bit in the masks: 0 bridge, 1 firewall, 2 portmap
	tried  uint8 // DELs tried in this pass
	done   uint8 // DELs done in this pass; written to the journal at the end of the pass
	shows  int8  // the address that the delegate gets
	place  int8  // the namespace that the delegate gets
	pin    bool  // the namespace existed when the facts were gathered
	failed bool
	bare   bool // this ADD continues without the journal
	claim  int8 // this ADD's address, even if the journal lacks it
	stop   bool // a DEL asked it to end
	hangs  bool // its delegate never ends
	freed  bool // this pass has started bridge's DEL
	tries  int8 // how often firewall's DEL has failed in this pass
}

// The values of pc: what a process does next.
const (
	pEnded  = int8(iota) // nothing: the process has ended
	pLock                // take the attachment's lock
	pFind                // find the next record
	pIntent              // write the intent
	pAdd                 // run a delegate's ADD
	pCommit              // after bridge's ADD, write the address and the state "live"
	pPrint               // print success; the journal does not change
	pMark                // gather facts, and write that the undoing begins
	pNext                // choose the next DEL, its address and its namespace
	pDel                 // run a delegate's DEL
	pFinish              // write the DELs that are still pending
)

// The namespaces that a delegate may get.
const (
	nowhere = int8(iota) // none
	itsOwn               // the namespace of its ADD
	byPath               // the namespace that is at the path when the delegate opens it
	noPath               // a path that never exists
)

// lostDelegate is a call of a delegate. state.orphan has the calls whose unwind process was killed.
type lostDelegate struct {
	there, add   bool
	step, on, n  int8
	shows, place int8
}

// state is the whole state of a run.
type state struct {
	c        [maxC]sandboxed
	p        [maxC + 2]process
	lock     [maxC]int8 // by container: the process that holds the lock, none, or lockOrphan
	orphan   [maxC]lostDelegate
	owner    [maxA]int8 // the owner in the IPAM plugin's file, by address
	made     [maxA]int8 // the ADD that created that file
	rules    [maxA]uint8
	forwards [maxA]uint8
	left     budgets
	stays    [maxA]uint8 // rules that may remain after their address is freed (cmd/unwind/LIMITS.md)
	illegal  bool        // two processes have worked on one record
}

type budgets struct{ crashes, faults, lies, power, commits, losses int8 }

const lockOrphan = int8(100)

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

// of returns the container whose verb a process runs, or none.
func of(p int) int8 {
	switch p {
	case nSelf:
		return none
	case nOld:
		return 0
	}
	return int8(p)
}

// record returns a record by its number. If the record no longer exists, a second process has
// worked on it, so the state becomes illegal.
func (s *state) record(i, n int8) *record {
	for at := range s.c[i].r {
		if r := &s.c[i].r[at]; r.n == n && r.state != gone {
			return r
		}
	}
	s.illegal = true
	return &record{n: n, claim: none}
}

// push adds a record as the newest.
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

func (s *state) set(r *record, to int8) {
	s.illegal = s.illegal || journal.CheckEdge(states[r.state], states[to]) != nil
	r.state = to
}

// write changes the state of an ADD's record in the journal. If the journal lost the record, write
// adds it again.
func (m *protocol) write(s *state, p int, r *record, to int8) {
	if r.memory && !s.p[p].bare && m.without != rewrites {
		r.memory, r.state = false, gone
	}
	s.set(r, to)
}

// free returns the address that the next ADD gets: the pod's address if the pod has one, else the
// lowest free address, or none.
func (s *state) free(m *protocol) int8 {
	if has := slices.IndexFunc(s.owner[:], ofPod); m.pod && has != none {
		return int8(has)
	}
	return int8(slices.Index(s.owner[:m.addresses], none))
}

func ofPod(owner int8) bool { return owner == 0 || owner == 1 }

// has returns the address that a container has in the IPAM plugin's files, or none.
func (s *state) has(i int8) int8 { return int8(slices.Index(s.owner[:], i)) }

// atWork reports whether a process, or a delegate that outlived its unwind process, is running.
func (s *state) atWork() bool {
	return slices.ContainsFunc(s.p[:], func(p process) bool { return p.pc != pEnded }) ||
		slices.ContainsFunc(s.orphan[:], func(o lostDelegate) bool { return o.there })
}

// effect changes the state in the way that a delegate's call changes the node.
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
	case d.step == 0: // bridge's DEL frees by the container's ID
		for a := range s.owner {
			if o := s.owner[a]; o == d.on || m.pod && ofPod(o) {
				s.owner[a], s.made[a] = none, 0
			}
		}
		m.enter(s, d)
	case d.step == 1: // firewall's DEL removes the address's rules, whoever owns them
		s.rules[d.shows] = 0
	default:
		for a := range s.forwards {
			s.forwards[a] &^= 1 << d.on
		}
	}
}

// enter removes the interface in the namespace that bridge's DEL gets.
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

// judge calls Decide with the evidence about a record.
func (m *protocol) judge(s *state, i int8, r *record) Judgment {
	c := &s.c[i]
	answer := func(b bool) Truth { return TruthOf(b, nil) }
	its := r.n == c.adds // the record is of the newest ADD
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

// addedAgain reports whether libcni's cache names a namespace that exists, has the interface, and
// belongs to no record. Only the newest ADD's namespace can still have a path.
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

// unlisted reports whether the runtime's list shows that a container is dead. The list contains
// only container IDs, so it lists all ADDs of a container or none of them.
func (c *sandboxed) unlisted() bool {
	return !c.netns && !c.inside && c.phase != adds && c.phase != dels
}

// pass returns the facts about a record with which the model calls the product's decisions.
func (m *protocol) pass(s *state, p int, r *record) Pass {
	pr := &s.p[p]
	newer := &s.c[pr.on].r[0]
	facts := Pass{
		Now: 1, SameBoot: !r.booted, IgnorePause: true,
		NewerLives: newer.n != r.n && !newer.memory && (newer.state == live_ || newer.state == adding) &&
			m.without != older,
		PodLives: m.pod && m.without != otherOfPod && m.lives(s, 1-pr.on),
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

// journalled returns the journal's step for a delegate.
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

// due calls Due. It reports whether a step of a record runs now.
func (m *protocol) due(s *state, p int, r *record, step int8) bool {
	j := m.journalled(s, p, r, step)
	return Due(&j, m.pass(s, p, r)) == journal.Next{}
}

// gets calls Gets. It reports whether a delegate's DEL gets the address of its record.
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
		for _, other := range s.c[i].r { // the model has one pool, and in a pool, the file names the owner
			o.Others = o.Others || m.unnamed && i != pr.on && !other.memory && KeepsContainer(states[other.state]) &&
				other.claim == r.claim && m.without != rivals
		}
	}
	j := m.journalled(s, p, r, step)
	return Gets(&j, claim, o)
}

// lives reports whether a container's newest record is in the journal, with a verdict other than
// dead. A record that is being undone does not count: if it did, two sandboxes of a pod would wait
// for each other.
func (m *protocol) lives(s *state, i int8) bool {
	r := &s.c[i].r[0]
	return r.pending() && !r.memory && (m.without == deadOfPod || !m.judge(s, i, r).Releasable())
}

// show calls Show, and returns the namespace that bridge's DEL gets.
func (m *protocol) show(s *state, p int, r *record) int8 {
	c, pr := &s.c[s.p[p].on], &s.p[p]
	there := c.netns && r.n == c.adds // unwind identifies the namespace again before each delegate
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

// after passes a successful DEL to After. It reports whether the step is done, that is, whether the
// DEL is no longer pending.
func (m *protocol) after(s *state, p int, r *record) (done bool) {
	pr := &s.p[p]
	_, done = After(m.journalled(s, p, r, pr.step), Outcome{}, 1)
	return done
}
