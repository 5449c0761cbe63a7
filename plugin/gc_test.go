package plugin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
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
)

const (
	validKey = "cni.dev/valid-attachments"
	slipKey  = "cni.dev/attachments"
)

// valid is the list of a GC, under the key of the specification.
func valid(pods ...*pod) map[string]any { return map[string]any{validKey: listOf(pods...)} }

// listOf lists the attachments of pods as a runtime does.
func listOf(pods ...*pod) json.RawMessage {
	list := []Attachment{}
	for _, p := range pods {
		list = append(list, Attachment{p.ContainerID, p.IfName})
	}
	return marshal(list)
}

// mustGC has the runtime ask for a GC that must succeed. The chain is one faulty plugin, of a version without GC.
func (n *node) mustGC(changes map[string]any) outcome {
	n.Helper()
	out := n.ask("GC", "1.0.0", changes, n.faulty("p0", ""))
	if out.code != 0 {
		n.Errorf("GC: %v", out.said)
	}
	return out
}

// wantKept sees which attachments are left, as CONTAINER.IFNAME: in the journal, and by what the faulty plugin p0 holds.
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

// TestGCByList has pods of each kind, and each kind of list. One with a process inside is never released, one whose
// namespace is gone always is unless it is listed, one that owes a DEL always. What is between, with a namespace that is
// pinned and empty, is released if there is a list and it is not on it.
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

// addAll adds pods, some at a time.
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

// TestMalformedListReleasesNothing: a list that cannot be read is no empty list, and no absent one. The error names the key.
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

// TestListedIsKeptByThatListOnly: what the runtime lists is kept though its namespace is gone, by the GC; a STATUS goes by
// the evidence.
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

// editTimes changes when the pod's entry was made and last written, by its own account: a transaction would write the
// present time.
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
		return bucket.Put(key, append(value[:text], marshal(&e)...))
	})
}

// TestGraceByBootTime: what no list can have yet is kept. Its age is that of CLOCK_BOOTTIME, whatever the wall clock was
// when it was added, and the grace period that of the network as it is now.
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

// gate makes a plugin whose ADD waits until it is opened.
func (n *node) gate() (plugin string, open func()) {
	n.Helper()
	file := filepath.Join(n.dir, "open")
	n.script("gate", `cat >/dev/null; [ "$CNI_COMMAND" != ADD ] && exit
		until [ -e `+file+` ]; do sleep 0.02; done
		echo '{"cniVersion": "1.0.0"}'`)
	return `{"type": "gate"}`, func() { n.write(file, "") }
}

// addBehind begins an ADD that waits at the gate, after its first delegate; ended waits for its end.
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

// TestGCLeavesAnADDAlone: an ADD under way is on no list, and no GC waits for it or takes from it.
func TestGCLeavesAnADDAlone(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	gate, open := n.gate()
	list := n.unwind(n.faulty("p0", ""), gate)
	p, dead := n.pod("a"), n.pod("dead")
	dead.mustAdd(n.unwind(n.faulty("p0", "")))
	ended := p.addBehind(list)
	findings, err := n.sweeping().plan(t.Context())
	if i := slices.IndexFunc(findings, func(f Finding) bool { return f.Key == p.key() }); i < 0 || findings[i].Fate != Live {
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

// sweeping is a sweep in this process, as for a GC with an empty list.
func (n *node) sweeping() *sweeping {
	n.Helper()
	conf, err := ParseConf([]byte(n.entryOf(`{"plugins": [{"type": "faulty"}]}`, valid())))
	if err != nil {
		n.Fatal(err)
	}
	p := &Plugin{Stdout: io.Discard, Stderr: io.Discard, Budgets: DefaultBudgets}
	o, closeLog := p.newOp(n.Context(), &skel.CmdArgs{Path: strings.Join(n.path, ":")}, conf)
	n.Cleanup(closeLog)
	o.invoked = true
	s := &sweeping{op: o, eager: true}
	s.List = NewList(n.network, conf.Valid)
	s.list = s.List
	return s
}

// act has the sweep release what it has found dead, and sees what it finds and does now.
func (s *sweeping) act(t *testing.T, f *Finding, fate Fate, released bool) {
	t.Helper()
	if err := s.release(t.Context(), f); err != nil || f.Err != nil || f.Fate != fate || f.Released != released {
		t.Errorf("%s (%s), released %t, errors %v and %v; want %s, released %t", f.Fate, f.Reason, f.Released, err, f.Err,
			fate, released)
	}
}

// TestSweepJudgesAgain has an attachment be dead when a sweep looks, and something happen before the sweep acts: it acts on
// what is then. An ADD of the same container is not taken, neither while it runs nor after.
func TestSweepJudgesAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name      string
		meanwhile func(t *testing.T, s *sweeping, f *Finding, p *pod)
	}{
		{"nothing happens", func(t *testing.T, s *sweeping, f *Finding, p *pod) {
			s.act(t, f, Dead, true)
			p.wantCalls("the sweep", "DEL p0")
		}},
		{"its ADD again is under way", func(t *testing.T, s *sweeping, f *Finding, p *pod) {
			gate, open := p.gate()
			next, list := p.again(), p.unwind(p.faulty("p0", ""), gate)
			ended, start := next.addBehind(list), time.Now()
			s.act(t, f, Live, false)
			if waited := time.Since(start); waited > s.Budgets.Undo/3 {
				t.Errorf("it waited for the lock: %s", waited)
			}
			open()
			ended()
			p.wantCalls("the ADD", "DEL p0", "ADD p0")
			next.wantKept("after the ADD", "a.eth0")
			next.mustDel(list)
		}},
		{"it was added again", func(t *testing.T, s *sweeping, f *Finding, p *pod) {
			next, list := p.again(), p.unwind(p.faulty("p0", ""))
			next.mustAdd(list)
			p.forgetCalls()
			s.act(t, f, Live, false)
			p.wantCalls("the sweep")
			next.wantKept("after the ADD", "a.eth0")
			next.mustDel(list)
		}},
		{"the runtime's DEL came", func(t *testing.T, s *sweeping, f *Finding, p *pod) {
			p.mustDel(p.unwind(p.faulty("p0", "")))
			p.forgetCalls()
			s.act(t, f, Dead, true)
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
			s := n.sweeping()
			findings, err := s.plan(t.Context())
			if err != nil || len(findings) != 1 || findings[0].Fate != Dead {
				t.Fatalf("the plan is %+v (%v)", findings, err)
			}
			c.meanwhile(t, s, &findings[0], p)
			n.nothingLeft()
		})
	}
}

// TestListJudgesItsNetwork has two networks in one journal. The list of one says nothing of the other, whose attachments of
// the same containers are kept; but what is plainly dead there goes too: a network that was renamed gets no GC of its own.
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

// TestDisableGC: nothing happens where GC is switched off, in unwind's entry or in the chain, by a bool or by a text, which
// libcni allows too.
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
