package plugin

import (
	"slices"
	"strings"
	"testing"

	"cni-unwind/plugin/netconf"
)

// The log messages of a CHECK when the journal and the runtime disagree.
const (
	warnedUnknown = "CHECK of an attachment without a journal entry"
	warnedResult  = "prevResult differs from the result of the ADD"
)

// prevs has the statement "prevs ADDRESS …": what a delegate's CHECKs since "forgets" had as prevResult.
var prevs = acts{"prevs": func(s *story, w []string) {
	for _, l := range s.callLog() {
		r, err := netconf.ParseResult(l.Stdin["prevResult"])
		var got []string
		for _, a := range r.Addresses() {
			got = append(got, a.String())
		}
		s.want(err == nil && slices.Equal(got, w) && l.NetNS == s.who("a").NetNS && l.Args != "",
			"%s: prevResult %s, netns %s, args %s", l.Instance, l.Stdin["prevResult"], l.NetNS, l.Args)
	}
}}

// TestCheck: CHECK asks every delegate in the order of the chain, with the configuration of its ADD
// and the final result, even if the conflist has changed.
func TestCheck(t *testing.T) {
	stories(t, `
	chain p0 | p1, "key": "as added" | p2, "address": "192.0.2.7/24"
	add a; forgets
	either same conflist:
	or another conflist: chain p9 | p1, "key": "changed"
	or a chain that cannot be read: chain {}
	check a
	key "as added"; prevs 192.0.2.7; calls CHECK p0, CHECK p1, CHECK p2
	logged '`+warnedUnknown+`' 0; logged '`+warnedResult+`' 0
	del a`, prevs, acts{"key": func(s *story, w []string) { // of p1
		for _, l := range s.callLog() {
			s.want(l.Instance != "p1" || string(l.Stdin["key"]) == strings.Join(w, " "), "%s", l.Stdin["key"])
		}
	}})
}

// TestCheckIsNotSwitchedOn: CHECK asks no delegate that the plain chain would not ask.
func TestCheckIsNotSwitchedOn(t *testing.T) {
	stories(t, `
	let rest "plugins": [{"type": "faulty", "dir": "$dir/faulty", "instance": "p0"}]}
	either disableCheck: conf chain {"cniVersion": "1.0.0", "disableCheck": true, $rest
	or disableCheck, as a string: conf chain {"cniVersion": "1.0.0", "disableCheck": "true", $rest
	or before CHECK was specified: conf chain {"cniVersion": "0.3.1", $rest
	chain p0; add a; check a; calls ADD p0
	lose journal; check a; calls
	del a`)
}

// TestCheckOfResults: CHECK compares the runtime's result with that of the ADD by meaning, over
// every pair of versions and any order of the keys. If the runtime's version can say less,
// delegates get the result as they printed it.
func TestCheckOfResults(t *testing.T) {
	const printed = `{"cniVersion": "1.1.0", "dns": {}, "interfaces": [{"sandbox": "/s", "name": "eth0", "mtu": 1400, "mac": "02:00:00:00:00:07"}],
		"routes": [{"dst": "0.0.0.0/0", "mtu": 1300}], "ips": [{"interface": 0, "address": "192.0.2.7/24", "gateway": "192.0.2.1"}]}`
	stories(t, `
	either 0.4.0: versions 0.4.0 1.1.0
	or 1.0.0: versions 1.0.0 1.1.0
	or 1.1.0: versions 1.1.0 1.1.0
	printer; chain {"type": "printer"}
	add a; check a; logged '`+warnedResult+`' 0
	shell 'grep -Eq \"mtu\":.?1400 $dir/CHECK; grep -Eq \"mtu\":.?1300 $dir/CHECK'
	del a`, acts{"printer": func(s *story, _ []string) {
		s.node.script("printer", `cat >`+s.dir+`/$CNI_COMMAND; [ $CNI_COMMAND != ADD ] || echo '`+printed+`'`)
	}})
}

// TestCheckOfAnotherResult: if the runtime's result means something else than that of the ADD,
// CHECK warns, and gives the delegates the runtime's.
func TestCheckOfAnotherResult(t *testing.T) {
	stories(t, `
	chain p0, "address": "192.0.2.7/24"; add a; forgets
	shell 'sed -i s/192.0.2.7/192.0.2.8/ $dir/cache/results/$network-a-eth0'
	check a; logged '`+warnedResult+`'; prevs 192.0.2.8
	del a`, prevs)
}

// TestCheckBesideOthers: a CHECK blocks nobody. A DEL kills it after a while. An ADD of another
// sandbox of the pod, and another CHECK, neither wait for it nor kill it.
func TestCheckBesideOthers(t *testing.T) {
	stories(t, `
	hasty; chain p0; add a; let held $dir/faulty/held/CHECK.a.p0
	plan p0 CHECK hold; start check a; appears $held
	plan; check a
	sandbox a b; add b; del b
	lose $held; wait check a
	forgets; plan p0 CHECK hang; start check a; awaits CHECK p0
	del a; fails wait check a`)
}

// TestCheckFails: the runtime gets the error of the delegate that fails, with its code and words,
// and the delegates after it are not asked.
func TestCheckFails(t *testing.T) {
	stories(t, `
	chain p0 | p1, "code": 117 | p2
	add a; forgets; plan p1 CHECK fail
	fails check a code=117 'plugin type="faulty" failed (check): faulty: p1 CHECK refused'
	calls CHECK p0, CHECK p1
	plan; check a
	del a`)
}

// TestCheckWithoutEntry: without an entry the delegates decide; the missing entry is a warning.
func TestCheckWithoutEntry(t *testing.T) {
	stories(t, `
	chain p0 | p1, "address": "192.0.2.7/24"
	past add a; forgets
	either they agree: check a; logged '`+warnedUnknown+`'
	or one refuses: plan p1 CHECK fail; fails check a
	prevs 192.0.2.7; calls CHECK p0, CHECK p1
	del a`, prevs)
}

// TestCheckThatOutlivesUnwind: when unwind is killed in a CHECK, its delegate goes on. The next
// verb that undoes the attachment kills it, and no DEL becomes pending for that: the second DEL of a
// delegate that was killed would come after gracePeriod.
func TestCheckThatOutlivesUnwind(t *testing.T) {
	stories(t, `
	hasty; chain p0 | p1
	add a; plan p1 CHECK kill-parent; killed check a
	conf gracePeriod 10m
	either DEL: del a
	or sweep: drop a; statuses 0
	or next sandbox: drop a; sandbox a b; add b; del b
	ends CHECK p1`)
}

// TestCheckWithoutLock: a CHECK goes on if the lock is held for long, and creates no lock file for
// an attachment that the journal does not know.
func TestCheckWithoutLock(t *testing.T) {
	stories(t, `
	hasty; chain p0
	add a; lock a; check a; unlock; del a
	past add a; check a; locks 0
	del a`)
}
