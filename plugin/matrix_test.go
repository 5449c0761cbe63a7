package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// TestFaultMatrixAdd: each plugin of a chain of four fails its ADD in every way, while the DELs of
// all four succeed, or all fail. Then the plugins work again, and one of three verbs follows: the
// runtime's DEL, an ADD of the same container ID, or an ADD of the pod's next sandbox. Nothing may
// be left.
func TestFaultMatrixAdd(t *testing.T) {
	modes := []string{
		"fail", "fail-effect", "hang", "hang-effect", "crash", "crash-effect",
		"kill-parent", "kill-parent-effect", "orphan", "empty", "garbage", "stderr",
	}
	chain := []pluginConf{p0, p1, p2, p3}
	each4(t, modes, []int{0, 1, 2, 3}, []string{"ok", "fail-effect"}, recoveries,
		func(t *testing.T, mode string, index int, del string, recovery recovery) {
			n := newNode(t)
			if strings.HasPrefix(mode, "hang") {
				n.hasty()
			}
			n.chain(chain...)
			n.plan(chain[index].ADD(mode), chain[index].DEL(del), everyone.DEL(del))
			a := n.newPod("a")
			n.wantError(a.tryAdd())
			n.plan()
			recovery.of(a)
			n.wantClean()
		})
}

// TestFaultMatrixDel: after a successful ADD, each plugin of a chain of four fails its DEL in every
// way. The runtime's DEL still runs the DELs of the other plugins. With onDelFailure "report", it
// returns an error with the failed plugin's type, code and message. With "defer", it returns no
// error. Once the plugins work again, a DEL leaves nothing, and a repeated DEL succeeds.
func TestFaultMatrixDel(t *testing.T) {
	modes := []string{
		"fail", "fail-effect", "hang", "hang-effect", "crash", "crash-effect", "stderr", "ignore-term",
	}
	chain := []pluginConf{
		p0.code(120).delay(100),
		p1.code(121).delay(100),
		p2.code(122).delay(100),
		p3.code(123).delay(100),
	}
	each3(t, modes, []int{0, 1, 2, 3}, []string{"report", "defer"},
		func(t *testing.T, mode string, index int, onDelFailure string) {
			n := newNode(t)
			code := uint(999)
			if strings.HasPrefix(mode, "fail") {
				code = 120 + uint(index)
			}
			if strings.HasPrefix(mode, "hang") || mode == "ignore-term" {
				n.hasty()
			}
			n.conf["onDelFailure"] = onDelFailure
			n.chain(chain...)
			a := n.add("a")
			n.forgetCalls()
			failing := chain[index]
			n.plan(failing.DEL(mode))
			del := func() {
				if onDelFailure == "defer" {
					a.del()
					return
				}
				err := a.tryDel()
				begin := fmt.Sprintf("unwind: DEL incomplete; it will be retried: faulty (code %d): ", code)
				end := fmt.Sprintf("; see unwindctl show %s", a.key())
				var got *types.Error
				n.want(errors.As(err, &got) && got.Code == code && got.Details == "" &&
					strings.HasPrefix(got.Msg, begin) && strings.HasSuffix(got.Msg, end), "%+v", err)
			}
			del()
			n.wantCalls("DEL p3", "DEL p2", "DEL p1", "DEL p0")
			a.wantRecord(journal.Deleting, 1)
			a.wantPending(failing.instance)
			del()
			n.wantCalls("DEL " + failing.instance)
			a.wantRecord(journal.Deleting, 1)
			a.wantPending(failing.instance)
			n.plan()
			a.del()
			n.wantClean()
			a.del()
			n.wantClean()
		})
}

// TestDELErrorSaysWhy: the error of a DEL contains each plugin's own message once, as without
// unwind. It omits a message that would make go-cni treat the DEL as a success.
func TestDELErrorSaysWhy(t *testing.T) {
	d := &deleting{op: &op{Worker: &undo.Worker{}}}
	d.Verb.Conf, d.Verb.Key = &netconf.Conf{}, journal.Key{Network: "net", ContainerID: "a", IfName: "eth0"}
	no := &delegate.Failure{Plugin: "mesh", Code: 100, Msg: "cannot reach the API", Details: "at 10.0.0.9"}
	err := d.report([]*delegate.Failure{no, no, {Plugin: "bridge", Code: 7, Msg: "link not found"}}, true)
	want := "unwind: DEL incomplete; it will be retried: mesh (code 100): cannot reach the API; at 10.0.0.9, " +
		"bridge (code 7); see unwindctl show net/a/eth0"
	var got *types.Error
	if !errors.As(err, &got) || got.Code != 100 || got.Msg != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

// TestFaultMatrixDelKilled: a plugin kills unwind in its DEL. If the journal then says that this
// DEL was tried, the runtime's next DEL runs the other plugins' DELs first. So after two DELs of
// the runtime, each plugin's DEL has run. Once the plugin works again, a DEL leaves nothing.
func TestFaultMatrixDelKilled(t *testing.T) {
	modes := []string{"hold-kill-parent", "kill-parent-effect", "orphan"}
	chain := []pluginConf{p0, p1, p2, p3}
	each2(t, modes, []int{0, 1, 2, 3}, func(t *testing.T, mode string, index int) {
		n := newNode(t)
		n.hasty()
		n.chain(chain...)
		a := n.add("a")
		n.forgetCalls()
		n.plan(chain[index].DEL(mode))
		if mode == "hold-kill-parent" {
			killedLate := func() {
				del := a.beginDel()
				n.awaitHeld("DEL", "a", chain[index].instance)
				tried := func(step journal.Step) bool { return step.Index == index && step.Tries > 0 }
				eventually(n, "it is on record as tried", func() bool {
					return slices.ContainsFunc(a.record().Steps, tried)
				})
				n.letGo("DEL", "a", chain[index].instance)
				n.wantError(del.wait())
			}
			killedLate()
			killedLate()
			calls := n.calls()
			slices.Sort(calls)
			n.wantEqual("calls", slices.Compact(calls), []string{"DEL p0", "DEL p1", "DEL p2", "DEL p3"})
		} else {
			n.wantError(a.tryDel())
			n.wantError(a.tryDel())
			n.wantError(a.tryDel())
			n.wantError(a.tryDel())
		}
		n.plan()
		a.del()
		n.wantClean()
	})
}

// TestHangingDELLeavesTime: a plugin's DEL hangs until its share of the time is over. The same DEL
// of the runtime still runs the other plugins' DELs.
func TestHangingDELLeavesTime(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.budget("Undo=26s")
	n.budget("Step=8s")
	n.chain(p0, p1, p2)
	a := n.add("a")
	n.forgetCalls()
	n.plan(p2.DEL("hang"))
	n.wantError(a.tryDel())
	n.wantCalls("DEL p2", "DEL p1", "DEL p0")
	a.wantPending("p2")
	n.plan()
	a.del()
	n.wantClean()
}

// prevAddresses returns the addresses in the prevResult that a plugin got.
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

// TestJournaledBytes: a DEL gives each plugin the same input as its ADD did, however the
// configuration has changed since. This is true even if the ADD failed and all its DELs are
// pending. (prevResult is not compared, because it may lack addresses.)
func TestJournaledBytes(t *testing.T) {
	changes := oneOf(
		"conflist changed", "delegate left", "chain broken", "chainFile changed", "chainFile gone")
	each2(t, changes, oneOf("ADD", "failed ADD"), func(t *testing.T, change, add choice) {
		n := newNode(t)
		n.chain(addressed(`"big": 9007199254740993`, `"text": "<&>"`)...)
		file := ""
		if change.has("chainFile") {
			file = n.chainFile(n.chainOf(n.plugins()...))
		}
		a := n.newPod("a")
		if add.is("ADD") {
			a.add()
		} else {
			n.plan(p3.ADD("fail-effect"), p3.DEL("fail"), everyone.DEL("fail"))
			n.wantError(a.tryAdd())
			n.plan()
		}
		switch {
		case change.is("conflist changed"):
			n.chain(addressed(`"more": {"than": "before"}`)...)
		case change.is("delegate left"):
			n.chain(p1.address("198.51.100.1/32"), p2.address("198.51.100.2/32"))
		case change.is("chain broken"):
			n.conf["chain"] = rawJSON(`{"plugins": 7}`)
		case change.is("chainFile changed"):
			n.write(file, `{"cniVersion": "1.0.0", "plugins": [{"type": "faulty", "instance": "more"}]}`)
		case change.is("chainFile gone"):
			n.remove(file)
		}
		a.del()
		n.wantClean()
		n.wantSameInput(4)
		n.wantClean()
	})
}
