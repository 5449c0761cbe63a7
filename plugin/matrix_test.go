package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// TestFaultMatrixAdd: each delegate of a chain of four fails its ADD in every way, while any one of
// the four, or none, fails its DEL too. Then unwind and the plugins work again, and one of three
// things follows: the runtime's DEL, an ADD of the same container ID, the pod's next sandbox.
// Nothing may be left.
func TestFaultMatrixAdd(t *testing.T) {
	stories(t, `
	each mode fail fail-effect hang hang-effect crash crash-effect kill-parent kill-parent-effect orphan empty garbage stderr
	each index 0 1 2 3
	each del ok fail-effect
	each recovery DEL ADD 'next sandbox'
	if hang: hasty
	chain p0 | p1 | p2 | p3
	plan p$index ADD $mode, p$index DEL $del, * DEL $del
	fails add a
	plan; recover a $recovery`)
}

// TestFaultMatrixDel: each delegate of a chain of four fails its DEL in every way after a good ADD.
// The others get their DEL in the same pass. The runtime's error has fixed words with the delegate's
// type and code, and nothing of its message: go-cni takes an error that says "not found" for a
// success. Or there is none. Then the plugins work again, and a DEL leaves nothing, nor does the runtime's second one.
func TestFaultMatrixDel(t *testing.T) {
	stories(t, `
	each mode fail fail-effect hang hang-effect crash crash-effect stderr ignore-term
	each index 0 1 2 3
	each failure report defer
	let code 999
	if mode fail: let code 12$index
	if hang: hasty
	if ignore: hasty
	conf onDelFailure $failure
	let other , "delayMS": 100
	chain p0, "code": 120$other | p1, "code": 121$other | p2, "code": 122$other | p3, "code": 123$other
	add a; forgets
	plan p$index DEL $mode
	if report: incomplete a
	if defer: del a
	calls DEL p3, DEL p2, DEL p1, DEL p0; entry a deleting 1; pending a p$index
	if report: incomplete a
	if defer: del a
	calls DEL p$index; entry a deleting 1; pending a p$index
	plan; del a; clean; del a`, acts{"incomplete": func(s *story, w []string) {
		_, err := s.attempt([]string{"del", w[0]})
		var got *types.Error
		s.want(errors.As(err, &got) && fmt.Sprint(got.Code) == s.vars["code"] && got.Details == "" && got.Msg == fmt.Sprintf(
			"unwind: DEL incomplete; it will be retried: faulty (code %s); see unwindctl show %s", s.vars["code"], s.who(w[0]).key()), "%+v", err)
	}})
}

// TestFaultMatrixDelKilled: the fault kills unwind itself. Every delegate gets its DEL within as many
// DELs as there are delegates. If the fault comes late, the DEL is on record as tried by then, so the
// others get theirs first in the next pass.
func TestFaultMatrixDelKilled(t *testing.T) {
	stories(t, `
	each mode hold-kill-parent kill-parent-effect orphan
	each index 0 1 2 3
	hasty; chain p0 | p1 | p2 | p3
	add a; forgets
	plan p$index DEL $mode
	if hold: late; late; reached
	unless hold: fails del a; fails del a; fails del a; fails del a
	plan; del a`, acts{
		"late": func(s *story, _ []string) {
			s.tell("start del a; appears $dir/faulty/held/DEL.a.p" + s.vars["index"])
			tried := func(step journal.Step) bool { return fmt.Sprint(step.Index) == s.vars["index"] && step.Tries > 0 }
			eventually(s, "it is on record as tried", func() bool { return slices.ContainsFunc(s.who("a").entry().Undo.Steps, tried) })
			s.tell("lose $dir/faulty/held/DEL.a.p" + s.vars["index"] + "; fails wait del a")
		},
		"reached": func(s *story, _ []string) {
			calls := s.node.calls()
			slices.Sort(calls)
			s.want(slices.Equal(slices.Compact(calls), listed([]string{"DEL p0, DEL p1, DEL p2, DEL p3"})), "%q", calls)
		},
	})
}

// TestHangingDELLeavesTime: a DEL hangs until its part of the time is over. The others get theirs in
// the same pass.
func TestHangingDELLeavesTime(t *testing.T) {
	stories(t, `
	budget Undo 26s; budget Step 8s; chain p0 | p1 | p2
	add a; forgets; plan p2 DEL hang
	fails del a; calls DEL p2, DEL p1, DEL p0; pending a p2
	plan; del a`)
}

// addressed is a chain of four, each of which adds an address to the result.
func addressed(n *node, extra string) []string {
	var chain []string
	for i := range 4 {
		chain = append(chain, n.faulty(fmt.Sprintf("p%d", i), fmt.Sprintf(`, "address": "198.51.100.%d/32"%s`, i, extra)))
	}
	return chain
}

// prevAddresses returns the addresses in a delegate's prevResult.
func (l logged) prevAddresses(t testing.TB) string {
	t.Helper()
	r, err := netconf.ParseResult(l.Stdin["prevResult"])
	must(t, err)
	var all []string
	for _, p := range r.Prefixes() {
		all = append(all, p.Addr().String())
	}
	return strings.Join(all, " ")
}

// TestJournaledBytes: a DEL gives each delegate what its ADD gave it, however the configuration has
// changed, also where the ADD failed and every DEL was pending. (Addresses that may be free by then are not given.)
func TestJournaledBytes(t *testing.T) {
	stories(t, `
	addressed , "big": 9007199254740993, "text": "<&>"
	either conflist changed: let change addressed , "more": {"than": "before"}
	or delegate left: let change chain p1, "address": "198.51.100.1/32" | p2, "address": "198.51.100.2/32"
	or chain broken: let change conf chain {"plugins": 7}
	or chainFile changed: file; let change write $file {"cniVersion": "1.0.0", "plugins": [{"type": "faulty", "instance": "more"}]}
	or chainFile gone: file; let change lose $file
	either ADD: add a
	or failed ADD: plan p3 ADD fail-effect, p3 DEL fail, * DEL fail; fails add a; plan
	$change; del a; clean; same 4`, acts{
		"file": func(s *story, _ []string) {
			s.vars["file"] = s.chainFile(s.chainOf(s.plugins(s.node)...))
		},
		"write": func(s *story, w []string) { s.node.write(w[0], strings.Join(w[1:], " ")) },
	})
}
