package plugin

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/plugin/netconf"
)

func chainOfFour(n *node) []string {
	return []string{n.faulty("p0", ""), n.faulty("p1", ""), n.faulty("p2", ""), n.faulty("p3", "")}
}

// TestFaultMatrixAdd: each delegate of a chain of four fails its ADD in every way, while any one of
// the four, or none, fails its DEL too. Then unwind and the plugins work again, and one of three
// things follows: the runtime's DEL, an ADD of the same container ID, the pod's next sandbox.
// Nothing may be left.
func TestFaultMatrixAdd(t *testing.T) {
	stories(t, `
	one-in 3
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
	one-in 2
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
	calls DEL p3, DEL p2, DEL p1, DEL p0; entry a removing 1; pending a p$index
	if report: incomplete a
	if defer: del a
	calls DEL p$index; entry a removing 1; pending a p$index
	plan; del a; left; del a`, acts{"incomplete": func(s *story, w []string) {
		_, err := s.attempt([]string{"del", w[0]})
		var got *types.Error
		s.want(errors.As(err, &got) && fmt.Sprint(got.Code) == s.vars["code"] && got.Details == "" && got.Msg == fmt.Sprintf(
			"unwind: DEL incomplete, to be retried: faulty (code %s); unwindctl list shows the pending DELs", s.vars["code"]), "%+v", err)
	}})
}

// TestFaultMatrixDelKilled: the fault kills unwind itself. Every delegate gets its DEL within as many
// DELs as there are delegates.
func TestFaultMatrixDelKilled(t *testing.T) {
	stories(t, `
	each mode kill-parent kill-parent-effect orphan
	each index 0 1 2 3
	hasty; chain p0 | p1 | p2 | p3
	add a; forgets
	plan p$index DEL $mode
	fails del a; fails del a; fails del a; fails del a
	reached; plan; del a`, acts{"reached": func(s *story, _ []string) {
		calls := s.node.calls()
		slices.Sort(calls)
		s.want(slices.Equal(slices.Compact(calls), listed([]string{"DEL p0, DEL p1, DEL p2, DEL p3"})), "%q", calls)
	}})
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
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, p := range r.Prefixes() {
		all = append(all, p.Addr().String())
	}
	return strings.Join(all, " ")
}

// TestRollBack: every delegate that was started gets its DEL, the failed one first, with the best
// known result.
func TestRollBack(t *testing.T) {
	stories(t, `
	either at the first: let failed p0; let calls ADD p0, DEL p0; let known
	or at the second: let failed p1; let calls ADD p0, ADD p1, DEL p1, DEL p0; let known 198.51.100.0
	or at the third: let failed p2; let calls ADD p0, ADD p1, ADD p2, DEL p2, DEL p1, DEL p0
		let known 198.51.100.0 198.51.100.1
	or at the last: let failed p3; let calls ADD p0, ADD p1, ADD p2, ADD p3, DEL p3, DEL p2, DEL p1, DEL p0
		let known 198.51.100.0 198.51.100.1 198.51.100.2
	addressed; plan $failed ADD fail-effect; fails add a
	previous $known; calls $calls`)
}

// TestJournaledBytes: a DEL gives each delegate what its ADD gave it, however the configuration has
// changed.
func TestJournaledBytes(t *testing.T) {
	t.Parallel()
	for change, apply := range map[string]func(n *node, chainFile string) *libcni.NetworkConfigList{
		"conflist changed": func(n *node, _ string) *libcni.NetworkConfigList {
			return n.unwind(addressed(n, `, "more": {"than": "before"}`)...)
		},
		"delegate left": func(n *node, _ string) *libcni.NetworkConfigList {
			return n.unwind(addressed(n, "")[1:3]...)
		},
		"chain broken": func(n *node, _ string) *libcni.NetworkConfigList {
			return n.unwindChain(`{"plugins": 7}`)
		},
		"chainFile changed": func(n *node, chainFile string) *libcni.NetworkConfigList {
			n.write(chainFile, conflistOf(addressed(n, `, "more": 1`)[:1]))
			return n.unwind()
		},
		"chainFile gone": func(n *node, chainFile string) *libcni.NetworkConfigList {
			if err := os.Remove(chainFile); err != nil {
				n.Fatal(err)
			}
			return n.unwind()
		},
	} {
		for _, failed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, ADD failed %t", change, failed), func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				chain, chainFile := addressed(n, `, "big": 9007199254740993, "text": "<&>"`), ""
				if strings.HasPrefix(change, "chainFile") {
					chainFile = n.chainFile("10-provider.conflist", conflistOf(chain))
				}
				sameBytes(n, n.unwind(chain...), func() *libcni.NetworkConfigList { return apply(n, chainFile) }, failed)
			})
		}
	}
}

func conflistOf(plugins []string) string {
	return fmt.Sprintf(`{"cniVersion": "1.0.0", "plugins": [%s]}`, strings.Join(plugins, ", "))
}

// sameBytes compares the delegates' input at an ADD, which may fail and leave every DEL pending,
// with that at the DEL after the change.
func sameBytes(n *node, before *libcni.NetworkConfigList, change func() *libcni.NetworkConfigList, failed bool) {
	p := n.pod("a")
	addresses := "198.51.100.0 198.51.100.1 198.51.100.2 198.51.100.3"
	if failed {
		n.plan(map[string]map[string]string{"p3": {"ADD": "fail-effect", "DEL": "fail"}, "*": {"DEL": "fail"}})
		addresses = "198.51.100.0 198.51.100.1 198.51.100.2"
	}
	if _, err := p.add(before); (err != nil) != failed {
		n.Fatalf("ADD: %v", err)
	}
	added := n.callLog()[:4]
	n.forgetCalls()
	n.plan(nil)
	p.mustDel(change())
	n.nothingLeft()
	deleted := n.callLog()
	if len(deleted) != 4 {
		n.Fatalf("calls: %v", n.calls())
	}
	for i, del := range deleted {
		if got := del.prevAddresses(n); got != addresses {
			n.Errorf("DEL %s had the addresses %q in prevResult, want %q", del.Instance, got, addresses)
		}
		add := added[3-i]
		delete(add.Stdin, "prevResult")
		delete(del.Stdin, "prevResult")
		if !reflect.DeepEqual(add.Stdin, del.Stdin) || add.Args != del.Args || add.NetNS != del.NetNS || add.Path != del.Path {
			n.Errorf("ADD %s had %s, %q; its DEL %s, %q", add.Instance, add.Stdin, add.Args, del.Stdin, del.Args)
		}
	}
}

// TestFailedDelGoesLast: a pending DEL that failed last time runs after one that passed, whatever
// their places in the chain. A DEL that passed is still pending if its delegate was killed.
func TestFailedDelGoesLast(t *testing.T) {
	stories(t, `
	hasty; conf gracePeriod 1h; chain p0 | p1 | p2 | p3
	add a; forgets
	plan p0 DEL hang, p3 DEL fail; fails del a; calls DEL p3, DEL p2, DEL p1, DEL p0
	plan p3 DEL fail; fails del a; calls DEL p3, DEL p0
	fails del a; calls DEL p0, DEL p3
	leaves`)
}
