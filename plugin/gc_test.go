package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	bolt "go.etcd.io/bbolt"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/sandbox"
	"cni-unwind/plugin/sweep"
)

const (
	validKey = "cni.dev/valid-attachments"
	slipKey  = "cni.dev/attachments"
)

// valid returns a list of these pods for a GC, under the key that the CNI specification defines.
func valid(pods ...*pod) map[string]any { return map[string]any{validKey: listOf(pods...)} }

// listOf lists the attachments of pods as a runtime does.
func listOf(pods ...*pod) json.RawMessage {
	list := []netconf.Attachment{}
	for _, p := range pods {
		list = append(list, netconf.Attachment{ContainerID: p.ContainerID, IfName: p.IfName})
	}
	return netconf.Marshal(list)
}

// TestSweepJudgesAgain: an attachment is dead when a sweep makes its plan, but the attachment may
// change before the sweep applies the plan. The sweep acts on the new state. It does not release a
// new ADD of the same container, whether that ADD still runs or has ended.
func TestSweepJudgesAgain(t *testing.T) {
	sandbox.Concurrent(t)
	changes := oneOf(
		"nothing happens",
		"its ADD again is under way",
		"it was added again",
		"the runtime's DEL came",
	)
	each1(t, changes, func(t *testing.T, change choice) {
		n := newNode(t)
		n.conf["gracePeriod"] = "10m"
		n.chain(p0)
		a := n.add("a")
		a.dropNetNS()
		n.forgetCalls()
		sweeping := sweep.New(n.worker(), sweep.Options{List: facts.NewList(n.network, nil)})
		findings, err := sweeping.Plan(n.Context())
		n.want(err == nil && len(findings) == 1 && findings[0].Verdict == decide.Dead, "%+v (%v)", findings, err)
		act := func(verdict decide.Verdict, releases bool) {
			n.Helper()
			sweeping.Apply(n.Context(), findings)
			f := findings[0]
			n.want(f.Err == nil && f.Verdict == verdict && f.Released == releases, "%+v", f)
		}
		switch {
		case change.is("nothing happens"):
			act(decide.Dead, true)
			n.wantCalls("DEL p0")
		case change.is("its ADD again is under way"):
			next := a.again()
			n.chain(p0, p1)
			n.plan(p1.ADD("hold"))
			add := next.beginAdd()
			n.awaitHeld("ADD", "a", "p1")
			act(decide.Live, false)
			n.letGo("ADD", "a", "p1")
			add.passes()
			n.wantCalls("DEL p0", "ADD p0", "ADD p1")
			next.wantRecord(journal.Live)
			n.wantTaken("a.eth0.p0", "a.eth0.p1")
			next.del()
		case change.is("it was added again"):
			next := a.again()
			next.add()
			n.forgetCalls()
			act(decide.Live, false)
			n.wantCalls()
			n.wantAttachments("a.eth0")
			next.del()
		case change.is("the runtime's DEL came"):
			a.del()
			n.forgetCalls()
			act(decide.Dead, true)
			n.wantCalls()
		}
		n.wantClean()
	})
}

// TestDisableGC: GC does nothing if it is disabled in unwind's entry or in the chain, by a bool or,
// as in libcni, by a string.
func TestDisableGC(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.chain(p0)
	gone := n.add("gone")
	gone.dropNetNS()
	n.forgetCalls()
	n.versions("1.1.0", "1.1.0")
	chain := func(disableGC string) string {
		return fmt.Sprintf(`{"disableGC": %s, "name": %q, "cniVersion": "1.1.0", "plugins": [%s]}`,
			disableGC, n.network, n.faulty("p0", ""))
	}
	inFile := func(disableGC string) keys {
		file := filepath.Join(n.dir, "off.conflist")
		n.write(file, chain(disableGC))
		return keys{"chain": rawJSON(`null`), "chainFile": file}
	}
	n.gc(valid(), keys{"disableGC": true})
	n.gc(valid(), keys{"disableGC": "true"})
	n.gc(valid(), keys{"chain": rawJSON("%s", chain(`true`))})
	n.gc(valid(), keys{"chain": rawJSON("%s", chain(`"true"`))})
	n.gc(valid(), inFile(`true`))
	n.gc(valid(), inFile(`"true"`))
	n.wantCalls()
	n.wantAttachments("gone.eth0")
	n.gc(valid(), inFile(`"false"`), keys{"disableGC": "false"})
	n.wantCalls("DEL p0", "GC p0")
	n.wantClean()
}

// TestGCIsPassedOn: if a GC has a list, and the chain's CNI version supports GC, the plugins get
// the list as the runtime sent it. They get no container ID, even if unwind's own environment
// contains one.
func TestGCIsPassedOn(t *testing.T) {
	list := rawJSON(`[{"ifname":"eth0","containerID":"\u0061","more":12345678901234567890.10},` +
		`{"containerID":"b","ifname":"eth0"}]`)
	empty, null := rawJSON(`[]`), rawJSON(`null`)
	const ofTwoVersions, ofUnwinds = `"cniVersion": "0.4.0", "cniVersions": ["1.0.0", "1.1.0"]`, `"disableCheck": true`
	type test struct {
		name   string
		inner  string // the version of the chain
		chain  string // the chain's keys other than plugins; "": as in the node's chain
		given  keys
		passed keys // nil: no plugin gets a GC
	}
	tests := []test{
		{"by the specification's key", "1.1.0", "", keys{validKey: list}, keys{validKey: list}},
		{"by the other key", "1.1.0", "", keys{slipKey: list}, keys{slipKey: list}},
		{"by both", "1.1.0", "", keys{validKey: list, slipKey: list}, keys{validKey: list, slipKey: list}},
		{"empty", "1.1.0", "", keys{validKey: empty, slipKey: empty}, keys{validKey: empty, slipKey: empty}},
		{"null and a list", "1.1.0", "", keys{validKey: null, slipKey: list}, keys{slipKey: list}},
		{"null twice", "1.1.0", "", keys{validKey: null, slipKey: null}, nil},
		{"absent", "1.1.0", "", nil, nil},
		{"a chain of an older version", "1.0.0", "", keys{validKey: list}, nil},
		{"a chain of two versions", "1.1.0", ofTwoVersions, keys{validKey: list}, keys{validKey: list}},
		{"a chain of unwind's version", "1.1.0", ofUnwinds, keys{validKey: list}, keys{validKey: list}},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.env = []string{"CNI_CONTAINERID=stray", "CNI_NETNS=/run/stray", "CNI_IFNAME=stray0", "CNI_ARGS=STRAY=1"}
		n.versions("1.1.0", tt.inner)
		n.chain(p0, p1)
		given := maps.Clone(tt.given)
		if tt.chain != "" {
			given["chain"] = rawJSON(`{%s, "plugins": [%s]}`, tt.chain, strings.Join(n.plugins(), ", "))
		}
		n.gc(given)
		if tt.passed == nil {
			n.wantCalls()
			n.wantClean()
			return
		}
		n.wantCount("calls", len(n.callLog()), 2)
		for _, l := range n.callLog() {
			n.want(l.Command == "GC" && l.ContainerID+l.NetNS+l.IfName+l.Args == "", "it names a container: %+v", l)
			n.want(string(l.Stdin["name"]) == fmt.Sprintf("%q", n.network) && string(l.Stdin["cniVersion"]) == `"1.1.0"`,
				"%s", l.Stdin)
			got := keys{}
			for _, key := range []string{validKey, slipKey} {
				if list, there := l.Stdin[key]; there {
					got[key] = list
				}
			}
			n.want(reflect.DeepEqual(got, tt.passed), "%s got %s", l.Instance, got)
		}
		n.wantClean()
	})
}

// TestGCHandsOnWhatIsKept: a plugin of the chain releases all host-local addresses whose owners are
// not on the GC's list, as host-local 1.10 does. The runtime's list lacks a young pod and a dead
// pod whose DEL fails. unwind adds both to the list, so they keep their addresses. An owner that is
// not in the journal loses its address, as without unwind. But if the key of a record is damaged,
// the plugin gets no GC, and the address of that pod stays.
func TestGCHandsOnWhatIsKept(t *testing.T) {
	each1(t, oneOf("by the specification's key", "by both"), func(t *testing.T, by choice) {
		n := newNode(t)
		n.versions("1.1.0", "1.1.0")
		n.conf["gracePeriod"] = "10m"
		n.chain(bridge)
		listed, young, owed := n.add("listed"), n.add("young"), n.add("owed")
		repairHostLocal := n.breakPlugin("host-local")
		n.wantError(owed.tryDel())
		n.reserve(n.ip(9), "unknown", "eth0")
		n.script("collects", `[ $CNI_COMMAND = GC ] || exit 0; list=$(cat); cd `+n.poolFile("")+`
			for f in *.*.*.*; do case "$list" in *\"$(head -n 1 $f | tr -d "\r")\"*) ;; *) rm $f ;; esac; done`)
		n.chain(named("collects"))
		list := valid(listed)
		if by.is("by both") {
			list = keys{slipKey: rawJSON(`[]`), validKey: listOf(listed)}
		}
		n.gc(list)
		n.wantOwners(listed.address+" listed eth0", young.address+" young eth0", owed.address+" owed eth0")
		repairHostLocal()
		n.chain(bridge)
		owed.del()
		young.dropNetNS()
		n.shell(`touch -d "20 minutes ago" %s %s`, n.poolFile(young.address), young.cacheFile())
		young.damageKey()
		n.chain(bridge, named("collects"))
		n.wantError(n.tryGC(valid(listed)), "is damaged")
		n.wantOwners(listed.address+" listed eth0", young.address+" young eth0")
		n.chain(bridge)
		young.del()
		listed.del()
	})
}

// damageKey changes one bit in the key of the pod's record.
func (p *pod) damageKey() {
	p.Helper()
	key := []byte(p.network + "\x00" + p.ContainerID + "\x00")
	p.editJournal(func(tx *bolt.Tx) error {
		entries := tx.Bucket([]byte("records"))
		k, v := entries.Cursor().Seek(key)
		other := bytes.Clone(k)
		other[len(key)-2] ^= 1
		return errors.Join(entries.Put(other, bytes.Clone(v)), entries.Delete(bytes.Clone(k)))
	})
}

// TestGCWithFailingDELs: although some DELs fail, a GC runs all other DELs. The GC's error contains
// the failures, if it has room for them. The failed DELs stay pending, with their last errors, and
// every GC retries them.
func TestGCWithFailingDELs(t *testing.T) {
	type test struct {
		name  string
		pods  int
		id    string
		named bool // the error names the pods
	}
	tests := []test{
		{"some", 3, "bad", true},
		{"more than an error can hold", 9, "bad0123456789abcdef0123456789abcdef0123456789abcdef", false},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.versions("1.1.0", "1.1.0")
		bad := faulty("bad").code(77)
		n.chain(bad)
		n.crowd(tt.pods, tt.id)
		texts := []string{fmt.Sprintf("unwind: GC incomplete with %d errors: ", tt.pods+1)}
		if tt.named {
			const says = `: plugin type="faulty" failed (delete): faulty: bad DEL refused`
			texts = append(texts, n.network+"/bad00/eth0"+says, n.network+"/bad01/eth0"+says)
		}
		n.chain(faulty("good"))
		n.add("good")
		n.plan(bad.DEL("fail"), faulty("gc").GC("fail"))
		n.chain(faulty("gc"), bad, bad)
		for tries := range 3 {
			n.wantCode(n.tryGC(valid()), 11, texts...)
			n.wantRecords(tt.pods)
			n.wantCount("taken", len(n.taken()), tt.pods)
			for _, e := range n.records() {
				step := e.Steps[0]
				n.want(e.State == journal.Deleting && e.Reason != "" && len(e.Steps) == 1 &&
					step.Code == 77 && step.Tries == tries+1 && step.Last == "faulty: bad DEL refused", "%+v", e)
			}
		}
		n.plan()
		n.chain(p0)
		n.gc()
		n.wantClean()
	})
}

// TestGCByList combines pods of each kind with lists of each kind. A GC never releases an
// attachment with a process in its namespace, and always releases one with a pending DEL. If the
// namespace is gone, the GC releases the attachment unless a list contains it. If the namespace is
// empty, the GC releases the attachment only if there is a list, and the list lacks it.
func TestGCByList(t *testing.T) {
	null, none := rawJSON(`null`), rawJSON(`[]`)
	type test struct {
		name  string
		lists []keys // each in a GC of its own
		kept  []string
		warns bool
	}
	tests := []test{
		{"none", []keys{nil, {validKey: null}, {slipKey: null}, {validKey: null, slipKey: null}},
			[]string{"busy.eth0", "empty.eth0", "empty.net1"}, false},
		{"empty", []keys{{validKey: none}}, []string{"busy.eth0"}, true},
		{"empty, by the other key", []keys{{slipKey: none}}, []string{"busy.eth0"}, true},
		{"null and empty", []keys{{validKey: null, slipKey: none}}, []string{"busy.eth0"}, true},
		{"some", []keys{{validKey: rawJSON(`[{"containerID":"empty","ifname":"net1"},
			{"containerID":"gone","ifname":"eth0"},{"containerID":"deleting","ifname":"eth0"},
			{"containerID":"unheard-of","ifname":"eth0"}]`)}},
			[]string{"busy.eth0", "empty.net1", "gone.eth0"}, true},
		{"some, by the other key", []keys{{slipKey: rawJSON(`[{"ifname":"eth0","containerID":"empty","more":1}]`)}},
			[]string{"busy.eth0", "empty.eth0"}, true},
		{"another by each", []keys{{
			validKey: rawJSON(`[{"containerID":"gone","ifname":"eth0"}]`),
			slipKey:  rawJSON(`[{"containerID":"empty","ifname":"eth0"}]`),
		}}, []string{"busy.eth0", "gone.eth0", "empty.eth0"}, true},
		{"others", []keys{{validKey: rawJSON(`[{"containerID":"EMPTY","ifname":"eth0"},
			{"containerID":"empty","ifname":"eth"}]`)}}, []string{"busy.eth0"}, true},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.chain(p0)
		busy, empty, gone, deleting := n.add("busy"), n.add("empty"), n.add("gone"), n.add("deleting")
		n.second(empty).add()
		n.plan(p0.DEL("fail"))
		n.wantError(deleting.tryDel())
		n.plan()
		gone.dropNetNS()
		busy.processInside()
		for _, list := range tt.lists {
			n.gc(list)
		}
		n.wantAttachments(tt.kept...)
		const warning = "a process is in its network namespace, though the runtime does not list it"
		if tt.warns {
			n.wantWarned(warning)
		} else {
			n.wantNotWarned(warning)
		}
	})
}

// TestListJudgesItsNetwork: one journal contains two networks. The list of one network says nothing
// about the other network, so attachments of the same containers in that other network are kept.
// But a GC also releases the other network's attachments whose namespace is gone, because a renamed
// network gets no GC of its own.
func TestListJudgesItsNetwork(t *testing.T) {
	each1(t, oneOf("no list", "a list"), func(t *testing.T, list choice) {
		n := newNode(t)
		n.chain(p0)
		empty, gone := n.add("empty"), n.add("gone")
		old := n.newNetwork("old")
		old.second(empty).add()
		old.second(gone).add()
		gone.dropNetNS()
		if list.is("no list") {
			n.gc()
			n.wantAttachments("empty.eth0", "empty.net1")
			return
		}
		n.gc(valid())
		n.wantAttachments("empty.net1")
		old.gc(keys{slipKey: rawJSON(`[{"containerID":"empty","ifname":"net1"}]`)})
		n.wantAttachments("empty.net1")
		old.gc(valid(empty))
		n.wantClean()
	})
}

// TestGCInAnotherTimeNamespace: a GC runs in a different time namespace from the ADD. By its clock,
// the attachment seems old, and so does an address that has no record. But unwind cannot tell their
// age in that namespace, so it keeps both.
func TestGCInAnotherTimeNamespace(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.conf["gracePeriod"] = "10m"
	n.chain(bridge, p0)
	a := n.add("a")
	n.reserve(n.ip(9), "stranger", "eth0")
	n.shell(`touch -d "20 minutes ago" %s`, n.poolFile(n.ip(9)))
	if _, err := os.Lstat("/proc/self/ns/time"); err != nil {
		n.Skip("the kernel has no time namespaces")
	}
	list := keys{"cniVersion": "1.1.0", validKey: rawJSON(`[{"containerID": "other", "ifname": "eth0"}]`)}
	out := n.start(&input{
		stdin: n.entryOf(n.chainOf(n.plugins()...), list),
		first: `exec unshare --time --fork --boottime 100000 "$0"`,
		env:   map[string]string{"CNI_COMMAND": "GC", "CNI_PATH": strings.Join(n.path, ":")},
	})
	n.want(out.code == 0, "%+v", out)
	a.wantRecord(journal.Live)
	n.wantReserved(2)
	n.loseReservation(n.ip(9))
	a.del()
	n.wantClean()
}

// TestGCDelegateFails: the GCs of two plugins fail, or one fails while the other and a DEL hang.
// unwind still runs all other DELs and sends GC to all plugins, in time. The runtime gets an error
// that contains all errors.
func TestGCDelegateFails(t *testing.T) {
	each1(t, oneOf("fail", "hang at a DEL too"), func(t *testing.T, how choice) {
		n := newNode(t)
		n.budget("GC=21s")
		n.versions("1.1.0", "1.1.0")
		n.chain(faulty("d0"))
		n.add("dead")
		n.chain(faulty("d1"))
		other := n.add("other")
		n.chain(p0.code(42), p1, p2.code(43))
		var code uint
		texts := []string{"unwind: GC incomplete with ", "p2 GC refused"}
		if how.is("fail") {
			n.plan(p0.GC("fail"), p2.GC("fail"))
			code = 42
			texts = append(texts, `plugin type="faulty" failed (gc): faulty: p0 GC refused`)
		} else {
			n.plan(p0.GC("hang"), p2.GC("fail"), faulty("d0").DEL("hang"))
			code = 11
			texts = append(texts, "failed (gc): timed out and was killed",
				`/dead/eth0: plugin type="faulty" failed (delete): timed out and was killed`)
		}
		n.forgetCalls()
		n.wantCode(n.tryGC(valid()), code, texts...)
		n.wantCallsInAnyOrder("DEL d0", "DEL d1", "GC p0", "GC p1", "GC p2")
		other.wantGone()
		n.plan()
		n.gc(valid())
		n.wantClean()
	})
}

// TestGCWithoutJournal: if the journal cannot be read, a GC fails, and its error says so once.
func TestGCWithoutJournal(t *testing.T) {
	each1(t, []breakage{newerFormat, groupWritable, linked, blocked}, func(t *testing.T, breakage breakage) {
		n := newNode(t)
		n.chain(p0)
		n.makeJournal()
		text := ""
		if breakage.name == newerFormat.name {
			text = fmt.Sprintf("%s was written by a newer release of unwind (format %d; this release reads up to %d)",
				n.store.Path(), journal.Version+1, journal.Version)
		}
		mend := breakage.of(n)
		n.wantCode(n.tryGC(valid()), 11, "unwind: GC incomplete with 1 error: "+text)
		mend()
		n.gc(valid())
		n.wantClean()
	})
}

// TestBrakeOnANode: the list of a GC lacks 12 of 20 live pods. The mass-release guard keeps all of
// them, and the error says why. No plugin gets that list, because a plugin might release the pods.
// Attachments that are dead by other evidence are released, and the guard doesn't count them. At
// the second GC with this list, unwind adds the kept pods to the list, and passes it to the
// plugins. unwind believes a list that lacks only 10 of 20 pods.
func TestBrakeOnANode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.versions("1.1.0", "1.1.0")
	n.chain(p0)
	x, y, z := n.crowd(10, "x"), n.crowd(2, "y"), n.crowd(8, "z")
	deleting, old := n.add("deleting"), n.add("earlier")
	n.plan(p0.ADD("fail-effect"), p0.DEL("fail"))
	n.wantError(deleting.tryDel())
	n.wantError(n.newPod("rolling-back").tryAdd())
	n.plan()
	old.ofEarlierBoot()
	n.wantAttachments(append(attachments(x, y, z), "deleting.eth0", "rolling-back.eth0", "earlier.eth0")...)
	n.forgetCalls()
	n.wantCode(n.tryGC(valid(z...)), 11, "unwind: GC incomplete with 1 error: "+
		"12 of the 20 attachments of this boot seem dead, which is implausibly many")
	n.wantAttachments(attachments(x, y, z)...)
	n.wantTimes(0, "GC p0")
	n.gc(valid(z...))
	n.wantAttachments(attachments(x, y, z)...)
	n.wantTimes(1, "GC p0")
	n.gc(valid(slices.Concat(y, z)...))
	n.wantAttachments(attachments(y, z)...)
	n.gc(valid())
	n.wantClean()
}

// TestGCOfRealPlugins: pods of each kind have addresses, rules and host ports of real plugins. A GC
// releases some of the pods completely. Their late DELs take nothing from the kept pods, which
// still have all their resources and reach their gateway.
func TestGCOfRealPlugins(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.versions("1.1.0", "1.1.0")
	n.chain(masquerading("bridge", "IPv4"), firewall, portmap)
	listed, busy, empty, gone := n.newPod("listed"), n.newPod("busy"), n.newPod("empty"), n.newPod("gone")
	for _, p := range []*pod{listed, busy, empty, gone} {
		p.add()
		p.remember()
	}
	busy.processInside()
	gone.dropNetNS()
	n.gc(valid(listed))
	empty.wantVanished()
	gone.wantVanished()
	empty.del()
	gone.del()
	listed.wantUnchanged()
	busy.wantUnchanged()
	listed.wantPing()
	busy.wantPing()
	listed.del()
	busy.del()
	n.wantClean()
}
