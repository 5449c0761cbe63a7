package plugin

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"
)

// TestDecideOrphan: a reservation whose owner the journal does not know is dead only by all of the
// evidence.
func TestDecideOrphan(t *testing.T) {
	t.Parallel()
	dead := alive.Orphan{SameNamespaces: tristate.Yes, Listed: tristate.No, PastGracePeriod: tristate.Yes, Cached: tristate.No, InUse: tristate.No}
	if v := alive.DecideOrphan(dead); v.Fate != alive.Dead {
		t.Errorf("%+v", v)
	}
	answers := []tristate.Value{tristate.Unknown, tristate.No, tristate.Yes}
	for i := range 3 * 3 * 3 * 3 * 3 {
		o := alive.Orphan{SameNamespaces: answers[i%3], Listed: answers[i/3%3], PastGracePeriod: answers[i/9%3],
			Cached: answers[i/27%3], InUse: answers[i/81]}
		v := alive.DecideOrphan(o)
		if (v.Fate == alive.Dead) != (o == dead) || v.Reason.Text == "" {
			t.Errorf("%+v: %+v", o, v)
		}
		if uncovered := o.SameNamespaces == tristate.Yes && o.Listed == tristate.Unknown; uncovered &&
			(v.Fate == alive.Live) != (o.InUse == tristate.Yes) {
			t.Errorf("no list covers it: %+v: %+v", o, v)
		}
	}
}

// orphanage are statements on a node with pods that were added before unwind was installed, or are
// unknown to its journal. Its libcni has its cache where every runtime has it, below $lib; $any are the
// words of "give gc" there.
var orphanage = acts{
	"orphanage": func(s *story, _ []string) {
		s.vars["lib"] = filepath.Join(s.dir, "varlib")
		s.vars["any"] = "any varLib=" + s.vars["lib"]
		s.cni = libcni.NewCNIConfigWithCacheDir(s.path, filepath.Join(s.vars["lib"], "cni"), &nodeExec{node: s.node})
		s.chain, s.outer, s.inner = []string{"bridge"}, "1.1.0", "1.1.0"
	},
	// gcs N [KEY=JSON …]: GCs after the grace period, until N addresses are reserved. While processes come
	// and go, not every namespace can be examined each time.
	"gcs": func(s *story, w []string) {
		eventually(s, "as many addresses", func() bool {
			s.passes(append([]string{"give", "gc", "any", "varLib=" + s.vars["lib"], "gracePeriod=0s"}, w[1:]...))
			return fmt.Sprint(len(s.reserved())) == w[0]
		})
	},
	// have CONTAINERS: just these have an address
	"have": func(s *story, w []string) {
		var ids []string
		for _, owner := range s.reserved() {
			id, _, _ := strings.Cut(owner, " ")
			ids = append(ids, id)
		}
		slices.Sort(ids)
		s.want(slices.Equal(ids, w), "%v have an address", ids)
	},
	// reaped: by the reaper of the race, as antrea does at its start, with an empty list
	"reaped": func(s *story, _ []string) { reap(s.TB, filepath.Join(s.dataDir(), s.network)) },
}

// TestOrphans: there are pods of every kind from before the install. Only reservations that nobody
// has and no evidence supports go. The cache has lost one whose interface is there; it never had the one
// whose ADD and DEL failed.
func TestOrphans(t *testing.T) {
	stories(t, `
	orphanage; past add cached gone listed moved; drop gone listed; lose $lib/cni/results/$network-moved-eth0
	chain bridge | p1; plan p1 ADD fail, p1 DEL fail; fails past add leaked; drop leaked; chain bridge
	let list 'valid=[{"containerID":"listed","ifname":"eth0"}]'
	have cached gone leaked listed moved
	give gc $any; give status $any; give gc $any valid=; give status $any valid=; give gc $any $list gracePeriod=1h
	have cached gone leaked listed moved
	gcs 3 $list; have cached listed moved
	gcs 2 valid=[]; have cached moved
	reaped; have; leaves`, orphanage)
}

// TestOrphanInItsGracePeriod: a person's sweep, which has no network of its own, uses the grace
// period of each pool's network.
func TestOrphanInItsGracePeriod(t *testing.T) {
	stories(t, `
	either over: conf gracePeriod 1ns; let kept 0
	or not over: conf gracePeriod 1h; let kept 1
	chain bridge; past add a; lose $dir/cache/results/$network-a-eth0; drop a
	person $kept; leaves`, acts{"person": func(s *story, w []string) {
		dir := filepath.Join(s.dir, "net.d")
		s.mkdir(dir)
		s.write(filepath.Join(dir, "10.conflist"), string(s.unwind(s.plugins(s.node)...).Bytes))
		pools, err := sweep.ReadPools(s.stateDir, dir)
		s.must(err)
		eventually(s, "as many addresses as are to be kept", func() bool {
			plugin := &Plugin{Stderr: s.Output(), Budgets: undo.DefaultBudgets, CacheDir: s.cacheDir()}
			_, err := plugin.sweepAsRuntime(s.Context(), s.stateDir, sweep.Job{List: alive.NewList(s.network, nil), Pools: pools})
			return err == nil && fmt.Sprint(len(s.reserved())) == w[0]
		})
	}})
}

// TestLostJournal: after the journal was lost, every live pod is an orphan (antrea#8239 is of this
// kind). With a list that lacks them unwind takes nothing, while a reaper that goes by the list
// alone takes all. Once they are gone, unwind releases them.
func TestLostJournal(t *testing.T) {
	stories(t, `
	orphanage; add p0 p1 p2; lose journal
	either naive: reaped; have; leaves
	or unwind: give gc $any valid=[] gracePeriod=0s; have p0 p1 p2
		drop p1; gcs 2 valid=[]; have p0 p2
		del p0 p2`, orphanage)
}

// TestReservedWhileListed: an ADD reserves its address after a list was read, and has made no interface
// yet. A naive reconcile takes the address from the new pod; unwind's grace period keeps it.
func TestReservedWhileListed(t *testing.T) {
	stories(t, `
	orphanage; chain p0, "ipam": $hostlocal; plan p0 ADD hold-effect; start past add new; appears $dir/faulty/held/ADD.new.p0
	have new
	either naive: reaped; have
	or unwind: give gc $any valid=[] gracePeriod=10m; have new
	lose $dir/faulty/held/ADD.new.p0; wait add new; leaves`, orphanage)
}

// TestAddressLeftByDEL: host-device does not call its IPAM plugin if its device went with the
// namespace. Its success proves nothing.
func TestAddressLeftByDEL(t *testing.T) {
	stories(t, `
	either plain: let past past; let left 1; leaves
	or wrapped: let past; let left 0
	shell 'ip link add d$bridge type veth peer name e$bridge'
	chain {"type": "host-device", "device": "d$bridge", "ipam": $hostlocal}
	$past add a; drop a; names a; $past del a; reserved $left`)
}
