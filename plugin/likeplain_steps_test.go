package plugin

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/plugintest/sandbox"
)

// year is one run of a sequence of steps on both machines, P and U: see TestLikePlain.
type year struct {
	*attempt
	p, u  *plainWorld
	net   *network
	log   []string
	found difference
	step  string
	only  map[string]bool // the pods whose ADD succeeded only in U
}

func newYear(a *attempt, s setup) *year {
	plugins := strings.Fields(s.Plugins)
	net := &network{
		name: "net0", file: "10-net.conflist", installed: "10-net.conflist", version: s.Version, main: plugins[0], chained: plugins[1:],
		masq: s.Masq, nft: s.NFT, ipam: "host-local", revs: map[string]int{}, binaries: map[string]*program{}, generations: map[string]int{},
	}
	for _, name := range plainTypes {
		net.binaries[name] = &program{modes: map[string]string{}}
	}
	y := &year{attempt: a, net: net, only: map[string]bool{}}
	y.p, y.u = newPlainWorld(a, "P", &s, net), newPlainWorld(a, "U", &s, net)
	return y
}

// differs records a difference, unless it is allowed.
func (y *year) differs(class, format string, a ...any) {
	y.differ(difference{class: class, text: fmt.Sprintf(format, a...)})
}

func (y *year) differ(d difference) {
	for _, allowed := range allowedDifferences {
		if allowed.is(y, d) {
			y.note("allowed, %s: %s", allowed.name, d.text)
			return
		}
	}
	if y.found.class == "" {
		y.found = d
		y.found.text = fmt.Sprintf("after %q: %s", y.step, d.text)
	}
}

func (y *year) note(format string, a ...any) { y.log = append(y.log, fmt.Sprintf(format, a...)) }

// allowedDifferences contains all differences that are allowed. A comment that begins with LIMITS
// names the entry of LIMITS.md that describes the difference.
var allowedDifferences = []struct {
	name string
	is   func(y *year, d difference) bool
}{
	// LIMITS, "Duplicate addresses": host-local has lost its files or uses another directory, and
	// assigns an address that a live pod has. Without unwind, the new pod starts, and both pods lose
	// packets.
	{"duplicate address", func(_ *year, d difference) bool {
		return d.class == "ADD fails" && strings.Contains(d.text, "duplicate address ")
	}},
	// LIMITS, "A plugin that was replaced, or left the chain": the plugin has left the chain, or its
	// present configuration is unknown because the network was renamed. The runtime gets no error, and
	// sweeps retry the DEL for about a day. A file of the plugin may be left, as without unwind.
	{"a plugin that left the chain", func(y *year, d difference) bool {
		renamed := func(e *journal.Record) bool { return e.Network != y.u.net.name && y.waitsForLeft(e) }
		return d.class == "pending" && y.waitsForLeft(d.record) ||
			d.class == "left: file" && slices.ContainsFunc(y.u.pending(), renamed)
	}},
	// LIMITS, "A plugin that was replaced, or left the chain": with the old configuration, the DEL
	// exits 0 without effect. mesh's file is left, or the rules of the main plugin's ipMasq.
	{"a DEL without effect", func(y *year, d difference) bool {
		items, _, _ := strings.Cut(d.text, "; pending: ")
		others := regexp.MustCompile(`"(link|tuning)|CNI-(FORWARD|HOSTPORT|DN)|dnat`).MatchString(items)
		return !others && (d.class == "left: file" && y.did("renew mesh nothing") && !strings.Contains(items, `"rule`) ||
			d.class == "left: rule" && y.did("renew bridge nothing", "renew ptp nothing"))
	}},
	// The same DEL, and host-local is missing. CRI-O's DEL in P has no effect, and leaks the address.
	// In U, the DEL with the new configuration follows. It fails, as containerd's does in P.
	{"a DEL with effect without host-local", func(y *year, d difference) bool {
		return d.class == "DEL fails" && strings.Contains(d.text, `failed to find plugin "host-local"`) &&
			y.net.binaries["host-local"].missing && y.did("renew bridge nothing", "renew ptp nothing")
	}},
	// LIMITS, "While the journal cannot be written": a container's first ADD was not recorded. The
	// rollback of its second ADD freed the first ADD's address. A rule with that address is left.
	{"a full disk", func(y *year, d difference) bool {
		full := slices.Index(y.log, "full")
		return d.class == "left: rule" && full >= 0 && slices.ContainsFunc(y.log[full:], func(line string) bool {
			return strings.HasPrefix(line, "again ")
		})
	}},
	// LIMITS, "An ACCEPT rule of firewall": firewall's DEL failed, and unwind freed the address before
	// it retried that DEL. Or the ADD was not recorded, and its address is not in the present pool,
	// because dataDir has changed.
	{"an ACCEPT rule", func(y *year, d difference) bool {
		failed := y.did("again ", "break firewall", "remove firewall", "renew firewall")
		return d.class == "left: rule" && (failed || y.did("off", "uninstall", "nostate") && y.did("set dataDir")) &&
			!strings.Contains(strings.ReplaceAll(d.text, "rule -A CNI-FORWARD ", ""), "rule -A ")
	}},
	// LIMITS, "CRI-O without a conflist": the journal was emptied, and the configuration in libcni's
	// cache contains only the path of the chainFile. A plugin that has left that file gets no DEL.
	{"a plugin that left the chain of a pod that nobody recorded", func(y *year, d difference) bool {
		crio := slices.ContainsFunc(y.log, func(line string) bool {
			return strings.HasPrefix(line, "del ") && strings.HasSuffix(line, " crio")
		})
		return strings.HasPrefix(d.class, "left: ") && y.u.chosen.ChainFile && crio &&
			y.did("nostate", "uninstall") && y.did("remove ", "set main")
	}},
	// LIMITS, "An ADD that bypassed unwind": the chain cannot be read, and the runtime has no result
	// under the network's new name. The DEL seems to be for an ADD that never ran, and does nothing.
	{"bypassed, unreadable and renamed", func(y *year, d difference) bool {
		at := func(word string) int {
			return slices.IndexFunc(y.log, func(line string) bool { return strings.HasPrefix(line, word) })
		}
		bypassed := at("off") >= 0 || at("uninstall") >= 0 || at("nostate") >= 0 || at("full") >= 0
		return strings.HasPrefix(d.class, "left: ") && bypassed && at("conf ") >= 0 && at("set name") > at("conf ")
	}},
	// The requested address belongs to a pod that started only in U, or to a pod that got another
	// address than in P because of such a pod.
	{"a requested address", func(y *year, d difference) bool {
		return d.class == "ADD fails" && slices.ContainsFunc(slices.Collect(maps.Values(y.u.pods)), func(p *plainPod) bool {
			other := y.p.pods[p.name]
			moved := len(y.only) > 0 && other != nil && other.state == podLive && other.ip != p.ip
			return p.state == podLive && (y.only[p.name] || moved) &&
				strings.Contains(d.text, "requested IP address "+p.ip.String()+" is not available")
		})
	}},
	// portmap left the chain of a pod with a fixed address. In P, its rule leaks. The pod's next
	// container has the same address, so the leaked rule leads to it.
	{"a leaked host port", func(y *year, d difference) bool {
		rule := d.class == "a live pod lacks its rule" && strings.Contains(d.text, "CNI-DN-")
		return (rule || d.class == "a live pod does not answer on its host port") && !y.present("portmap") &&
			y.did("remove portmap", "replace portmap") && y.did("restart ")
	}},
	// A pod started only in U, where a file of a plugin that has left the chain remains. The pod's
	// file in libcni's cache may remain, too, because the pod's DEL needs it.
	{"a pod that started with unwind alone", func(y *year, d difference) bool {
		return slices.Contains([]string{"left: file", "left: cache"}, d.class) &&
			slices.ContainsFunc(slices.Collect(maps.Keys(y.only)), func(name string) bool {
				return strings.Contains(d.text, "file of "+name)
			})
	}},
	// LIMITS, "Plugins that hang": the next verb waits up to 10 s for a child of a killed plugin.
	{"a child that hangs", func(y *year, d difference) bool {
		return strings.HasSuffix(d.class, " is slow") && len(y.u.budgets) > 0
	}},
	// A GC with unwind retries pending DELs, and fails if one fails: by the CNI specification, a GC
	// reports what it could not clean up. Without unwind, a GC does not know of these DELs.
	{"GC reports a DEL that keeps failing", func(y *year, d difference) bool {
		if d.class != "GC fails" {
			return false
		}
		broken := func(b *program) bool {
			return b.modes["DEL"] != "" || y.net.wiped || b.missing || b.old
		}
		one := slices.ContainsFunc(slices.Collect(maps.Values(y.net.binaries)), broken)
		for name, b := range y.net.binaries {
			stale := one && b.stale != "" // the error is that of the DEL with the old configuration
			if (broken(b) || stale) && strings.Contains(d.text, name) {
				return true
			}
		}
		return y.net.hangsIn("DEL")
	}},
	// LIMITS, "Plugins that hang": the hanging plugin has left the chain or was replaced. In P, the
	// runtime no longer calls it. In U, unwind still runs its DEL.
	{"a plugin of the ADD that hangs", func(y *year, d difference) bool {
		return d.class == "DEL fails" && strings.Contains(d.text, "signal: killed") && y.net.hangsIn("DEL") &&
			y.did("remove ", "replace ", "ipam ", "set main", "set name")
	}},
	// LIMITS, "Plugins that hang": an ADD first undoes the pod's earlier sandbox, for up to 10 s. In
	// this test, the runtime kills a verb as soon as a plugin hangs.
	{"an ADD waits for a DEL that hangs", func(y *year, d difference) bool {
		return d.class == "ADD fails" && strings.Contains(d.text, "signal: killed") && y.net.hangsIn("DEL")
	}},
	// LIMITS, "CRI-O without a conflist": CRI-O uses the configuration in the pod's entry of libcni's
	// cache, but a sweep has removed that entry.
	{"no conflist and no cache", func(y *year, d difference) bool {
		return d.class == "DEL fails" && strings.Contains(d.text, "the runtime has no network") && y.net.unreadable != ""
	}},
	// LIMITS, "CRI-O without a conflist".
	{"no journal and no chain", func(_ *year, d difference) bool {
		return d.class == "DEL fails" && strings.Contains(d.text, "is not in the journal, and the chain cannot be read")
	}},
}

// did reports whether one of the steps so far began with one of the words.
func (y *year) did(words ...string) bool {
	return slices.ContainsFunc(y.log, func(line string) bool {
		return slices.ContainsFunc(words, func(word string) bool { return strings.HasPrefix(line, word) })
	})
}

// waitsForLeft reports whether a record's DELs may all stay pending. Such a DEL waits for a later
// plugin's DEL, or it has failed and its plugin has port mappings or no present configuration.
func (y *year) waitsForLeft(e *journal.Record) bool {
	return !slices.ContainsFunc(e.Steps, func(s journal.Step) bool {
		left := s.Tries > 0 && (e.Network != y.u.net.name || !y.present(s.Type) || decide.HasPorts(&s))
		return !left && s.Next.Why != journal.ForRules
	})
}

// steps maps the first word of a step to an action, which gets the step's other words. The action
// returns true if it may have changed what live pods have. In that case, run calls compareLive.
var steps map[string]func(y *year, w []string) bool

func (y *year) run(sequence []string) {
	for _, y.step = range sequence {
		w := strings.Fields(y.step)
		if steps[w[0]] == nil {
			y.Fatalf("there is no step %q", y.step)
		}
		y.note("%s", y.step)
		if steps[w[0]](y, w[1:]) && y.found.class == "" {
			y.compareLive()
		}
		if y.found.class != "" {
			return
		}
	}
	y.end()
}

// worlds returns both machines, P first.
func (y *year) worlds() []*plainWorld { return []*plainWorld{y.p, y.u} }

// compareCalls compares a verb's calls on both machines: whether the last call succeeded, and how
// long the longest call took.
func (y *year) compareCalls(who string, p, u []plainCall) {
	for _, of := range []struct {
		called string
		calls  []plainCall
	}{{"P", p}, {"U", u}} {
		for _, c := range of.calls {
			if c.err != nil {
				y.note("  %s: %s %s: %.600v", of.called, c.verb, who, c.err)
			}
		}
	}
	if len(p) == 0 || len(u) == 0 {
		return
	}
	lastP, lastU := p[len(p)-1], u[len(u)-1]
	if lastU.verb == "ADD" && lastP.err != nil && lastU.err == nil {
		y.only[who] = true
	}
	if lastP.err == nil && lastU.err != nil {
		y.differs(lastU.verb+" fails", "%s %s: %v", lastU.verb, who, lastU.err)
	}
	longest := func(calls []plainCall) (d time.Duration) {
		for _, c := range calls {
			d = max(d, c.took)
		}
		return d
	}
	// Times are comparable only on a quiet machine, and if the verb did all its work in P.
	if slow := longest(u); sandbox.Long() && lastP.err == nil && slow > 5*time.Second && slow > 3*longest(p) {
		y.differs(lastU.verb+" is slow", "%s %s takes %s instead of %s", lastU.verb, who, slow, longest(p))
	}
}

// compareLive compares the resources and connections of the pods that are live on both machines.
func (y *year) compareLive() {
	y.note("  pods: P %s, U %s", y.p.podStates(), y.u.podStates())
	both := slices.DeleteFunc(slices.Sorted(maps.Keys(y.p.pods)), func(name string) bool {
		return y.p.pods[name].state != podLive || y.u.pods[name] == nil || y.u.pods[name].state != podLive
	})
	if len(both) == 0 {
		return
	}
	rules, links := map[string][]string{}, map[string][]string{}
	for _, w := range y.worlds() {
		if slices.ContainsFunc(both, func(name string) bool { return w.pods[name].rules }) {
			rules[w.called] = w.ruleLines()
		}
		w.in(func() { links[w.called] = w.hostLinks() })
	}
	for _, name := range both {
		have := map[string][]string{}
		for _, w := range y.worlds() {
			var lines []string // empty if the pod's chain creates no rules: any that exist are leaks
			if w.pods[name].rules {
				lines = rules[w.called]
			}
			have[w.called] = w.ofPod(w.pods[name], lines, chainOwners(lines, ownerID), links[w.called])
		}
		for _, trait := range have["P"] {
			if !slices.Contains(have["U"], trait) {
				kind, _, _ := strings.Cut(trait, " ")
				y.differs("a live pod lacks its "+kind, "%s lacks: %s; it has %q", name, trait, have["U"])
			}
		}
		if y.p.shares(name) || y.u.shares(name) {
			continue
		}
		if y.p.pings(y.p.pods[name]) && !y.u.pings(y.u.pods[name]) {
			y.differs("a live pod does not reach its gateway", "%s", name)
		}
		if y.p.serves(y.p.pods[name]) {
			y.note("  host port %d leads to %s", hostPort(name), name)
			if !y.u.serves(y.u.pods[name]) {
				y.differs("a live pod does not answer on its host port", "%s", name)
			}
		}
	}
}

func (w *plainWorld) podStates() string {
	var all []string
	for _, name := range slices.Sorted(maps.Keys(w.pods)) {
		if p := w.pods[name]; p.state != podNone {
			all = append(all, fmt.Sprintf("%s %s %s", p.rt.ContainerID, p.state, p.ip))
		}
	}
	return strings.Join(all, ", ")
}

// end repairs everything that is only temporarily broken, deletes all pods, sweeps, and compares
// what is left.
func (y *year) end() {
	y.step = "end"
	y.note("end")
	for _, b := range y.net.binaries {
		b.missing, b.modes = false, map[string]string{}
	}
	y.net.wiped, y.net.unreadable, y.net.off = false, "", false
	y.net.installed = y.net.file
	if y.net.binaries["portmap"].old { // the operator corrects the version
		y.net.version = "0.4.0"
	}
	y.u.free()
	y.rewrite()
	for _, name := range slices.Sorted(maps.Keys(y.p.pods)) {
		for range 2 {
			y.eachPod(name, func(w *plainWorld, p *plainPod) []plainCall { return w.delete(p, "containerd") })
		}
	}
	for _, w := range y.worlds() {
		for _, p := range w.pods {
			w.drop(p)
		}
	}
	if err := y.u.sweeps(3); err != nil {
		y.differs("a sweep fails", "%v", err)
	}
	y.compareLeft()
}

func (y *year) compareLeft() {
	var more []string
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		allowed := map[string]int{}
		for _, item := range y.p.left() {
			allowed[item]++
		}
		more = nil
		for _, item := range y.u.left() {
			if allowed[item]--; allowed[item] < 0 {
				more = append(more, item)
			}
		}
		if len(more) == 0 || time.Now().After(end) {
			break
		}
	}
	if len(more) > 0 {
		kind, _, _ := strings.Cut(more[0], " ")
		y.differs("left: "+kind, "%d items are left in U alone: %q; pending: %v", len(more), more, y.u.pendingTexts())
	}
	for _, e := range y.u.pending() {
		// The pod's DEL has not succeeded in P either.
		if p := y.p.pods[e.ContainerID[:1]]; p != nil && p.rt.ContainerID == e.ContainerID && p.state == podDead {
			continue
		}
		y.differ(difference{"pending", describe(e), e})
	}
}

func (w *plainWorld) pendingTexts() (all []string) {
	for _, e := range w.pending() {
		all = append(all, describe(e))
	}
	return all
}

// eachPod runs a function for a pod on each machine that has the pod, and compares the calls. It
// reports whether a machine has the pod.
func (y *year) eachPod(name string, do func(w *plainWorld, p *plainPod) []plainCall) (did bool) {
	calls := map[string][]plainCall{}
	for _, w := range y.worlds() {
		if p := w.pods[name]; p != nil && p.state != podNone {
			calls[w.called], did = do(w, p), true
		}
	}
	y.compareCalls(name, calls["P"], calls["U"])
	return did
}

// rewrite writes the plugins' programs and the conflist on both machines, according to y.net.
func (y *year) rewrite() {
	for _, w := range y.worlds() {
		for _, name := range plainTypes {
			w.writeBinary(name)
		}
		w.writeFile()
	}
}

// configure returns an action that changes only files.
func configure(change func(y *year, w []string)) func(y *year, w []string) bool {
	return func(y *year, w []string) bool {
		change(y, w)
		y.rewrite()
		return false
	}
}

func (y *year) present(name string) bool {
	return name == y.net.main || slices.Contains(y.net.chained, name)
}

func number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		panic(err)
	}
	return n
}

func init() {
	steps = map[string]func(y *year, w []string) bool{
		// add POD [ports] [ip] [bw]: add a sandbox with a new container ID
		"add": func(y *year, w []string) bool {
			name := w[0]
			for _, world := range y.worlds() {
				if p := world.pods[name]; p != nil && p.state != podNone {
					return false
				}
			}
			y.net.generations[name]++
			calls := map[string][]plainCall{}
			for _, world := range y.worlds() {
				p := &plainPod{name: name, rt: y.runtimeConf(name, w[1:])}
				if slices.Contains(w[1:], "ports") {
					p.port = hostPort(name)
				}
				world.pods[name] = p
				calls[world.called] = []plainCall{world.add(p)}
			}
			y.compareCalls(name, calls["P"], calls["U"])
			if y.found.class != "" {
				return true
			}
			// The runtime deletes a pod that could not start.
			clear(calls)
			for _, world := range y.worlds() {
				if p := world.pods[name]; p.state == podDead {
					calls[world.called] = world.delete(p, "containerd")
				}
			}
			y.compareCalls(name+", which did not start,", calls["P"], calls["U"])
			return true
		},
		// del POD containerd|crio|nerdctl: delete it as this runtime does
		"del": func(y *year, w []string) bool {
			return y.eachPod(w[0], func(world *plainWorld, p *plainPod) []plainCall { return world.delete(p, w[1]) })
		},
		// restart POD: delete it as nerdctl does, and add it under the same ID even if the DEL fails
		"restart": func(y *year, w []string) bool {
			y.eachPod(w[0], func(world *plainWorld, p *plainPod) []plainCall { return world.delete(p, "nerdctl") })
			if y.found.class != "" {
				return true
			}
			calls := map[string][]plainCall{}
			for _, world := range y.worlds() {
				if p := world.pods[w[0]]; p != nil && p.gen > 0 {
					calls[world.called] = []plainCall{world.add(p)}
				}
			}
			y.compareCalls(w[0], calls["P"], calls["U"])
			return true
		},
		// again POD: add it under the same ID without a DEL, as nerdctl does after a kill
		"again": func(y *year, w []string) bool {
			calls := map[string][]plainCall{}
			for _, world := range y.worlds() {
				if p := world.pods[w[0]]; p != nil && p.gen > 0 {
					world.drop(p)
					calls[world.called] = []plainCall{world.add(p)}
				}
			}
			y.compareCalls(w[0], calls["P"], calls["U"])
			return true
		},
		// lose POD: the runtime forgets it, and its namespace disappears
		"lose": func(y *year, w []string) bool {
			return y.eachPod(w[0], func(world *plainWorld, p *plainPod) []plainCall {
				world.drop(p)
				p.state = podNone
				return nil
			})
		},
		"check": func(y *year, w []string) bool {
			for _, world := range y.worlds() {
				if p := world.pods[w[0]]; p == nil || p.state != podLive {
					return false
				}
			}
			y.eachPod(w[0], func(world *plainWorld, p *plainPod) []plainCall { return []plainCall{world.check(p)} })
			return false
		},
		"status": func(y *year, _ []string) bool {
			y.compareCalls("", []plainCall{y.p.status()}, []plainCall{y.u.status()})
			return true
		},
		"gc": func(y *year, _ []string) bool {
			y.compareCalls("", []plainCall{y.p.gc()}, []plainCall{y.u.gc()})
			return true
		},
		"sweep": func(y *year, _ []string) bool {
			if err := y.u.sweeps(1); err != nil {
				y.differs("a sweep fails", "%v", err)
			}
			return true
		},
		// append PLUGIN: add it to the chain, and install it
		"append": configure(func(y *year, w []string) {
			if !y.present(w[0]) {
				y.net.chained = append(slices.Clone(y.net.chained), w[0])
				*y.net.binaries[w[0]] = program{modes: map[string]string{}}
			}
		}),
		// remove PLUGIN kept|deleted|down: remove it from the chain; its program is kept or deleted, or
		// its daemon is down
		"remove": configure(func(y *year, w []string) {
			if i := slices.Index(y.net.chained, w[0]); i >= 0 {
				y.net.chained = slices.Delete(slices.Clone(y.net.chained), i, i+1)
				y.leave(w[0], w[1])
			}
		}),
		// replace PLUGIN OTHER kept|deleted|down: OTHER takes its place in the chain
		"replace": configure(func(y *year, w []string) {
			if i := slices.Index(y.net.chained, w[0]); i >= 0 && !y.present(w[1]) {
				y.net.chained = slices.Clone(y.net.chained)
				y.net.chained[i] = w[1]
				y.leave(w[0], w[2])
				*y.net.binaries[w[1]] = program{modes: map[string]string{}}
			}
		}),
		"reorder": configure(func(y *year, _ []string) {
			if c := y.net.chained; len(c) > 1 {
				y.net.chained = append(slices.Clone(c[1:]), c[0])
			}
		}),
		// renew PLUGIN CODE|hang|nothing: add a new key to its configuration, and install a version that
		// needs this key. Without the key, it fails with CODE, or its DEL hangs or does nothing
		"renew": configure(func(y *year, w []string) {
			if y.present(w[0]) {
				b := y.net.binaries[w[0]]
				y.net.revs[w[0]]++
				b.needs, b.stale = y.net.revs[w[0]], w[1]
				y.shorten(w[1] == "hang")
			}
		}),
		// set KEY VALUE: change the conflist
		"set": configure(func(y *year, w []string) {
			c := y.net
			switch w[0] {
			case "subnet":
				c.subnet = number(w[1])
			case "bridge":
				c.bridge = number(w[1])
			case "mtu":
				c.mtu = number(w[1])
			case "dataDir":
				c.dataDir = number(w[1])
			case "ipMasq":
				c.masq = w[1] == "on"
			case "backend":
				c.nft = w[1] == "nftables"
			case "version":
				c.version = w[1]
			case "main": // the old plugin's program is kept, or w[2] says what becomes of it
				if c.main != w[1] {
					y.leave(c.main, w[len(w)-1])
				}
				c.main = w[1]
				c.binaries[w[1]].gone, c.binaries[w[1]].down = false, false
			case "name": // and unwindctl install runs again
				c.name, c.installed = w[1], c.file
			case "file": // unwind's entry names the old file until the step "install"
				c.file = w[1]
			default:
				y.Fatalf("no key %q", w[0])
			}
		}),
		// ipam PLUGIN [deleted|down]: replace the IPAM plugin
		"ipam": configure(func(y *year, w []string) {
			if y.net.ipam != w[0] {
				y.leave(y.net.ipam, w[len(w)-1])
				y.net.ipam = w[0]
				y.net.binaries[w[0]].gone, y.net.binaries[w[0]].down = false, false
			}
		}),
		// old portmap: replace portmap with a program that supports only CNI versions up to 0.4.0
		"old":     configure(func(y *year, w []string) { y.net.binaries[w[0]].old = true }),
		"install": configure(func(y *year, _ []string) { y.net.installed, y.net.off = y.net.file, false }),
		"conf": configure(func(y *year, w []string) {
			y.net.unreadable = map[string]string{"missing": "missing", "invalid": "invalid"}[w[0]]
		}),
		"missing": configure(func(y *year, w []string) { y.net.binaries[w[0]].missing = true }),
		"wipe":    configure(func(y *year, _ []string) { y.net.wiped = true }),
		"restore": configure(func(y *year, _ []string) {
			y.net.wiped = false
			for _, b := range y.net.binaries {
				b.missing = false
			}
		}),
		"break": configure(func(y *year, w []string) {
			y.net.binaries[w[0]].modes[w[1]] = w[2]
			y.shorten(w[2] == "hang")
		}),
		"repair": configure(func(y *year, w []string) { clear(y.net.binaries[w[0]].modes) }),
		"off":    configure(func(y *year, _ []string) { y.net.off = true }),
		// uninstall: switch unwind off, and delete its state directory's contents
		"uninstall": configure(func(y *year, _ []string) {
			y.net.off = true
			y.u.emptyState()
		}),
		"on": configure(func(y *year, _ []string) { y.net.off = false }),
		// plugins before|now: install an older release of the reference plugins, or the present one
		"plugins": configure(func(y *year, w []string) {
			_, err := os.Stat(filepath.Join(toolsDir(y), "e2e", "plugins-before", "bridge"))
			y.net.before = w[0] == "before" && err == nil
		}),
		// directory: the plugins' directory gets another name
		"directory": func(y *year, _ []string) bool {
			for _, world := range y.worlds() {
				from := world.path[0]
				must(y, os.Rename(from, from+"x"))
				world.usePath(from + "x")
			}
			return false
		},
		"reboot": func(y *year, _ []string) bool {
			for _, world := range y.worlds() {
				world.reboot()
			}
			return true
		},
		"nocache": func(y *year, _ []string) bool {
			for _, world := range y.worlds() {
				must(y, os.RemoveAll(world.cacheDir()))
			}
			return false
		},
		"nostate": func(y *year, _ []string) bool {
			y.u.emptyState()
			return false
		},
		"full": func(y *year, _ []string) bool { y.u.fill(); return false },
		"free": func(y *year, _ []string) bool { y.u.free(); return false },
	}
}

// leave changes the program of a plugin that has left the chain. If how is "deleted", the program
// is deleted. If how is "down", its daemon is down. Otherwise, the program is kept.
func (y *year) leave(plugin, how string) {
	y.net.binaries[plugin].gone, y.net.binaries[plugin].down = how == "deleted", how == "down"
}

// shorten shortens unwind's budgets the first time that hangs is true.
func (y *year) shorten(hangs bool) {
	if hangs && len(y.u.budgets) == 0 {
		for _, budget := range []string{"Undo=20s", "GC=20s", "Release=10s", "Recorded=1s", "Step=2s"} {
			y.u.budget(budget)
		}
	}
}

// emptyState deletes everything in unwind's state directory.
func (w *plainWorld) emptyState() {
	w.Helper()
	for _, name := range w.names(w.stateDir) {
		must(w, os.RemoveAll(filepath.Join(w.stateDir, name)))
	}
}

// podNumber returns the number of a pod, from 1.
func podNumber(name string) int { return int(name[0]-'a') + 1 }

// hostPort returns the host port that leads to a pod with ports.
func hostPort(name string) int { return 8000 + podNumber(name) }

// runtimeConf returns what a runtime passes to libcni for a new sandbox.
func (y *year) runtimeConf(name string, wants []string) libcni.RuntimeConf {
	rt := libcni.RuntimeConf{
		ContainerID: fmt.Sprintf("%s%d", name, y.net.generations[name]), IfName: "eth0",
		Args:           [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "default"}, {"K8S_POD_NAME", name}},
		CapabilityArgs: map[string]any{},
	}
	if slices.Contains(wants, "ports") {
		rt.CapabilityArgs["portMappings"] = []map[string]any{{"hostPort": hostPort(name), "containerPort": podPort, "protocol": "tcp"}}
	}
	if slices.Contains(wants, "bw") {
		rt.CapabilityArgs["bandwidth"] = map[string]any{"ingressRate": 8000000, "ingressBurst": 8000000, "egressRate": 8000000, "egressBurst": 8000000}
	}
	if slices.Contains(wants, "ip") || y.net.ipam == "static" {
		rt.CapabilityArgs["ips"] = []string{fmt.Sprintf("10.200.%d.%d/26", y.net.subnet, 50+podNumber(name))}
	}
	return rt
}

// dice draws the steps of a sequence. It roughly tracks the effect of the earlier steps, so that
// few steps do nothing.
type dice struct {
	*rand.Rand
	pods    map[string]bool // the pods that were added
	chain   []string
	broken  string // a plugin that fails
	changed bool   // the last step changed the conflist or a plugin
}

func (d *dice) pick(words ...string) string { return words[d.IntN(len(words))] }

// pod returns a random pod that was added or, if added is false, one that was not added.
func (d *dice) pod(added bool) string {
	var names []string
	for _, name := range []string{"a", "b", "c", "d"} {
		if d.pods[name] == added {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return "a"
	}
	return d.pick(names...)
}

// plugin returns a random plugin, usually one of the chain.
func (d *dice) plugin() string {
	if d.IntN(3) > 0 {
		return d.pick(d.chain...)
	}
	return d.pick("firewall", "portmap", "mesh", "sidecar", "tuning")
}

func (d *dice) chained() string {
	if len(d.chain) > 1 && d.IntN(3) > 0 {
		return d.pick(d.chain[1:]...)
	}
	return d.pick("firewall", "portmap", "mesh", "sidecar", "tuning")
}

// step returns a random step. Ordinary steps are more likely.
func (d *dice) step() string {
	choices := []struct {
		weight int
		step   func() string
	}{
		{30, func() string {
			pod := d.pod(false)
			step := "add " + pod
			for _, more := range []struct {
				name string
				odds int
			}{{"ports", 2}, {"ip", 6}, {"bw", 8}} {
				if d.IntN(more.odds) == 0 {
					step += " " + more.name
				}
			}
			d.pods[pod] = true
			return step
		}},
		{22, func() string {
			pod := d.pod(true)
			delete(d.pods, pod)
			return "del " + pod + " " + d.pick("containerd", "containerd", "crio", "nerdctl")
		}},
		{6, func() string { return "restart " + d.pod(true) }},
		{2, func() string { return "again " + d.pod(true) }},
		{2, func() string {
			pod := d.pod(true)
			delete(d.pods, pod)
			return "lose " + pod
		}},
		{3, func() string { return "check " + d.pod(true) }},
		{3, func() string { return "status" }},
		{2, func() string { return "gc" }},
		{3, func() string { return "sweep" }},
		{6, func() string {
			name := d.pick("firewall", "portmap", "mesh", "sidecar", "tuning")
			d.chain = append(slices.Clone(d.chain), name)
			return "append " + name
		}},
		{6, func() string { return "remove " + d.chained() + " " + d.pick("kept", "deleted", "down") }},
		{1, func() string { return "reorder" }},
		{4, func() string { return "renew " + d.plugin() + " " + d.pick("999", "4", "7", "100", "hang") }},
		{2, func() string { return "renew " + d.pick("mesh", d.chain[0]) + " nothing" }},
		{4, func() string {
			old := d.chained()
			other := map[string]string{"mesh": "mesh2", "mesh2": "mesh"}[old]
			if other == "" {
				other = "sidecar"
			}
			d.chain = append(slices.Clone(d.chain), other)
			return "replace " + old + " " + other + " " + d.pick("kept", "deleted", "down")
		}},
		{4, func() string { return "set dataDir " + d.pick("0", "1") }},
		{7, func() string {
			return "set " + d.pick("subnet 1", "subnet 0", "bridge 1", "bridge 0", "mtu 1400", "ipMasq on", "ipMasq off", "backend nftables", "backend iptables",
				"version 1.0.0", "version 0.4.0", "version 1.1.0", "main ptp", "main bridge", "main ptp deleted", "main ptp down", "main bridge deleted", "main bridge down", "name net1", "file 20-net.conflist")
		}},
		{2, func() string { return "ipam " + d.pick("static", "static deleted", "static down", "host-local") }},
		{1, func() string { return "old portmap" }},
		{1, func() string { return "install" }},
		{2, func() string { return "conf " + d.pick("missing", "invalid") }},
		{3, func() string { return "conf good" }},
		{2, func() string { return "missing " + d.pick(d.plugin(), d.plugin(), "host-local") }},
		{1, func() string { return "wipe" }},
		{4, func() string { return "restore" }},
		{4, func() string {
			d.broken = d.pick(d.plugin(), d.plugin(), "host-local")
			return "break " + d.broken + " " + d.pick("ADD", "DEL") + " " + d.pick("fail", "fail", "fail-effect", "garbage", "slow", "hang")
		}},
		{6, func() string { return "repair " + d.broken }},
		{3, func() string { return "off" }},
		{4, func() string { return "on" }},
		{1, func() string { return "uninstall" }},
		{1, func() string { return "plugins " + d.pick("before", "now") }},
		{2, func() string { return "reboot" }},
		{1, func() string { return "directory" }},
		{1, func() string { return "nocache" }},
		{1, func() string { return "nostate" }},
		{1, func() string { return "full" }},
		{2, func() string { return "free" }},
	}
	if d.changed && d.IntN(3) == 0 { // something happens before the pods' DELs
		d.changed = false
		return d.pick("status", "reboot", "sweep", "gc", "restart "+d.pod(true), "break "+d.plugin()+" DEL "+d.pick("fail", "fail-effect", "garbage"))
	}
	sum := 0
	for _, c := range choices {
		sum += c.weight
	}
	at := d.IntN(sum)
	for _, c := range choices {
		if at -= c.weight; at < 0 {
			step := c.step()
			d.changed = slices.Contains([]string{"renew", "replace", "remove", "set", "ipam"}, strings.Fields(step)[0])
			return step
		}
	}
	panic("no step")
}
