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

	"cni-unwind/journal"
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
	t.Parallel()
	modes := []string{"fail", "fail-effect", "hang", "hang-effect", "crash", "crash-effect", "kill-parent",
		"kill-parent-effect", "orphan", "empty", "garbage", "stderr"}
	for m, mode := range modes {
		for at := range 4 {
			for d, delMode := range []string{"ok", "fail-effect"} {
				for r, recovery := range []string{"DEL", "ADD", "next sandbox"} {
					if !sampled(3, m, at, d, r) {
						continue
					}
					t.Run(fmt.Sprintf("%s at %d, DEL %s, then %s", mode, at, delMode, recovery), func(t *testing.T) {
						t.Parallel()
						addFails(t, mode, at, delMode, recovery)
					})
				}
			}
		}
	}
}

func addFails(t *testing.T, mode string, at int, delMode, recovery string) {
	n := newNode(t)
	if strings.HasPrefix(mode, "hang") || mode == "ignore-term" {
		n.hasty()
	}
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	n.plan(map[string]map[string]string{
		fmt.Sprintf("p%d", at): {"ADD": mode, "DEL": delMode},
		"*":                    {"DEL": delMode},
	})
	if _, err := p.add(list); err == nil {
		t.Fatal("the ADD succeeded")
	}
	n.plan(nil)
	recoverBy(p, list, recovery)
	n.nothingLeft()
}

// TestFaultMatrixDel: each delegate of a chain of four fails its DEL in every way after a good ADD.
// The others get their DEL in the same pass; if the fault kills unwind itself, within as many DELs
// as there are delegates. Then the plugins work again, and a DEL leaves nothing.
func TestFaultMatrixDel(t *testing.T) {
	t.Parallel()
	for m, mode := range []string{"fail", "fail-effect", "hang", "hang-effect", "crash", "crash-effect", "stderr", "ignore-term"} {
		for at := range 4 {
			for o, onFailure := range []string{"report", "defer"} {
				if !sampled(2, m, at, o) {
					continue
				}
				t.Run(fmt.Sprintf("%s at %d, %s", mode, at, onFailure), func(t *testing.T) {
					t.Parallel()
					delFails(t, mode, at, onFailure)
				})
			}
		}
	}
	for _, mode := range []string{"kill-parent", "kill-parent-effect", "orphan"} {
		for at := range 4 {
			t.Run(fmt.Sprintf("%s at %d", mode, at), func(t *testing.T) {
				t.Parallel()
				delIsKilled(t, mode, at)
			})
		}
	}
}

// unfindable is a chain of four, each with its own error code, whose errors say "not found".
func unfindable(n *node) (chain, instances []string) {
	for i := range 4 {
		instances = append(instances, fmt.Sprintf("p%d not found", i))
		chain = append(chain, n.faulty(instances[i], fmt.Sprintf(`, "code": %d, "delayMS": 100`, 120+i)))
	}
	return chain, instances
}

func delFails(t *testing.T, mode string, at int, onFailure string) {
	n := newNode(t)
	if strings.HasPrefix(mode, "hang") || mode == "ignore-term" {
		n.hasty()
	}
	n.conf["onDelFailure"] = onFailure
	chain, instances := unfindable(n)
	list := n.unwind(chain...)
	p := n.pod("a")
	p.mustAdd(list)
	n.forgetCalls()
	n.plan(map[string]map[string]string{instances[at]: {"DEL": mode}})
	for _, want := range [][]string{
		{"DEL " + instances[3], "DEL " + instances[2], "DEL " + instances[1], "DEL " + instances[0]},
		{"DEL " + instances[at]},
	} {
		checkDelError(t, p.del(list), mode, at, onFailure)
		n.wantCalls("DEL", want...)
		e := p.entry()
		if e == nil || e.State != journal.Removing || e.Pending() != 1 || e.Newest().Steps[0].Index != at {
			t.Fatalf("the journal does not have the one DEL that is pending: %+v", e)
		}
	}
	n.plan(nil)
	p.mustDel(list)
	n.nothingLeft()
	p.mustDel(list) // the runtime's DEL may come again
	n.nothingLeft()
}

// checkDelError checks the runtime's error: fixed words with the delegate's type and code, or none.
// go-cni takes an error that says "not found" for a success.
func checkDelError(t *testing.T, err error, mode string, at int, onFailure string) {
	t.Helper()
	if onFailure == "defer" {
		if err != nil {
			t.Errorf("DEL: %v; it is to be deferred", err)
		}
		return
	}
	code := types.ErrInternal
	if strings.HasPrefix(mode, "fail") {
		code = uint(120 + at)
	}
	var got *types.Error
	if !errors.As(err, &got) || got.Code != code {
		t.Fatalf("DEL: %v, want code %d", err, code)
	}
	want := fmt.Sprintf("unwind: DEL incomplete, to be retried: faulty (code %d); unwindctl list shows the pending DELs", code)
	if got.Msg != want || got.Details != "" {
		t.Errorf("DEL: %q, %q, want %q", got.Msg, got.Details, want)
	}
}

func delIsKilled(t *testing.T, mode string, at int) {
	n := newNode(t).hasty()
	chain, instances := unfindable(n)
	list := n.unwind(chain...)
	p := n.pod("a")
	p.mustAdd(list)
	n.forgetCalls()
	n.plan(map[string]map[string]string{instances[at]: {"DEL": mode}})
	for range instances {
		if err := p.del(list); err == nil {
			t.Fatal("DEL: no error, though the fault kills unwind")
		}
	}
	for _, instance := range instances {
		if !slices.Contains(n.calls(), "DEL "+instance) {
			t.Errorf("%s had no DEL in %d tries: %q", instance, len(instances), n.calls())
		}
	}
	n.plan(nil)
	p.mustDel(list)
	n.nothingLeft()
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
	t.Parallel()
	known := []string{"", "198.51.100.0", "198.51.100.0 198.51.100.1", "198.51.100.0 198.51.100.1 198.51.100.2"}
	for at := range 4 {
		t.Run(fmt.Sprintf("failed at %d", at), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(addressed(n, "")...)
			p := n.pod("a")
			n.plan(map[string]map[string]string{fmt.Sprintf("p%d", at): {"ADD": "fail-effect"}})
			if _, err := p.add(list); err == nil {
				t.Fatal("the ADD succeeded")
			}
			n.nothingLeft()
			dels := n.callLog()[at+1:]
			if len(dels) != at+1 {
				t.Fatalf("calls: %v", n.calls())
			}
			for i, l := range dels {
				if want := fmt.Sprintf("p%d", at-i); l.Command != "DEL" || l.Instance != want {
					t.Errorf("call %d is %s %s, want DEL %s", i, l.Command, l.Instance, want)
				}
				if got := l.prevAddresses(t); got != known[at] {
					t.Errorf("DEL %s had the addresses %q in prevResult, want %q", l.Instance, got, known[at])
				}
			}
		})
	}
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
					chainFile = n.chainFile(conflistOf(chain))
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
