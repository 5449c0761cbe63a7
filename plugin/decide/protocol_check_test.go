package decide

import (
	"fmt"
	"hash/maphash"
	"math/bits"
	"slices"
	"strings"
	"testing"

	"cni-unwind/plugin/plugintest/sandbox"
)

// wrong returns a description of the invariant that a state breaks, or "".
func (m *protocol) wrong(s state) string {
	switch {
	case s.illegal:
		return "two processes worked on one attachment at the same time"
	}
	for p, pr := range s.p {
		if pr.pc == pDel && m.shownAnothers(&s, pr.delegate()) {
			return name(p) + "'s DEL of firewall gets the address of another ADD"
		}
	}
	for _, d := range s.orphan {
		if d.there && !d.add && m.shownAnothers(&s, d) {
			return "a DEL of firewall that outlived its unwind process gets the address of another ADD"
		}
	}
	for i := range m.containers() {
		c := &s.c[i]
		if c.phase != up || c.given == none || !c.inside {
			continue
		}
		switch {
		case s.owner[c.given] != i:
			return fmt.Sprintf("%s lives, and its address %d is no longer its own", name(int(i)), c.given)
		case s.rules[c.given]&(1<<i) == 0:
			return fmt.Sprintf("%s lives, and its rule is gone", name(int(i)))
		case m.ports && s.forwards[c.given]&(1<<i) == 0:
			return fmt.Sprintf("%s lives, and its host port is gone", name(int(i)))
		case s.forwards[c.given]&^(1<<i) != 0:
			return fmt.Sprintf("%s lives, and another container's host port forwards to it", name(int(i)))
		case !c.device:
			return fmt.Sprintf("%s lives, and its interface is gone", name(int(i)))
		}
	}
	if p := m.stuck(s); p != none {
		return name(p) + " waits forever"
	}
	if s.atWork() {
		return ""
	}
	return m.converges(s)
}

// shownAnothers reports whether firewall's DEL gets an address that belongs to another ADD.
func (m *protocol) shownAnothers(s *state, d lostDelegate) bool {
	if d.step != 1 || d.shows == none || s.owner[d.shows] == none {
		return false
	}
	c := &s.c[s.owner[d.shows]]
	if m.pod && ofPod(s.owner[d.shows]) && ofPod(d.on) || m.unnamed && c.r[0].claim != d.shows {
		return false // the address is the pod's, or no record shows yet that another ADD got it
	}
	return s.owner[d.shows] != d.on || s.made[d.shows] != d.n && c.phase == up && c.inside
}

// stuck returns a process that waits for an event that can never happen, or none.
func (m *protocol) stuck(s state) int {
	waits := none
	for p := range s.p {
		if s.p[p].pc == pEnded {
			continue
		}
		can := false
		m.step(s, p, func(string, state) { can = true })
		if can {
			return none
		}
		if !s.p[p].hangs {
			waits = p
		}
	}
	if slices.ContainsFunc(s.orphan[:], func(o lostDelegate) bool { return o.there }) {
		return none
	}
	return waits
}

// converges ends all sandboxes, and runs sweeps in which all DELs succeed. It returns a description
// of something that the sweeps left behind, or "".
func (m *protocol) converges(s state) string {
	s.left = budgets{}
	for i := range m.containers() {
		c := &s.c[i]
		// The journal lacks the newest ADD, and no sweep can reconstruct its record. So the model itself
		// removes everything that the ADD created.
		if c.unknown() && (!m.lists || m.unnamed || s.has(i) == none) {
			c.given = max(c.cached, s.has(i))
			m.plainDELs(&s, i)
			for a := range s.rules {
				s.rules[a], s.forwards[a] = s.rules[a]&^(1<<i), s.forwards[a]&^(1<<i)
			}
		}
		c.netns, c.inside, c.phase = false, false, over
	}
	for range 3 * maxC {
		for i := range m.containers() {
			if m.reconstruct(&s, i) {
				s = m.swept(s)
			}
			for at := range s.c[i].r {
				r := s.c[i].r[at]
				if !r.pending() || !m.judge(&s, i, &r).Releasable() {
					continue
				}
				m.sweep(&s, i, r.n)
				s = m.swept(s)
			}
		}
		if m.pod { // the IPAM plugin's own GC frees the pod's address
			m.effect(&s, lostDelegate{})
		}
	}
	for i := range m.containers() {
		if s.c[i].r[0].pending() || s.c[i].r[1].pending() {
			return fmt.Sprintf("%s is never released", name(int(i)))
		}
	}
	for a := range s.owner {
		switch {
		case s.owner[a] != none:
			return fmt.Sprintf("address %d of %s is leaked", a, name(int(s.owner[a])))
		case s.rules[a]&^s.stays[a] != 0:
			return fmt.Sprintf("a rule for address %d of %s is leaked", a, name(bits.TrailingZeros8(s.rules[a]&^s.stays[a])))
		case s.forwards[a] != 0:
			return fmt.Sprintf("a host port of %s is leaked", name(bits.TrailingZeros8(s.forwards[a])))
		}
	}
	return ""
}

// swept returns the state after the sweep has finished its current pass.
func (m *protocol) swept(s state) state {
	for s.p[nSelf].pc != pEnded {
		m.step(s, nSelf, func(_ string, next state) { s = next })
	}
	return s
}

// unknown reports whether the journal lacks the newest ADD of a container.
func (c *sandboxed) unknown() bool {
	return c.bare || c.plain &&
		!c.knows(c.cachedN)
}

// check visits every reachable state, breadth first. It returns the number of states, and the trace
// to the first state that breaks an invariant. To save memory, check keeps only a hash of each
// visited state, and the move that led to the state.
func (m *protocol) check() (states int, trace []string) {
	type step struct{ from, nth int32 } // the previous state, and the index of the move from it
	type reached struct {
		state
		at int32
	}
	seed := maphash.MakeSeed()
	found, queue := []step{{}}, []reached{{state: m.first()}}
	seen := map[uint64]bool{maphash.Comparable(seed, queue[0].state): true}
	for len(queue) > 0 {
		s := queue[0]
		queue = queue[1:]
		for nth, next := range m.moves(s.state) {
			hash := maphash.Comparable(seed, next.to)
			if seen[hash] {
				continue
			}
			seen[hash] = true
			found = append(found, step{s.at, int32(nth)})
			queue = append(queue, reached{next.to, int32(len(found) - 1)})
			if what := m.wrong(next.to); what != "" {
				var way []int32
				for at := len(found) - 1; at > 0; at = int(found[at].from) {
					way = append(way, found[at].nth)
				}
				slices.Reverse(way)
				return len(found), append(m.replay(way), what)
			}
		}
	}
	return len(found), nil
}

// replay returns a description of each move on the way to a state.
func (m *protocol) replay(way []int32) (trace []string) {
	s := m.first()
	for _, nth := range way {
		next := m.moves(s)[nth]
		trace = append(trace, name(next.who)+": "+next.how)
		s = next.to
	}
	return trace
}

// TestProtocol: in each of these variants of the model, no interleaving breaks an invariant.
func TestProtocol(t *testing.T) {
	t.Parallel()
	sandbox.SkipRaced(t)
	type variant struct {
		name  string
		model protocol
	}
	small := []variant{
		{"two addresses", protocol{addresses: 2, crashes: 1}},
		{"a path that disappears", protocol{addresses: 1, hides: true}},
		{"commits of unknown outcome, an unknown IPAM plugin", protocol{addresses: 1, unnamed: true, commits: 1}},
		{"a container added by the plain chain", protocol{addresses: 1, plain: true, crashes: 1}},
		{"an unknown IPAM plugin, a crash", protocol{addresses: 1, unnamed: true, once: true, crashes: 1}},
		{"a rule must go before the address", protocol{addresses: 1, strict: true, faults: 1}},
		{"deleted by the plain chain", protocol{addresses: 1, crashes: 1, plainDEL: true}},
		{"a list, a container added by the plain chain", protocol{addresses: 1, lists: true, plain: true, crashes: 1}},
		{"a list, added again by the plain chain", protocol{addresses: 2, lists: true, off: true}},
		{"added again by the plain chain, DELs without a path", protocol{addresses: 2, off: true, nameless: true}},
		{"a path of another container", protocol{addresses: 2, path: true}},
		{"a path of another container, given to a plugin", protocol{addresses: 2, path: true, byName: true, prompt: true}},
		{"DELs that lie", protocol{addresses: 1, lies: 2}},
		{"DELs that lie, a reused container ID", protocol{addresses: 1, lies: 1, reuse: true}},
		{"host ports, a crash", protocol{addresses: 1, ports: true, crashes: 1}},
		{"sandboxes of one pod", protocol{addresses: 1, pod: true, unnamed: true, faults: 2}},
		{"an IPAM plugin with its own GC", protocol{addresses: 1, collects: true, crashes: 1}},
		{"two commits of unknown outcome", protocol{addresses: 1, commits: 2}},
	}
	large := []variant{ // each takes more than 3 s, so "make test" samples them
		{"one address, DELs fail", protocol{addresses: 1, faults: 2}},
		{"one address, a crash and a DEL that fails", protocol{addresses: 1, crashes: 1, faults: 1}},
		{"one address, a reused container ID", protocol{addresses: 1, faults: 1, reuse: true}},
		{"a reused container ID, a crash", protocol{addresses: 2, crashes: 1, reuse: true}},
		{"added again without a DEL", protocol{addresses: 1, again: true, crashes: 1}},
		{"an unknown IPAM plugin", protocol{addresses: 1, unnamed: true, faults: 2}},
		{"a power loss", protocol{addresses: 1, power: 1, faults: 1}},
		{"a power loss, a reused container ID", protocol{addresses: 1, power: 1, reuse: true}},
		{"three containers, one address", protocol{three: true, addresses: 1}},
		{"added again by the plain chain", protocol{addresses: 2, off: true, faults: 1}},
		{"a list, commits of unknown outcome", protocol{addresses: 1, lists: true, commits: 1, crashes: 1}},
		{"added again by the plain chain, one address", protocol{addresses: 1, off: true, crashes: 1}},
		{"a path of another container, a crash", protocol{addresses: 2, path: true, crashes: 1}},
		{"DELs that lie, and a crash", protocol{addresses: 1, lies: 1, crashes: 1}},
		{"host ports", protocol{addresses: 1, ports: true, faults: 2}},
		{"host ports, a power loss", protocol{addresses: 1, ports: true, power: 1, faults: 1}},
		{"an ADD that the runtime gives up", protocol{addresses: 1, impatient: true, crashes: 1}},
		{"commits of unknown outcome, an unknown IPAM plugin, DELs fail", protocol{addresses: 1, unnamed: true, commits: 1, faults: 1}},
		{"a journal that is lost during ADDs, an unknown IPAM plugin", protocol{addresses: 1, unnamed: true, losses: 1, faults: 1}},
		{"commits of unknown outcome", protocol{addresses: 1, commits: 1, crashes: 1}},
		{"a journal that is lost during ADDs", protocol{addresses: 1, losses: 1, faults: 2}},
		{"commits of unknown outcome, a reused container ID", protocol{addresses: 1, commits: 1, faults: 1, reuse: true}},
	}
	for i, tt := range slices.Concat(small, large) {
		if i >= len(small) && !sandbox.Sampled(sandbox.Rounds(3, 1, 1), i) {
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			states, trace := tt.model.check()
			t.Logf("%d states\n%s", states, strings.Join(trace, "\n"))
			if trace != nil {
				t.Errorf("the trace above breaks an invariant")
			}
		})
	}
}

// TestGuards: the protocol needs each of its guards. If one is left out, some interleaving breaks
// an invariant.
func TestGuards(t *testing.T) {
	t.Parallel()
	sandbox.SkipRaced(t)
	for _, tt := range []struct {
		model protocol
		wrong string // part of the description of the broken invariant
	}{
		{protocol{without: locks, addresses: 1, crashes: 1}, "two processes worked on one attachment"},
		{protocol{without: inherited, addresses: 1, crashes: 1}, "leaked"},
		{protocol{without: witness, addresses: 1, hides: true}, "lives"},
		{protocol{without: ahead, addresses: 1, crashes: 1}, "leaked"},
		{protocol{without: looksAgain, addresses: 1, commits: 1}, "its rule is gone"},
		{protocol{without: noLate, addresses: 1, commits: 1}, "its rule is gone"},
		{protocol{without: rewrites, addresses: 1, losses: 1, faults: 2}, "leaked"},
		{protocol{without: inFile, addresses: 1, faults: 2}, "gets the address of"},
		{protocol{without: freed, addresses: 1, unnamed: true, faults: 2}, "gets the address of"},
		{protocol{without: noted, addresses: 1, unnamed: true, once: true, crashes: 1}, "gets the address of"},
		{protocol{without: rivals, addresses: 1, unnamed: true, crashes: 1}, "gets the address of"},
		{protocol{without: rules, addresses: 1, strict: true, faults: 1}, "a rule for address"},
		{protocol{without: port, addresses: 1, ports: true, faults: 2}, "forwards to it"},
		{protocol{without: leftover, addresses: 2, lies: 1}, "leaked"},
		{protocol{without: records, addresses: 2, faults: 2, reuse: true}, "leaked"},
		{protocol{without: older, addresses: 2, faults: 2, reuse: true}, "gets the address of"},
		{protocol{without: uncached, addresses: 1, unnamed: true, commits: 1}, "gets the address of"},
		{protocol{without: otherCache, addresses: 2, off: true}, "gets the address of"},
		{protocol{without: anyState, addresses: 2, off: true, faults: 1}, "gets the address of"},
		{protocol{without: both, addresses: 2, off: true}, "leaked"},
		{protocol{without: pinned, addresses: 2, path: true, crashes: 1}, "its interface is gone"},
		{protocol{without: anothers, addresses: 2, path: true, byName: true, prompt: true}, "its interface is gone"},
		{protocol{without: ends, addresses: 1, impatient: true}, "waits forever"},
		{protocol{without: alone, addresses: 1, impatient: true}, "two processes worked on one attachment"},
		{protocol{without: deadOfPod, addresses: 1, pod: true, unnamed: true, faults: 2}, "never released"},
		{protocol{without: handsOn, addresses: 1, collects: true}, "is no longer its own"},
		{protocol{without: otherOfPod, addresses: 1, pod: true, unnamed: true, faults: 1}, "its rule is gone"},
	} {
		t.Run(string(tt.model.without), func(t *testing.T) {
			t.Parallel()
			states, trace := tt.model.check()
			t.Logf("%d states\n%s", states, strings.Join(trace, "\n"))
			if trace == nil || !strings.Contains(trace[len(trace)-1], tt.wrong) {
				t.Errorf("no counterexample with %q", tt.wrong)
			}
		})
	}
}

// TestLimits covers the sequences of events that break an invariant in spite of the protocol.
// cmd/unwind/LIMITS.md lists them for operators.
func TestLimits(t *testing.T) {
	t.Parallel()
	sandbox.SkipRaced(t)
	for _, tt := range []struct {
		name  string
		model protocol
		wrong string
	}{
		{"a plugin opens the path itself, after unwind identified the namespace",
			protocol{addresses: 2, path: true, byName: true, crashes: 1}, "its interface is gone"},
		{"portmap's ADD failed and left a rule, and its DEL fails",
			protocol{addresses: 1, ports: true, faults: 3, partial: true}, "forwards to it"},
		{"portmap's DEL succeeds and leaves its rule",
			protocol{addresses: 1, ports: true, lies: 1}, "a host port of"},
		{"a DEL is killed after it freed the address, no file shows that, and the runtime sends it again after another ADD got the address",
			protocol{addresses: 1, unnamed: true, crashes: 1}, "gets the address of"},
		{"a DEL frees the address, no file shows that, the power fails, and the runtime sends the DEL again after another ADD got the address",
			protocol{addresses: 1, unnamed: true, power: 1}, "gets the address of"},
		{"the plain chain frees an address, no file shows that, and a sweep runs after another ADD got the address",
			protocol{addresses: 1, unnamed: true, off: true}, "gets the address of"},
		{"the plain chain adds a container again, and the path of its namespace disappears",
			protocol{addresses: 1, off: true, hides: true}, "gets the address of"},
		{"an ADD of the plain chain is interrupted while a DEL is pending, and the runtime's DEL has no path",
			protocol{addresses: 1, off: true, nameless: true, crashes: 1, faults: 1}, "leaked"},
		{"an ADD is killed that could not write its intent, and the container is added again without a DEL",
			protocol{addresses: 1, commits: 1, crashes: 1, reuse: true}, "leaked"},
		{"a DEL succeeds and frees nothing, and no file shows that",
			protocol{addresses: 1, unnamed: true, lies: 1}, "leaked"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			states, trace := tt.model.check()
			t.Logf("%d states\n%s", states, strings.Join(trace, "\n"))
			if trace == nil || !strings.Contains(trace[len(trace)-1], tt.wrong) {
				t.Errorf("no counterexample with %q: this limit no longer exists", tt.wrong)
			}
		})
	}
}

// TestProtocolAtLength explores variants of the model that are too large for a normal run.
func TestProtocolAtLength(t *testing.T) {
	if !sandbox.Long() {
		t.Skip("these worlds take long: make proof")
	}
	for _, model := range []protocol{
		{addresses: 2, power: 1, faults: 1},
		{addresses: 2, crashes: 1, faults: 1},
		{addresses: 1, crashes: 2, faults: 2},
		{addresses: 2, crashes: 1, faults: 1, lies: 1},
		{addresses: 2, crashes: 1, faults: 1, reuse: true},
		{addresses: 1, crashes: 2, faults: 1, reuse: true, hides: true},
		{addresses: 2, crashes: 2, faults: 1, unnamed: true, once: true},
		{three: true, addresses: 1, faults: 1},
		{three: true, addresses: 2},
		{addresses: 2, crashes: 1, faults: 1, off: true},
		{addresses: 2, crashes: 1, faults: 1, path: true},
		{addresses: 1, power: 1, crashes: 1},
		{addresses: 1, crashes: 1, faults: 1, plainDEL: true},
		{addresses: 1, crashes: 1, faults: 2, ports: true},
		{addresses: 1, power: 1, faults: 1, ports: true},
		{addresses: 1, crashes: 1, faults: 1, impatient: true},
		{addresses: 1, faults: 3, pod: true, unnamed: true},
		{addresses: 2, commits: 1, crashes: 1},
		{addresses: 1, commits: 2, faults: 1},
		{addresses: 1, commits: 1, losses: 1},
		{addresses: 1, crashes: 1, losses: 1},
		{addresses: 1, commits: 1, crashes: 1, power: 1},
		{addresses: 2, commits: 1, faults: 1, reuse: true},
		{addresses: 1, crashes: 1, faults: 1, again: true},
		{addresses: 2, crashes: 1, faults: 1, reuse: true, nameless: true},
		{addresses: 1, power: 1, off: true, crashes: 1},
	} {
		states, trace := model.check()
		t.Logf("%+v: %d states", model, states)
		if trace != nil {
			t.Errorf("broken invariant:\n%s", strings.Join(trace, "\n"))
		}
	}
}
