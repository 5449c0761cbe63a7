package plugin

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"pgregory.net/rapid"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/plugintest/env"
	"cni-unwind/plugin/plugintest/sandbox"
	"cni-unwind/plugin/undo"
)

// fakes are plugins that run without a process. Each allocates something at ADD, and releases it at
// DEL, unless its mode says otherwise. Before an ADD, and before a DEL that has something to
// release, Run checks that the journal has a step of the plugin.
type fakes struct {
	*seam
	mu    sync.Mutex
	taken map[string]bool   // by "CONTAINER PLUGIN"
	mode  map[string]string // by "VERB PLUGIN"; in "fails after it", "it" is the effect of the verb
	calls []string          // each is "VERB PLUGIN"
}

func (f *fakes) Run(_ context.Context, c *delegate.Call, _ io.Writer) ([]byte, *delegate.Failure) {
	f.mu.Lock()
	defer f.mu.Unlock()
	what := c.ContainerID + " " + c.Plugin
	holds := c.Command == "ADD" || f.taken[what] // a DEL with nothing to release may have no record
	if entries := f.records()[c.ContainerID]; holds && !onRecord(entries, c.Plugin) {
		f.t.Fatalf("%s of %s runs, and the journal has %+v", c.Command, c.Plugin, entries)
	}
	f.calls = append(f.calls, c.Command+" "+c.Plugin)
	mode := f.mode[c.Command+" "+c.Plugin]
	failure := &delegate.Failure{Plugin: c.Plugin, Command: c.Command, Code: types.ErrInternal, Msg: "it " + mode,
		Killed: mode == "is cut off after it"}
	if mode == "fails" {
		return nil, failure
	}
	if c.Command == "ADD" {
		f.taken[what] = true
	} else {
		delete(f.taken, what)
	}
	if mode != "" {
		return nil, failure
	}
	return []byte(`{"cniVersion": "1.0.0"}`), nil
}

// seam is an unwind whose plugins are fakes. It needs neither root nor a network namespace.
type seam struct {
	t      *rapid.T
	fakes  *fakes
	plugin *Plugin
	dir    string
	conf   []byte
}

func newSeam(t *rapid.T, dir string) *seam {
	dir, err := os.MkdirTemp(dir, "")
	must(t, err)
	s := &seam{t: t, dir: dir}
	s.fakes = &fakes{seam: s, taken: map[string]bool{}, mode: map[string]string{}}
	var chain []string
	for i := range 3 {
		name := fmt.Sprint("p", i)
		must(t, os.WriteFile(filepath.Join(dir, name), nil, 0o755))
		chain = append(chain, fmt.Sprintf(`{"type": %q}`, name))
	}
	s.conf = fmt.Appendf(nil, `{"cniVersion": "1.0.0", "name": "net", "type": "unwind", "stateDir": %q, "gracePeriod": "0s", "chain": `+
		`{"cniVersion": "1.0.0", "name": "net", "plugins": [%s]}}`, filepath.Join(dir, "state"), strings.Join(chain, ", "))
	s.plugin = &Plugin{Env: undo.Env{Stderr: io.Discard, Budgets: env.Long, Runner: s.fakes}, Stdout: io.Discard, CacheDir: filepath.Join(dir, "cache")}
	return s
}

func (s *seam) verb(do func(*op, context.Context) error, id string) error {
	return s.plugin.verb(context.Background(), do)(&skel.CmdArgs{ContainerID: id, IfName: "eth0", Netns: filepath.Join(s.dir, "netns"),
		Path: s.dir, StdinData: s.conf, NetnsOverride: "1"})
}

// records returns the journal's records by container ID.
func (s *seam) records() map[string][]*journal.Record {
	all := map[string][]*journal.Record{}
	err := (&journal.Store{Dir: filepath.Join(s.dir, "state")}).View(context.Background(), func(tx *journal.Tx) error {
		return tx.All(func(e *journal.Record, err error) error {
			if err == nil {
				all[e.ContainerID] = append(all[e.ContainerID], e)
			}
			return err
		})
	})
	if err != nil {
		s.t.Fatal(err)
	}
	return all
}

// TestProtocolOverSeam runs random ADDs and DELs of three containers, with plugins that may fail in
// any way. After each verb, the journal must record everything that the plugins have allocated,
// and a container whose ADD succeeded must still have all of it. Once the plugins work again, the
// runtime's DELs must leave nothing.
func TestProtocolOverSeam(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		s := newSeam(t, dir)
		added := map[string]bool{}
		modes := rapid.SampledFrom([]string{"", "", "", "fails", "fails after it", "is cut off after it"})
		for range rapid.IntRange(1, 10).Draw(t, "verbs") {
			for _, verb := range []string{"ADD", "DEL"} {
				for i := range 3 {
					s.fakes.mode[fmt.Sprintf("%s p%d", verb, i)] = modes.Draw(t, verb)
				}
			}
			id := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "container")
			if !added[id] && rapid.Bool().Draw(t, "adds") {
				added[id] = s.verb((*op).add, id) == nil
			} else {
				_ = s.verb((*op).del, id)
				added[id] = false
			}
			s.sees(added)
		}
		s.fakes.mode = map[string]string{}
		for _, id := range []string{"a", "b", "c"} {
			for end := time.Now().Add(sandbox.Patience); ; {
				if err := s.verb((*op).del, id); err == nil {
					break
				} else if time.Now().After(end) {
					t.Fatalf("DEL %s: %v", id, err)
				}
			}
		}
		s.sees(nil)
		if len(s.fakes.taken) > 0 || len(s.records()) > 0 {
			t.Fatalf("left: %v, %v", s.fakes.taken, s.records())
		}
	})
}

// sees checks that each allocation is on record, and that added containers are live and intact.
func (s *seam) sees(added map[string]bool) {
	entries := s.records()
	for what := range s.fakes.taken {
		id, plugin, _ := strings.Cut(what, " ")
		if !onRecord(entries[id], plugin) {
			s.t.Fatalf("%s is taken and not on record; calls %v", what, s.fakes.calls)
		}
	}
	for id := range maps.Keys(added) {
		live := func(e *journal.Record) bool { return e.State == journal.Live }
		if added[id] && !slices.ContainsFunc(entries[id], live) {
			s.t.Fatalf("%s was added and is not live; calls %v", id, s.fakes.calls)
		}
		for i := range 3 {
			if what := fmt.Sprintf("%s p%d", id, i); added[id] && !s.fakes.taken[what] {
				s.t.Fatalf("%s was added and has lost %s; calls %v", id, what, s.fakes.calls)
			}
		}
	}
}

// onRecord reports whether a record has a step of the plugin.
func onRecord(entries []*journal.Record, plugin string) bool {
	return slices.ContainsFunc(entries, func(e *journal.Record) bool {
		return slices.ContainsFunc(e.Steps, func(step journal.Step) bool { return step.Type == plugin })
	})
}
