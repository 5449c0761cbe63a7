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
)

// TestFaultMatrixDel has each delegate of a chain of four fail its DEL in every way after a good ADD. The others get their
// DEL in the same DEL, none is skipped; where the fault kills unwind itself, within as many DELs as there are delegates.
// Then the plugins are well again, and a DEL leaves nothing.
func TestFaultMatrixDel(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"fail", "fail-effect", "hang", "hang-effect", "crash", "crash-effect", "stderr", "ignore-term"} {
		for at := range 4 {
			for _, onFailure := range []string{"report", "defer"} {
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

// unfindable is a chain of four, each with an error code of its own, whose errors say "not found".
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

// checkDelError: the runtime gets an error of fixed words with the delegate's type and code, or none. go-cni takes an error
// that says "not found" for a success.
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
	want := fmt.Sprintf("unwind: DEL incomplete, to be tried again: faulty (code %d); unwindctl list shows what is pending", code)
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

// TestFailedDelGoesLast: among the DELs that are pending, one that failed last time goes behind one that passed, whatever
// their places in the chain. What passed and is pending all the same is a delegate that was killed.
func TestFailedDelGoesLast(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	n.conf["gracePeriod"] = "1h"
	list := n.unwind(chainOfFour(n)...)
	p := n.pod("a")
	p.mustAdd(list)
	n.forgetCalls()
	for _, step := range []struct {
		p0, p3 string
		calls  []string
	}{
		{"hang", "fail", []string{"DEL p3", "DEL p2", "DEL p1", "DEL p0"}},
		{"ok", "fail", []string{"DEL p3", "DEL p0"}},
		{"ok", "fail", []string{"DEL p0", "DEL p3"}},
	} {
		n.plan(map[string]map[string]string{"p0": {"DEL": step.p0}, "p3": {"DEL": step.p3}})
		if err := p.del(list); err == nil {
			t.Error("DEL: no error")
		}
		n.wantCalls("DEL", step.calls...)
	}
}

// addressed is a chain of four, each of which adds an address to the result.
func addressed(n *node, extra string) []string {
	var chain []string
	for i := range 4 {
		chain = append(chain, n.faulty(fmt.Sprintf("p%d", i), fmt.Sprintf(`, "address": "198.51.100.%d/32"%s`, i, extra)))
	}
	return chain
}

// prevAddresses returns the addresses in the prevResult that a delegate was given.
func (l logged) prevAddresses(t testing.TB) string {
	t.Helper()
	r, err := parseResult(l.Stdin["prevResult"])
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, p := range r.prefixes() {
		all = append(all, p.Addr().String())
	}
	return strings.Join(all, " ")
}

// TestRollBack: every delegate that was started gets its DEL, the one that failed first, with the best result there was.
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

// TestJournaledBytes: a DEL gives each delegate what its ADD gave it, whatever has become of the configuration since.
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

// sameBytes compares what the delegates got with an ADD, which may fail and leave every DEL pending, and with the DEL after
// the change.
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
