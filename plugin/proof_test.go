package plugin

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"cni-unwind/ipam"
	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// aws is a plugin of the type aws-cni whose DEL frees nothing, since ipamd is away, and ipamd's
// checkpoint.
type aws struct {
	*node
	checkpoint string
}

func newAWS(t *testing.T) *aws {
	t.Helper()
	a := &aws{node: newNode(t)}
	if err := os.Symlink(filepath.Join(toolsDir(t), "test", "faulty"), filepath.Join(a.path[0], "aws-cni")); err != nil {
		t.Fatal(err)
	}
	a.checkpoint = filepath.Join(a.dir, "aws-node", "ipam.json")
	a.mkdir(filepath.Dir(a.checkpoint))
	a.conf["stores"] = map[string]string{"aws-cni": a.checkpoint}
	return a
}

// plugin returns the configuration of the plugin.
func (a *aws) plugin() string {
	return fmt.Sprintf(`{"type": "aws-cni", "dir": %q, "instance": "aws", "address": "192.0.2.7/32"}`, a.faultyDir())
}

// gives writes a checkpoint with the address of a container.
func (a *aws) gives(file, container string) {
	a.Helper()
	a.write(filepath.Join(filepath.Dir(a.checkpoint), file), fmt.Sprintf(`{"version": "vpc-cni-ipam/1", "allocations": [
		{"networkName": %q, "containerID": %q, "ifName": "eth0", "ipv4": "192.0.2.7", "allocationTimestamp": 1790000000123456789,
		 "metadata": {"k8sPodNamespace": "default", "k8sPodName": "web-0", "interfacesCount": 1}}]}`, a.network, container))
}

// unproven returns why the pod's DEL is not proven.
func (p *pod) unproven() string {
	e := p.entry()
	if e == nil || len(e.Generations) == 0 || len(e.Newest().Steps) == 0 {
		return ""
	}
	return e.Newest().Steps[0].Unproven
}

// dels returns how often a plugin's DEL ran.
func (n *node) dels(instance string) int {
	return len(slices.DeleteFunc(n.calls(), func(call string) bool { return call != "DEL "+instance }))
}

// TestDELThatLies: aws-cni's DEL passes, and ipamd still has the address. The runtime's DEL succeeds.
// The DEL stays pending, alone, is tried again with pauses, and is done once ipamd has given the
// address back, with no further DEL.
func TestDELThatLies(t *testing.T) {
	t.Parallel()
	for _, file := range []string{"ipam.json", "ipam-nic-1.json"} {
		t.Run(file, func(t *testing.T) {
			t.Parallel()
			a := newAWS(t)
			list := a.unwind(a.plugin(), a.faulty("p1", ""))
			p := a.pod("a")
			p.mustAdd(list)
			a.gives(file, "a")
			p.mustDel(list)
			if why := p.unproven(); why != "192.0.2.7 is not free" {
				t.Fatalf("unproven: %q; the entry: %+v", why, p.entry())
			}
			if e := p.entry(); e.Pending() != 1 || e.State != journal.Removing {
				t.Errorf("%+v, want the DEL of aws-cni alone", e)
			}
			p.mustDel(list) // the runtime may ask again
			a.sweep(undo.DefaultBudgets)
			if before := a.dels("aws"); before < 2 || p.unproven() == "" {
				t.Errorf("%d DELs ran; unproven: %q", before, p.unproven())
			}
			before := a.dels("aws")
			a.write(filepath.Join(filepath.Dir(a.checkpoint), file), `{"version": "vpc-cni-ipam/1", "allocations": []}`)
			eventually(t, "released", func() bool { a.sweep(undo.DefaultBudgets); return p.entry() == nil })
			if after := a.dels("aws"); after != before {
				t.Errorf("%d DELs ran after ipamd had given the address back", after-before)
			}
			a.nothingLeft()
			events := a.events()
			if len(events) != 2 || !strings.HasPrefix(events[0], "unproven a [192.0.2.7] [aws-cni]: 192.0.2.7 is not free") || !strings.HasPrefix(events[1], "swept a ") {
				t.Errorf("history: %q", events)
			}
		})
	}
}

// TestCheckpoints: what ipamd's checkpoint says, or fails to say. Nothing in it harms the pod, and a
// pod that has its address there is not given up. A file that cannot be read holds a DEL up for
// maxUnproven tries, then the DEL runs once more as without a file.
func TestCheckpoints(t *testing.T) {
	t.Parallel()
	const proven, again = "", "once more"
	for _, tt := range []struct {
		name  string
		write func(a *aws)
		want  string // in the reason why it is unproven
	}{
		{"free", func(a *aws) { a.gives("ipam.json", "other") }, proven},
		{"its own", func(a *aws) { a.gives("ipam.json", "a") }, "192.0.2.7 is not free"},
		{"no file", func(*aws) {}, again},
		{"another format", func(a *aws) { a.write(a.checkpoint, `{"version": "vpc-cni-ipam/2", "allocations": {}}`) }, again},
		{"half written", func(a *aws) { a.write(a.checkpoint, `{"version": "vpc-cni-ipam/1", "alloc`) }, "unexpected end of JSON"},
		{"no list", func(a *aws) { a.write(a.checkpoint, `{"version": "vpc-cni-ipam/1", "allocations": "x"}`) }, "cannot unmarshal"},
		{"no allocations", func(a *aws) { a.write(a.checkpoint, `{"version": "vpc-cni-ipam/1"}`) }, "has no allocations"},
		{"null allocations", func(a *aws) { a.write(a.checkpoint, `{"version": "vpc-cni-ipam/1", "allocations": null}`) }, "has no allocations"},
		{"its address is odd", func(a *aws) { a.checkpointWith(`"ipv4": "x"`) }, "unable to parse IP"},
		{"its address is a number", func(a *aws) { a.checkpointWith(`"ipv4": 7`) }, "cannot unmarshal"},
		{"it has no address", func(a *aws) { a.checkpointWith(`"ipv6": ""`) }, "has no address"},
		{"odd entries of others", func(a *aws) { a.checkpointWith("") }, proven},
		{"its own among odd ones", func(a *aws) { a.checkpointWith(`"ipv4": "192.0.2.7"`) }, "192.0.2.7 is not free"},
		{"its own, and a file of another card that is cut off", func(a *aws) {
			a.write(filepath.Join(filepath.Dir(a.checkpoint), "ipam-nic-0.json"), "{")
			a.gives("ipam.json", "a")
		}, "192.0.2.7 is not free"},
		{"a file of another card that is cut off", func(a *aws) {
			a.write(filepath.Join(filepath.Dir(a.checkpoint), "ipam-nic-1.json"), "{")
			a.gives("ipam.json", "other")
		}, "ipam-nic-1.json: unexpected end of JSON"},
		{"null", func(a *aws) { a.write(a.checkpoint, `null`) }, again},
		{"50 MB", func(a *aws) {
			a.write(a.checkpoint, "")
			if err := os.Truncate(a.checkpoint, 50<<20); err != nil {
				a.Fatal(err)
			}
		}, "more than 4194304 bytes"},
		{"a directory", func(a *aws) { a.mkdir(a.checkpoint) }, "not a regular file"},
		{"a pipe", func(a *aws) {
			if err := unix.Mkfifo(a.checkpoint, 0o600); err != nil {
				a.Fatal(err)
			}
		}, "not a regular file"},
		{"a link", func(a *aws) {
			if err := os.Symlink("/etc/passwd", a.checkpoint); err != nil {
				a.Fatal(err)
			}
		}, "too many levels of symbolic links"},
		{"its directory is none", func(a *aws) {
			if err := os.Remove(filepath.Dir(a.checkpoint)); err != nil {
				a.Fatal(err)
			}
			a.write(filepath.Dir(a.checkpoint), "")
		}, "not a directory"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			a := newAWS(t)
			a.conf["gracePeriod"] = "1h"
			list := a.unwind(a.plugin())
			p := a.pod("a")
			p.mustAdd(list)
			tt.write(a)
			p.mustDel(list)
			e := p.entry()
			switch {
			case tt.want == proven:
				if e != nil {
					t.Errorf("%+v, want nothing", e)
				}
			case e == nil:
				t.Error("the entry is gone")
			case tt.want == again:
				if s := e.Newest().Steps[0]; s.Unproven != "" {
					t.Errorf("unproven: %s", s.Unproven)
				}
				p.wantConfirmation(time.Hour)
			case !strings.Contains(p.unproven(), tt.want):
				t.Errorf("unproven: %q, want %q", p.unproven(), tt.want)
			default:
				a.triesWithoutEnd(p, strings.HasSuffix(tt.want, "is not free"))
			}
		})
	}
}

// checkpointWith writes a checkpoint with odd entries, and with one of container a between them if keys is
// not "".
func (a *aws) checkpointWith(keys string) {
	a.Helper()
	own := ""
	if keys != "" {
		own = fmt.Sprintf(`{"networkName": %q, "containerID": "a", "ifName": "eth0", %s},`, a.network, keys)
	}
	a.write(a.checkpoint, fmt.Sprintf(`{"version": "vpc-cni-ipam/1", "allocations": [null, 5, {"containerID": {}},
		{"networkName": %q, "containerID": "b", "ifName": "eth0", "ipv4": "300.0.2.7"}, %s
		{"networkName": %q, "containerID": "c", "ifName": "eth0", "ipv4": [4], "ipv6": "fd00::7"}]}`, a.network, own, a.network))
}

// maxUnproven is the number of DELs of an unproven step while its store cannot be asked.
const maxUnproven = 300

// triesWithoutEnd checks whether the try after which an unproven DEL counts ends it, or not.
func (a *aws) triesWithoutEnd(p *pod, without bool) {
	a.Helper()
	why := p.unproven()
	for _, tried := range []int{maxUnproven - 2, maxUnproven - 1} {
		p.edit(func(g *journal.Generation) { g.Steps[0].Attempts = tried })
		a.sweep(undo.DefaultBudgets)
		if last := tried == maxUnproven-1; (p.unproven() != why) != (last && !without) {
			a.Fatalf("unproven after %d tries: %q", tried+1, p.unproven())
		}
	}
	if without {
		return
	}
	p.wantConfirmation(time.Hour)
	p.edit(func(g *journal.Generation) { g.Steps[0].ConfirmAt = 1 })
	a.sweep(undo.DefaultBudgets)
	if e := p.entry(); e != nil {
		a.Errorf("%+v, want nothing", e)
	}
}

// TestAgentKeepsPauses: many DELs are unproven, since ipamd's checkpoint cannot be read. A sweep of the
// agent, which nobody asked for, tries three of them, and none before its pause is over. A person's
// sweep tries all. Once the file can be read, one sweep of the agent releases all, with no DEL.
func TestAgentKeepsPauses(t *testing.T) {
	t.Parallel()
	const many = 12
	a := newAWS(t)
	a.mkdir(a.checkpoint)
	list := a.unwind(a.plugin())
	var pods []*pod
	for i := range many {
		p := a.pod(fmt.Sprint("a", i))
		p.mustAdd(list)
		p.mustDel(list)
		pods = append(pods, p)
	}
	ran := func(s sweep.Job) int {
		before := a.dels("aws")
		p := &Plugin{Stderr: a.Output(), Budgets: undo.DefaultBudgets, CacheDir: a.cacheDir()}
		if _, err := p.Sweep(t.Context(), a.stateDir, s); err != nil {
			t.Fatal(err)
		}
		return a.dels("aws") - before
	}
	retryAt := func(in time.Duration) {
		for _, p := range pods {
			p.edit(func(g *journal.Generation) { g.Steps[0].RetryAt = journal.BootNanos() + int64(in) })
		}
	}
	for range 4 { // one each minute: the pauses of the first 20 tries are over by then
		retryAt(0)
		if dels := ran(sweep.Job{Periodic: true}); dels > probes {
			t.Errorf("a sweep of the agent ran %d DELs", dels)
		}
	}
	retryAt(4 * time.Minute)
	if dels := ran(sweep.Job{Periodic: true}); dels != 0 {
		t.Errorf("a sweep of the agent ran %d DELs before their time", dels)
	}
	if dels := ran(sweep.Job{}); dels != many {
		t.Errorf("a person's sweep ran %d DELs", dels)
	}
	if err := os.Remove(a.checkpoint); err != nil {
		t.Fatal(err)
	}
	a.gives("ipam.json", "other")
	retryAt(0)
	if dels := ran(sweep.Job{Periodic: true}); dels != 0 || len(a.entries()) != 0 {
		t.Errorf("%d DELs, %d entries, though all addresses are free", dels, len(a.entries()))
	}
}

// askedProbe answers as a store elsewhere does.
type askedProbe struct {
	answer func(ctx context.Context) ([]netip.Addr, bool, error)
}

func (p askedProbe) Held(ctx context.Context, _ ipam.Query) ([]netip.Addr, bool, error) {
	return p.answer(ctx)
}

// newWhereabouts is a node whose chain calls a whereabouts that always passes.
func newWhereabouts(t *testing.T) (*node, *libcni.NetworkConfigList) {
	t.Helper()
	n := newNode(t)
	n.conf["gracePeriod"] = "1h"
	n.write(filepath.Join(n.path[0], "whereabouts"), "#!/bin/sh\ncat >/dev/null\n"+
		`[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0", "ips": [{"address": "192.0.2.9/32"}]}'`)
	if err := os.Chmod(filepath.Join(n.path[0], "whereabouts"), 0o700); err != nil {
		t.Fatal(err)
	}
	return n, n.unwind(n.faulty("p0", `, "ipam": {"type": "whereabouts"}`))
}

// TestStoreElsewhere: whereabouts' DEL proves nothing. The program that starts for each pod cannot
// ask its store, so the DEL runs once more after the grace period. The agent asks: what is held, or
// cannot be told, stays; a store that hangs is waited for no longer than probeTime.
func TestStoreElsewhere(t *testing.T) {
	t.Parallel()
	n, list := newWhereabouts(t)
	p := n.pod("a")
	p.mustAdd(list)
	p.mustDel(list)
	p.wantConfirmation(time.Hour)
	address := netip.MustParseAddr("192.0.2.9")
	answers := []struct {
		answer func(context.Context) ([]netip.Addr, bool, error)
		want   string
	}{
		{func(context.Context) ([]netip.Addr, bool, error) { return []netip.Addr{address}, true, nil }, "192.0.2.9 is not free"},
		{func(context.Context) ([]netip.Addr, bool, error) { return nil, true, errors.New("no route") }, "cannot be told: no route"},
		{func(ctx context.Context) ([]netip.Addr, bool, error) { <-ctx.Done(); return nil, true, ctx.Err() }, "deadline exceeded"},
	}
	for _, a := range answers {
		began := time.Now()
		n.sweepAsking(askedProbe{a.answer})
		if why := p.unproven(); !strings.Contains(why, a.want) || time.Since(began) > 14*time.Second {
			t.Errorf("unproven: %q after %s, want %q", why, time.Since(began), a.want)
		}
	}
	soon := n.pod("b") // whose address is free: its second DEL is not waited for
	soon.mustAdd(list)
	soon.mustDel(list)
	before := n.dels("p0")
	n.sweepAsking(askedProbe{func(context.Context) ([]netip.Addr, bool, error) { return nil, true, nil }})
	if e := soon.entry(); e != nil || p.entry() != nil || n.dels("p0") != before {
		t.Errorf("%+v and %+v, %d more DELs, though the store has nothing", e, p.entry(), n.dels("p0")-before)
	}
}

// TestUnprovenElsewhere: a process that cannot ask the store does not drop what the agent found.
func TestUnprovenElsewhere(t *testing.T) {
	t.Parallel()
	n, list := newWhereabouts(t)
	p := n.pod("a")
	p.mustAdd(list)
	p.mustDel(list)
	n.sweepAsking(askedProbe{func(context.Context) ([]netip.Addr, bool, error) {
		return []netip.Addr{netip.MustParseAddr("192.0.2.9")}, true, nil
	}})
	why := p.unproven()
	p.edit(func(g *journal.Generation) { g.Steps[0].ConfirmAt = 1 })
	n.sweep(undo.DefaultBudgets) // of a STATUS, which cannot ask
	if got := p.unproven(); got != why {
		t.Errorf("unproven: %q, want still %q", got, why)
	}
}

// TestOtherNetworkOfTheContainer: whereabouts goes by container ID and interface, whatever the
// network. A second DEL of a network that a pod has left would free the address that the pod has in
// another one by now. It waits until the container is gone, also within that other network's ADD.
func TestOtherNetworkOfTheContainer(t *testing.T) {
	t.Parallel()
	for _, unproven := range []string{"", "192.0.2.9 is not free"} {
		t.Run(unproven, func(t *testing.T) {
			t.Parallel()
			n, list := newWhereabouts(t)
			a := n.pod("a")
			a.mustAdd(list)
			a.mustDel(list)
			other := *n
			other.network += "-other"
			b := *a
			b.node = &other
			otherList := other.unwind(other.faulty("p1", `, "ipam": {"type": "whereabouts"}`))
			b.mustAdd(otherList)
			a.edit(func(g *journal.Generation) {
				g.Steps[0].ConfirmAt, g.Steps[0].Unproven = 1, unproven
				if unproven != "" {
					g.Steps[0].State = journal.StepUnproven
				}
			})
			before := n.dels("p0")
			n.sweep(undo.DefaultBudgets)
			n.sweepAsking(askedProbe{func(context.Context) ([]netip.Addr, bool, error) {
				return []netip.Addr{netip.MustParseAddr("192.0.2.9")}, true, nil
			}})
			if ran := n.dels("p0") - before; ran != 0 || a.entry() == nil {
				t.Errorf("%d DELs of the network that the pod left; its entry: %+v", ran, a.entry())
			}
			b.mustDel(otherList)
			n.sweepAsking(askedProbe{func(context.Context) ([]netip.Addr, bool, error) { return nil, true, nil }})
			if a.entry() != nil || b.entry() != nil {
				t.Errorf("%+v, %+v", a.entry(), b.entry())
			}
		})
	}
}

// TestOtherNetworkAfterAKill: unwind is killed when whereabouts' DEL has passed, and before the journal
// has that. No sweep runs the DEL again while another network of the container lives; the runtime
// may ask for it.
func TestOtherNetworkAfterAKill(t *testing.T) {
	t.Parallel()
	for _, asked := range []bool{false, true} {
		t.Run(fmt.Sprintf("asked %t", asked), func(t *testing.T) {
			t.Parallel()
			n, list := newWhereabouts(t)
			a := n.pod("a")
			a.Args = nil // of no pod, for whose next ADD the DEL would run before that has an address
			a.mustAdd(list)
			if err := n.killedAtPoint("undone", 1, func() error { return a.del(list) }); !wasKilled(err) {
				t.Fatalf("DEL: %v", err)
			}
			if s := a.entry().Newest().Steps[0]; n.dels("p0") != 1 || s.Attempts != 0 {
				t.Fatalf("%d DELs; %+v", n.dels("p0"), s)
			}
			var leave []func()
			for _, network := range []string{"-other", "-third"} { // with the same address
				other := *n
				other.network += network
				b := *a
				b.node = &other
				otherList := other.unwind(other.faulty("p1", `, "ipam": {"type": "whereabouts"}`))
				b.mustAdd(otherList)
				leave = append(leave, func() { b.mustDel(otherList) })
				n.sweep(undo.DefaultBudgets)
			}
			if ran := n.dels("p0") - 1; ran != 0 || a.entry() == nil {
				t.Errorf("%d DELs of the network that the pod left; its entry: %+v", ran, a.entry())
			}
			if asked {
				a.mustDel(list)
			} else {
				leave[0]()
				leave[1]()
				n.sweep(undo.DefaultBudgets)
			}
			if n.dels("p0") != 2 {
				t.Errorf("%d DELs, want 2", n.dels("p0"))
			}
			a.wantConfirmation(time.Hour)
		})
	}
}

// TestCutOffLies: an ADD that was cut off may have an address too, so a DEL that proves nothing is
// repeated there as well.
func TestCutOffLies(t *testing.T) {
	t.Parallel()
	n, list := newWhereabouts(t)
	p := n.pod("a")
	if err := n.killedAtPoint("added", 1, func() error { _, err := p.add(list); return err }); !wasKilled(err) {
		t.Fatalf("ADD: %v", err)
	}
	n.sweep(undo.DefaultBudgets)
	p.wantConfirmation(time.Hour)
}

// TestUnknownStore: a store that no probe knows is not asked for at each sweep, nor its DEL run.
func TestUnknownStore(t *testing.T) {
	t.Parallel()
	n, list := newWhereabouts(t)
	p := n.pod("a")
	p.mustAdd(list)
	p.mustDel(list)
	for range 3 {
		n.sweepAsking(askedProbe{func(context.Context) ([]netip.Addr, bool, error) { return nil, false, nil }})
	}
	if dels := n.dels("p0"); dels != 1 {
		t.Errorf("%d DELs, want 1", dels)
	}
	p.wantConfirmation(time.Hour)
}

// TestUnprovenOnce: a sweep that releases another attachment runs an unproven DEL once.
func TestUnprovenOnce(t *testing.T) {
	t.Parallel()
	a := newAWS(t)
	list := a.unwind(a.plugin())
	p, other := a.pod("a"), a.pod("b")
	p.mustAdd(list)
	a.gives("ipam.json", "a")
	p.mustDel(list)
	plain := a.unwind(a.faulty("p1", ""))
	other.mustAdd(plain)
	other.dropNetNS()
	before := a.dels("aws")
	a.sweep(undo.DefaultBudgets)
	if ran := a.dels("aws") - before; ran != 1 || other.entry() != nil {
		t.Errorf("%d DELs, want 1; the other: %+v", ran, other.entry())
	}
}

// sweepAsking sweeps as the agent does, with its probes.
func (n *node) sweepAsking(probe ipam.Probe) {
	n.Helper()
	plugin := &Plugin{Stderr: n.Output(), Budgets: undo.DefaultBudgets, CacheDir: n.cacheDir(), Probes: map[string]ipam.Probe{"whereabouts": probe}}
	if _, err := plugin.Sweep(n.Context(), n.stateDir, sweep.Job{}); err != nil {
		n.Fatal(err)
	}
}
