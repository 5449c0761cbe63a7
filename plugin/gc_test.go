package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	bolt "go.etcd.io/bbolt"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

const (
	validKey = "cni.dev/valid-attachments"
	slipKey  = "cni.dev/attachments"
)

// valid is the list of a GC, under the key of the specification.
func valid(pods ...*pod) map[string]any { return map[string]any{validKey: listOf(pods...)} }

// listOf lists the attachments of pods as a runtime does.
func listOf(pods ...*pod) json.RawMessage {
	list := []netconf.Attachment{}
	for _, p := range pods {
		list = append(list, netconf.Attachment{ContainerID: p.ContainerID, IfName: p.IfName})
	}
	return netconf.Marshal(list)
}

// mustGC runs a GC of the runtime that must succeed. The chain is one faulty plugin, of a version
// without GC.
func (n *node) mustGC(changes map[string]any) outcome {
	n.Helper()
	out := n.ask("GC", "1.0.0", changes, n.faulty("p0", ""))
	if out.code != 0 {
		n.Errorf("GC: %v", out.said)
	}
	return out
}

// wantKept checks which attachments are left, as CONTAINER.IFNAME: in the journal, and among the
// files of the faulty plugin p0.
func (n *node) wantKept(what string, want ...string) {
	n.Helper()
	var known, held []string
	for _, e := range n.entries() {
		known = append(known, e.ContainerID+"."+e.IfName)
	}
	for _, file := range n.taken() {
		held = append(held, strings.TrimSuffix(file, ".p0"))
	}
	want = slices.Sorted(slices.Values(want))
	slices.Sort(known)
	slices.Sort(held)
	if !slices.Equal(known, want) || !slices.Equal(held, want) {
		n.Errorf("%s: the journal has %v and held is %v, want %v", what, known, held, want)
	}
}

// second is another attachment of the pod to the same network.
func (p *pod) second() *pod {
	second := &pod{p.node, p.RuntimeConf}
	second.IfName = "net1"
	return second
}

// TestGCByList: pods of each kind meet each kind of list. An attachment with a process in its
// namespace is never released. One whose namespace is gone always is, unless it is listed; one with
// a pending DEL always is. One with a pinned, empty namespace is released if there is a list that
// lacks it.
func TestGCByList(t *testing.T) {
	t.Parallel()
	type lists = map[string]string
	for _, c := range []struct {
		name string
		gcs  []lists
		kept []string
	}{
		{"no list", []lists{{}, {validKey: `null`}, {slipKey: `null`}, {validKey: `null`, slipKey: `null`}},
			[]string{"busy.eth0", "empty.eth0", "empty.net1"}},
		{"empty", []lists{{validKey: `[]`}}, []string{"busy.eth0"}},
		{"empty, by the other key", []lists{{slipKey: `[]`}}, []string{"busy.eth0"}},
		{"empty, by both", []lists{{validKey: `[]`, slipKey: `[]`}}, []string{"busy.eth0"}},
		{"null and empty", []lists{{validKey: `null`, slipKey: `[]`}}, []string{"busy.eth0"}},
		{"empty and null", []lists{{validKey: `[]`, slipKey: `null`}}, []string{"busy.eth0"}},
		{"some", []lists{{validKey: `[{"containerID":"empty","ifname":"net1"},{"containerID":"gone","ifname":"eth0"},` +
			`{"containerID":"removing","ifname":"eth0"},{"containerID":"unheard-of","ifname":"eth0"}]`}},
			[]string{"busy.eth0", "empty.net1", "gone.eth0"}},
		{"some, by the other key", []lists{{slipKey: `[{"ifname":"eth0","containerID":"empty","more":1}]`}},
			[]string{"busy.eth0", "empty.eth0"}},
		{"some, by both", []lists{{validKey: `[{"containerID":"gone","ifname":"eth0"}]`,
			slipKey: `[{"containerID":"gone","ifname":"eth0"}]`}}, []string{"busy.eth0", "gone.eth0"}},
		{"others", []lists{{validKey: `[{"containerID":"EMPTY","ifname":"eth0"},{"containerID":"empty","ifname":"eth"}]`}},
			[]string{"busy.eth0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			list := n.unwind(n.faulty("p0", ""))
			busy, empty, gone, removing := n.pod("busy"), n.pod("empty"), n.pod("gone"), n.pod("removing")
			n.addAll(list, busy, empty, empty.second(), gone, removing)
			n.plan(map[string]map[string]string{"p0": {"DEL": "fail"}})
			if err := removing.del(list); err == nil {
				t.Error("the DEL succeeded")
			}
			n.plan(nil)
			gone.dropNetNS()
			busy.processInside()
			for _, lists := range c.gcs {
				changes := map[string]any{}
				for key, list := range lists {
					changes[key] = json.RawMessage(list)
				}
				out := n.mustGC(changes)
				n.wantKept(fmt.Sprint(lists), c.kept...)
				const warning = "a process is in its network namespace, though the runtime does not list it"
				if warned := strings.Contains(out.stderr, warning); warned != (c.name != "no list") {
					t.Errorf("%v: it warns of the process: %t\n%s", lists, warned, out.stderr)
				}
			}
		})
	}
}

// addAll adds pods, several at a time.
func (n *node) addAll(list *libcni.NetworkConfigList, pods ...*pod) {
	n.Helper()
	slots, errs := make(chan bool, 4), make(chan error)
	for _, p := range pods {
		go func() {
			slots <- true
			_, err := p.add(list)
			<-slots
			errs <- err
		}()
	}
	for range pods {
		if err := <-errs; err != nil {
			n.Error(err)
		}
	}
	if n.Failed() {
		n.FailNow()
	}
}

// TestMalformedListReleasesNothing: a list that cannot be read is neither an empty list nor an
// absent one. The error names the key.
func TestMalformedListReleasesNothing(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("gone")
	p.mustAdd(n.unwind(n.faulty("p0", "")))
	p.dropNetNS()
	n.forgetCalls()
	for i, malformed := range []string{
		`{}`, `{"containerID":"gone","ifname":"eth0"}`, `""`, `"[]"`, `0`, `false`, `[null]`, `["gone"]`, `[[]]`,
		`[{}]`, `[{"ifname":"eth0"}]`, `[{"containerID":"a"}]`, `[{"containerID":"","ifname":"eth0"}]`,
		`[{"containerID":"a","ifname":""}]`, `[{"containerID":1,"ifname":"eth0"}]`, `[{"containerID":"a","ifname":null}]`,
		`[{"containerID":"a","ifname":"eth0"},{"containerID":"b"}]`,
	} {
		key, other := validKey, slipKey
		if i%2 == 1 {
			key, other = other, key
		}
		for _, changes := range []map[string]any{
			{key: json.RawMessage(malformed)},
			{key: json.RawMessage(malformed), other: json.RawMessage(`[]`)},
		} {
			out, want := n.ask("GC", "1.1.0", changes, n.faulty("p0", "")), fmt.Sprintf("unwind: key %q: ", key)
			if out.code == 0 || out.said.Code != types.ErrInvalidNetworkConfig || !strings.HasPrefix(out.said.Msg, want) {
				t.Errorf("%s: %+v, want code 7 and %s", malformed, out.said, want)
			}
		}
	}
	n.wantCalls("malformed lists")
	n.wantKept("malformed lists", "gone.eth0")
	n.mustGC(nil)
	n.nothingLeft()
}

// TestListedIsKeptByThatListOnly: GC keeps an attachment that the runtime lists, though its
// namespace is gone. STATUS goes by the evidence.
func TestListedIsKeptByThatListOnly(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("gone")
	p.mustAdd(n.unwind(n.faulty("p0", "")))
	p.dropNetNS()
	for range 2 {
		n.mustGC(valid(p))
		n.wantKept("listed", "gone.eth0")
	}
	if out := n.ask("STATUS", "1.0.0", nil, n.faulty("p0", "")); out.code != 0 {
		t.Errorf("STATUS: %v", out.said)
	}
	n.nothingLeft()
}

// editTimes changes the times at which the pod's entry says that it was made and last written; a
// transaction would write the present time.
func (p *pod) editTimes(change func(created, updated *journal.Time)) {
	p.Helper()
	p.editJournal(func(tx *bolt.Tx) error {
		bucket := tx.Bucket([]byte("entries"))
		key := []byte(p.network + "\x00" + p.ContainerID + "\x00" + p.IfName)
		value := bytes.Clone(bucket.Get(key))
		text := bytes.LastIndexByte(value, 0) + 1
		var e journal.Entry
		if err := json.Unmarshal(value[text:], &e); err != nil {
			return err
		}
		change(&e.Newest().Created, &e.Updated)
		return bucket.Put(key, append(value[:text], netconf.Marshal(&e)...))
	})
}

// TestGraceByBootTime: GC keeps an attachment that is too new for any list. It takes the age from
// CLOCK_BOOTTIME, whatever the wall clock was at the ADD, and the grace period from the network's
// present configuration.
func TestGraceByBootTime(t *testing.T) {
	t.Parallel()
	const year = 365 * 24 * time.Hour
	n := newNode(t)
	n.conf["gracePeriod"] = "10m"
	list := n.unwind(n.faulty("p0", ""))
	const nine, eleven = 9 * time.Minute, 11 * time.Minute
	ages := map[string]struct{ boot, wall time.Duration }{
		"young":                   {},
		"young-by-boot":           {0, year},
		"from-the-future":         {0, -year},
		"nine-minutes":            {nine, nine},
		"nine-minutes-and-a-year": {nine, year},
		"old":                     {eleven, eleven},
		"old-by-boot":             {eleven, 0},
		"old-from-the-future":     {eleven, -year},
	}
	var pods []*pod
	for _, name := range slices.Sorted(maps.Keys(ages)) {
		pods = append(pods, n.pod(name))
	}
	n.addAll(list, pods...)
	for _, p := range pods {
		age := ages[p.ContainerID]
		p.editTimes(func(created, updated *journal.Time) {
			for _, at := range []*journal.Time{created, updated} {
				at.Boot, at.Wall = at.Boot-int64(age.boot), at.Wall.Add(-age.wall)
			}
		})
	}
	n.mustGC(nil)
	if left := len(n.entries()); left != len(ages) {
		t.Errorf("without a list %d of %d are left", left, len(ages))
	}
	n.mustGC(valid())
	n.wantKept("an empty list", "young.eth0", "young-by-boot.eth0", "from-the-future.eth0", "nine-minutes.eth0",
		"nine-minutes-and-a-year.eth0")
	n.conf["gracePeriod"] = "5m"
	n.mustGC(valid())
	n.wantKept("a shorter grace period", "young.eth0", "young-by-boot.eth0", "from-the-future.eth0")
	n.conf["gracePeriod"] = "0s"
	n.mustGC(valid())
	n.nothingLeft()
}

// gate makes a plugin whose ADD waits until open is called.
func (n *node) gate() (plugin string, open func()) {
	n.Helper()
	file := filepath.Join(n.dir, "open")
	n.script("gate", `cat >/dev/null; [ "$CNI_COMMAND" != ADD ] && exit
		until [ -e `+file+` ]; do sleep 0.02; done
		echo '{"cniVersion": "1.0.0"}'`)
	return `{"type": "gate"}`, func() { n.write(file, "") }
}

// addBehind starts an ADD that waits at the gate, after its first delegate; ended waits for its
// end.
func (p *pod) addBehind(list *libcni.NetworkConfigList) (ended func()) {
	p.Helper()
	p.forgetCalls()
	errs := make(chan error, 1)
	go func() {
		_, err := p.add(list)
		errs <- err
	}()
	p.running("ADD p0")
	return func() {
		p.Helper()
		if err := <-errs; err != nil {
			p.Errorf("ADD: %v", err)
		}
	}
}

// TestGCLeavesAnADDAlone: an ADD under way is on no list, and GC neither waits for it nor takes
// from it.
func TestGCLeavesAnADDAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	gate, open := n.gate()
	list := n.unwind(n.faulty("p0", ""), gate)
	p, dead := n.pod("a"), n.pod("dead")
	dead.mustAdd(n.unwind(n.faulty("p0", "")))
	ended := p.addBehind(list)
	findings, err := n.emptyList().Plan(t.Context())
	if i := slices.IndexFunc(findings, func(f sweep.Finding) bool { return f.Key == p.key() }); i < 0 || findings[i].Fate != alive.Live {
		t.Errorf("the plan is %v (%v), want the ADD to be live", findings, err)
	}
	n.mustGC(valid())
	n.wantKept("while the ADD runs", "a.eth0")
	open()
	ended()
	n.wantCalls("the ADD, and the GC of the other", "ADD p0", "DEL p0")
	if e := p.entry(); e == nil || e.State != journal.Live {
		t.Errorf("the entry is %+v", e)
	}
	p.mustDel(list)
	n.nothingLeft()
}

// empty is a sweep in this process, as for a GC with an empty list.
type empty struct {
	*sweep.Sweep
	w *undo.Worker
}

func (n *node) emptyList() empty {
	n.Helper()
	conf, err := netconf.ParseConf([]byte(n.entryOf(`{"plugins": [{"type": "faulty"}]}`, valid())))
	if err != nil {
		n.Fatal(err)
	}
	p := &Plugin{Stdout: io.Discard, Stderr: io.Discard, Budgets: undo.DefaultBudgets}
	o, closeLog := p.newOp(&skel.CmdArgs{Path: strings.Join(n.path, ":")}, conf)
	n.Cleanup(closeLog)
	o.node.Invoked = true
	return empty{sweep.New(o.w, sweep.Job{List: alive.NewList(n.network, conf.Valid)}), o.w}
}

// act lets the sweep release a finding, and checks its verdict and its act at that time.
func (s empty) act(t *testing.T, f *sweep.Finding, fate alive.Fate, released bool) {
	t.Helper()
	findings := []sweep.Finding{*f}
	s.Apply(t.Context(), findings)
	if *f = findings[0]; f.Err != nil || f.Fate != fate || f.Released != released {
		t.Errorf("%s (%s), released %t, error %v; want %s, released %t", f.Fate, f.Reason, f.Released, f.Err, fate, released)
	}
}

// TestSweepJudgesAgain: an attachment is dead when a sweep looks, and changes before the sweep
// acts. The sweep acts on the new state. It does not take an ADD of the same container, neither
// while that runs nor after.
func TestSweepJudgesAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		meanwhile func(t *testing.T, s empty, f *sweep.Finding, p *pod)
	}{
		{"nothing happens", func(t *testing.T, s empty, f *sweep.Finding, p *pod) {
			s.act(t, f, alive.Dead, true)
			p.wantCalls("the sweep", "DEL p0")
		}},
		{"its ADD again is under way", func(t *testing.T, s empty, f *sweep.Finding, p *pod) {
			gate, open := p.gate()
			next, list := p.again(), p.unwind(p.faulty("p0", ""), gate)
			ended, start := next.addBehind(list), time.Now()
			s.act(t, f, alive.Live, false)
			if waited := time.Since(start); waited > s.w.Budgets.Undo/3 {
				t.Errorf("it waited for the lock: %s", waited)
			}
			open()
			ended()
			p.wantCalls("the ADD", "DEL p0", "ADD p0")
			next.wantKept("after the ADD", "a.eth0")
			next.mustDel(list)
		}},
		{"it was added again", func(t *testing.T, s empty, f *sweep.Finding, p *pod) {
			next, list := p.again(), p.unwind(p.faulty("p0", ""))
			next.mustAdd(list)
			p.forgetCalls()
			s.act(t, f, alive.Live, false)
			p.wantCalls("the sweep")
			next.wantKept("after the ADD", "a.eth0")
			next.mustDel(list)
		}},
		{"the runtime's DEL came", func(t *testing.T, s empty, f *sweep.Finding, p *pod) {
			p.mustDel(p.unwind(p.faulty("p0", "")))
			p.forgetCalls()
			s.act(t, f, alive.Dead, true)
			p.wantCalls("the sweep")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.conf["gracePeriod"] = "10m"
			p := n.pod("a")
			p.mustAdd(n.unwind(n.faulty("p0", "")))
			p.dropNetNS()
			n.forgetCalls()
			s := n.emptyList()
			findings, err := s.Plan(t.Context())
			if err != nil || len(findings) != 1 || findings[0].Fate != alive.Dead {
				t.Fatalf("the plan is %+v (%v)", findings, err)
			}
			c.meanwhile(t, s, &findings[0], p)
			n.nothingLeft()
		})
	}
}

// TestListJudgesItsNetwork: one journal has two networks. The list of one says nothing of the
// other, so the other's attachments of the same containers are kept. But a GC also releases what is
// plainly dead in the other: a network that was renamed gets no GC of its own.
func TestListJudgesItsNetwork(t *testing.T) {
	t.Parallel()
	for _, given := range []bool{true, false} {
		t.Run(fmt.Sprintf("list %t", given), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			renamed := *n
			renamed.network += "-old"
			old := &renamed
			empty, gone := n.pod("empty"), n.pod("gone")
			for _, n := range []*node{n, old} {
				for _, p := range []*pod{empty, gone} {
					attachment := pod{n, p.RuntimeConf}
					attachment.IfName = map[bool]string{true: "eth0", false: "net1"}[n != old]
					attachment.mustAdd(n.unwind(n.faulty("p0", "")))
				}
			}
			gone.dropNetNS()
			if !given {
				n.mustGC(nil)
				n.wantKept("no list", "empty.eth0", "empty.net1")
				return
			}
			n.mustGC(valid())
			n.wantKept("the list of the new network", "empty.net1")
			old.mustGC(map[string]any{slipKey: listOf(empty.second())})
			n.wantKept("the list of the old network", "empty.net1")
			old.mustGC(valid(empty))
			n.nothingLeft()
		})
	}
}

// TestDisableGC: nothing happens where GC is disabled, in unwind's entry or in the chain, by a bool
// or by a string, which libcni allows too.
func TestDisableGC(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("gone")
	p.mustAdd(n.unwind(n.faulty("p0", "")))
	p.dropNetNS()
	n.forgetCalls()
	chain := func(disabled string) string {
		return fmt.Sprintf(`{"cniVersion": "1.1.0", "disableGC": %s, "plugins": [%s]}`, disabled, n.faulty("p0", ""))
	}
	in := func(name, disabled string) map[string]any {
		path := filepath.Join(n.dir, name)
		n.write(path, strings.Replace(chain(disabled), "{", fmt.Sprintf(`{"name": %q, `, n.network), 1))
		return map[string]any{"chain": nil, "chainFile": path}
	}
	for name, changes := range map[string]map[string]any{
		"entry":              {"disableGC": true},
		"entry, as text":     {"disableGC": "true"},
		"chain":              {"chain": json.RawMessage(chain(`true`))},
		"chain, as text":     {"chain": json.RawMessage(chain(`"true"`))},
		"chainFile":          in("bool.conflist", `true`),
		"chainFile, as text": in("text.conflist", `"true"`),
	} {
		maps.Copy(changes, valid())
		if out := n.ask("GC", "1.1.0", changes, n.faulty("p0", "")); out.code != 0 {
			t.Errorf("%s: %v", name, out.said)
		}
		n.wantCalls(name)
		n.wantKept(name, "gone.eth0")
	}
	changes := in("off.conflist", `"false"`)
	maps.Copy(changes, valid())
	changes["disableGC"] = "false"
	if out := n.ask("GC", "1.1.0", changes); out.code != 0 {
		t.Error(out.said)
	}
	n.wantCalls("not disabled", "DEL p0", "GC p0")
	n.nothingLeft()
}

// TestGCIsPassedOn: the delegates get the list as the runtime gave it, if there is one and their
// chain's version has GC. They are told no container, whatever is in unwind's own environment.
func TestGCIsPassedOn(t *testing.T) {
	t.Parallel()
	const list = `[{"ifname":"eth0","containerID":"\u0061","more":12345678901234567890.10},{"containerID":"b","ifname":"eth0"}]`
	type lists = map[string]string
	for _, c := range []struct {
		name    string
		version string // keys of the chain
		given   lists
		passed  lists // nil: no delegate is asked
	}{
		{"by the specification's key", `"cniVersion": "1.1.0"`, lists{validKey: list}, lists{validKey: list}},
		{"by the other key", `"cniVersion": "1.1.0"`, lists{slipKey: list}, lists{slipKey: list}},
		{"by both", `"cniVersion": "1.1.0"`, lists{validKey: list, slipKey: list}, lists{validKey: list, slipKey: list}},
		{"empty", `"cniVersion": "1.1.0"`, lists{validKey: `[]`, slipKey: `[]`}, lists{validKey: `[]`, slipKey: `[]`}},
		{"a list and null", `"cniVersion": "1.1.0"`, lists{validKey: list, slipKey: `null`}, lists{validKey: list}},
		{"null and a list", `"cniVersion": "1.1.0"`, lists{validKey: `null`, slipKey: list}, lists{slipKey: list}},
		{"null", `"cniVersion": "1.1.0"`, lists{validKey: `null`}, nil},
		{"null twice", `"cniVersion": "1.1.0"`, lists{validKey: `null`, slipKey: `null`}, nil},
		{"absent", `"cniVersion": "1.1.0"`, nil, nil},
		{"a chain of an older version", `"cniVersion": "1.0.0"`, lists{validKey: list}, nil},
		{"a chain of two versions", `"cniVersion": "0.4.0", "cniVersions": ["1.0.0", "1.1.0"]`,
			lists{validKey: list}, lists{validKey: list}},
		{"a chain of unwind's version", `"disableCheck": true`, lists{validKey: list}, lists{validKey: list}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.env = []string{"CNI_CONTAINERID=stray", "CNI_NETNS=/run/stray", "CNI_IFNAME=stray0", "CNI_ARGS=STRAY=1"}
			changes := map[string]any{
				"chain": json.RawMessage(fmt.Sprintf(`{%s, "plugins": [%s, %s]}`, c.version, n.faulty("p0", ""), n.faulty("p1", ""))),
			}
			for key, list := range c.given {
				changes[key] = json.RawMessage(list)
			}
			if out := n.ask("GC", "", changes); out.code != 0 {
				t.Fatal(out.said)
			}
			calls := n.callLog()
			if asked := len(calls); c.passed == nil && asked != 0 || c.passed != nil && asked != 2 {
				t.Fatalf("calls: %+v", calls)
			}
			for _, call := range calls {
				if call.ContainerID != "" || call.NetNS != "" || call.IfName != "" || call.Args != "" || call.Command != "GC" {
					t.Errorf("it names a container: %+v", call)
				}
				if string(call.Stdin["name"]) != fmt.Sprintf("%q", n.network) || string(call.Stdin["cniVersion"]) != `"1.1.0"` {
					t.Errorf("name and version are wrong: %s", call.Stdin)
				}
				got := lists{}
				for _, key := range netconf.ValidKeys {
					if list, there := call.Stdin[key]; there {
						got[key] = string(list)
					}
				}
				if !maps.Equal(got, c.passed) {
					t.Errorf("%s got %v, want %v", call.Instance, got, c.passed)
				}
			}
		})
	}
}

// TestGCDelegateFails: a delegate fails in each way at its GC. The others get theirs, the runtime's
// error has all errors, and the GC keeps its time even if delegates hang at their DELs too.
func TestGCDelegateFails(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mode string
		dels string // the outcome of a dead attachment's DEL
		code uint
		says []string
	}{
		{"fail", "ok", 42, []string{`plugin type="faulty" failed (gc): faulty: p0 GC refused`}},
		{"stderr", "ok", types.ErrInternal, []string{`failed (gc): netplugin failed: "faulty: this text is on stderr only`}},
		{"crash", "ok", types.ErrInternal, []string{"failed (gc): netplugin failed with no error message: signal: killed"}},
		{"hang", "ok", types.ErrInternal, []string{"failed (gc): it did not end in time and was killed"}},
		{"hang", "hang", types.ErrTryAgainLater, []string{"/dead/eth0: ", "failed (delete): it did not end in time and was killed",
			"failed (gc): it did not end in time and was killed"}},
	} {
		t.Run(c.mode+", DEL "+c.dels, func(t *testing.T) {
			t.Parallel()
			n := newNode(t).hasty()
			dead, other := n.pod("dead"), n.pod("other")
			dead.mustAdd(n.unwind(n.faulty("d0", "")))
			other.mustAdd(n.unwind(n.faulty("d1", "")))
			n.plan(map[string]map[string]string{
				"d0": {"DEL": c.dels}, "p0": {"GC": c.mode}, "p2": {"GC": "fail"},
			})
			n.forgetCalls()
			start := time.Now()
			out := n.ask("GC", "1.1.0", valid(), n.faulty("p0", `, "code": 42`), n.faulty("p1", ""), n.faulty("p2", `, "code": 43`))
			// The delegates hang for two minutes.
			if took := time.Since(start); took > 15*time.Second {
				t.Errorf("it took %s", took)
			}
			if out.code == 0 || out.said.Code != c.code || !strings.HasPrefix(out.said.Msg, "unwind: GC incomplete, ") {
				t.Errorf("%+v, want code %d", out.said, c.code)
			}
			for _, says := range append(c.says, "p2 GC refused") {
				if !strings.Contains(out.said.Msg, says) {
					t.Errorf("%q does not say %q", out.said.Msg, says)
				}
			}
			calls := n.calls()
			slices.Sort(calls)
			if want := []string{"DEL d0", "DEL d1", "GC p0", "GC p1", "GC p2"}; !slices.Equal(calls, want) {
				t.Errorf("calls: %v, want %v", calls, want)
			}
			if e := other.entry(); e != nil {
				t.Errorf("the other is left: %+v", e)
			}
			n.plan(nil)
			n.mustGC(valid())
			n.nothingLeft()
		})
	}
}

// TestGCLeavesTimeForDelegates: more DELs hang than a sweep has time for. The delegates still get
// their GC.
func TestGCLeavesTimeForDelegates(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(n.faulty("d0", ""))
	for i := range 9 { // more than a sweep releases at a time
		p := n.pod(fmt.Sprint("dead", i))
		p.mustAdd(list)
	}
	n.plan(map[string]map[string]string{"d0": {"DEL": "hang"}})
	n.forgetCalls()
	out := n.ask("GC", "1.1.0", valid(), n.faulty("p0", ""), n.faulty("p1", ""))
	if want := "unwind: GC incomplete, 9 failed: "; out.code == 0 || !strings.HasPrefix(out.said.Msg, want) {
		t.Errorf("%+v, want %s", out.said, want)
	}
	if calls := n.calls(); !slices.Contains(calls, "GC p0") || !slices.Contains(calls, "GC p1") {
		t.Errorf("calls: %v", calls)
	}
	n.plan(nil)
	n.mustGC(valid())
	n.nothingLeft()
}

// TestGCWithFailingDELs: a failing DEL does not keep others from being tried. It is in the GC's one
// error and stays pending, with its last error. Every GC tries it again.
func TestGCWithFailingDELs(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		bad  int
		long string // the beginning of container IDs
	}{
		{"some", 3, ""},
		{"more than an error can hold", 9, strings.Repeat("0123456789abcdef", 3)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			var bad []*pod
			for i := range c.bad {
				bad = append(bad, n.pod(fmt.Sprintf("%sbad%d", c.long, i)))
			}
			good := n.pod("good")
			n.addAll(n.unwind(n.faulty("bad", ", \"code\": 77")), bad...)
			n.addAll(n.unwind(n.faulty("good", "")), good)
			n.plan(map[string]map[string]string{"bad": {"DEL": "fail"}, "gc": {"GC": "fail"}})
			for attempt := range 3 {
				out := n.ask("GC", "1.1.0", valid(), n.faulty("gc", ""))
				want := fmt.Sprintf("unwind: GC incomplete, %d failed: ", c.bad+1)
				if out.code == 0 || out.said.Code != types.ErrTryAgainLater || !strings.HasPrefix(out.said.Msg, want) {
					t.Errorf("%+v, want that it is tried again, and %s", out.said, want)
				}
				for i, p := range bad {
					if says := fmt.Sprintf("%s: plugin type=\"faulty\" failed (delete): faulty: bad DEL refused", p.key()); c.long == "" &&
						!strings.Contains(out.said.Msg, says) {
						t.Errorf("the error does not say %q: %s", says, out.said.Msg)
					}
					e := p.entry()
					if e == nil || e.State != journal.Removing || e.Reason == "" || len(e.Newest().Steps) != 1 {
						t.Fatalf("entry %d is %+v", i, e)
					}
					if s := e.Newest().Steps[0]; s.Attempts != attempt+1 || s.LastCode != 77 || s.LastError != "faulty: bad DEL refused" {
						t.Errorf("attempt %d: %+v", attempt, s)
					}
				}
				if taken := n.taken(); good.entry() != nil || len(taken) != c.bad {
					t.Errorf("held: %v", taken)
				}
			}
			n.plan(nil)
			n.mustGC(nil)
			n.nothingLeft()
		})
	}
}

// TestBrakeOnANode: a list lacks 12 of 20 live pods. None of them is released, and the error says
// why. Attachments that are dead by other evidence are released and not counted. A list that lacks
// 10 of 20 is believed.
func TestBrakeOnANode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.faulty("p0", ""))
	var pods []*pod
	var all []string
	for i := range 20 {
		pods = append(pods, n.pod(fmt.Sprintf("pod%02d", i)))
		all = append(all, pods[i].ContainerID+".eth0")
	}
	removing, unwinding, earlier := n.pod("removing"), n.pod("unwinding"), n.pod("earlier")
	n.addAll(list, append(pods, removing, earlier)...)
	n.plan(map[string]map[string]string{"p0": {"ADD": "fail-effect", "DEL": "fail"}})
	if err := removing.del(list); err == nil {
		t.Error("the DEL succeeded")
	}
	if _, err := unwinding.add(list); err == nil {
		t.Error("the ADD succeeded")
	}
	n.plan(nil)
	earlier.edit(func(g *journal.Generation) { g.Host.BootID = "another" })
	n.wantKept("before", append(all, "removing.eth0", "unwinding.eth0", "earlier.eth0")...)

	for range 2 {
		out := n.ask("GC", "1.0.0", valid(pods[12:]...), n.faulty("p0", ""))
		want := "unwind: GC incomplete, 1 failed: 12 of the 20 live attachments of this boot seem dead, too many to be believed"
		if out.code == 0 || out.said.Code != types.ErrTryAgainLater || !strings.HasPrefix(out.said.Msg, want) {
			t.Errorf("%+v, want %q", out.said, want)
		}
		n.wantKept("12 of 20", all...)
	}
	n.mustGC(valid(pods[10:]...))
	n.wantKept("10 of 20", all[10:]...)
	n.mustGC(valid())
	n.nothingLeft()
}

// TestGCOfLibcni: libcni drives the GC. libcni itself runs the DEL of an attachment that is in its
// cache and on no list; unwind finds those that the cache lacks.
func TestGCOfLibcni(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outer, n.inner = "1.1.0", "1.1.0"
	list := n.unwind(n.faulty("p0", ""), n.faulty("p1", ""))
	live, forgotten, cached := n.pod("live"), n.pod("forgotten"), n.pod("cached")
	n.addAll(list, live, forgotten, cached)
	cache, err := filepath.Glob(filepath.Join(n.dir, "cache", "results", "*forgotten*"))
	if err != nil || len(cache) != 1 {
		t.Fatalf("libcni's cache has %v (%v)", cache, err)
	}
	if err := os.Remove(cache[0]); err != nil {
		t.Fatal(err)
	}
	gc := func(args *libcni.GCArgs) {
		t.Helper()
		n.forgetCalls()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := n.cni.GCNetworkList(ctx, list, args); err != nil {
			t.Error(err)
		}
	}
	gc(&libcni.GCArgs{ValidAttachments: []types.GCAttachment{
		{ContainerID: "live", IfName: "eth0"}, {ContainerID: "cached", IfName: "eth0"},
	}})
	if got := n.taken(); !slices.Equal(got, []string{"cached.eth0.p0", "cached.eth0.p1", "live.eth0.p0", "live.eth0.p1"}) {
		t.Errorf("held: %v", got)
	}
	calls := n.calls()
	slices.Sort(calls[min(2, len(calls)):])
	if want := []string{"DEL p1", "DEL p0", "GC p0", "GC p1"}; !slices.Equal(calls, want) {
		t.Errorf("calls: %v, want %v", calls, want)
	}
	gc(&libcni.GCArgs{ValidAttachments: []types.GCAttachment{{ContainerID: "live", IfName: "eth0"}}})
	if got := n.taken(); !slices.Equal(got, []string{"live.eth0.p0", "live.eth0.p1"}) {
		t.Errorf("held: %v", got)
	}
	gc(&libcni.GCArgs{ValidAttachments: []types.GCAttachment{}})
	n.nothingLeft()
}

// TestGCOfRealPlugins: pods of each kind run on real plugins, with addresses, rules and host ports.
// Nothing is left of those that a GC releases. Those that it keeps have all they had, and reach
// their gateway.
func TestGCOfRealPlugins(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.outer, n.inner = "1.1.0", "1.1.0"
	plugins := []string{
		n.masquerading("bridge", "IPv4", ""), `{"type": "firewall"}`,
		`{"type": "portmap", "capabilities": {"portMappings": true}}`,
	}
	list := n.unwind(plugins...)
	port := 20000
	type added struct {
		*pod
		result types.Result
		marks  marks
		traces int
	}
	add := func(name string) *added {
		p := n.pod(name)
		port++
		p.CapabilityArgs = map[string]any{
			"portMappings": []map[string]any{{"hostPort": port, "containerPort": 80, "protocol": "tcp"}},
		}
		r := p.mustAdd(list)
		a := &added{p, r, p.marks(r), 0}
		// The traces are its interfaces, its address, its rules.
		if a.traces = len(a.pod.traces(a.marks)); a.traces < 8 {
			t.Fatalf("%s has left no traces but %v", name, a.pod.traces(a.marks))
		}
		return a
	}
	listed, busy, empty, gone := add("listed"), add("busy"), add("empty"), add("gone")
	busy.processInside()
	gone.dropNetNS()
	if out := n.ask("GC", n.inner, valid(listed.pod), plugins...); out.code != 0 {
		t.Error(out.said)
	}
	for _, p := range []*added{empty, gone} {
		for _, trace := range p.pod.traces(p.marks) {
			t.Errorf("%s: left: %s", p.ContainerID, trace)
		}
	}
	// Each of these scripts records its start.
	for _, plugin := range []string{"bridge", "firewall", "portmap"} {
		n.script(plugin, `echo "$CNI_COMMAND" >>`+n.dir+`/started; exit 1`)
	}
	empty.mustDel(list) // the runtime's late DELs
	gone.mustDel(list)
	for _, plugin := range []string{"bridge", "firewall", "portmap"} {
		if err := os.Remove(filepath.Join(n.path[0], plugin)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(filepath.Join(n.dir, "started")); !os.IsNotExist(err) {
		t.Errorf("a late DEL of what was released has started a plugin (%v)", err)
	}
	for _, p := range []*added{listed, busy} {
		if traces := p.pod.traces(p.marks); len(traces) != p.traces {
			t.Errorf("%s had %d traces and has %v", p.ContainerID, p.traces, traces)
		}
		p.pingsGateways(p.result)
		p.mustDel(list)
	}
	n.nothingLeft()
}

// TestListNotBelieved: a list that the mass-release guard rejects is not passed on either, since a
// delegate would act on it.
func TestListNotBelieved(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := n.faulty("p0", "")
	list := n.unwind(chain)
	for i := range 12 {
		n.pod(fmt.Sprint(i)).mustAdd(list)
	}
	n.forgetCalls()
	out := n.ask("GC", "1.1.0", map[string]any{netconf.ValidKeys[0]: []netconf.Attachment{}}, chain)
	if out.code == 0 || !strings.Contains(out.said.Msg, "too many to be believed") || len(n.entries()) != 12 {
		t.Errorf("%s; %d entries", out.stdout, len(n.entries()))
	}
	if calls := n.calls(); len(calls) > 0 {
		t.Errorf("calls: %v", calls)
	}
}

// TestListsUnderBothKeys: an attachment on either list is attached.
func TestListsUnderBothKeys(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := n.faulty("p0", "")
	for _, id := range []string{"a", "b", "c"} {
		n.pod(id).mustAdd(n.unwind(chain))
	}
	n.ask("GC", "1.1.0", map[string]any{netconf.ValidKeys[0]: []netconf.Attachment{{ContainerID: "a", IfName: "eth0"}}, netconf.ValidKeys[1]: []netconf.Attachment{{ContainerID: "b", IfName: "eth0"}}}, chain)
	if taken := n.taken(); len(taken) != 2 || taken[0] != "a.eth0.p0" || taken[1] != "b.eth0.p0" {
		t.Errorf("taken: %v", taken)
	}
}
