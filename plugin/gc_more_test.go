package plugin

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
)

// TestGCIsPassedOn: the delegates get the list as the runtime gave it, if there is one and their chain is of a version that
// has GC. What they get names no container, whatever is in unwind's own environment.
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
				for _, key := range validKeys {
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

// TestGCDelegateFails has a delegate fail in each way at its GC: the others get theirs, all errors are in the runtime's, and
// the time of a GC is kept even if delegates hang at their DELs too.
func TestGCDelegateFails(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mode string
		dels string // how the DEL of a dead attachment goes
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
			if took := time.Since(start); took > 15*time.Second { // of two minutes that they would hang
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

// TestGCLeavesTimeForDelegates has more DELs hang than a sweep has time for: the delegates get their GC all the same.
func TestGCLeavesTimeForDelegates(t *testing.T) {
	t.Parallel()
	n := newNode(t).hasty()
	list := n.unwind(n.faulty("d0", ""))
	for i := range 9 { // more than are released at a time
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

// TestGCWithFailingDELs: a DEL that fails keeps no other from being tried, is in the one error of the GC, and stays owed,
// with what is known of it. Every GC tries it again.
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

// TestBrake: a sweep keeps the live ones of this boot if those that seem dead are more than 10 and more than 30 % of them.
func TestBrake(t *testing.T) {
	t.Parallel()
	type counts struct{ dead, live, removing, earlier, unknown int } // live: those that are not dead
	for _, c := range []struct {
		name   string
		counts counts
		force  bool
		kept   bool
	}{
		{"none", counts{}, false, false},
		{"ten, all there are", counts{dead: 10}, false, false},
		{"eleven, all there are", counts{dead: 11}, false, true},
		{"eleven, forced", counts{dead: 11}, true, false},
		{"eleven of 36", counts{dead: 11, live: 25}, false, true},
		{"eleven of 37", counts{dead: 11, live: 26}, false, false},
		{"thirty of a hundred", counts{dead: 30, live: 70}, false, false},
		{"thirty of 99", counts{dead: 30, live: 69}, false, true},
		{"eleven of 37, some of them not to be told", counts{dead: 11, live: 20, unknown: 6}, false, false},
		{"ten, and what has to go anyway", counts{dead: 10, removing: 50, earlier: 50}, false, false},
		{"eleven of 36, and many of an earlier boot", counts{dead: 11, live: 25, earlier: 50}, false, true},
		{"eleven of 36, and many that are being removed", counts{dead: 11, live: 25, removing: 50}, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var findings []Finding
			add := func(many int, f Finding) { findings = append(findings, slices.Repeat([]Finding{f}, many)...) }
			add(c.counts.earlier, Finding{State: journal.Live, Fate: Dead})
			add(c.counts.dead, Finding{State: journal.Live, Fate: Dead, thisBoot: true})
			add(c.counts.removing, Finding{State: journal.Removing, Fate: Dead, thisBoot: true})
			add(c.counts.live, Finding{State: journal.Live, Fate: Live, thisBoot: true})
			add(c.counts.unknown, Finding{State: journal.Live, Fate: Unknown, thisBoot: true})
			s := &sweeping{Sweep: Sweep{Force: c.force}}
			err := s.brake(findings)
			if (err != nil) != c.kept {
				t.Errorf("the brake says %v", err)
			}
			for i, f := range findings {
				live := f.State == journal.Live && f.Fate == Dead && f.thisBoot
				if kept := f.Err != nil; kept != (live && c.kept) {
					t.Errorf("finding %d, %+v: kept %t", i, f, kept)
				}
			}
		})
	}
}

// TestBrakeOnANode has a list that misses 12 of 20 live pods: none of them is released, and the error says why. What has to
// go by other evidence goes, and is not counted. A list that misses 10 of 20 is believed.
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

// TestGCOfLibcni has libcni drive it. What is in its cache and on no list it DELs by itself; what it has forgotten is found.
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

// TestGCOfRealPlugins has pods of each kind on real plugins, with addresses, rules and host ports. Of those that a GC
// releases nothing is left; those that it keeps have all they had, and reach their gateway.
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
		if a.traces = len(a.pod.traces(a.marks)); a.traces < 8 { // its interfaces, its address, its rules
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
	for _, plugin := range []string{"bridge", "firewall", "portmap"} { // one that is started writes it down
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

// TestListNotBelieved: a list with which the brake is put on is not passed on either: a delegate would act on it.
func TestListNotBelieved(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := n.faulty("p0", "")
	list := n.unwind(chain)
	for i := range 12 {
		n.pod(fmt.Sprint(i)).mustAdd(list)
	}
	n.forgetCalls()
	out := n.ask("GC", "1.1.0", map[string]any{validKeys[0]: []Attachment{}}, chain)
	if out.code == 0 || !strings.Contains(out.said.Msg, "too many to be believed") || len(n.entries()) != 12 {
		t.Errorf("%s; %d entries", out.stdout, len(n.entries()))
	}
	if calls := n.calls(); len(calls) > 0 {
		t.Errorf("calls: %v", calls)
	}
}

// TestListsUnderBothKeys: what is on either list is attached.
func TestListsUnderBothKeys(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	chain := n.faulty("p0", "")
	for _, id := range []string{"a", "b", "c"} {
		n.pod(id).mustAdd(n.unwind(chain))
	}
	n.ask("GC", "1.1.0", map[string]any{validKeys[0]: []Attachment{{"a", "eth0"}}, validKeys[1]: []Attachment{{"b", "eth0"}}}, chain)
	if taken := n.taken(); len(taken) != 2 || taken[0] != "a.eth0.p0" || taken[1] != "b.eth0.p0" {
		t.Errorf("taken: %v", taken)
	}
}
