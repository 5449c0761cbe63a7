package plugin

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/env"
)

// verbs are the statements of a story. Where a comment names PODS, the verb is for each of them.
var verbs = acts{}

func init() {
	// The node and its configuration.
	maps.Copy(verbs, acts{
		// chain PLUGIN | PLUGIN …, as story.plugins reads them: in an ADD, and the present one in a DEL
		"chain": func(s *story, w []string) { s.chain = strings.Split(strings.Join(w, " "), " | ") },
		// addressed [KEYS]: a chain of four with these keys, each of which adds an address to the result
		"addressed": func(s *story, w []string) { s.chain = addressedBy(s.node, strings.Join(w, " ")) },
		// conf KEY [VALUE]: a key of unwind's entry; none without a value
		"conf": func(s *story, w []string) {
			var v any
			if text := strings.Join(w[1:], " "); text != "" && json.Unmarshal([]byte(text), &v) != nil {
				v = text
			}
			s.conf[w[0]] = v
		},
		// hasty: the time of a delegate is over when it hangs, also in an ADD (see env.Hangs), and a
		// delegate that outlives its unwind has less
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
		// plan PLUGIN VERB MODE [once], …: of faulty plugins; nothing: all are well
		"plan": func(s *story, w []string) {
			plan := map[string]map[string]string{}
			for _, one := range listed(w) {
				f := strings.Fields(one)
				if plan[f[0]] == nil {
					plan[f[0]] = map[string]string{}
				}
				plan[f[0]][f[1]] = strings.Join(f[2:], " ")
			}
			s.node.setModes(plan)
		},
		// lowest: the next pod gets the lowest free address
		"lowest": func(s *story, _ []string) { s.must(os.Remove(s.pool("last_reserved_ip.0"))) },
		// forget ADDRESS: host-local loses its reservation, so that the next pod gets it
		"forget": func(s *story, w []string) { s.must(os.Remove(s.pool(w[0]))); verbs["lowest"](s, nil) },
		"file":   func(s *story, w []string) { s.write(w[0], strings.Join(w[1:], " ")) },
		// shell COMMANDS
		"shell": func(s *story, w []string) { run(s, "sh", "-ec", w[0]) },
		"lose":  func(s *story, w []string) { s.must(os.RemoveAll(w[0])) },
		"pause": func(s *story, w []string) { time.Sleep(s.duration(w[0])) },
		// reserve ADDRESS CONTAINER [IFNAME]: in host-local's files
		"reserve": func(s *story, w []string) {
			s.mkdir(s.pool(""))
			s.write(s.pool(w[0]), strings.Join(w[1:], "\r\n"))
		},
		"journal": func(s *story, _ []string) {
			s.must(s.store.Update(s.Context(), func(*journal.Tx) error { return nil }))
		},
		// breaks PLUGIN: its DELs fail
		"breaks": func(s *story, w []string) {
			real, err := netconf.FindPlugin(w[0], strings.Join(s.path, ":"))
			s.must(err)
			flag := filepath.Join(s.dir, w[0]+".broken")
			s.node.script(w[0], "[ $CNI_COMMAND = DEL ] && [ -e "+flag+" ] && exit 1\nexec "+real)
			s.write(flag, "")
			s.undo[w[0]] = func() { s.must(os.Remove(flag)) }
		},
		// works PLUGIN: after "breaks"
		"works": func(s *story, w []string) { s.undo[w[0]]() },
		// break HOW: the journal, see breakage
		"break": func(s *story, w []string) {
			for _, b := range allBreakages {
				if b.name == strings.Join(w, " ") {
					s.undo["mend"] = b.of(s.node)
				}
			}
		},

		// Pods.
		// crowd N [NAME]: adds N pods, whose names are $all or $NAME; $NAME_eth0: their attachments
		"crowd": func(s *story, w []string) {
			var names []string
			name, slots, errs := append(w[1:], "all")[0], make(chan bool, 4), make(chan error)
			for i := range s.number(w[0]) {
				names = append(names, fmt.Sprintf("%s%02d", name, i))
				p := s.who(names[i])
				list := s.list(p, false)
				go func() {
					slots <- true
					_, err := p.addWith(list)
					<-slots
					errs <- err
				}()
			}
			for range names {
				s.must(<-errs)
			}
			s.vars[name] = strings.Join(names, " ")
			s.vars[name+"_eth0"] = strings.Join(names, ".eth0 ") + ".eth0"
		},
		// copies POD N [POD-NAME]: N more such entries, of containers POD-1, POD-2 and so on
		"copies": func(s *story, w []string) {
			p := s.who(w[0])
			name, taken := cmp.Or(strings.Join(w[2:], ""), p.entry().Added.Pod.Name), s.taken()
			s.must(s.store.Update(s.Context(), func(tx *journal.Tx) error {
				for i := range s.number(w[1]) {
					e, err := tx.Get(p.key())
					s.must(err)
					id, state := fmt.Sprintf("%s-%d", p.ContainerID, i+1), e.Undo.State
					e.ContainerID, e.Number, e.Added.Pod.Name = id, 0, name
					for _, e.Undo.State = range []journal.State{journal.Adding, state} {
						s.must(tx.Put(e))
					}
					for _, file := range taken { // the faulty plugins hold for it what they hold for the pod
						if rest, is := strings.CutPrefix(file, p.ContainerID+"."); is {
							s.write(filepath.Join(s.faultyDir(), "taken", id+"."+rest), "")
						}
					}
				}
				return nil
			}))
		},
		// pauses N TIME: the last N entries are tried again at this time
		"pauses": func(s *story, w []string) {
			all, until := s.entries(), journal.BootNanos()+int64(s.duration(w[1]))
			s.must(s.store.Update(s.Context(), func(tx *journal.Tx) (err error) {
				for _, e := range all[len(all)-s.number(w[0]):] {
					e.Undo.Steps[0].Next.At = until
					err = errors.Join(err, tx.Put(e))
				}
				return err
			}))
		},
		// damage PODS: their entries cannot be read
		"damage": each(func(p *pod) {
			p.editJournal(func(tx *bolt.Tx) error {
				entries, prefix := tx.Bucket([]byte("entries")), []string{p.network, p.ContainerID, p.IfName}
				key, _ := entries.Cursor().Seek([]byte(strings.Join(prefix, "\x00")))
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
		// second A B: another interface of the container, in the present network
		"second": func(s *story, w []string) {
			second := &pod{node: s.node, RuntimeConf: s.who(w[0]).RuntimeConf}
			second.IfName = "net1"
			s.pods[w[1]] = second
		},
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
		"elsewhere": each(func(p *pod) {
			p.edit(func(e *journal.Entry) { e.Added.Host.MountNS = "mnt:[1]" })
		}),
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
	})
	for _, name := range []string{"mend", "end", "unlock"} {
		verbs[name] = func(s *story, _ []string) { s.undo[name]() }
	}
}

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

// pool is the path of one of host-local's files.
func (s *story) pool(name string) string { return filepath.Join(s.dataDir(), s.network, name) }

// addressedBy is a chain of four, each of which adds an address to the result.
func addressedBy(n *node, extra string) []string {
	var chain []string
	for i := range 4 {
		chain = append(chain, n.faulty(fmt.Sprintf("p%d", i), fmt.Sprintf(`, "address": "198.51.100.%d/32"%s`, i, extra)))
	}
	return chain
}

var allBreakages = []breakage{readOnly, fullDisk, newerFormat, groupWritable, linked, blocked, strangersTurn}

// chainFiles are statements about this file.
var chainFiles = acts{
	// chainfile [PLUGIN | PLUGIN …]: $file has these; without them it is not there
	"chainfile": func(s *story, w []string) {
		content := ""
		if len(w) > 0 {
			s.chain = strings.Split(strings.Join(w, " "), " | ")
			content = s.chainOf(s.plugins(s.node)...)
		}
		s.vars["file"] = s.chainFile(content)
	},
}
