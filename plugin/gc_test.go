package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
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

// TestSweepJudgesAgain: an attachment is dead when a sweep looks, and changes before the sweep
// acts. The sweep acts on the new state. It does not take an ADD of the same container, neither
// while that runs nor after.
func TestSweepJudgesAgain(t *testing.T) {
	sandbox.Concurrent(t)
	stories(t, `
	conf gracePeriod 10m; chain p0; add a; drop a; forgets; looks
	either nothing happens: acts dead true; calls DEL p0
	or its ADD again is under way: again a next; chain p0 | p1
		plan p1 ADD hold; start add next; appears $dir/faulty/held/ADD.a.p1
		acts live false
		lose $dir/faulty/held/ADD.a.p1; wait add next; calls DEL p0, ADD p0, ADD p1
		entry next live; taken a.eth0.p0 a.eth0.p1; del next
	or it was added again: again a next; add next; forgets
		acts live false; calls; kept a.eth0; del next
	or the runtime's DEL came: del a; forgets
		acts dead true; calls`, acts{
		"looks": func(s *story, _ []string) {
			sweeping := sweep.New(s.worker(), sweep.Job{List: facts.NewList(s.network, nil)})
			findings, err := sweeping.Plan(s.Context())
			s.want(err == nil && len(findings) == 1 && findings[0].Fate == decide.Dead, "%+v (%v)", findings, err)
			s.acts["acts"] = func(s *story, w []string) { // its verdict at that time, and whether it releases
				sweeping.Apply(s.Context(), findings)
				f := findings[0]
				s.want(f.Err == nil && string(f.Fate) == w[0] && fmt.Sprint(f.Released) == w[1], "%+v", f)
			}
		},
	})
}

// TestDisableGC: nothing happens where GC is disabled, in unwind's entry or in the chain, by a bool
// or by a string, which libcni allows too.
func TestDisableGC(t *testing.T) {
	stories(t, `
	chain p0; add gone; drop gone; forgets; versions 1.1.0 1.1.0
	let rest "name": "$network", "cniVersion": "1.1.0", "plugins": [{"type": "faulty", "dir": "$dir/faulty", "instance": "p0"}]}
	file $dir/bool.conflist '{"disableGC": true, $rest'; file $dir/text.conflist '{"disableGC": "true", $rest'
	file $dir/off.conflist '{"disableGC": "false", $rest'
	gc list disableGC=true; gc list disableGC="true"
	gc list 'chain={"disableGC": true, $rest'; gc list 'chain={"disableGC": "true", $rest'
	gc list chain=null chainFile="$dir/bool.conflist"; gc list chain=null chainFile="$dir/text.conflist"
	calls; kept gone.eth0
	gc list chain=null chainFile="$dir/off.conflist" disableGC="false"; calls DEL p0, GC p0`)
}

// TestGCIsPassedOn: the delegates get the list as the runtime gave it, if there is one and their
// chain's version has GC. They are told no container, whatever is in unwind's own environment.
func TestGCIsPassedOn(t *testing.T) {
	stories(t, `
	stray; versions 1.1.0 1.1.0; chain p0 | p1
	let list [{"ifname":"eth0","containerID":"\u0061","more":12345678901234567890.10},{"containerID":"b","ifname":"eth0"}]
	let rest "plugins": [{"type": "faulty", "dir": "$dir/faulty", "instance": "p0"}, {"type": "faulty", "dir": "$dir/faulty", "instance": "p1"}]}
	either by the specification's key: gc 'valid=$list'; passed 'valid=$list'
	or by the other key: gc 'slip=$list'; passed 'slip=$list'
	or by both: gc 'valid=$list' 'slip=$list'; passed 'valid=$list' 'slip=$list'
	or empty: gc valid=[] slip=[]; passed valid=[] slip=[]
	or null and a list: gc valid=null 'slip=$list'; passed 'slip=$list'
	or null twice: gc valid=null slip=null; calls
	or absent: gc; calls
	or a chain of an older version: versions 1.1.0 1.0.0; gc 'valid=$list'; calls
	or a chain of two versions: gc 'chain={"cniVersion": "0.4.0", "cniVersions": ["1.0.0", "1.1.0"], $rest' 'valid=$list'
		passed 'valid=$list'
	or a chain of unwind's version: gc 'chain={"disableCheck": true, $rest' 'valid=$list'; passed 'valid=$list'`, acts{
		"stray": func(s *story, _ []string) {
			s.env = []string{"CNI_CONTAINERID=stray", "CNI_NETNS=/run/stray", "CNI_IFNAME=stray0", "CNI_ARGS=STRAY=1"}
		},
		"passed": func(s *story, w []string) {
			calls := s.callLog()
			s.want(len(calls) == 2, "%+v", calls)
			for _, l := range calls {
				s.want(l.Command == "GC" && l.ContainerID+l.NetNS+l.IfName+l.Args == "", "it names a container: %+v", l)
				s.want(string(l.Stdin["name"]) == fmt.Sprintf("%q", s.network) && string(l.Stdin["cniVersion"]) == `"1.1.0"`, "%s", l.Stdin)
				var got []string
				for _, short := range []string{"valid", "slip"} {
					if list, there := l.Stdin[listKey(short)]; there {
						got = append(got, short+"="+string(list))
					}
				}
				s.want(slices.Equal(got, w), "%s got %v", l.Instance, got)
			}
		},
	})
}

// TestGCHandsOnWhatIsKept: a plugin of the chain releases all addresses of host-local's that are not on
// a GC's list, as host-local 1.10 does. The list lacks a young pod and a dead one whose DEL fails, and
// both keep their addresses. Somebody of whom the journal knows nothing loses his, as without unwind,
// unless a record is damaged: one whose key is damaged keeps its address too.
func TestGCHandsOnWhatIsKept(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.1.0; conf gracePeriod 10m
	chain bridge; add listed young owed; breaks host-local; fails del owed; reserve $ip9 unknown eth0
	script collects '[ $CNI_COMMAND = GC ] || exit 0; list=$(cat); cd $data/$network;
		for f in *.*.*.*; do case "$list" in *\"$(head -n 1 $f | tr -d "\r")\"*) ;; *) rm $f ;; esac; done'
	chain {"type": "collects"}
	either by the specification's key: let list 'valid=[{"containerID":"listed","ifname":"eth0"}]'
	or by both: let list 'slip=[] valid=[{"containerID":"listed","ifname":"eth0"}]'
	gc $list
	owners '$listed listed eth0' '$young young eth0' '$owed owed eth0'
	works host-local; chain bridge; del owed
	drop young; shell 'touch -d "20 minutes ago" $data/$network/$young $dir/cache/results/*-young-*'; rename young
	chain bridge | {"type": "collects"}; fails gc list listed 'is damaged'; owners '$listed listed eth0' '$young young eth0'
	chain bridge; del young listed; leaves`, acts{"rename": func(s *story, w []string) { // one bit of its record's key
		key := []byte(s.network + "\x00" + w[0] + "\x00")
		s.editJournal(func(tx *bolt.Tx) error {
			entries := tx.Bucket([]byte("entries"))
			k, v := entries.Cursor().Seek(key)
			other := bytes.Clone(k)
			other[len(key)-2] ^= 1
			return errors.Join(entries.Put(other, bytes.Clone(v)), entries.Delete(bytes.Clone(k)))
		})
	}})
}

// TestGCWithFailingDELs: a failing DEL does not keep others from being tried. It is in the GC's one
// error, if there is room, and stays pending, with its last error. Every GC tries it again.
func TestGCWithFailingDELs(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.1.0; let bad bad, "code": 77; chain $bad; let says ': plugin type="faulty" failed (delete): faulty: bad DEL refused'
	either some: crowd 3 bad; let failed 4; let one $network/bad00/eth0$says; let two $network/bad01/eth0$says
	or more than an error can hold: crowd 9 bad0123456789abcdef0123456789abcdef0123456789abcdef; let failed 10
		let one; let two
	chain good; add good
	plan bad DEL fail, gc GC fail; chain gc | $bad | $bad`+strings.Repeat(`
	fails gc list code=11 'unwind: GC incomplete with $failed errors: ' '$one' '$two'; tried`, 3)+`
	plan; chain p0; gc`, acts{"tried": func(s *story, _ []string) { // once more, and alone pending
		s.vars["tries"] += "I"
		s.wantCount(len(s.entries())+1, s.vars["failed"])
		s.wantCount(len(s.taken())+1, s.vars["failed"])
		for _, e := range s.entries() {
			step := e.Undo.Steps[0]
			s.want(e.Undo.State == journal.Deleting && e.Undo.Reason != "" && len(e.Undo.Steps) == 1 && step.Code == 77 &&
				step.Tries == len(s.vars["tries"]) && step.Last == "faulty: bad DEL refused", "%+v", e)
		}
	}})
}

// TestGCByList: pods of each kind meet each kind of list. An attachment with a process in its
// namespace is never released. One whose namespace is gone always is, unless it is listed; one with
// a pending DEL always is. One with a pinned, empty namespace is released if there is a list that
// lacks it. An attachment on either list is attached.
func TestGCByList(t *testing.T) {
	stories(t, `
	chain p0; let warnings 1
	add busy empty gone deleting; second empty empty2; add empty2
	plan p0 DEL fail; fails del deleting; plan
	drop gone; process busy
	either none: let warnings 0; gc; gc valid=null; gc slip=null; gc valid=null slip=null
		kept busy.eth0 empty.eth0 empty.net1
	or empty: gc valid=[]; kept busy.eth0
	or empty, by the other key: gc slip=[]; kept busy.eth0
	or null and empty: gc valid=null slip=[]; kept busy.eth0
	or some: gc list empty2 gone deleting unheard-of; kept busy.eth0 empty.net1 gone.eth0
	or some, by the other key: gc 'slip=[{"ifname":"eth0","containerID":"empty","more":1}]'; kept busy.eth0 empty.eth0
	or another by each: gc 'valid=[{"containerID":"gone","ifname":"eth0"}]' 'slip=[{"containerID":"empty","ifname":"eth0"}]'
		kept busy.eth0 gone.eth0 empty.eth0
	or others: gc 'valid=[{"containerID":"EMPTY","ifname":"eth0"},{"containerID":"empty","ifname":"eth"}]'; kept busy.eth0
	warned 'a process is in its network namespace, though the runtime does not list it' $warnings
	leaves`)
}

// TestListJudgesItsNetwork: one journal has two networks. The list of one says nothing of the
// other, so the other's attachments of the same containers are kept. But a GC also releases what is
// plainly dead in the other: a network that was renamed gets no GC of its own.
func TestListJudgesItsNetwork(t *testing.T) {
	stories(t, `
	chain p0; add empty gone
	network old; second empty empty2; second gone gone2; add empty2 gone2
	drop gone
	network
	either no list: gc; kept empty.eth0 empty.net1; leaves
	or a list: gc list; kept empty.net1
		network old; gc 'slip=[{"containerID":"empty","ifname":"net1"}]'; kept empty.net1
		gc list empty`)
}

// TestGCInAnotherTimeNamespace: by the clock of a GC in another time namespace, an attachment and an
// address without a record are old. Nobody can tell their age there, so both stay.
func TestGCInAnotherTimeNamespace(t *testing.T) {
	stories(t, `
	conf gracePeriod 10m; chain bridge | p0; add a
	reserve $ip9 stranger eth0; shell 'touch -d "20 minutes ago" $data/$network/$ip9'
	shifted; entry a live; reserved 2
	forget $ip9; del a`, acts{"shifted": func(s *story, _ []string) {
		if _, err := os.Lstat("/proc/self/ns/time"); err != nil {
			s.Skip("the kernel has no time namespaces")
		}
		list := map[string]any{"cniVersion": "1.1.0", validKey: json.RawMessage(`[{"containerID": "other", "ifname": "eth0"}]`)}
		out := s.node.start(&input{stdin: s.entryOf(s.chainOf(s.plugins(s.node)...), list), first: `exec unshare --time --fork --boottime 100000 "$0"`,
			env: map[string]string{"CNI_COMMAND": "GC", "CNI_PATH": strings.Join(s.path, ":")}})
		s.want(out.code == 0, "%+v", out)
	}})
}

// TestGCDelegateFails: a delegate fails in each way at its GC. The others get theirs, the runtime's
// error has all errors, and the GC ends even if delegates hang at their DELs too: its time has parts,
// so that what is not theirs is done.
func TestGCDelegateFails(t *testing.T) {
	stories(t, `
	budget GC 21s; versions 1.1.0 1.1.0
	chain d0; add dead
	chain d1; add other
	chain p0, "code": 42 | p1 | p2, "code": 43
	let code 999; let more unwind: GC incomplete with
	either fail: plan p0 GC fail, p2 GC fail
		let code 42; let says plugin type="faulty" failed (gc): faulty: p0 GC refused
	or hang at a DEL too: plan p0 GC hang, p2 GC fail, d0 DEL hang
		let code 11; let says failed (gc): timed out and was killed
		let more /dead/eth0: plugin type="faulty" failed (delete): timed out and was killed
	forgets
	fails gc list code=$code 'unwind: GC incomplete with ' '$says' '$more' 'p2 GC refused'
	sorted-calls DEL d0, DEL d1, GC p0, GC p1, GC p2
	gone other
	plan; gc list`)
}

// TestBrakeOnANode: a list lacks 12 of 20 live pods. None of them is released, and the error says
// why. No delegate gets the list, since it would act on it. Attachments that are dead by other evidence
// are released and not counted. The same list once more is passed on, with those that are kept. A list
// that lacks 10 of 20 is believed.
func TestBrakeOnANode(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.1.0; chain p0; crowd 10 x; crowd 2 y; crowd 8 z; add deleting earlier
	plan p0 ADD fail-effect, p0 DEL fail; fails del deleting; fails add rolling-back
	plan; boot earlier
	kept $x_eth0 $y_eth0 $z_eth0 deleting.eth0 rolling-back.eth0 earlier.eth0
	let says unwind: GC incomplete with 1 error: 12 of the 20 attachments of this boot seem dead, which is implausibly many
	forgets; fails gc list $z code=11 '$says'; kept $x_eth0 $y_eth0 $z_eth0; times 0 GC p0
	gc list $z; kept $x_eth0 $y_eth0 $z_eth0; times 1 GC p0
	gc list $y $z; kept $y_eth0 $z_eth0
	gc list`)
}

// TestGCOfRealPlugins: pods of each kind run on real plugins, with addresses, rules and host ports.
// Nothing is left of those that a GC releases, and their late DELs take nothing from the others. Those that it
// keeps have all they had, and reach their gateway.
func TestGCOfRealPlugins(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.1.0; chain masquerading bridge IPv4 | firewall | portmap
	add listed; remember listed; add busy; remember busy; add empty; remember empty; add gone; remember gone
	process busy; drop gone
	gc list listed
	vanished empty gone
	del empty gone
	unchanged listed busy; pings listed; pings busy
	del listed busy`)
}
