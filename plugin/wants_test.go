package plugin

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

func init() {
	// What has to be.
	maps.Copy(verbs, acts{
		// calls VERB PLUGIN, …: since the last time
		"calls": func(s *story, w []string) {
			s.want(slices.Equal(s.node.calls(), listed(w)), "%q", s.node.calls())
			s.forgetCalls()
		},
		// previous ADDRESSES: just these were in the prevResult of each DEL and CHECK since "calls" or
		// "forgets"
		"previous": func(s *story, w []string) {
			for _, l := range s.callLog() {
				if l.Command != "ADD" {
					got := l.prevAddresses(s)
					s.want(got == strings.Join(w, " "), "%s had %s", l.Instance, got)
				}
			}
		},
		// stdin PLUGIN KEY [JSON]: each call of the plugin since "calls" or "forgets" got just this under the key
		"stdin": func(s *story, w []string) {
			for _, l := range s.callLog() {
				got := string(l.Stdin[w[1]])
				s.want(l.Instance != w[0] || got == strings.Join(w[2:], " "), "%s got %s", l.Command, got)
			}
		},
		// same N: the last N DELs got what the first N ADDs got, in reverse order
		"same": func(s *story, w []string) {
			n, all := s.number(w[0]), s.callLog()
			for i, del := range all[len(all)-n:] {
				add := all[n-1-i]
				delete(add.Stdin, "prevResult")
				delete(del.Stdin, "prevResult")
				s.want(add.Command == "ADD" && del.Command == "DEL" && reflect.DeepEqual(add.Stdin, del.Stdin) &&
					add.Args == del.Args && add.NetNS == del.NetNS && add.Path == del.Path,
					"ADD %s had %.1000s, %.1000q; its DEL %.1000s, %.1000q", add.Instance, add.Stdin, add.Args, del.Stdin, del.Args)
			}
		},
		// times N VERB PLUGIN
		"times": func(s *story, w []string) {
			others := func(call string) bool { return call != strings.Join(w[1:], " ") }
			s.wantCount(len(slices.DeleteFunc(s.node.calls(), others)), w[0])
		},
		// forgets: the calls so far
		"forgets": func(s *story, _ []string) { s.forgetCalls() },
		// began start|end VERB PLUGIN, …: the first ones
		"began": func(s *story, w []string) {
			var h []string
			for _, l := range s.wholeLog() {
				h = append(h, fmt.Sprintf("%s %s %s", l.Phase, l.Command, l.Instance))
			}
			s.want(slices.Equal(h[:min(len(h), len(listed(w)))], listed(w)), "%q", h)
		},
		// events BEGINNING …
		"events": func(s *story, w []string) {
			s.want(slices.EqualFunc(s.node.events(), w, strings.HasPrefix), "%q", s.node.events())
		},
		// absent FILE
		"absent":     func(s *story, w []string) { _, err := os.Lstat(w[0]); s.want(os.IsNotExist(err), "%v", err) },
		"was-killed": func(s *story, _ []string) { s.want(s.killed, "it was not killed") },
		"sorted-calls": func(s *story, w []string) {
			got := s.node.calls()
			slices.Sort(got)
			s.want(slices.Equal(got, listed(w)), "%q", got)
		},
		// warned TEXT [0]: by the last GC, STATUS or "give"
		"warned": func(s *story, w []string) {
			s.want(strings.Contains(s.said.stderr, w[0]) == (len(w) == 1 || w[1] == "1"), "%s", s.said.stderr)
		},
		// ends VERB PLUGIN: soon
		"ends": func(s *story, w []string) {
			pid := s.callLog()[slices.Index(s.node.calls(), strings.Join(w, " "))].PID
			eventually(s, "its end", func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) })
		},
		// counters 'NAME LABELS N' …: those that are not 0
		"counters": func(s *story, w []string) {
			var got []string
			for name, n := range s.node.counters() {
				got = append(got, fmt.Sprint(name, " ", n))
			}
			slices.Sort(got)
			s.want(slices.Equal(got, w), "%q", got)
		},
		// deleted POD N: DELs of faulty plugins
		"deleted": func(s *story, w []string) { s.wantCount(len(s.who(w[0]).dels()), w[1]) },
		"open":    func(s *story, w []string) { s.want(s.open(w[0]), "%s is closed", w[0]) },
		"closed":  func(s *story, w []string) { s.want(!s.open(w[0]), "%s is open", w[0]) },
		// entry POD [STATE [PENDING [GENERATIONS]]]: is in the journal
		"entry": func(s *story, w []string) {
			e, all, steps := s.who(w[0]).entry(), s.who(w[0]).records(), 0
			if e == nil {
				s.Fatalf("there is none")
			}
			for _, one := range all {
				steps += len(one.Undo.Steps)
			}
			got := []string{string(e.Undo.State), strconv.Itoa(steps), strconv.Itoa(len(all))}
			s.want(slices.Equal(got[:len(w)-1], w[1:]), "it is %q: %s", got, asJSON(s, e.Undo))
		},
		// pending POD PLUGINS: of its generations in order, each in the order of the chain
		"pending": func(s *story, w []string) {
			var got []string
			for _, e := range s.who(w[0]).records() {
				for _, step := range e.Undo.Steps {
					var conf struct{ Instance string }
					_ = json.Unmarshal(step.Config, &conf)
					got = append(got, cmp.Or(conf.Instance, step.Type))
				}
			}
			s.want(slices.Equal(got, w[1:]), "%v", got)
		},
		// agent: its sweep
		"agent": func(s *story, _ []string) {
			_, err := s.plugin().Sweep(s.Context(), s.stateDir, sweep.Job{})
			s.must(err)
		},
		// held N: stand-ins for providers' plugins hold so many addresses, in $holds
		"held": func(s *story, w []string) { s.wantCount(len(s.names(s.vars["holds"])), w[0]) },
		// together N: the DELs of each attachment ran one after the other, p1's first, those of N or more at
		// the same time
		"together": func(s *story, w []string) {
			running, done, most := map[string]string{}, map[string]string{}, 0
			for _, l := range s.wholeLog() {
				if l.Phase == "end" {
					delete(running, l.ContainerID)
					continue
				}
				s.want(running[l.ContainerID] == "", "%s: two at once", l.ContainerID)
				running[l.ContainerID] = l.Instance
				done[l.ContainerID] += l.Instance
				most = max(most, len(running))
			}
			for id, instances := range done {
				s.want(instances == "p1p0", "%s: %s", id, instances)
			}
			s.want(most >= s.number(w[0]), "%d attachments at once", most)
		},
		// shown PODS: whose namespace each call since "calls" or "forgets" was shown
		"shown": func(s *story, w []string) {
			log := s.callLog()
			s.want(len(log) == len(w), "%d calls", len(log))
			for i, l := range log[:min(len(log), len(w))] {
				s.want(l.NetNS == s.who(w[i]).NetNS && l.Args != "", "%+v", l)
			}
		},
		// owners 'ADDRESS CONTAINER IFNAME' …: of host-local's files
		"owners": func(s *story, w []string) {
			var got []string
			for address, owner := range s.node.reserved() {
				got = append(got, address+" "+owner)
			}
			slices.Sort(got)
			s.want(slices.Equal(got, w), "%q", got)
		},
		// port ADDRESS [N]: so many rules lead to it, or one
		"port": func(s *story, w []string) {
			s.wantCount(len(s.node.rules("--to-destination "+w[0]+":80")), append(w[1:], "1")[0])
		},
		// gone PODS: not in the journal
		"gone": each(func(p *pod) {
			if e := p.entry(); e != nil {
				p.Errorf("kept: %s, %v, %s", e.Undo.State, undo.PendingSteps(e), e.Undo.Reason)
			}
		}),
		"goes": each(func(p *pod) { // soon: a sweep behind a STATUS may still run
			eventually(p, "no entry of "+p.ContainerID, func() bool { return p.entry() == nil })
		}),
		"entries": func(s *story, w []string) { s.wantCount(len(s.entries()), w[0]) },
		// kept CONTAINER.IFNAME …: just these are in the journal, and among what p0 has taken
		"kept": func(s *story, w []string) {
			var known, held []string
			for _, e := range s.entries() {
				known = append(known, e.ContainerID+"."+e.IfName)
			}
			for _, file := range s.taken() {
				held = append(held, strings.TrimSuffix(file, ".p0"))
			}
			slices.Sort(w)
			slices.Sort(known)
			slices.Sort(held)
			s.want(slices.Equal(known, w) && slices.Equal(held, w), "journal %q, taken %q", known, held)
		},
		// taken FILES: just these, by faulty plugins
		"taken": func(s *story, w []string) { s.want(slices.Equal(s.node.taken(), w), "taken: %q", s.node.taken()) },
		// reserved N [POD]: addresses, in the pod's network
		"reserved": func(s *story, w []string) {
			n := s.node
			if len(w) > 1 {
				n = s.who(w[1]).node
			}
			s.want(strconv.Itoa(len(n.reserved())) == w[0], "%v", n.reserved())
		},
		// rules ADDRESS.PLUGIN …: just these, of faulty plugins
		"rules":     func(s *story, w []string) { s.want(slices.Equal(s.addressRules(), w), "rules: %q", s.addressRules()) },
		"locks":     func(s *story, w []string) { s.wantCount(len(s.names(filepath.Join(s.stateDir, "locks"))), w[0]) },
		"abandoned": func(s *story, w []string) { s.want(s.abandoned(s.who(w[0]).key()) != nil, "it is not forgotten") },
		// uncached PODS: libcni's cache has no result of them
		"uncached": func(s *story, w []string) {
			for _, name := range w {
				_, err := os.Stat(s.who(name).cacheFile())
				s.want(errors.Is(err, os.ErrNotExist), "%s: %v", name, err)
			}
		},
		// remember POD: what it has now
		"remember": func(s *story, w []string) {
			p := s.who(w[0])
			m := p.marks(s.added[w[0]])
			s.seen[w[0]] = seen{m, p.whole(m)}
			s.want(strings.Count(s.seen[w[0]].traces, "\n") > 0, "it has only %q", s.seen[w[0]].traces)
		},
		// unchanged PODS: they have just what they had when it was remembered
		"unchanged": func(s *story, w []string) {
			for _, name := range w {
				if got, was := s.who(name).whole(s.seen[name].marks), s.seen[name].traces; got != was {
					s.Fatalf("%s has\n%s\nand had\n%s", name, got, was)
				}
			}
		},
		// vanished PODS: nothing is left of that
		"vanished": func(s *story, w []string) {
			for _, name := range w {
				left := s.who(name).whole(s.seen[name].marks)
				s.want(left == "", "left of %s:\n%s", name, left)
			}
		},
		"pings": func(s *story, w []string) { s.who(w[0]).pingsGateways(s.added[w[0]]) },
		// logged TEXT [TIMES]
		"logged": func(s *story, w []string) {
			got := strings.Count(s.log(), w[0])
			s.want(len(w) == 1 && got > 0 || len(w) > 1 && strconv.Itoa(got) == w[1], "%d times", got)
		},
		// clean: nothing is left, in no network
		"clean": func(s *story, _ []string) {
			for _, n := range s.nodes {
				n.nothingLeft()
			}
		},
		// leaves: something, so that nothingLeft is not checked
		"leaves": func(s *story, _ []string) { s.leaves = true },
	})
}

func (s *story) want(is bool, format string, a ...any) {
	s.Helper()
	if !is {
		s.Errorf(format, a...)
	}
}

func asJSON(t testing.TB, v any) string {
	t.Helper()
	text, err := json.Marshal(v)
	must(t, err)
	return string(text)
}

func (s *story) wantCount(got int, want string) {
	s.Helper()
	s.want(strconv.Itoa(got) == want, "there are %d", got)
}

// steady checks that something is as it was when it was last looked at.
func (s *story) steady(what, now string) {
	s.Helper()
	was, is := s.vars[what]
	s.want(!is || was == now, "%s, was %s", now, was)
	s.vars[what] = now
}

// nothingLeft checks the invariant at the end of every test: nothing is taken, and the journal is
// empty.
func (n *node) nothingLeft() {
	n.Helper()
	n.nothingOnDisk()
	// The kernel removes those of a namespace that is gone after a while.
	eventually(n, n.bridge+" has no ports", func() bool { return len(n.ports()) == 0 })
	n.noRules()
}

// ports returns the interfaces of the bridge.
func (n *node) ports() (names []string) {
	n.Helper()
	bridge, err := netlink.LinkByName(n.bridge)
	if err != nil {
		return nil
	}
	links, err := netlink.LinkList()
	for errors.Is(err, netlink.ErrDumpInterrupted) { // other tests make and remove interfaces meanwhile
		links, err = netlink.LinkList()
	}
	must(n, err)
	for _, l := range links {
		if l.Attrs().MasterIndex == bridge.Attrs().Index {
			names = append(names, l.Attrs().Name)
		}
	}
	return names
}

// noRules checks that no rule has an address of the node's, or its network in its comment.
func (n *node) noRules() {
	n.Helper()
	if !n.ruled.Load() {
		return
	}
	if rules := n.rules(strings.TrimSuffix(n.subnet, "0/24"), fmt.Sprintf(`name: \"%s\"`, n.network)); len(rules) > 0 {
		n.Errorf("rules are left:\n%s", strings.Join(rules, "\n"))
	}
}

// nothingOnDisk checks that delegates and journal hold nothing.
func (n *node) nothingOnDisk() {
	n.Helper()
	if taken := n.taken(); len(taken) > 0 {
		n.Errorf("faulty plugins still hold %v", taken)
	}
	if reserved := n.reserved(); len(reserved) > 0 {
		n.Errorf("host-local still holds %v", reserved)
	}
	for _, e := range n.entries() {
		n.Errorf("the journal still has %s: %s, %v (%s)", e.Key, e.Undo.State, undo.PendingSteps(e), e.Undo.Reason)
	}
	if locks := n.names(filepath.Join(n.stateDir, "locks")); len(locks) > 0 {
		n.Errorf("%d lock files are left", len(locks))
	}
}
