package plugin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// In the tests of this file DELs pass while the journal cannot be written, so that it has the
// attachments as live from then on.

// cached makes unwind look for libcni's cache where the node's runtime has it.
func (n *node) cached() *node {
	return n
}

// TestDELHasPassed: unwind believes that a pod's DEL has passed only if both host-local and
// libcni's cache say so.
func TestDELHasPassed(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.pod("a")
	given := address(t, p.mustAdd(n.unwind(n.bridgePlugin(""))))
	o := &alive.Node{CacheDir: n.cacheDir()}
	pool := filepath.Join(n.dataDir(), n.network)
	file, cache := filepath.Join(pool, given), filepath.Join(n.cacheDir(), n.network+"-a-eth0")
	steps := []struct {
		name   string
		do     func()
		passed bool
	}{
		{"live", func() {}, false},
		{"host-local has it alone", func() { n.rename(cache, cache+".away") }, false},
		{"nobody has it", func() { n.rename(file, file+".away") }, true},
		{"libcni has it alone", func() { n.rename(cache+".away", cache) }, false},
		{"another one has the address", func() {
			n.rename(cache, cache+".away")
			n.write(file, "b\r\neth0")
		}, true},
		{"so has another interface", func() { n.write(file, "a\r\neth1") }, true},
		{"no owner", func() { n.write(file, "") }, true},
		{"its file cannot be read", func() {
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			n.mkdir(file)
		}, false},
		{"no pool", func() { n.rename(pool, pool+".away") }, false},
		{"the pool is back", func() {
			n.rename(pool+".away", pool)
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}, true},
		{"no cache", func() { n.rename(n.cacheDir(), n.cacheDir()+".away") }, false},
	}
	for _, s := range steps {
		s.do()
		if passed := o.Passed(p.entry()); passed != s.passed {
			t.Errorf("%s: %t", s.name, passed)
		}
	}
	n.rename(n.cacheDir()+".away", n.cacheDir())
	p.edit(func(g *journal.Generation) { g.Claims[0].Pool = "" })
	if o.Passed(p.entry()) {
		t.Error("of an address of another IPAM's nothing is known")
	}
}

// manyPods adds 20 pods.
func (n *node) manyPods(list *libcni.NetworkConfigList) (pods []*pod) {
	n.Helper()
	for i := range 20 {
		p := n.pod(fmt.Sprintf("p%d", i))
		p.mustAdd(list)
		pods = append(pods, p)
	}
	return pods
}

// TestPassedDELsAreNoMassDeath: 20 pods get their DELs while the disk is full. With room again, all
// of them seem to have died at once. They are released, since their DELs have passed. Pods whose
// namespaces vanish without a DEL are kept.
func TestPassedDELsAreNoMassDeath(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"STATUS", "sweep"} {
		for _, deleted := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, deleted %t", by, deleted), func(t *testing.T) {
				t.Parallel()
				n := newNode(t).patient().cached()
				n.conf["sweepOnStatus"] = false
				chain := []string{n.bridgePlugin(""), n.faulty("p1", "")}
				pods := n.manyPods(n.unwind(chain...))
				mend := func() {}
				if deleted {
					mend = breakages["read-only file system"](n)
				}
				for _, p := range pods {
					if deleted {
						p.mustDel(n.unwind(chain...))
					}
					p.unpin()
				}
				mend()
				eventually(t, "the namespaces are gone", func() bool {
					for _, e := range n.entries() {
						if there, _ := host.LinkThere(e.Newest().HostLinks); there {
							return false
						}
					}
					return len(n.entries()) == len(pods)
				})
				if by == "STATUS" {
					out := n.ask("STATUS", "1.0.0", map[string]any{"sweepOnStatus": true}, chain...)
					if out.code != 0 {
						t.Errorf("STATUS: %s", out.stdout)
					}
				} else {
					p := &Plugin{Stderr: t.Output(), Budgets: undo.DefaultBudgets, CacheDir: n.cacheDir()}
					_, err := p.Sweep(t.Context(), n.stateDir, sweep.Job{})
					if is := errors.As(err, new(*sweep.MassReleaseError)); is == deleted {
						t.Errorf("sweep: %v", err)
					}
				}
				if deleted {
					n.nothingLeft()
				} else if left := len(n.entries()); left != len(pods) {
					t.Errorf("%d of %d are kept", left, len(pods))
				}
			})
		}
	}
}

// TestRestartWithReadOnlyJournal: a container starts again under its ID while the journal is
// read-only. It starts if the earlier DEL has passed. The journal then has an entry of an ended
// ADD, and nothing is left in the end.
func TestRestartWithReadOnlyJournal(t *testing.T) {
	t.Parallel()
	deleted := func(p *pod, list *libcni.NetworkConfigList) { p.mustDel(list) }
	for _, c := range []struct {
		name   string
		before func(p *pod, list *libcni.NetworkConfigList)
		mended bool // before the last DEL
		starts bool
	}{
		{"its DEL has passed", deleted, false, true},
		{"its DEL has passed, the journal is mended", deleted, true, true},
		{"no DEL", func(*pod, *libcni.NetworkConfigList) {}, false, false},
		{"the DEL has failed", func(p *pod, list *libcni.NetworkConfigList) {
			p.plan(map[string]map[string]string{"p1": {"DEL": "fail"}})
			if err := p.del(list); err == nil {
				p.Error("the DEL succeeded")
			}
			p.plan(nil)
		}, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t).cached()
			list := n.unwind(n.bridgePlugin(""), n.faulty("p1", ""), `{"type": "firewall"}`)
			p := n.pod("a")
			p.mustAdd(list)
			mend := breakages["read-only file system"](n)
			c.before(p, list)
			next := p.again()
			_, err := next.add(list)
			var refused *types.Error
			if (err == nil) != c.starts {
				t.Errorf("ADD: %v", err)
			}
			if err != nil && (!errors.As(err, &refused) || refused.Code != types.ErrTryAgainLater) {
				t.Errorf("ADD: %v", err)
			}
			if c.mended {
				mend()
			}
			next.mustDel(list)
			if !c.mended {
				mend()
			}
			p.dropNetNS()
			next.dropNetNS()
			n.sweep(undo.DefaultBudgets)
			n.nothingLeft()
		})
	}
}
