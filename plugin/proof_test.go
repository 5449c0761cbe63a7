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
	n := newNode(t)
	a := &aws{n, filepath.Join(n.dir, "aws-node", "ipam.json")}
	a.install()
	return a
}

func (a *aws) install() {
	a.Helper()
	a.link("aws-cni", filepath.Join(a.path[2], "faulty"))
	a.mkdir(filepath.Dir(a.checkpoint))
	a.conf["stores"] = map[string]string{"aws-cni": a.checkpoint}
}

// plugin returns the configuration of the plugin.
func (a *aws) plugin() string {
	return fmt.Sprintf(`{"type": "aws-cni", "dir": %q, "instance": "aws", "address": "198.18.0.7/32"}`, a.faultyDir())
}

// gives writes a checkpoint with the address of a container.
func (a *aws) gives(file, container string) {
	a.Helper()
	a.write(filepath.Join(filepath.Dir(a.checkpoint), file), fmt.Sprintf(`{"version": "vpc-cni-ipam/1", "allocations": [
		{"networkName": %q, "containerID": %q, "ifName": "eth0", "ipv4": "198.18.0.7", "allocationTimestamp": 1790000000123456789,
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

// ipamd are statements about aws-cni, whose DEL passes and frees nothing, and ipamd's checkpoint.
func ipamd() acts {
	of := func(s *story) *aws { return &aws{s.node, filepath.Join(s.dir, "aws-node", "ipam.json")} }
	return acts{
		"aws": func(s *story, w []string) { // aws PLUGINS: the chain, after aws-cni
			a := of(s)
			a.install()
			s.chain = append([]string{a.plugin()}, w...)
		},
		"gives": func(s *story, w []string) { of(s).gives(w[0], w[1]) }, // gives FILE POD
		"unproven": func(s *story, w []string) {
			s.want(s.who(w[0]).unproven() == "198.18.0.7 is still allocated", "%q", s.who(w[0]).unproven())
		},
		"released": func(s *story, w []string) {
			eventually(s, "released", func() bool { s.sweep(undo.DefaultBudgets); return s.who(w[0]).entry() == nil })
		},
	}
}

// TestDELThatLies: aws-cni's DEL passes, and ipamd still has the address. The runtime's DEL succeeds.
// The DEL stays pending, alone, is tried again with pauses, and is done once ipamd has given the
// address back, with no further DEL.
func TestDELThatLies(t *testing.T) {
	stories(t, `
	each file ipam.json ipam-nic-1.json
	aws p1; add a; gives $file a
	del a; unproven a; entry a removing 1; pending a aws
	# the runtime may ask again
	del a; sweep; unproven a; times 3 DEL aws
	forgets; gives $file other; released a; calls
	events 'unproven a [198.18.0.7] [aws-cni]: 198.18.0.7 is still allocated' 'swept a '`, ipamd())
}

// TestUnprovenOnce: a sweep that releases another attachment runs an unproven DEL once.
func TestUnprovenOnce(t *testing.T) {
	stories(t, `
	aws; add a; gives ipam.json a; del a
	chain p1; add b; drop b; forgets
	sweep; times 1 DEL aws; gone b
	leaves`, ipamd())
}

// TestConfirmationIsNoKill: aws-cni's DEL passed, proves nothing and waits for the one once more. No
// DEL of the attachment has less time for that.
func TestConfirmationIsNoKill(t *testing.T) {
	stories(t, `
	conf gracePeriod 1h; aws p1
	add a; plan p1 DEL fail; fails del a; unkilled a
	leaves`, ipamd(), acts{"unkilled": func(s *story, w []string) {
		step := s.who(w[0]).entry().Newest().Steps[0]
		s.want(step.ConfirmAt != 0 && step.RepeatAt == 0, "%+v", step)
	}})
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
		{"its own", func(a *aws) { a.gives("ipam.json", "a") }, "198.18.0.7 is still allocated"},
		{"no file", func(*aws) {}, again},
		{"another format", func(a *aws) { a.write(a.checkpoint, `{"version": "vpc-cni-ipam/2", "allocations": {}}`) }, again},
		{"half written", func(a *aws) { a.write(a.checkpoint, `{"version": "vpc-cni-ipam/1", "alloc`) }, "unexpected end of JSON"},
		{"no list", func(a *aws) { a.write(a.checkpoint, `{"version": "vpc-cni-ipam/1", "allocations": "x"}`) }, "cannot unmarshal"},
		{"no allocations", func(a *aws) { a.write(a.checkpoint, `{"version": "vpc-cni-ipam/1"}`) }, "no allocations"},
		{"null allocations", func(a *aws) { a.write(a.checkpoint, `{"version": "vpc-cni-ipam/1", "allocations": null}`) }, "no allocations"},
		{"its address is odd", func(a *aws) { a.checkpointWith(`"ipv4": "x"`) }, "unable to parse IP"},
		{"its address is a number", func(a *aws) { a.checkpointWith(`"ipv4": 7`) }, "cannot unmarshal"},
		{"it has no address", func(a *aws) { a.checkpointWith(`"ipv6": ""`) }, "has no address"},
		{"odd entries of others", func(a *aws) { a.checkpointWith("") }, proven},
		{"its own among odd ones", func(a *aws) { a.checkpointWith(`"ipv4": "198.18.0.7"`) }, "198.18.0.7 is still allocated"},
		{"its own, and a file of another card that is cut off", func(a *aws) {
			a.write(filepath.Join(filepath.Dir(a.checkpoint), "ipam-nic-0.json"), "{")
			a.gives("ipam.json", "a")
		}, "198.18.0.7 is still allocated"},
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
				a.triesWithoutEnd(p, strings.HasSuffix(tt.want, "is still allocated"))
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

// whereabouts are statements about a chain that calls a whereabouts that always passes, and its store.
func whereabouts() acts {
	address := netip.MustParseAddr("198.18.0.9")
	stores := map[string]func(context.Context) ([]netip.Addr, bool, error){
		"free":    func(context.Context) ([]netip.Addr, bool, error) { return nil, true, nil },
		"held":    func(context.Context) ([]netip.Addr, bool, error) { return []netip.Addr{address}, true, nil },
		"fails":   func(context.Context) ([]netip.Addr, bool, error) { return nil, true, errors.New("no route") },
		"hangs":   func(ctx context.Context) ([]netip.Addr, bool, error) { <-ctx.Done(); return nil, true, ctx.Err() },
		"unknown": func(context.Context) ([]netip.Addr, bool, error) { return nil, false, nil },
	}
	edit := func(s *story, name string, change func(*journal.Step)) {
		s.who(name).edit(func(g *journal.Generation) { change(&g.Steps[0]) })
	}
	return acts{
		"whereabouts": func(s *story, w []string) { // whereabouts PLUGIN: the chain of a plugin that calls it
			s.conf["gracePeriod"] = "1h"
			s.node.script("whereabouts", "cat >/dev/null\n"+
				`[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0", "ips": [{"address": "198.18.0.9/32"}]}'`)
			s.chain = []string{w[0] + `, "ipam": {"type": "whereabouts"}`}
		},
		// asking HOW sweeps as the agent does, which asks the store.
		"asking": func(s *story, w []string) {
			plugin := &Plugin{Stderr: s.Output(), Budgets: undo.DefaultBudgets, CacheDir: s.cacheDir(),
				Probes: map[string]ipam.Probe{"whereabouts": askedProbe{stores[w[0]]}}}
			_, err := plugin.Sweep(s.Context(), s.stateDir, sweep.Job{})
			s.must(err)
		},
		"unproven": func(s *story, w []string) { // unproven POD REASON
			why := s.who(w[0]).unproven()
			s.want(strings.Contains(why, strings.Join(w[1:], " ")), "%q", why)
		},
		"confirms": func(s *story, w []string) { s.who(w[0]).wantConfirmation(time.Hour) },
		"ripe": func(s *story, w []string) { // ripe POD [REASON]: the second DEL's time has come
			edit(s, w[0], func(step *journal.Step) {
				if step.ConfirmAt = 1; len(w) > 1 {
					step.State, step.Unproven = journal.StepUnproven, strings.Join(w[1:], " ")
				}
			})
		},
		"longer": func(s *story, w []string) {
			edit(s, w[0], func(step *journal.Step) { step.ConfirmAt += int64(time.Hour) })
		},
		"also": func(s *story, w []string) { // also POD OTHER: the container in this network
			p := *s.who(w[0])
			p.node = s.node
			s.pods[w[1]] = &p
		},
		"nobody": func(s *story, w []string) { s.who(w[0]).Args = nil }, // a container of no pod
	}
}

// TestStoreElsewhere: whereabouts' DEL proves nothing. The program that starts for each pod cannot
// ask its store, so the DEL runs once more after the grace period. The agent asks: what is held, or
// cannot be told, stays; a store that hangs is not waited for. Of what is free, no second DEL is
// waited for.
func TestStoreElsewhere(t *testing.T) {
	stories(t, `
	whereabouts p0; add a; del a; confirms a
	asking held; unproven a 198.18.0.9 is still allocated
	asking fails; unproven a cannot check whether its address is free: no route
	clock; asking hangs; unproven a deadline exceeded; within 14s
	add b; del b; forgets
	asking free; gone a b; calls`, whereabouts())
}

// TestUnprovenElsewhere: a process that cannot ask the store, as that of a STATUS, does not drop what
// the agent found.
func TestUnprovenElsewhere(t *testing.T) {
	stories(t, `
	whereabouts p0; add a; del a
	asking held; ripe a 198.18.0.9 is still allocated
	sweep; unproven a 198.18.0.9 is still allocated
	leaves`, whereabouts())
}

// TestOtherNetworkOfTheContainer: whereabouts goes by container ID and interface, whatever the
// network. A second DEL of a network that a pod has left would free the address that the pod has in
// another one by now. It waits until the container is gone, also within that other network's ADD.
func TestOtherNetworkOfTheContainer(t *testing.T) {
	stories(t, `
	whereabouts p0; add a; del a
	network other; also a b; whereabouts p1; add b; forgets
	either unknown: ripe a
	or unproven: ripe a 198.18.0.9 is still allocated
	sweep; asking held; calls; entry a
	del b; asking free; gone a b`, whereabouts())
}

// TestOtherNetworkBesideDamage: the damaged entry of another container hides no living one.
func TestOtherNetworkBesideDamage(t *testing.T) {
	stories(t, `
	whereabouts p0; add a; del a
	network another; whereabouts p0; add c; damage c
	network other; also a b; whereabouts p1; add b; forgets
	ripe a; sweep; calls
	leaves`, whereabouts())
}

// TestOtherNetworkAfterAKill: unwind is killed when whereabouts' DEL has passed, and before the journal
// has that. No sweep runs the DEL again while another network of the container lives; the runtime
// may ask for it. The container is of no pod, for whose next ADD the DEL would run before that has an
// address.
func TestOtherNetworkAfterAKill(t *testing.T) {
	stories(t, `
	whereabouts p0; nobody a; add a
	kill undone 1 del a; was-killed; times 1 DEL p0
	network other; also a b; whereabouts p1; add b; sweep
	network third; also a c; add c; sweep
	times 1 DEL p0; entry a
	either asked for: network; whereabouts p0; del a
	or not asked for: del b c; sweep
	times 2 DEL p0; confirms a
	leaves`, whereabouts())
}

// TestCutOffLies: an ADD that was cut off may have an address too, so a DEL that proves nothing is
// repeated there as well.
func TestCutOffLies(t *testing.T) {
	stories(t, `
	whereabouts p0; kill added 1 add a; was-killed
	sweep; confirms a
	leaves`, whereabouts())
}

// TestUnknownStore: a store that no probe knows is not asked for at each sweep, nor its DEL run.
func TestUnknownStore(t *testing.T) {
	stories(t, `
	whereabouts p0; add a; del a
	asking unknown; asking unknown; asking unknown
	times 1 DEL p0; confirms a
	leaves`, whereabouts())
}

// TestConfirmationAfterReboot: a DEL of a later boot proves as little as one of the same boot. A
// time that a longer boot has left holds nothing up.
func TestConfirmationAfterReboot(t *testing.T) {
	stories(t, `
	whereabouts p0; add a; boot a
	sweep; confirms a
	sweep; del a; confirms a
	longer a; sweep; gone a`, whereabouts())
}
