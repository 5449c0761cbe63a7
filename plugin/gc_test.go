package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
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

// TestGCByList: pods of each kind meet each kind of list. An attachment with a process in its
// namespace is never released. One whose namespace is gone always is, unless it is listed; one with
// a pending DEL always is. One with a pinned, empty namespace is released if there is a list that
// lacks it. An attachment on either list is attached.
func TestGCByList(t *testing.T) {
	stories(t, `
	chain p0; let warnings 1
	add busy empty gone removing; second empty empty2; add empty2
	plan p0 DEL fail; fails del removing; plan
	drop gone; process busy
	either none: let warnings 0; gc; gc valid=null; gc slip=null; gc valid=null slip=null
		kept busy.eth0 empty.eth0 empty.net1
	or empty: gc valid=[]; kept busy.eth0
	or empty, by the other key: gc slip=[]; kept busy.eth0
	or empty, by both: gc valid=[] slip=[]; kept busy.eth0
	or null and empty: gc valid=null slip=[]; kept busy.eth0
	or empty and null: gc valid=[] slip=null; kept busy.eth0
	or some: gc list empty2 gone removing unheard-of; kept busy.eth0 empty.net1 gone.eth0
	or some, by the other key: gc 'slip=[{"ifname":"eth0","containerID":"empty","more":1}]'; kept busy.eth0 empty.eth0
	or one, by both: gc 'valid=[{"containerID":"gone","ifname":"eth0"}]' 'slip=[{"containerID":"gone","ifname":"eth0"}]'
		kept busy.eth0 gone.eth0
	or another by each: gc 'valid=[{"containerID":"gone","ifname":"eth0"}]' 'slip=[{"containerID":"empty","ifname":"eth0"}]'
		kept busy.eth0 gone.eth0 empty.eth0
	or others: gc 'valid=[{"containerID":"EMPTY","ifname":"eth0"},{"containerID":"empty","ifname":"eth"}]'; kept busy.eth0
	warned 'a process is in its network namespace, though the runtime does not list it' $warnings
	leaves`)
}

// TestListedIsKeptByThatListOnly: GC keeps an attachment that the runtime lists, though its
// namespace is gone. STATUS goes by the evidence.
func TestListedIsKeptByThatListOnly(t *testing.T) {
	stories(t, `
	chain p0; add gone; drop gone
	gc list gone; gc list gone; kept gone.eth0
	status`)
}

// TestGraceByBootTime: GC keeps an attachment that is too new for any list. It takes the age from
// CLOCK_BOOTTIME, whatever the wall clock was at the ADD, and the grace period from the network's
// present configuration.
func TestGraceByBootTime(t *testing.T) {
	stories(t, `
	conf gracePeriod 10m; chain p0
	add young young-by-boot from-the-future nine nine-and-a-year old old-by-boot old-from-the-future
	# By CLOCK_BOOTTIME, and by the wall clock.
	age young-by-boot 0s 8760h; age from-the-future 0s -8760h
	age nine 9m 9m; age nine-and-a-year 9m 8760h
	age old 11m 11m; age old-by-boot 11m 0s; age old-from-the-future 11m -8760h
	gc; entries 8
	gc list; kept young.eth0 young-by-boot.eth0 from-the-future.eth0 nine.eth0 nine-and-a-year.eth0
	conf gracePeriod 5m; gc list; kept young.eth0 young-by-boot.eth0 from-the-future.eth0
	conf gracePeriod 0s; gc list`, acts{"age": func(s *story, w []string) {
		boot, err1 := time.ParseDuration(w[1])
		wall, err2 := time.ParseDuration(w[2])
		s.must(errors.Join(err1, err2))
		s.who(w[0]).editTimes(func(created, updated *journal.Time) {
			for _, at := range []*journal.Time{created, updated} {
				at.Boot, at.Wall = at.Boot-int64(boot), at.Wall.Add(-wall)
			}
		})
	}})
}

// TestListJudgesItsNetwork: one journal has two networks. The list of one says nothing of the
// other, so the other's attachments of the same containers are kept. But a GC also releases what is
// plainly dead in the other: a network that was renamed gets no GC of its own.
func TestListJudgesItsNetwork(t *testing.T) {
	stories(t, `
	chain p0; add empty gone
	network old; also empty empty2; also gone gone2; add empty2 gone2
	drop gone
	network
	either no list: gc; kept empty.eth0 empty.net1; leaves
	or a list: gc list; kept empty.net1
		network old; gc 'slip=[{"containerID":"empty","ifname":"net1"}]'; kept empty.net1
		gc list empty`, acts{"also": func(s *story, w []string) { // another interface of the container, in this network
		p := s.who(w[0]).second()
		p.node = s.node
		s.pods[w[1]] = p
	}})
}

// TestGCDelegateFails: a delegate fails in each way at its GC. The others get theirs, the runtime's
// error has all errors, and the GC keeps its time even if delegates, which hang for two minutes, hang
// at their DELs too.
func TestGCDelegateFails(t *testing.T) {
	stories(t, `
	hasty; versions 1.1.0 1.1.0
	chain d0; add dead
	chain d1; add other
	chain p0, "code": 42 | p1 | p2, "code": 43
	let code 999; let more unwind: GC incomplete,
	either fail: plan p0 GC fail, p2 GC fail
		let code 42; let says plugin type="faulty" failed (gc): faulty: p0 GC refused
	or stderr: plan p0 GC stderr, p2 GC fail
		let says failed (gc): netplugin failed: "faulty: this text is on stderr only
	or crash: plan p0 GC crash, p2 GC fail; let says failed (gc): netplugin failed with no error message: signal: killed
	or hang: plan p0 GC hang, p2 GC fail; let says failed (gc): timed out and was killed
	or hang at a DEL too: plan p0 GC hang, p2 GC fail, d0 DEL hang
		let code 11; let says failed (gc): timed out and was killed
		let more /dead/eth0: plugin type="faulty" failed (delete): timed out and was killed
	forgets; clock
	fails gc list code=$code 'unwind: GC incomplete, ' '$says' '$more' 'p2 GC refused'
	within 15s
	sorted-calls DEL d0, DEL d1, GC p0, GC p1, GC p2
	gone other
	plan; gc list`)
}

// TestGCLeavesTimeForDelegates: more DELs hang than a sweep has time for, and releases at a time. The
// delegates still get their GC.
func TestGCLeavesTimeForDelegates(t *testing.T) {
	stories(t, `
	hasty; versions 1.1.0 1.1.0
	chain d0; crowd 9
	plan d0 DEL hang; forgets
	chain p0 | p1; fails gc list 'unwind: GC incomplete, 9 failed: '
	times 1 GC p0; times 1 GC p1
	plan; gc list`)
}

// TestBrakeOnANode: a list lacks 12 of 20 live pods. None of them is released, and the error says
// why. Attachments that are dead by other evidence are released and not counted. A list that lacks
// 10 of 20 is believed.
func TestBrakeOnANode(t *testing.T) {
	stories(t, `
	chain p0; crowd 10 x; crowd 2 y; crowd 8 z; add removing earlier
	plan p0 ADD fail-effect, p0 DEL fail; fails del removing; fails add unwinding
	plan; boot earlier
	kept $x_eth0 $y_eth0 $z_eth0 removing.eth0 unwinding.eth0 earlier.eth0
	let says unwind: GC incomplete, 1 failed: 12 of the 20 live attachments of this boot seem dead, which is implausibly many
	fails gc list $z code=11 '$says'; kept $x_eth0 $y_eth0 $z_eth0
	fails gc list $z code=11 '$says'; kept $x_eth0 $y_eth0 $z_eth0
	gc list $y $z; kept $y_eth0 $z_eth0
	gc list`)
}

// TestListNotBelieved: a list that the mass-release guard rejects is not passed on either, since a
// delegate would act on it.
func TestListNotBelieved(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.1.0; chain p0; crowd 12; forgets
	fails gc list 'implausibly many'
	entries 12; calls; leaves`)
}

// TestGCOfRealPlugins: pods of each kind run on real plugins, with addresses, rules and host ports.
// Nothing is left of those that a GC releases, and their late DELs start no plugin. Those that it
// keeps have all they had, and reach their gateway.
func TestGCOfRealPlugins(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.1.0; chain masquerading bridge IPv4 | firewall | portmap
	add listed; remember listed; add busy; remember busy; add empty; remember empty; add gone; remember gone
	process busy; drop gone
	gc list listed
	vanished empty gone
	script bridge 'touch $dir/started; exit 1'; script firewall 'touch $dir/started; exit 1'
	script portmap 'touch $dir/started; exit 1'
	del empty gone; absent $dir/started
	lose $dir/bin/bridge; lose $dir/bin/firewall; lose $dir/bin/portmap
	unchanged listed busy; pings listed; pings busy
	del listed busy`)
}
