package plugin

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
)

func init() {
	// What the runtime does, beside calls.
	maps.Copy(verbs, acts{
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
			recoverBy(s, s.who(w[0]), strings.Join(w[1:], " "))
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
	})
	for _, call := range calls {
		verbs[call] = func(s *story, w []string) { s.Helper(); s.passes(append([]string{call}, w...)) }
	}
}

// calls are the verbs of the runtime that have to pass: "add PODS", "del PODS", "check PODS", "past
// add|del PODS" by the plain chain, "gc [list PODS]", "status", "wait VERB POD" or "wait
// sweep|gc|status" for one that "start" began; "libcni-gc PODS" and "libcni-status" go through
// libcni. "giveup POD" is a person's, "give VERB POD" see story.give. GC and STATUS also take
// KEY=JSON, a key of unwind's entry; "valid" and "slip" are those of the list.
var calls = []string{"add", "del", "check", "past", "gc", "status", "libcni-gc", "libcni-status", "wait", "giveup", "give"}

// listKey returns the key of a GC's list.
func listKey(short string) string {
	return cmp.Or(map[string]string{"valid": validKey, "slip": slipKey}[short], short)
}

var plainWord = regexp.MustCompile(`^[\w-]+$`)

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
		s.said = s.ask(command, changes, s.plugins(s.node)...)
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
		return w[2:], s.plugin().Forget(s.Context(), s.stateDir, s.who(w[1]).key(), "an operator")
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
		if r, err = p.addWith(list); err == nil {
			s.added[w[1]] = r
			if parsed, err := json.Marshal(r); err == nil && strings.Contains(string(parsed), `"address"`) {
				s.vars[w[1]] = address(s, r)
			}
		}
	case "del":
		err = p.delWith(list)
	case "check":
		err = p.checkWith(list)
	default:
		s.Fatalf("the runtime has no %s", w[0])
	}
	return w[2:], err
}

// beginning are the verbs without a pod that "start" begins.
var beginning = map[string]func(n *node, chain []string) outcome{
	"sweep":  func(n *node, _ []string) outcome { n.sweep(); return outcome{} },
	"gc":     func(n *node, chain []string) outcome { return n.ask("GC", nil, chain...) },
	"status": func(n *node, chain []string) outcome { return n.ask("STATUS", nil, chain...) },
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
		go func() { done <- sweep(s.node, chain).err() }()
		return
	}
	p, list := s.who(w[1]), s.list(s.who(w[1]), past)
	go func() {
		var err error
		switch w[0] {
		case "del":
			err = p.delWith(list)
		case "check":
			err = p.checkWith(list)
		default:
			_, err = p.addWith(list)
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

// give runs a verb of unwind with an input that no runtime would give: "give VERB POD [NAME=VALUE …]". A
// name in capitals is a variable of the environment, another one a key of unwind's entry; without a
// value, it is absent. varLib=DIR is /var/lib to it, first=COMMANDS are a shell's before it. $result is
// that of an ADD.
func (s *story) give(w []string) (rest []string, err error) {
	s.Helper()
	p, changes := s.who(w[1]), keys{}
	in := p.input(strings.ToUpper(w[0]), "")
	in.more = s.env // where libcni's cache is
	for _, v := range w[2:] {
		name, text, _ := strings.Cut(v, "=")
		switch {
		case !assignment.MatchString(v) || name == "code":
			rest = append(rest, v)
		case name == "varLib":
			in.first, in.more = fmt.Sprintf("mount --bind %s /var/lib", text), nil // with libcni's cache
			s.mkdir(text)
		case name == "first":
			in.first, in.mute = text, strings.HasPrefix(text, "exec ")
		case name == strings.ToUpper(name):
			in.env[name] = text
		case json.Valid([]byte(text)):
			changes[listKey(name)] = json.RawMessage(text)
		default:
			changes[name] = text
		}
		if text == "" {
			delete(in.env, name)
			changes[listKey(name)] = nil
		}
	}
	in.stdin = s.entryOf(s.chainOf(s.plugins(s.node)...), changes)
	if s.said = s.node.start(in); s.said.code == 0 && w[0] == "add" {
		s.vars["result"] = s.said.stdout
	}
	return rest, s.said.err()
}

var assignment = regexp.MustCompile(`^[\w./-]+=`)

// plugins returns the configurations of the present chain in a network.
func (s *story) plugins(n *node) (all []string) {
	for _, spec := range s.chain {
		name, extra, more := strings.Cut(spec, ",")
		if more {
			extra = "," + extra
		}
		switch {
		case spec[0] == '{':
			all = append(all, spec)
		case name == "bridge":
			all = append(all, n.bridgePlugin(extra))
		case name == "portmap":
			all = append(all, `{"type": "portmap", "capabilities": {"portMappings": true}`+extra+`}`)
		case name == "firewall" || name == "loopback" || name == "sbr":
			all = append(all, fmt.Sprintf(`{"type": %q%s}`, name, extra))
		case strings.HasPrefix(name, "masquerading"): // masquerading PLUGIN FAMILIES
			f := strings.Fields(name)
			all = append(all, n.masquerading(f[1], f[2], extra))
		case name == "static": // an IPAM plugin that names no owner of the address
			all = append(all, fmt.Sprintf(`{"type": "bridge", "bridge": %q, "isGateway": true,
				"ipam": {"type": "static", "addresses": [{"address": "%s"}]}}`, n.bridge, n.prefix(4, 7)))
		case name == "pooled": // an address of the second to the third: see node.pooled
			all = append(all, n.pooled("p0", 2, 3))
		case name == "single": // of one address
			all = append(all, n.pooled("p0", 2, 2))
		default:
			all = append(all, n.faulty(name, extra))
		}
	}
	return all
}

// list returns the present chain of a pod's network, through unwind or past it.
func (s *story) list(p *pod, past bool) *libcni.NetworkConfigList {
	s.Helper()
	if past {
		return p.plain(s.plugins(p.node)...)
	}
	return p.unwind(s.plugins(p.node)...)
}

// recoverBy does what a runtime may do next: see recovery.
func recoverBy(s *story, p *pod, by string) {
	p.present = nil
	for _, spec := range s.plugins(p.node) {
		p.present = append(p.present, object("%s", spec))
	}
	for _, r := range recoveries {
		if r.name == by {
			r.of(p)
		}
	}
}
