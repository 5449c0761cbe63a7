package agent

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
	"cni-unwind/journal/journaltest"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
)

// reconciling is a reconciler on a test node, with its log.
type reconciling struct {
	*nodetest.Dirs
	*reconciler
	log   *bytes.Buffer
	other *install.AgentLock // the lock that another agent holds
	stop  func()             // ends the check of alwaysThere
}

func newReconciling(t testing.TB, dir string) *reconciling {
	k := &reconciling{Dirs: nodetest.NewDirs(t, dir), log: &bytes.Buffer{}}
	k.again(nil)
	return k
}

// again replaces the reconciler with a new one, as if the agent had been restarted.
func (k *reconciling) again(change func(*reconciler)) {
	if k.reconciler != nil {
		k.unlock()
	}
	paths := node.Runtime{Name: "k3s", Socket: "/none", Kubelet: true, ConfDir: k.Dirs.ConfDir(), BinDirs: []string{k.Dirs.BinDir()}, MaxConfs: 1,
		Searched: []string{k.Dirs.BinDir()}}
	state := filepath.Join(k.Dir, "state")
	k.reconciler = &reconciler{
		Setup: install.Setup{
			ConfDir: k.Dirs.ConfDir(), BinDir: k.Dirs.BinDir(), Binary: filepath.Join(k.Dir, "unwind"), StateDir: state,
		},
		paths: paths,
		agent: &agent{Options: Options{Interval: time.Hour}, log: newDedupLogger(slog.New(slog.NewTextHandler(k.log, nil))),
			find: func() (node.Runtime, error) { return paths, nil }},
	}
	if change != nil {
		change(k.reconciler)
	}
}

// reconciles runs the reconciler, and returns a description of unwind's conflist: see
// nodetest.Dirs.Installed.
func (k *reconciling) reconciles() string {
	for range 3 { // a repetition must not change the result
		if again := k.reconcile(context.Background()); again <= debounce {
			time.Sleep(again)
		}
	}
	return k.Installed()
}

func (k *reconciling) says(text string) int { return strings.Count(k.log.String(), text) }

// TestReconcile runs the scripts of testdata/agent. Each script runs in its own directory, which
// contains "net.d" (conflists), "plugins" (binaries) and "state" (the agent's state directory).
// When a script starts, net.d contains a provider's file, and the agent has not reconciled yet.
func TestReconcile(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "../../../../testdata/agent",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			env.Values["k"] = newReconciling(env.T().(testing.TB), env.WorkDir)
			env.Setenv("FIRST", nodetest.First)
			env.Setenv("PID", strconv.Itoa(os.Getpid()))
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"agent": story(agentAgain), "reconcile": story(reconcileWant), "once": story(reconcileOnce), "inuse": story(wantInUse),
			"says": story(wantSaid), "provider": story(provide), "list": story(wantTypes), "install": story(installBy), "pass": story(passTime),
			"mended": story(mended), "always": story(alwaysThere), "other": story(otherAgent),
			"ready": story(wantReady), "newer": story(newerJournal), "off": story(offBy),
			"version": story(writeVersion),
		},
	})
}

// story turns a function into a command of the scripts.
func story(do func(k *reconciling, args []string) error) func(*testscript.TestScript, bool, []string) {
	return func(ts *testscript.TestScript, _ bool, args []string) {
		k := ts.Value("k").(*reconciling)
		if err := do(k, args); err != nil {
			ts.Fatalf("%v\nlog:\n%s", err, k.log)
		}
	}
}

// agentAgain implements "agent [KEY=VALUE…]": it restarts the agent with these settings.
func agentAgain(k *reconciling, args []string) error {
	k.again(func(r *reconciler) {
		paths := r.paths
		for _, arg := range args {
			switch key, value, _ := strings.Cut(arg, "="); key {
			case "conf":
				r.Conf = value
			case "state":
				r.Setup.StateDir = value
			case "problem":
				paths.Problems = []string{value}
			case "confs":
				paths.MaxConfs, _ = strconv.Atoi(value)
				paths.Check()
			case "searched":
				paths.Searched = strings.Fields(value)
			case "programs":
				r.ProgramDir = value
			}
		}
		r.find = func() (node.Runtime, error) { return paths, nil }
	})
	return nil
}

// mended implements "mended": it removes the problem from the runtime's configuration.
func mended(k *reconciling, _ []string) error {
	paths := k.paths
	paths.Problems, paths.MaxConfs = nil, 1
	k.find = func() (node.Runtime, error) { return paths, nil }
	return nil
}

// reconcileWant implements "reconcile [WANT]": it runs the reconciler, and checks that unwind's
// conflist then has the description WANT.
func reconcileWant(k *reconciling, args []string) error {
	return same(k.reconciles(), append(args, "")[0])
}

// reconcileOnce implements "once [MOST]": it runs the reconciler once, and checks that the next
// run is due within the time MOST.
func reconcileOnce(k *reconciling, args []string) error {
	most, err := time.ParseDuration(append(args, "24h")[0])
	if again := k.reconcile(context.Background()); err != nil || again > most {
		return errors.Join(err, errors.New("it looks again after "+again.String()))
	}
	return nil
}

// wantInUse implements "inuse REASON": it checks the reason in the agent's status. In the metric
// unwind_status, this reason is the value of the label "state".
func wantInUse(k *reconciling, args []string) error {
	return same(string(k.status().Reason), args[0])
}

// wantReady implements "ready TEXT [METRIC]": it checks that /readyz contains TEXT, and that
// /metrics contains METRIC.
func wantReady(k *reconciling, args []string) error {
	server, w := &server{agent: k.agent, setup: k.Setup, found: k.status}, httptest.NewRecorder()
	server.readyz(w, nil)
	if !strings.Contains(w.Body.String(), args[0]) {
		return errors.New("/readyz: " + w.Body.String())
	}
	w = httptest.NewRecorder()
	server.metricsHandler().ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if metrics := w.Body.String(); len(args) > 1 && !strings.Contains(metrics, args[1]) {
		return errors.New(metrics)
	}
	return nil
}

// newerJournal implements "newer": it creates a journal that only newer releases can read.
func newerJournal(k *reconciling, _ []string) error {
	store := &journal.Store{Dir: k.Setup.StateDir}
	err := store.Update(context.Background(), func(*journal.Tx) error { return nil })
	return errors.Join(err, journaltest.MakeNewer(store))
}

// offBy implements "off [BY]": it checks that unwind is switched off, and that the off switch names
// BY as the cause. Without BY, it checks that unwind is not switched off.
func offBy(k *reconciling, args []string) error {
	by := ""
	if off := install.ReadOff(k.Setup.StateDir); off != nil {
		by = off.By
	}
	return same(by, append(args, "")[0])
}

// wantSaid implements "says N TEXT": it checks that the log contains TEXT exactly N times.
func wantSaid(k *reconciling, args []string) error {
	return same(strconv.Itoa(k.says(args[1])), args[0])
}

// provide implements "provider FILE NETWORK [CAPABILITY…]": it atomically replaces a conflist.
func provide(k *reconciling, args []string) error {
	k.Rename(filepath.Join(k.Dir, args[0]), nodetest.Conflist(args[1], args[2:]...))
	return nil
}

// onWrite is a log that calls a function for each line.
type onWrite func(text string)

func (f onWrite) Write(text []byte) (int, error) {
	f(string(text))
	return len(text), nil
}

// TestDirectoryAnewAtOnce: just after an install, somebody removes and recreates the directory of
// conflists. The agent installs unwind again. It does not mistake this for the removal of unwind's
// conflist alone, which would switch unwind off.
func TestDirectoryAnewAtOnce(t *testing.T) {
	k := newReconciling(t, t.TempDir())
	provider := []string{"net.d/10-bridge.conflist", "podnet", "portMappings"}
	must := func(err error) {
		t.Helper()
		check(t, err)
	}
	must(provide(k, provider))
	times := 0
	k.again(func(r *reconciler) {
		r.agent.log = newDedupLogger(slog.New(slog.NewTextHandler(onWrite(func(text string) {
			if !strings.Contains(text, "msg=installed") {
				return
			}
			if times++; times == 1 {
				must(os.RemoveAll(k.ConfDir()))
				must(os.Mkdir(k.ConfDir(), 0o755))
				must(provide(k, provider))
			}
		}), nil)))
	})
	if got := k.reconciles(); got != nodetest.First || times != 2 {
		t.Errorf("installed %d times: %q, want %q", times, got, nodetest.First)
	}
}

// TestRuntimeSilent: the agent does not install unwind until the runtime has answered once. If the
// runtime then stops answering for a while, unwind stays installed.
func TestRuntimeSilent(t *testing.T) {
	k := newReconciling(t, t.TempDir())
	check(t, provide(k, []string{"net.d/10-bridge.conflist", "podnet"}))
	told, silent := k.paths, k.paths
	told.Config, silent.Problems = "/s", []string{"it does not report its directories"}
	for _, step := range []struct {
		answer node.Runtime
		want   install.Reason
	}{{silent, install.Refused}, {told, install.On}, {silent, install.On}, {told, install.On}} {
		k.find = func() (node.Runtime, error) { return step.answer, nil }
		if k.reconciles(); k.status().Reason != step.want {
			t.Errorf("%v: %+v, want %s", step.answer, k.status(), step.want)
		}
	}
}

// TestDirectoriesChange: if the runtime reports other directories than at the agent's start, the
// agent exits. After its restart, it uses the new directories. The directories of another runtime
// change nothing.
func TestDirectoriesChange(t *testing.T) {
	for _, c := range []struct {
		name          string
		first, second node.Runtime // only Name, Socket and Config
		exits         bool
	}{
		{"a configuration is changed", node.Runtime{Socket: "/c", Config: "/s"}, node.Runtime{Socket: "/c", Config: "/s"}, true},
		{"the runtime starts after the agent", node.Runtime{Socket: "/c"}, node.Runtime{Socket: "/c", Config: "/s"}, true},
		{"a runtime is installed", node.Runtime{}, node.Runtime{Socket: "/c", Config: "/s"}, true},
		{"the runtime stops", node.Runtime{Socket: "/c", Config: "/s"}, node.Runtime{Socket: "/c"}, false},
		{"another runtime runs while it is stopped", node.Runtime{Socket: "/c", Config: "/s"}, node.Runtime{Socket: "/d", Config: "/t"}, false},
		{"CRI-O returns to its defaults", node.Runtime{Name: "cri-o", Socket: "/c", Config: "/s"}, node.Runtime{Name: "cri-o", Socket: "/c"}, true},
		{"CRI-O's files disappear", node.Runtime{Name: "cri-o", Socket: "/c"}, node.Runtime{}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			k := newReconciling(t, t.TempDir())
			check(t, provide(k, []string{"net.d/10-bridge.conflist", "podnet"}))
			answer := k.paths
			k.find = func() (node.Runtime, error) { return answer, nil }
			answer.Name, answer.Socket, answer.Config = c.first.Name, c.first.Socket, c.first.Config
			k.paths = answer
			k.reconciles()
			if k.fatal != nil {
				t.Fatal("it exits before anything has changed:", k.fatal)
			}
			answer.Name, answer.Socket, answer.Config, answer.BinDirs = c.second.Name, c.second.Socket, c.second.Config, []string{"/other"}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var err error
			if !c.exits {
				k.reconciles()
				err = k.fatal
			} else if err = k.run(ctx); ctx.Err() != nil {
				t.Error("it does not exit")
			}
			if (err != nil) != c.exits || c.exits && !strings.Contains(err.Error(), "now "+k.ConfDir()+" and /other, not ") {
				t.Errorf("exits: %v, want %v: %v", err != nil, c.exits, err)
			}
			if got := k.Installed(); got != nodetest.First {
				t.Errorf("installed: %q", got)
			}
		})
	}
}

// TestOffUnrecorded: an agent with --off takes unwind's conflist out of use, even if it cannot
// record that unwind is off.
func TestOffUnrecorded(t *testing.T) {
	k := newReconciling(t, t.TempDir())
	check(t, provide(k, []string{"net.d/10-bridge.conflist", "podnet"}))
	if got := k.reconciles(); got != nodetest.First {
		t.Fatalf("installed: %q", got)
	}
	k.again(func(r *reconciler) {
		r.Off, r.Setup.StateDir = true, filepath.Join(k.Dir, "unwind", "is a file") // a path below a file cannot be created
	})
	check(t, k.switchOff(k.Setup))
	if got := k.reconciles(); got != "" || k.status().Reason != install.Off {
		t.Errorf("%+v: %q", k.status(), got)
	}
	if k.says("unwind is off only while this agent runs") != 1 {
		t.Error("the log:", k.log)
	}
}

// writeVersion implements "version FILE VERSION": it writes a plugin with this version.
func writeVersion(k *reconciling, args []string) error {
	plugin := strings.Replace(nodetest.FakePlugin, "unwind under test", "CNI plugin unwind "+args[1]+": under test", 1)
	return os.WriteFile(filepath.Join(k.Dir, args[0]), []byte(plugin), 0o755)
}

// wantTypes implements "list FILE TYPE…": it checks that a conflist lists exactly these plugins.
func wantTypes(k *reconciling, args []string) error {
	c, err := netconf.ReadConflist(filepath.Join(k.Dir, args[0]))
	if err != nil {
		return err
	}
	return same(strings.Join(c.Types, " "), strings.Join(args[1:], " "))
}

// installBy implements "install [CONF]": it switches unwind on and writes unwind's conflist, as
// "unwindctl install" does. CONF is the value of --provider-conf.
func installBy(k *reconciling, args []string) error {
	k.Source = append(args, k.Source)[0]
	if err := k.SwitchOn(k.Setup.StateDir); err != nil {
		return err
	}
	p, err := k.Plan()
	if err == nil {
		err = (&install.Changes{}).Make(context.Background(), k.WriteConflist(p))
	}
	return err
}

// passTime implements "pass": it changes the agent's recorded times, as if goneAfter and
// the agent's Interval had passed.
func passTime(k *reconciling, _ []string) error {
	k.gone, k.repaired = k.gone.Add(-goneAfter), k.repaired.Add(-k.Interval)
	return nil
}

// alwaysThere implements "always": until the script calls "always" again, unwind's conflist
// must exist at every moment.
func alwaysThere(k *reconciling, _ []string) error {
	if k.stop == nil {
		k.stop = k.AlwaysThere()
		return nil
	}
	k.stop()
	return nil
}

// otherAgent implements "other lock", "other refused" and "other release": another agent
// acquires the lock, must fail to acquire it, or releases it.
func otherAgent(k *reconciling, args []string) (err error) {
	switch args[0] {
	case "lock":
		k.other, err = install.TakeAgentLock(k.Setup.StateDir)
	case "refused":
		if _, lockErr := install.TakeAgentLock(k.Setup.StateDir); lockErr == nil {
			err = errors.New("a second agent gets the lock")
		}
	case "release":
		k.other.Release()
	}
	return err
}

func same(got, want string) error {
	if got != want {
		return errors.New("got " + got + "\nwant " + want)
	}
	return nil
}

// TestReconcileMatters: the temporary files that the agent writes must not trigger the reconciler.
// Otherwise, the agent would reconcile forever on a full disk.
func TestReconcileMatters(t *testing.T) {
	t.Parallel()
	k := newReconciling(t, t.TempDir())
	for path, want := range map[string]bool{
		k.InConf("." + nodetest.OwnFile + ".123.tmp"): false, k.Own(): true, k.InConf("10-bridge.conflist"): true,
		filepath.Join(k.Dirs.BinDir(), "unwind"): true, filepath.Join(k.Dirs.BinDir(), "bridge"): false,
		filepath.Join(k.Dirs.BinDir(), ".unwind.123.tmp"): false, filepath.Join(k.Dir, "state/off"): true,
		filepath.Join(k.Dir, "state/journal.db"): false,
	} {
		if k.matters(path) != want {
			t.Errorf("%s: %t", path, !want)
		}
	}
}
