package plugin

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/plugintest/sandbox"
)

// A story is a history of one node, told in a script: what happens, what unwind must say of it, and
// what is left. It runs on real plugins and real network namespaces.
//
// A statement is a verb and its words, in a line or behind "; ". verbs_test.go has those of the node
// and its pods, calls_test.go what the runtime does, wants_test.go what has to be. A word in single
// quotes may have spaces. A pod exists from the first time that a statement names it. $a is the
// address that pod a got, $ip7 the subnet's seventh, and "let" sets others. Every story ends with
// nothingLeft, unless it says "leaves".
//
//	chain bridge | firewall | p2, "delayMS": 100
//	either the namespace is gone: add a; drop a
//	or the machine was started again: add a; reboot a
//	sweep
//	if gone: calls DEL p2
//
// A block of "either" and "or" stands for a choice: the script is told once for each, and for each
// combination of several blocks, in a subtest of that name. "each NAME WORDS" is a choice among the
// words, which $NAME stands for. "if" and "unless" take statements for the names that have that text. A
// deeper line belongs to the line above it. make test does not tell all ways: see told.
//
// A script of its own, rather than testscript's, since a test may also mix it with Go: a node's and a
// pod's methods, statements of its own (acts), several scripts for one story. Choices and products
// of choices are what these tests consist of; testscript has none.
type story struct {
	*node
	first  *node   // the node as it began; node is its present network
	nodes  []*node // the networks of the node
	acts   acts
	at     string // the statement
	pods   map[string]*pod
	chain  []string // as in the script
	vars   map[string]string
	added  map[string]types.Result
	seen   map[string]seen
	begun  map[string]chan error
	undo   map[string]func() // what "mend", "end", "unlock" and "works" call
	killed bool              // in the last verb that could be
	leaves bool
	said   outcome       // of the last GC or STATUS
	own    journal.NetNS // for acts
}

// acts are a test's own statements.
type acts map[string]func(s *story, words []string)

// telling is one way through a script.
type telling struct {
	name       string
	choices    []int // by block
	statements []string
}

// told says whether this run tells this way through a script. make test tells one way, of each test
// another; make matrix so many that each choice of each block is in one of them; make proof all.
func (t telling) told(test string, all []telling) bool {
	last := all[len(all)-1].choices
	first, most := 0, slices.Max(last)+1
	if sandbox.Rounds(1, 0, 0) == 1 {
		first = len(test) % most
		most = first + 1
	}
	for n := first; n < most; n++ {
		is := true
		for block, choice := range t.choices {
			is = is && choice == n%(last[block]+1)
		}
		if is {
			return true
		}
	}
	return sandbox.Long()
}

// with returns the telling, longer by statements. The other one stays as it is.
func (t telling) with(statements []string) telling {
	t.statements = slices.Concat(t.statements, statements)
	return t
}

// choosing returns the telling, longer by a choice.
func (t telling) choosing(i int, name string) telling {
	t.name = strings.TrimPrefix(t.name+", "+name, ", ")
	t.choices = append(slices.Clone(t.choices), i)
	return t
}

// stories tells a script, each way in a subtest.
func stories(t *testing.T, script string, own ...acts) {
	t.Helper()
	t.Parallel()
	all := tellings(script)
	for _, one := range all {
		tell := func(t *testing.T) {
			s := newStory(t, own...)
			s.run(one.statements)
			s.end()
		}
		switch {
		case len(all) == 1:
			tell(t)
		case one.told(t.Name(), all):
			t.Run(one.name, func(t *testing.T) {
				t.Parallel()
				tell(t)
			})
		}
	}
}

// atEveryPoint tells a script for each point of a verb at which unwind may be killed: "kill any $at
// VERB POD", the last kill. The ways that have the first choice in common are told together. Except
// in make proof, one of them is told at each point, so that the points meet the other choices in turn.
func atEveryPoint(t *testing.T, atLeast int, script string, own ...acts) {
	t.Helper()
	all := tellings(script)
	tell := func(t *testing.T, at int, one telling) (killed bool) {
		s := newStory(t, own...)
		s.vars["at"] = fmt.Sprint(at)
		s.run(one.statements)
		s.end()
		return s.killed
	}
	if len(all) == 1 {
		everyPoint(t, atLeast, func(t *testing.T, at int) bool { return tell(t, at, all[0]) })
		return
	}
	groups := map[string][]telling{}
	for _, one := range all {
		name, _, _ := strings.Cut(one.name, ",")
		groups[name] = append(groups[name], one)
	}
	for name, ways := range groups {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			everyPoint(t, atLeast, func(t *testing.T, at int) (killed bool) {
				for i, one := range ways {
					if sandbox.Sampled(sandbox.Rounds(len(ways), len(ways), 1), at/pointsApart(), i) {
						t.Run(one.name, func(t *testing.T) { killed = tell(t, at, one) || killed })
					}
				}
				return killed
			})
		})
	}
}

func newStory(t testing.TB, own ...acts) *story {
	s := &story{
		pods: map[string]*pod{}, vars: map[string]string{}, added: map[string]types.Result{}, seen: map[string]seen{},
		begun: map[string]chan error{}, undo: map[string]func(){}, acts: acts{},
	}
	for _, some := range own {
		for name, act := range some {
			s.acts[name] = act
		}
	}
	n := newNode(teller{t, s})
	s.node, s.first, s.nodes = n, n, []*node{n}
	return s
}

// tell runs a script without choices.
func (s *story) tell(script string) {
	s.Helper()
	all := tellings(script)
	s.run(all[0].statements)
}

// end checks what is left.
func (s *story) end() {
	s.Helper()
	s.at = "at the end"
	for _, n := range s.nodes {
		if !s.leaves {
			n.nothingLeft()
		}
	}
}

// teller says at which statement a test failed.
type teller struct {
	testing.TB
	story *story
}

func (t teller) Errorf(format string, a ...any) {
	t.Helper()
	t.TB.Errorf("%s: %s", t.story.at, fmt.Sprintf(format, a...))
}

func (t teller) Fatalf(format string, a ...any) {
	t.Helper()
	t.TB.Fatalf("%s: %s", t.story.at, fmt.Sprintf(format, a...))
}

func (t teller) Error(a ...any) { t.Helper(); t.Errorf("%s", fmt.Sprintln(a...)) }
func (t teller) Fatal(a ...any) { t.Helper(); t.Fatalf("%s", fmt.Sprintln(a...)) }

var (
	statement = regexp.MustCompile(`(?:[^';]|'[^']*')+`)
	word      = regexp.MustCompile(`'[^']*'|[^ ']+`)
	variable  = regexp.MustCompile(`\$\w+`)
)

// tellings returns all ways through a script.
func tellings(script string) (all []telling) {
	type line struct {
		condition string // "", either, or, each, if, unless
		name      string
		depth     int
		text      string
	}
	var lines []*line
	for text := range strings.Lines(script) {
		depth := len(text) - len(strings.TrimLeft(text, "\t"))
		text = strings.TrimSpace(text)
		if text == "" || text[0] == '#' {
			continue
		}
		if last := len(lines) - 1; last >= 0 && depth > lines[last].depth {
			if lines[last].condition != "" && lines[last].condition != "each" {
				lines[last].text += ";"
			}
			lines[last].text += " " + text
			continue
		}
		l := &line{depth: depth, text: text}
		switch first, rest, _ := strings.Cut(text, " "); first {
		case "either", "or", "if", "unless":
			l.condition = first
			l.name, l.text, _ = strings.Cut(rest, ":")
		case "each":
			l.condition = first
			l.name, l.text, _ = strings.Cut(rest, " ")
		}
		lines = append(lines, l)
	}
	all = []telling{{}}
	var before []telling
	option := 0
	for _, l := range lines {
		var statements []string
		for _, text := range statement.FindAllString(l.text, -1) {
			if text = strings.TrimSpace(text); text != "" {
				statements = append(statements, text)
			}
		}
		switch l.condition {
		case "either":
			before, all, option = all, nil, -1
			fallthrough
		case "or":
			option++
			for _, b := range before {
				all = append(all, b.choosing(option, l.name).with(statements))
			}
		case "each":
			before, all = all, nil
			for i, w := range word.FindAllString(l.text, -1) {
				for _, b := range before {
					all = append(all, b.choosing(i, l.name+" "+strings.Trim(w, "'")).with([]string{"let " + l.name + " " + w}))
				}
			}
		default:
			used := false
			for i, a := range all {
				if l.condition == "" || strings.Contains(a.name, l.name) == (l.condition == "if") {
					all[i], used = a.with(statements), true
				}
			}
			if !used {
				panic(fmt.Sprintf("%s %s: it holds for no choice above it", l.condition, l.name))
			}
		}
	}
	slices.SortStableFunc(all, func(a, b telling) int { return slices.Compare(a.choices, b.choices) })
	return all
}

// run carries out statements.
func (s *story) run(statements []string) {
	s.Helper()
	done := false
	defer func() {
		if !done && !s.Failed() && !s.Skipped() {
			s.Errorf("panic: is a word missing?") // Go prints where
		}
	}()
	for i, text := range statements {
		s.at = fmt.Sprintf("%d %q", i+1, text)
		text = variable.ReplaceAllStringFunc(text, s.value)
		var words []string
		for _, w := range word.FindAllString(text, -1) {
			words = append(words, strings.Trim(w, "'"))
		}
		s.verb(words[0])(s, words[1:])
	}
	done = true
}

// verb returns a verb of the test's own, or else of all stories.
func (s *story) verb(name string) func(s *story, words []string) {
	s.Helper()
	verb := verbs[name]
	if own := s.acts[name]; own != nil {
		verb = own
	}
	if verb == nil {
		s.Fatalf("there is no such verb")
	}
	return verb
}

// value returns what a variable stands for.
func (s *story) value(name string) string {
	s.Helper()
	name = name[1:]
	if v, is := s.vars[name]; is {
		return v
	}
	var host byte
	if _, err := fmt.Sscanf(name, "ip%d", &host); err == nil {
		return s.prefix(4, host).Addr().String()
	}
	if v, is := map[string]string{"dir": s.dir, "data": s.dataDir(), "state": s.stateDir, "network": s.network, "bridge": s.bridge, "hangs": s.hangsDir(),
		"subnet": s.subnet, "hostlocal": s.hostLocal(s.subnet),
		"netns": filepath.Join(s.dir, "netns"), "cni": s.path[1]}[name]; is {
		return v
	}
	return "$" + name // a shell's
}

// who returns a pod, which is made the first time.
func (s *story) who(name string) *pod {
	s.Helper()
	if s.pods[name] == nil {
		p := s.pod(name)
		p.CapabilityArgs = map[string]any{"portMappings": []map[string]any{
			{"hostPort": 20000 + len(s.pods), "containerPort": 80, "protocol": "tcp"}}}
		s.pods[name] = p
	}
	return s.pods[name]
}
