package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/journal"
	_ "cni-unwind/plugin" // see underTest
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/nodetest"
	"cni-unwind/plugin/plugintest/sandbox"
)

// TestMain runs the tests in namespaces of their own. If this program was started under the name
// "puts", it writes records instead: see putThree.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "puts" {
		putThree(os.Args[1], os.Args[2])
		os.Exit(0)
	}
	code := sandbox.Run(m) // the sandbox has its own process 1, so --host cannot leave the sandbox
	_ = os.RemoveAll(built)
	os.Exit(code)
}

// programsEnv is the environment variable with the directory of the programs under test.
const programsEnv = "UNWIND_TEST_PROGRAMS"

// built is the directory of the programs that this process has built, or "".
var built string

// underTest builds unwindctl and the plugin once, and returns their directory. Tests start these
// programs thousands of times, and a test binary would take two or three times as long to start. In
// this build, --install-dir is empty by default, so install writes only to the test's directories.
//
// "go test" doesn't know which files this build reads. So this package imports the plugin, and
// underTest opens the other files: "go test" then runs the tests again if one of them has changed.
var underTest = sync.OnceValues(func() (dir string, err error) {
	if dir := os.Getenv(programsEnv); dir != "" { // set by the parent process: see apart
		return dir, nil
	}
	const plugin = "../../testdata/unwind"
	for _, file := range []string{plugin + "/main.go", "../../plugin/plugintest/env/env.go"} {
		if _, err := os.ReadFile(file); err != nil {
			return "", err
		}
	}
	if built, err = os.MkdirTemp("", "under-test-"); err != nil {
		return "", err
	}
	cmd := exec.Command("go", "build", "-buildvcs=false", "-ldflags", "-s -w -X main.programDir=", "-o", built, ".", plugin)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%v: %w\n%s", cmd.Args, err, out)
	}
	return built, os.Setenv(programsEnv, built)
})

// programs returns a directory of links to the programs under test, and to this program as "puts".
func programs(t testing.TB) string {
	t.Helper()
	from, err := underTest()
	check(t, err)
	self, err := os.Executable()
	dir := t.TempDir()
	for name, program := range map[string]string{"unwindctl": filepath.Join(from, "unwindctl"),
		netconf.Name: filepath.Join(from, netconf.Name), "puts": self} {
		err = errors.Join(err, os.Symlink(program, filepath.Join(dir, name)))
	}
	check(t, err)
	return dir
}

// apart is sandbox.Apart, but first builds the programs under test, so that all processes use the
// same build.
func apart(t *testing.T) bool {
	t.Helper()
	sandbox.Need(t)
	_, err := underTest()
	check(t, err)
	return sandbox.Apart(t)
}

// noExitDelay is a value of GORACE. It makes a program with the race detector exit immediately,
// instead of a second later.
const noExitDelay = "atexit_sleep_ms=0"

func TestScript(t *testing.T) {
	sandbox.Need(t)
	bin := programs(t)
	cmds := map[string]func(*testscript.TestScript, bool, []string){}
	for name, do := range verbs {
		cmds[name] = func(ts *testscript.TestScript, neg bool, args []string) { do(ts.Value("n").(*scripted), ts, neg, args) }
	}
	testscript.Run(t, testscript.Params{
		Dir: "../../testdata/script", RequireExplicitExec: true, Cmds: cmds,
		Setup: func(env *testscript.Env) error {
			n := newMachineAt(env.T().(testing.TB), env.WorkDir, bin)
			n.Dirs = &nodetest.Dirs{TB: n.TB, Dir: n.dir}
			env.Values["n"] = &scripted{machine: n}
			for name, value := range map[string]string{
				"PATH": bin + ":" + env.Getenv("PATH"), "TOOLS": n.tools, "PROGRAMS": bin, "PLUGIN": filepath.Join(bin, netconf.Name),
				"GORACE": noExitDelay, "FIRST": nodetest.First,
			} {
				env.Setenv(name, value)
			}
			env.Defer(func() { unmountAll(filepath.Join(env.WorkDir, "netns")) })
			return expandFiles(env)
		},
	})
}

// expandFiles replaces $WORK in the files of a script with the script's directory.
func expandFiles(env *testscript.Env) error {
	return filepath.WalkDir(env.WorkDir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if expanded := bytes.ReplaceAll(data, []byte("$WORK"), []byte(env.WorkDir)); err == nil && !bytes.Equal(expanded, data) {
			err = os.WriteFile(path, expanded, 0o644)
		}
		return err
	})
}

// untilItSucceeds implements the command "eventually": it runs a program until its exit code is 0.
func untilItSucceeds(ts *testscript.TestScript, _ bool, args []string) {
	for end := time.Now().Add(sandbox.Patience); ts.Exec(args[0], args[1:]...) != nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			ts.Fatalf("not in time: %v", args)
		}
	}
}

// unmountAll unmounts the network namespaces that are mounted in a directory.
func unmountAll(dir string) {
	pins, _ := filepath.Glob(filepath.Join(dir, "*"))
	for _, pin := range pins {
		_ = unix.Unmount(pin, unix.MNT_DETACH)
	}
}

// scripted is the node on which a script of testdata/script runs. Its directories state, net.d,
// plugins and netns are in the script's directory.
type scripted struct {
	*machine
	agent *running // the agent that was started last
}

// verb implements a command of the scripts, in addition to testscript's own.
type verb func(n *scripted, ts *testscript.TestScript, neg bool, args []string)

// verbs contains the commands of the scripts that testscript lacks, by name.
var verbs = map[string]verb{
	// eventually PROGRAM ARG…: runs a program until its exit code is 0.
	"eventually": func(_ *scripted, ts *testscript.TestScript, neg bool, args []string) { untilItSucceeds(ts, neg, args) },
	// write FILE [LINE…]: writes a file with these lines.
	"write": func(_ *scripted, ts *testscript.TestScript, _ bool, args []string) {
		ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(strings.Join(append(args[1:], ""), "\n")), 0o644))
	},
	// compact FILE: prints a JSON file as one line.
	"compact": func(_ *scripted, ts *testscript.TestScript, _ bool, args []string) {
		var line bytes.Buffer
		ts.Check(json.Compact(&line, []byte(ts.ReadFile(args[0]))))
		fmt.Fprintln(ts.Stdout(), &line)
	},
	// journal VERB DIR ARG…: see nodetest.WriteJournal.
	"journal": func(_ *scripted, ts *testscript.TestScript, neg bool, args []string) {
		nodetest.WriteJournal(ts, neg, args)
	},
	// netns ID…: creates network namespaces, mounted at netns/ID.
	"netns": func(n *scripted, _ *testscript.TestScript, _ bool, ids []string) { n.netns(ids...) },
	// add ID…: attaches pods through unwind, each in a new network namespace. ID@FILE instead uses
	// the network namespace of the process whose PID is in FILE.
	// old ID…: like add, but the attachments are past their grace period.
	// dead ID…: like add, but then removes the network namespaces.
	"add": func(n *scripted, _ *testscript.TestScript, _ bool, ids []string) { n.addAll(ids) },
	"old": func(n *scripted, _ *testscript.TestScript, _ bool, ids []string) {
		for _, id := range n.addAll(ids) {
			n.edit(id, func(e *journal.Record) { e.Added.GracePeriod = 1 })
		}
	},
	"dead": func(n *scripted, _ *testscript.TestScript, _ bool, ids []string) {
		for _, id := range ids {
			n.addDead(id)
		}
	},
	// pause ID: makes it look as if the DEL of the attachment's first step had failed 30 times. The
	// next attempt is due in 4 minutes.
	"pause": func(n *scripted, _ *testscript.TestScript, _ bool, ids []string) {
		n.edit(ids[0], func(e *journal.Record) {
			s := &e.Steps[0]
			s.Tries, s.Next = 30, journal.Next{Why: journal.ForBackoff, At: journal.BootNanos() + int64(4*time.Minute)}
		})
	},
	// plan [VERB=MODE…]: sets the faulty plugin's mode for the next calls of each verb.
	"plan": func(n *scripted, _ *testscript.TestScript, _ bool, args []string) {
		modes := map[string]string{}
		for _, arg := range args {
			verb, mode, _ := strings.Cut(arg, "=")
			modes[verb] = mode
		}
		n.plan(modes)
	},
	// ids [ID…]: checks that the journal contains exactly these containers.
	// released ID…: waits until the journal contains none of these containers.
	"ids": func(n *scripted, ts *testscript.TestScript, _ bool, ids []string) {
		if got := n.ids(); !slices.Equal(got, ids) {
			ts.Fatalf("the journal has %v", got)
		}
	},
	"released": func(n *scripted, _ *testscript.TestScript, _ bool, ids []string) {
		for _, id := range ids {
			n.awaitReleased(id)
		}
	},
	// swept: waits until the agent has finished a sweep that read the journal after this command
	// began.
	"swept": func(n *scripted, _ *testscript.TestScript, _ bool, _ []string) {
		for _, id := range []string{"swept1", "swept2"} {
			n.addDead(id)
			n.awaitReleased(id)
		}
	},
	// cri [ID…]: serves a runtime with these pods at $CRI. With the ID "error", each call that lists
	// pods fails with a different error. With "hang", such a call hangs. With "silent", the runtime
	// answers no call.
	"cri": func(n *scripted, ts *testscript.TestScript, _ bool, args []string) { ts.Setenv("CRI", n.cri(args)) },
	// provider [CAPABILITY…]: atomically writes a provider's conflist with these capabilities.
	"provider": func(n *scripted, ts *testscript.TestScript, _ bool, args []string) {
		ts.Check(os.MkdirAll(n.ConfDir(), 0o755))
		if len(args) == 0 {
			args = []string{"portMappings"}
		}
		n.Rename(n.InConf("10-bridge.conflist"), nodetest.Conflist(network, args...))
	},
	// agent [ARG…]: starts an agent that sweeps every second and has a plugin to install. $AGENT is
	// its process ID.
	"agent": func(n *scripted, ts *testscript.TestScript, _ bool, args []string) {
		if binary := filepath.Join(n.dir, "unwind"); !durable.Exists(binary) {
			n.Write(binary, nodetest.FakePlugin)
		}
		check(n, os.MkdirAll(n.BinDir(), 0o755))
		n.agent = n.machine.agent(home, args...)
		ts.Setenv("AGENT", fmt.Sprint(n.agent.cmd.Process.Pid))
	},
	// end [SIGNAL CODE]: sends a signal (default TERM) to the last agent, and waits until it exits
	// with this code (default 0).
	// ended CODE: waits until the last agent exits with this code.
	"end": func(n *scripted, ts *testscript.TestScript, _ bool, args []string) {
		if len(args) == 0 {
			args = []string{"TERM", "0"}
		}
		ts.Check(n.agent.cmd.Process.Signal(map[string]os.Signal{"TERM": syscall.SIGTERM, "KILL": syscall.SIGKILL}[args[0]]))
		n.wantEnd(args[1])
	},
	"ended": func(n *scripted, _ *testscript.TestScript, _ bool, args []string) { n.wantEnd(args[0]) },
	// log: prints the last agent's log.
	"log": func(n *scripted, ts *testscript.TestScript, _ bool, _ []string) {
		fmt.Fprint(ts.Stdout(), n.agent.log())
	},
	// says N TEXT: checks that the last agent's log contains the text N times.
	// awaits TEXT: waits until the log contains the text.
	"says": func(n *scripted, ts *testscript.TestScript, _ bool, args []string) {
		if got := n.agent.says(args[1]); fmt.Sprint(got) != args[0] {
			ts.Fatalf("said %d times", got)
		}
	},
	"awaits": func(n *scripted, _ *testscript.TestScript, _ bool, args []string) {
		eventually(n, args[0], func() bool { return n.agent.says(args[0]) > 0 })
	},
	// installed WANT: waits until unwind's conflist matches the description WANT (see
	// nodetest.Dirs.Installed).
	"installed": func(n *scripted, _ *testscript.TestScript, _ bool, args []string) { n.await(args[0]) },
	// get PATH [TEXT]: waits until the last agent's HTTP response contains the text, and prints the
	// response. $AT is the agent's address.
	"get": func(n *scripted, ts *testscript.TestScript, _ bool, args []string) {
		ts.Setenv("AT", n.agent.address())
		answer := ""
		eventually(n, args[0], func() bool {
			answer = n.agent.get(args[0])
			return strings.Contains(answer, append(args, "")[1])
		})
		fmt.Fprint(ts.Stdout(), answer)
	},
}

// addAll implements the command "add", and returns the IDs.
func (n *machine) addAll(pods []string) (ids []string) {
	n.Helper()
	for _, pod := range pods {
		id, file, inside := strings.Cut(pod, "@")
		if ids = append(ids, id); !inside {
			n.netns(id)
			n.add(home, id, n.pin(id))
			continue
		}
		pid, err := os.ReadFile(filepath.Join(n.dir, file))
		check(n, err)
		n.add(home, id, "/proc/"+strings.TrimSpace(string(pid))+"/ns/net")
	}
	return ids
}

// cri implements the command "cri ID…": it starts a fake runtime that lists pods with these IDs, and
// returns its socket. With the ID "many", the list also contains about 8 MB of annotations, twice
// grpc's default limit for a message. With the ID "silent", the runtime never responds.
func (n *scripted) cri(ids []string) (socket string) {
	if slices.Contains(ids, "silent") {
		socket, _ = nodetest.Listen(n)
		return socket
	}
	return nodetest.ServeCRI(n, func(ctx context.Context) (all []*cri.PodSandbox, err error) {
		for _, id := range ids {
			switch id {
			case "error":
				return nil, fmt.Errorf("attempt %s", time.Now())
			case "hang":
				<-ctx.Done()
				return nil, ctx.Err()
			case "notready":
				all = append(all, nodetest.Sandbox(id, cri.PodSandboxState_SANDBOX_NOTREADY))
			case "many":
				for i := range 1000 {
					s := nodetest.Sandbox(fmt.Sprintf("many-%d", i), cri.PodSandboxState_SANDBOX_READY)
					s.Annotations = map[string]string{"kubectl.kubernetes.io/last-applied-configuration": strings.Repeat("x", 8<<10)}
					all = append(all, s)
				}
			default:
				all = append(all, nodetest.Sandbox(id, cri.PodSandboxState_SANDBOX_READY))
			}
		}
		return all, nil
	})
}

func (n *scripted) wantEnd(code string) {
	n.Helper()
	if got := n.agent.wait(sandbox.Patience); fmt.Sprint(got) != code {
		n.Fatalf("exit code %d", got)
	}
}
