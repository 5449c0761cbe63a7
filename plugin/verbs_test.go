package plugin

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
	"cni-unwind/testdata/unwind/env"
)

// verbs are the statements of a story. Where a comment names PODS, the verb is for each of them.
var verbs map[string]func(s *story, words []string)

func init() {
	verbs = map[string]func(s *story, words []string){
		// The node and its configuration.
		// chain PLUGIN | PLUGIN …, as story.plugins reads them: in an ADD, and the present one in a DEL
		"chain": func(s *story, w []string) { s.chain = strings.Split(strings.Join(w, " "), " | ") },
		// addressed [KEYS]: a chain of four with these keys, each of which adds an address to the result
		"addressed": func(s *story, w []string) { s.chain = addressed(s.node, strings.Join(w, " ")) },
		// conf KEY [VALUE]: a key of unwind's entry; none without a value
		"conf": func(s *story, w []string) {
			var v any
			if text := strings.Join(w[1:], " "); text != "" && json.Unmarshal([]byte(text), &v) != nil {
				v = text
			}
			s.conf[w[0]] = v
		},
		// hasty: the time of a delegate is over when it hangs, also in an ADD (see env.Hangs), and a delegate that
		// outlives its unwind has less
		"hasty": func(s *story, _ []string) {
			s.conf["delegateTimeout"] = env.Long.Undo.String()
			s.mkdir(s.hangsDir())
			s.env = append(s.env, env.Hangs+"="+s.hangsDir())
			s.budget("Orphans=500ms")
		},
		// budget NAME TIME: see undo.Budgets
		"budget": func(s *story, w []string) { s.budget(w[0] + "=" + w[1]) },
		// versions OF-UNWINDS-LIST OF-THE-CHAIN
		"versions": func(s *story, w []string) { s.outer, s.inner = w[0], w[1] },
		// let NAME TEXT: $NAME stands for it
		"let": func(s *story, w []string) { s.vars[w[0]] = strings.Join(w[1:], " ") },
		// network [NAME [BRIDGE]]: what is made next belongs to it, or to the first one
		"network": func(s *story, w []string) {
			if len(w) == 0 {
				s.node = s.first
				return
			}
			n := *s.first
			n.network += "-" + w[0]
			if len(w) > 1 {
				n.bridge = w[1] + n.bridge
			}
			s.node, s.nodes = &n, append(s.nodes, &n)
		},
		// script PLUGIN TEXT: a plugin that is a shell script
		"script": func(s *story, w []string) { s.node.script(w[0], w[1]) },
		// plan PLUGIN VERB MODE, …: of faulty plugins; nothing: all are well
		"plan": func(s *story, w []string) {
			plan := map[string]map[string]string{}
			for _, one := range listed(w) {
				f := strings.Fields(one)
				if plan[f[0]] == nil {
					plan[f[0]] = map[string]string{}
				}
				plan[f[0]][f[1]] = f[2]
			}
			s.node.plan(plan)
		},
		// lowest: the next pod gets the lowest free address
		"lowest": func(s *story, _ []string) { s.must(os.Remove(filepath.Join(s.pool(), "last_reserved_ip.0"))) },
		// forget ADDRESS: host-local loses its reservation, so that the next pod gets it
		"forget": func(s *story, w []string) { s.must(os.Remove(filepath.Join(s.pool(), w[0]))); verbs["lowest"](s, nil) },
		"file":   func(s *story, w []string) { s.write(w[0], strings.Join(w[1:], " ")) },
		// shell COMMANDS
		"shell": func(s *story, w []string) { run(s, "sh", "-ec", w[0]) },
		"lose":  func(s *story, w []string) { s.must(os.RemoveAll(w[0])) },
		"pause": func(s *story, w []string) { time.Sleep(s.duration(w[0])) },
		// reserve ADDRESS CONTAINER [IFNAME]: in host-local's files
		"reserve": func(s *story, w []string) {
			s.mkdir(s.pool())
			s.write(filepath.Join(s.pool(), w[0]), strings.Join(w[1:], "\r\n"))
		},
		"journal": func(s *story, _ []string) {
			s.must(s.store.Update(s.Context(), func(*journal.Tx) error { return nil }))
		},
		// breaks PLUGIN: its DELs fail
		"breaks": func(s *story, w []string) {
			real, err := netconf.FindPlugin(w[0], strings.Join(s.path, ":"))
			s.must(err)
			flag := filepath.Join(s.dir, w[0]+".broken")
			s.node.script(w[0], fmt.Sprintf("[ \"$CNI_COMMAND\" = DEL ] && [ -e %s ] && exit 1\nexec %s", flag, real))
			s.write(flag, "")
			s.undo[w[0]] = func() { s.must(os.Remove(flag)) }
		},
		// works PLUGIN: after "breaks"
		"works": func(s *story, w []string) { s.undo[w[0]]() },
		// break HOW: the journal, see breakages
		"break": func(s *story, w []string) { s.undo["mend"] = breakages[strings.Join(w, " ")](s.node) },

		// Pods.
		// crowd N [NAME]: adds N pods, whose names are $all or $NAME; $NAME_eth0: their attachments
		"crowd": func(s *story, w []string) {
			var names []string
			name, slots, errs := strings.Join(append(w[1:], "all")[:1], ""), make(chan bool, 4), make(chan error)
			for i := range s.number(w[0]) {
				names = append(names, fmt.Sprintf("%s%02d", name, i))
				p := s.who(names[i])
				list := s.list(p, false)
				go func() {
					slots <- true
					_, err := p.add(list)
					<-slots
					errs <- err
				}()
			}
			for range names {
				s.must(<-errs)
			}
			s.vars[name], s.vars[name+"_eth0"] = strings.Join(names, " "), strings.Join(names, ".eth0 ")+".eth0"
		},
		// copies POD N [POD-NAME]: N more such entries, of containers POD-1, POD-2 and so on
		"copies": func(s *story, w []string) {
			p := s.who(w[0])
			for i := range s.number(w[1]) {
				id := fmt.Sprintf("%s-%d", p.ContainerID, i+1)
				s.must(s.store.Update(s.Context(), func(tx *journal.Tx) error {
					e, err := tx.Get(p.key())
					if err != nil {
						return err
					}
					state := e.Undo.State
					e.ContainerID, e.Number, e.Added.Pod.Name = id, 0, cmp.Or(strings.Join(w[2:], ""), e.Added.Pod.Name)
					e.Undo.State = journal.Adding
					err = tx.Put(e)
					e.Undo.State = state
					return errors.Join(err, tx.Put(e))
				}))
				for _, name := range s.taken() { // the faulty plugins hold for these what they hold for the pod
					if rest, is := strings.CutPrefix(name, p.ContainerID+"."); is {
						s.write(filepath.Join(s.faultyDir(), "taken", id+"."+rest), "")
					}
				}
			}
		},
		// pauses N TIME: the last N entries are tried again at this time
		"pauses": func(s *story, w []string) {
			all := s.entries()
			for _, e := range all[len(all)-s.number(w[0]):] {
				e.Undo.Steps[0].Wait.Until = journal.BootNanos() + int64(s.duration(w[1]))
				s.must(s.store.Update(s.Context(), func(tx *journal.Tx) error { return tx.Put(e) }))
			}
		},
		// damage PODS: their entries cannot be read
		"damage": each(func(p *pod) {
			p.editJournal(func(tx *bolt.Tx) error {
				entries, k := tx.Bucket([]byte("entries")), p.key()
				key, _ := entries.Cursor().Seek([]byte(strings.Join([]string{k.Network, k.ContainerID, k.IfName}, "\x00")))
				return entries.Put(bytes.Clone(key), []byte(`{"network":`))
			})
		}),
		// again A B: A's ID in another namespace
		"again": func(s *story, w []string) { s.pods[w[1]] = s.who(w[0]).again() },
		// sandbox A B: the pod's next container
		"sandbox": func(s *story, w []string) {
			old, next := s.who(w[0]), s.pod(w[1])
			next.Args, next.CapabilityArgs = old.Args, old.CapabilityArgs
			s.pods[w[1]] = next
		},
		// second A B: another interface of the container
		"second": func(s *story, w []string) { s.pods[w[1]] = s.who(w[0]).second() },
		// move POD NAME: into a new namespace
		"move": func(s *story, w []string) { p := s.who(w[0]); p.NetNS = p.netns(w[1]) },
		// drop PODS: their namespaces are gone
		"drop": each(func(p *pod) { p.dropNetNS() }),
		// unpin PODS: their namespaces are mounted no more, and empty files are there
		"unpin": each(func(p *pod) { must(p, unix.Unmount(p.NetNS, unix.MNT_DETACH)) }),
		// process POD: is in its namespace, $inside, until "end"
		"process": func(s *story, w []string) {
			p := s.who(w[0])
			q := p.processInside()
			s.undo["end"] = func() { p.end(q) }
			s.vars["inside"] = netnsOf(q)
		},
		// as POD OTHER: with the other's container ID
		"as": func(s *story, w []string) { s.who(w[0]).ContainerID = s.who(w[1]).ContainerID },
		// takes POD OTHER: its namespace is at the other's former path
		"takes": func(s *story, w []string) {
			p, path := s.who(w[0]), s.who(w[1]).NetNS
			s.write(path, "")
			s.mount(p.NetNS, path, "", unix.MS_BIND, "")
			p.NetNS = path
		},
		// capabilities POD JSON: what the runtime gives to those that are declared
		"capabilities": func(s *story, w []string) {
			var args map[string]json.RawMessage
			s.must(json.Unmarshal([]byte(strings.Join(w[1:], " ")), &args))
			p := s.who(w[0])
			p.CapabilityArgs = map[string]any{}
			for name, arg := range args {
				p.CapabilityArgs[name] = arg
			}
		},
		// cached POD STATEMENT: libcni keeps the result that it has of the pod
		"cached": func(s *story, w []string) {
			file := s.who(w[0]).cacheFile()
			cache := read(s, file)
			s.verb(w[1])(s, w[2:])
			s.write(file, cache)
		},
		// names POD [PATH]: what the runtime says is its namespace
		"names": func(s *story, w []string) { s.who(w[0]).NetNS = strings.Join(w[1:], "") },
		// lock POD: somebody works on it
		"lock": func(s *story, w []string) {
			lock, err := (&journal.Store{Dir: s.stateDir}).TryAcquire(s.who(w[0]).key())
			s.must(err)
			s.undo["unlock"] = lock.Release
			s.Cleanup(lock.Release)
		},
		// flock FILE: somebody holds its lock
		"flock": func(s *story, w []string) { s.undo["unlock"] = s.node.flock(w[0]) },
		"free": each(func(p *pod) {
			eventually(p, "its lock is free", func() bool { lock, err := p.store.LookAtLock(p.key()); return !lock.Held && err == nil })
		}),
		// hold POD: a process elsewhere has its namespace open, until "end"
		"hold": func(s *story, w []string) {
			f, err := os.Open(s.who(w[0]).NetNS)
			s.must(err)
			defer f.Close()
			cmd := exec.Command("sleep", "60")
			cmd.ExtraFiles = []*os.File{f}
			s.undo["end"] = s.spawn(cmd)
		},
		// reboot PODS
		"reboot": each(func(p *pod) { p.dropNetNS(); p.ofEarlierBoot() }),
		// boot PODS: are of an earlier boot, and their namespaces there
		"boot": each((*pod).ofEarlierBoot),
		// elsewhere PODS: their ADDs ran in other namespaces
		"elsewhere": each(func(p *pod) { p.edit(func(e *journal.Entry) { e.Added.Host.MountNS = "mnt:[1]" }) }),
		// clone PODS: this disk is a copy of another machine's
		"clone": each(func(p *pod) {
			kind, _, _ := strings.Cut(facts.This().Machine, ":")
			if kind == "" {
				p.Skip("this machine has no name")
			}
			p.edit(func(e *journal.Entry) { e.Added.Host.BootID, e.Added.Host.Machine = earlier, kind+":another" })
		}),
		// state POD STATE
		"state": func(s *story, w []string) {
			s.who(w[0]).edit(func(e *journal.Entry) { e.Undo.State = journal.State(w[1]) })
		},
		// cutoff PODS: their ADDs were cut off in the first delegate
		"cutoff": each(func(p *pod) {
			must(p, os.RemoveAll(p.cacheFile()))
			p.edit(func(e *journal.Entry) { e.Undo.State, e.Got = journal.Adding, journal.Got{} })
		}),
		// due PODS: the time of their second DELs has come
		"due": each(func(p *pod) {
			p.edit(func(e *journal.Entry) {
				for i := range e.Undo.Steps {
					if e.Undo.Steps[i].Again != 0 {
						e.Undo.Steps[i].Again, e.Undo.Steps[i].Wait.Until = 1, 1
					}
				}
			})
		}),

		// What the runtime does, beside calls.
		// start sweep|gc|status, or [past] add|del|check POD
		"start": (*story).start,
		// fails VERB [POD] [TEXT …] [code=N]: the error has the texts
		"fails": func(s *story, w []string) {
			texts, err := s.attempt(w)
			s.want(err != nil, "it passed")
			for _, text := range texts {
				if code, is := strings.CutPrefix(text, "code="); is {
					var said *types.Error
					s.want(errors.As(err, &said) && fmt.Sprint(said.Code) == code, "%v", err)
					continue
				}
				s.want(err == nil || strings.Contains(err.Error(), text), "%v", err)
			}
		},
		// killed VERB POD: by the plan
		"killed": func(s *story, w []string) {
			_, err := s.attempt(w)
			s.want(wasKilled(err), "%v", err)
		},
		// kill POINT N [tries] VERB POD: unwind kills itself there, if it comes there; POINT any. With
		// tries, the verb may fail where it does not.
		"kill": func(s *story, w []string) {
			verb, mayFail := w[2:], w[2] == "tries"
			if mayFail {
				verb = w[3:]
			}
			err := s.first.killedAtPoint(strings.TrimPrefix(w[0], "any"), s.number(w[1]), func() error {
				_, err := s.attempt(verb)
				return err
			})
			s.killed = wasKilled(err)
			s.want(s.killed || err == nil || mayFail, "%v", err)
		},
		// sweep: a person's
		"sweep": func(s *story, _ []string) { s.sweep() },
		// sweeps STATEMENT: which holds after a sweep, a GC and a STATUS
		"sweeps": func(s *story, w []string) {
			at := s.at
			for _, sweep := range []string{"sweep", "gc", "status"} {
				verbs[sweep](s, nil)
				s.at = at + " after " + sweep
				s.verb(w[0])(s, w[1:])
			}
		},
		// until N STATEMENT: it is repeated until the journal has N entries, since a DEL may have to wait
		"until": func(s *story, w []string) {
			eventually(s, w[0]+" entries", func() bool {
				s.verb(w[1])(s, w[2:])
				return fmt.Sprint(len(s.entries())) == w[0]
			})
		},
		"passes": func(s *story, w []string) { s.passes(w) },
		// tries VERB POD: it may fail
		"tries": func(s *story, w []string) { _, _ = s.attempt(w) },
		// recover POD HOW: see recoverBy
		"recover": func(s *story, w []string) {
			recoverBy(s.who(w[0]), s.list(s.who(w[0]), false), strings.Join(w[1:], " "))
		},
		// appears FILE
		"appears": func(s *story, w []string) {
			eventually(s, w[0], func() bool { _, err := os.Lstat(w[0]); return err == nil })
		},
		// awaits VERB PLUGIN: until it runs
		"awaits": func(s *story, w []string) {
			call := strings.Join(w, " ")
			eventually(s, call, func() bool { return slices.Contains(s.node.calls(), call) })
		},
		// given POD ADDRESS
		"given": func(s *story, w []string) {
			if got := s.value("$" + w[0]); got != w[1] {
				s.Fatalf("%s has %s", w[0], got)
			}
		},

		// What has to be.
		// calls VERB PLUGIN, …: since the last time
		"calls": func(s *story, w []string) {
			s.want(slices.Equal(s.node.calls(), listed(w)), "%q", s.node.calls())
			s.forgetCalls()
		},
		// previous ADDRESSES: just these were in the prevResult of each DEL and CHECK since "calls" or "forgets"
		"previous": func(s *story, w []string) {
			for _, l := range s.callLog() {
				s.want(l.Command == "ADD" || l.prevAddresses(s) == strings.Join(w, " "), "%s had %s", l.Instance, l.Stdin["prevResult"])
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
		"absent": func(s *story, w []string) { _, err := os.Lstat(w[0]); s.want(os.IsNotExist(err), "%v", err) },
		// iptables N: rules of the subnet
		"iptables":   func(s *story, w []string) { s.wantCount(len(s.node.rules(strings.TrimSuffix(s.subnet, "0/24"))), w[0]) },
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
			s.want(slices.Equal(got[:len(w)-1], w[1:]), "it is %q: %v %s", got, undo.PendingSteps(e), e.Undo.Reason)
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
				s.want(running[l.ContainerID] == "", "%s: %s during %s", l.ContainerID, l.Instance, running[l.ContainerID])
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
				s.want(l.NetNS == s.who(w[i]).NetNS && l.Args != "", "%s %s was shown %s", l.Command, l.Instance, l.NetNS)
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
			s.want(slices.Equal(known, w) && slices.Equal(held, w), "the journal has %q, and taken is %q", known, held)
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
		"rules": func(s *story, w []string) { s.want(slices.Equal(s.addressRules(), w), "rules: %q", s.addressRules()) },
		"locks": func(s *story, w []string) { s.wantCount(len(s.names(filepath.Join(s.stateDir, "locks"))), w[0]) },
		// tombstone POD [TEXT]: with this in its reason
		"tombstone": func(s *story, w []string) {
			tomb := s.who(w[0]).tombstone(s.who(w[0]).key())
			s.want(tomb != nil && strings.Contains(tomb.Undo.Reason, strings.Join(w[1:], " ")), "%+v", tomb)
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
	}
	for _, name := range []string{"mend", "end", "unlock"} {
		verbs[name] = func(s *story, _ []string) { s.undo[name]() }
	}
	for _, call := range calls {
		verbs[call] = func(s *story, w []string) { s.Helper(); s.passes(append([]string{call}, w...)) }
	}
}

// calls are the verbs of the runtime that have to pass: "add PODS", "del PODS", "check PODS", "past
// add|del PODS" by the plain chain, "gc [list PODS]", "status", "wait VERB POD", or "wait sweep|gc|status",
// for one that "start" began; "libcni-gc PODS" and "libcni-status" go through libcni. "giveup POD" is a
// person's, "give VERB POD" see story.give. GC and STATUS also take KEY=JSON, a key of unwind's entry;
// "valid" and "slip" are those of the list.
var calls = []string{"add", "del", "check", "past", "gc", "status", "libcni-gc", "libcni-status", "wait", "giveup", "give"}

// listKey returns the key of a GC's list.
func listKey(short string) string {
	return cmp.Or(map[string]string{"valid": validKey, "slip": slipKey}[short], short)
}

var plainWord = regexp.MustCompile(`^[\w-]+$`)

// each is a verb of pods.
func each(do func(p *pod)) func(*story, []string) {
	return func(s *story, words []string) {
		s.Helper()
		for _, name := range words {
			do(s.who(name))
		}
	}
}

// listed splits "ADD p0, DEL p1".
func listed(words []string) []string {
	if len(words) == 0 {
		return nil
	}
	return strings.Split(strings.Join(words, " "), ", ")
}

func (s *story) want(is bool, format string, a ...any) {
	s.Helper()
	if !is {
		s.Errorf(format, a...)
	}
}

func (s *story) wantCount(got int, want string) {
	s.Helper()
	s.want(strconv.Itoa(got) == want, "%d", got)
}

func (s *story) number(text string) int {
	s.Helper()
	n, err := strconv.Atoi(text)
	s.must(err)
	return n
}

func (s *story) duration(text string) time.Duration {
	s.Helper()
	d, err := time.ParseDuration(text)
	s.must(err)
	return d
}

// pool is the directory of host-local's files.
func (s *story) pool() string { return filepath.Join(s.dataDir(), s.network) }

// steady checks that something is as it was when it was last looked at.
func (s *story) steady(what, now string) {
	s.Helper()
	was, is := s.vars[what]
	s.want(!is || was == now, "%s, was %s", now, was)
	s.vars[what] = now
}

func (s *story) must(err error) {
	s.Helper()
	must(s, err)
}

// attempt runs a verb of the runtime. It returns the words that are not of it.
func (s *story) attempt(w []string) (rest []string, err error) {
	s.Helper()
	past := w[0] == "past"
	if past {
		w = w[1:]
	}
	switch w[0] {
	case "gc", "status":
		changes := map[string]any{}
		command := strings.ToUpper(w[0])
		if len(w) > 1 && w[1] == "list" {
			changes, w = valid(), w[1:]
		}
		var pods []*pod
		for _, v := range w[1:] {
			key, text, is := strings.Cut(v, "=")
			switch {
			case is && json.Valid([]byte(text)) && key != "code":
				changes[listKey(key)] = json.RawMessage(text)
			case len(changes) > 0 && plainWord.MatchString(v):
				pods = append(pods, s.who(v))
				changes = valid(pods...)
			default:
				rest = append(rest, v)
			}
		}
		s.said = s.ask(command, s.inner, changes, s.plugins(s.node)...)
		err = s.said.err()
		s.want(err != nil || s.said.stdout == "", "it printed %s", s.said.stdout)
		return rest, err
	case "give":
		return s.give(w[1:])
	case "libcni-gc": // without a cache, for which libcni would run DELs
		s.must(os.RemoveAll(s.cacheDir()))
		var listed []types.GCAttachment
		for _, name := range w[1:] {
			listed = append(listed, types.GCAttachment{ContainerID: s.who(name).ContainerID, IfName: s.who(name).IfName})
		}
		return nil, s.cni.GCNetworkList(s.Context(), s.unwind(s.plugins(s.node)...), &libcni.GCArgs{ValidAttachments: listed})
	case "libcni-status":
		return w[1:], s.cni.GetStatusNetworkList(s.Context(), s.unwind(s.plugins(s.node)...))
	case "giveup":
		return w[2:], s.plugin().Forget(s.Context(), s.stateDir, s.who(w[1]).key())
	case "wait":
		words := 3
		if beginning[w[1]] != nil {
			words = 2
		}
		return w[words:], <-s.begun[strings.Join(w[1:words], " ")]
	}
	p := s.who(w[1])
	list := s.list(p, past)
	switch w[0] {
	case "add":
		var r types.Result
		if r, err = p.add(list); err == nil {
			s.added[w[1]] = r
			if parsed, err := json.Marshal(r); err == nil && strings.Contains(string(parsed), `"address"`) {
				s.vars[w[1]] = address(s, r)
			}
		}
	case "del":
		err = p.del(list)
	case "check":
		err = p.check(list)
	default:
		s.Fatalf("the runtime has no %s", w[0])
	}
	return w[2:], err
}

// beginning are the verbs without a pod that "start" begins.
var beginning = map[string]func(n *node, chain []string) error{
	"sweep":  func(n *node, _ []string) error { n.sweep(); return nil },
	"gc":     func(n *node, chain []string) error { return n.ask("GC", n.inner, nil, chain...).err() },
	"status": func(n *node, chain []string) error { return n.ask("STATUS", n.inner, nil, chain...).err() },
}

func (s *story) start(w []string) {
	s.Helper()
	past := w[0] == "past"
	if past {
		w = w[1:]
	}
	done := make(chan error, 1)
	s.begun[strings.Join(w, " ")] = done
	if sweep, chain := beginning[w[0]], s.plugins(s.node); sweep != nil {
		go func() { done <- sweep(s.node, chain) }()
		return
	}
	p, list := s.who(w[1]), s.list(s.who(w[1]), past)
	go func() {
		var err error
		switch w[0] {
		case "del":
			err = p.del(list)
		case "check":
			err = p.check(list)
		default:
			_, err = p.add(list)
		}
		done <- err
	}()
}

// passes runs a call, which has to pass, for each of its pods.
func (s *story) passes(w []string) {
	s.Helper()
	for {
		rest, err := s.attempt(w)
		s.must(err)
		if len(rest) == 0 {
			return
		}
		if w[0] == "past" {
			rest = append([]string{"past", w[1]}, rest...)
		} else {
			rest = append([]string{w[0]}, rest...)
		}
		w = rest
	}
}
