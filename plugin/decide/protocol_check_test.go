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

// wrong names the invariant that a state breaks, or returns "".
func (m *protocol) wrong(s state) string {
	switch {
	case s.illegal:
		return "two have worked on one attachment at once"
	}
	for p, pr := range s.p {
		if pr.pc == pDel && m.shownAnothers(&s, pr.delegate()) {
			return name(p) + "'s DEL of firewall is shown the address of another ADD"
		}
	}
	for _, d := range s.orphan {
		if d.there && !d.add && m.shownAnothers(&s, d) {
			return "a DEL of firewall that outlived its unwind is shown the address of another ADD"
		}
	}
	for i := range m.containers() {
		c := &s.c[i]
		if c.phase != up || c.given == none || !c.inside {
			continue
		}
		switch {
		case s.owner[c.given] != i:
			return fmt.Sprintf("%s lives, and its address %d is not its own any more", name(int(i)), c.given)
		case s.rules[c.given]&(1<<i) == 0:
			return fmt.Sprintf("%s lives, and its rule is gone", name(int(i)))
		case m.ports && s.forwards[c.given]&(1<<i) == 0:
			return fmt.Sprintf("%s lives, and its host port is gone", name(int(i)))
		case s.forwards[c.given]&^(1<<i) != 0:
			return fmt.Sprintf("%s lives, and the host port of another one forwards to it", name(int(i)))
		case !c.device:
			return fmt.Sprintf("%s lives, and its interface is gone", name(int(i)))
		}
	}
	if p := m.stuck(s); p != none {
		return name(p) + " waits for ever"
	}
	if s.atWork() {
		return ""
	}
	return m.converges(s)
}

// shownAnothers reports whether firewall's DEL is shown an address that another ADD has.
func (m *protocol) shownAnothers(s *state, d lostDelegate) bool {
	if d.step != 1 || d.shows == none || s.owner[d.shows] == none {
		return false
	}
	c := &s.c[s.owner[d.shows]]
	if m.pod && ofPod(s.owner[d.shows]) && ofPod(d.on) || m.unnamed && c.r[0].claim != d.shows {
		return false // it is the pod's; nothing shows yet that another one has it
	}
	return s.owner[d.shows] != d.on || s.made[d.shows] != d.n && c.phase == up && c.inside
}

// stuck returns a process that waits, while nothing that could end its wait can happen, or none.
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

// converges checks that, once every sandbox is gone and DELs pass, sweeps alone leave nothing.
func (m *protocol) converges(s state) string {
	s.left = budgets{}
	for i := range m.containers() {
		c := &s.c[i]
		if c.unknown() && (!m.lists || m.unnamed || s.has(i) == none) { // the leak is the plain chain's
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
		if m.pod { // the provider frees it
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

// swept returns the state after the sweep's pass.
func (m *protocol) swept(s state) state {
	for s.p[nSelf].pc != pEnded {
		m.step(s, nSelf, func(_ string, next state) { s = next })
	}
	return s
}

// unknown reports whether the newest ADD of a container is not in the journal.
func (c *sandboxed) unknown() bool {
	return c.bare || c.plain &&
		!c.knows(c.cachedN)
}

// check visits every reachable state, the nearest first. It returns their number, and the trace to
// one that is wrong. To save memory it keeps only a hash of each state, and the way to it.
func (m *protocol) check() (states int, trace []string) {
	type step struct{ from, nth int32 } // the state before, and which of its moves
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

// replay describes the moves that lead to a state.
func (m *protocol) replay(way []int32) (trace []string) {
	s := m.first()
	for _, nth := range way {
		next := m.moves(s)[nth]
		trace = append(trace, name(next.who)+": "+next.how)
		s = next.to
	}
	return trace
}

// TestProtocol: no interleaving breaks an invariant.
func TestProtocol(t *testing.T) {
	t.Parallel()
	sandbox.SkipRaced(t)
	for i, tt := range []struct {
		name  string
		model protocol
	}{
		{"two addresses", protocol{addresses: 2, crashes: 1}},
		{"one address, DELs fail", protocol{addresses: 1, faults: 2}},
		{"one address, a crash and a DEL that fails", protocol{addresses: 1, crashes: 1, faults: 1}},
		{"one address, an ID that is used again", protocol{addresses: 1, faults: 1, reuse: true}},
		{"an ID that is used again, a crash", protocol{addresses: 2, crashes: 1, reuse: true}},
		{"added again without a DEL", protocol{addresses: 1, again: true, crashes: 1}},
		{"paths that hide", protocol{addresses: 1, hides: true}},
		{"IPAM of which nothing is known", protocol{addresses: 1, unnamed: true, faults: 2}},
		{"a loss of power", protocol{addresses: 1, power: 1, faults: 1}},
		{"a loss of power, an ID that is used again", protocol{addresses: 1, power: 1, reuse: true}},
		{"a loss of power, IPAM of which nothing is known", protocol{addresses: 1, power: 1, unnamed: true}},
		{"commits of unknown outcome, IPAM of which nothing is known", protocol{addresses: 1, unnamed: true, commits: 1}},
		{"switched off between", protocol{addresses: 1, plain: true, crashes: 1}},
		{"IPAM of which nothing is known, a crash", protocol{addresses: 1, unnamed: true, once: true, crashes: 1}},
		{"a rule before the address", protocol{addresses: 1, strict: true, faults: 1}},
		{"deleted by the plain chain", protocol{addresses: 1, crashes: 1, plainDEL: true}},
		{"three containers, one address", protocol{three: true, addresses: 1}},
		{"added again past the journal", protocol{addresses: 2, off: true, faults: 1}},
		{"a list, commits of unknown outcome", protocol{addresses: 1, lists: true, commits: 1, crashes: 1}},
		{"a list, a plain chain", protocol{addresses: 1, lists: true, plain: true, crashes: 1}},
		{"a list, added again past the journal", protocol{addresses: 2, lists: true, off: true}},
		{"added again past the journal, DELs without a path", protocol{addresses: 2, off: true, nameless: true}},
		{"added again past the journal, one address", protocol{addresses: 1, off: true, crashes: 1}},
		{"a path that is another's", protocol{addresses: 2, path: true}},
		{"a path that is another's, a crash", protocol{addresses: 2, path: true, crashes: 1}},
		{"a path that is another's, shown to a plugin", protocol{addresses: 2, path: true, byName: true, prompt: true}},
		{"DELs that lie", protocol{addresses: 1, lies: 2}},
		{"DELs that lie, an ID that is used again", protocol{addresses: 1, lies: 1, reuse: true}},
		{"DELs that lie, and a crash", protocol{addresses: 1, lies: 1, crashes: 1}},
		{"host ports", protocol{addresses: 1, ports: true, faults: 2}},
		{"host ports, a crash", protocol{addresses: 1, ports: true, crashes: 1}},
		{"host ports, a loss of power", protocol{addresses: 1, ports: true, power: 1, faults: 1}},
		{"an ADD that the runtime gives up", protocol{addresses: 1, impatient: true, crashes: 1}},
		{"sandboxes of one pod", protocol{addresses: 1, pod: true, unnamed: true, faults: 2}},
		{"an IPAM plugin that collects", protocol{addresses: 1, collects: true, crashes: 1}},
		{"commits of unknown outcome, IPAM of which nothing is known, DELs fail", protocol{addresses: 1, unnamed: true, commits: 1, faults: 1}},
		{"a journal that is lost during ADDs, IPAM of which nothing is known", protocol{addresses: 1, unnamed: true, losses: 1, faults: 1}},
		{"commits of unknown outcome", protocol{addresses: 1, commits: 1, crashes: 1}},
		{"two commits of unknown outcome", protocol{addresses: 1, commits: 2}},
		{"a journal that is lost during ADDs", protocol{addresses: 1, losses: 1, faults: 2}},
		{"commits of unknown outcome, an ID that is used again", protocol{addresses: 1, commits: 1, faults: 1, reuse: true}},
	} {
		if !sandbox.Sampled(sandbox.Rounds(3, 1, 1), i) {
			continue
		}
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			states, trace := tt.model.check()
			t.Logf("%d states\n%s", states, strings.Join(trace, "\n"))
			if trace != nil {
				t.Errorf("wrong")
			}
		})
	}
}

// TestGuards: without any one of the guards, some interleaving breaks an invariant.
func TestGuards(t *testing.T) {
	t.Parallel()
	sandbox.SkipRaced(t)
	for _, tt := range []struct {
		model protocol
		wrong string // the invariant that breaks
	}{
		{protocol{without: locks, addresses: 1, crashes: 1}, "two have worked on one attachment at once"},
		{protocol{without: inherited, addresses: 1, crashes: 1}, "leaked"},
		{protocol{without: witness, addresses: 1, hides: true}, "lives"},
		{protocol{without: ahead, addresses: 1, crashes: 1}, "leaked"},
		{protocol{without: looksAgain, addresses: 1, commits: 1}, "its rule is gone"},
		{protocol{without: noLate, addresses: 1, commits: 1}, "its rule is gone"},
		{protocol{without: rewrites, addresses: 1, losses: 1, faults: 2}, "leaked"},
		{protocol{without: inFile, addresses: 1, faults: 2}, "is shown the address of"},
		{protocol{without: freed, addresses: 1, unnamed: true, faults: 2}, "is shown the address of"},
		{protocol{without: noted, addresses: 1, unnamed: true, once: true, crashes: 1}, "is shown the address of"},
		{protocol{without: rivals, addresses: 1, unnamed: true, crashes: 1}, "is shown the address of"},
		{protocol{without: rules, addresses: 1, strict: true, faults: 1}, "a rule for address"},
		{protocol{without: port, addresses: 1, ports: true, faults: 2}, "forwards to it"},
		{protocol{without: leftover, addresses: 2, lies: 1}, "leaked"},
		{protocol{without: records, addresses: 2, faults: 2, reuse: true}, "leaked"},
		{protocol{without: older, addresses: 2, faults: 2, reuse: true}, "is shown the address of"},
		{protocol{without: uncached, addresses: 1, unnamed: true, commits: 1}, "is shown the address of"},
		{protocol{without: otherCache, addresses: 2, off: true}, "is shown the address of"},
		{protocol{without: anyState, addresses: 2, off: true, faults: 1}, "is shown the address of"},
		{protocol{without: both, addresses: 2, off: true}, "leaked"},
		{protocol{without: pinned, addresses: 2, path: true, crashes: 1}, "its interface is gone"},
		{protocol{without: anothers, addresses: 2, path: true, byName: true, prompt: true}, "its interface is gone"},
		{protocol{without: ends, addresses: 1, impatient: true}, "waits for ever"},
		{protocol{without: alone, addresses: 1, impatient: true}, "two have worked on one attachment at once"},
		{protocol{without: deadOfPod, addresses: 1, pod: true, unnamed: true, faults: 2}, "never released"},
		{protocol{without: handsOn, addresses: 1, collects: true}, "is not its own"},
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

// TestLimits has the kinds of history that break an invariant in spite of the protocol. LIMITS.md
// names them for operators.
func TestLimits(t *testing.T) {
	t.Parallel()
	sandbox.SkipRaced(t)
	for _, tt := range []struct {
		name  string
		model protocol
		wrong string
	}{
		{"a plugin opens the path itself, later than unwind identified it",
			protocol{addresses: 2, path: true, byName: true, crashes: 1}, "its interface is gone"},
		{"portmap's ADD failed and left a rule, and its DEL fails",
			protocol{addresses: 1, ports: true, faults: 3, partial: true}, "forwards to it"},
		{"portmap's DEL passes and leaves its rule",
			protocol{addresses: 1, ports: true, lies: 1}, "a host port of"},
		{"a DEL is killed when it is done, no file shows that, and the runtime sends it again while another ADD gets the address",
			protocol{addresses: 1, unnamed: true, crashes: 1}, "is shown the address of"},
		{"the plain chain frees an address, no file shows that, and a sweep comes while another ADD gets it",
			protocol{addresses: 1, unnamed: true, off: true}, "is shown the address of"},
		{"added again past the journal, and the path of the namespace goes",
			protocol{addresses: 1, off: true, hides: true}, "is shown the address of"},
		{"an ADD past the journal is cut off while a DEL is pending, and the runtime's DEL has no path",
			protocol{addresses: 1, off: true, nameless: true, crashes: 1, faults: 1}, "leaked"},
		{"a DEL passes and frees nothing, and no file shows that",
			protocol{addresses: 1, unnamed: true, lies: 1}, "leaked"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			states, trace := tt.model.check()
			t.Logf("%d states\n%s", states, strings.Join(trace, "\n"))
			if trace == nil || !strings.Contains(trace[len(trace)-1], tt.wrong) {
				t.Errorf("no counterexample with %q: no limit any more", tt.wrong)
			}
		})
	}
}

// TestProtocolAtLength checks models that are too large for a normal run.
func TestProtocolAtLength(t *testing.T) {
	if !sandbox.Long() {
		t.Skip("only at full length: make proof")
	}
	for _, model := range []protocol{
		{addresses: 2, power: 1, faults: 1},
		{addresses: 2, crashes: 1, faults: 1},
		{addresses: 1, crashes: 2, faults: 2},
		{addresses: 2, crashes: 1, faults: 1, lies: 1},
		{addresses: 2, crashes: 1, faults: 1, reuse: true},
		{addresses: 1, crashes: 2, faults: 1, reuse: true, hides: true},
		{addresses: 2, crashes: 2, faults: 1, unnamed: true},
		{three: true, addresses: 1, faults: 1},
		{three: true, addresses: 2},
		{addresses: 2, crashes: 1, faults: 1, off: true},
		{addresses: 2, crashes: 1, faults: 1, path: true},
		{addresses: 1, power: 1, crashes: 1},
		{addresses: 1, power: 1, unnamed: true, faults: 1},
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
		{addresses: 1, commits: 1, crashes: 1, reuse: true},
		{addresses: 1, crashes: 1, faults: 1, again: true},
		{addresses: 2, crashes: 1, faults: 1, reuse: true, nameless: true},
		{addresses: 1, power: 1, off: true, crashes: 1},
	} {
		states, trace := model.check()
		t.Logf("%+v: %d states", model, states)
		if trace != nil {
			t.Errorf("wrong:\n%s", strings.Join(trace, "\n"))
		}
	}
}
