package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/netconf"
)

// input is what unwind gets from a runtime or another caller. Tests give it directly, since libcni
// would refuse some of it.
type input struct {
	env    map[string]string
	stdin  string
	varLib string   // a directory to mount as /var/lib, where the default stateDir is
	more   []string // more environment, as name=value, after env; duplicates stay
	first  string   // a shell's commands in a mount namespace, before unwind
	mute   bool     // nobody reads stdout
}

// input returns the pod's input for a command, with unwind's entry in a list.
func (p *pod) input(command string, entry string) *input {
	return &input{
		env: map[string]string{
			"CNI_COMMAND": command, "CNI_CONTAINERID": p.ContainerID, "CNI_NETNS": p.NetNS, "CNI_IFNAME": p.IfName,
			"CNI_PATH": strings.Join(p.path, ":"),
		},
		stdin: entry,
	}
}

// outcome is what a runtime gets back. said is the CNI error on stdout, if any.
type outcome struct {
	code   int
	stdout string
	stderr string
	said   types.Error
}

// start runs unwind with an input. If it fails, stdout must be a CNI error within unwind's bounds.
func (n *node) start(in *input) (out outcome) {
	n.Helper()
	n.seeConfiguration([]byte(in.stdin))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	binary := filepath.Join(n.path[0], netconf.Name)
	cmd := exec.CommandContext(ctx, binary)
	if in.varLib != "" {
		cmd = exec.CommandContext(ctx, "/bin/sh", "-c", `mount --bind "$0" /var/lib && exec "$1"`, in.varLib, binary)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	}
	if in.first != "" {
		cmd = exec.CommandContext(ctx, "/bin/sh", "-c", in.first+` && exec "$0"`, binary)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	}
	for name, value := range in.env {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Env = append(cmd.Env, in.more...)
	cmd.Env = append(cmd.Env, "PATH="+os.Getenv("PATH"), "GORACE="+os.Getenv("GORACE"))
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(in.stdin), &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() < 0 && n.mayDie {
		return outcome{code: -1, stderr: stderr.String()}
	}
	if err != nil && (!errors.As(err, &exit) || exit.ExitCode() != 1) {
		n.Fatalf("%v\n%s", err, stderr.String())
	}
	out = outcome{code: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
	if out.code != 0 && !in.mute {
		if err := json.Unmarshal(stdout.Bytes(), &out.said); err != nil || out.said.Code == 0 || out.said.Msg == "" {
			n.Errorf("stdout is not a CNI error (%v): %q", err, out.stdout)
		}
		if text := out.said.Error(); len(text) > maxMessage {
			n.Errorf("the error has %d bytes", len(text))
		}
	}
	return out
}

// entryOf returns unwind's entry in a list, as libcni would give it on stdin, with changes; a nil
// value removes its key.
func (n *node) entryOf(chain string, changes map[string]any) string {
	n.Helper()
	entry := map[string]any{
		"cniVersion": n.outer, "name": n.network, "type": netconf.Name, "stateDir": n.stateDir, "chain": json.RawMessage(chain),
	}
	maps.Copy(entry, n.conf)
	maps.Copy(entry, changes)
	maps.DeleteFunc(entry, func(_ string, v any) bool { return v == nil })
	return string(netconf.Marshal(entry))
}

// untouched checks that nothing was started and that nothing is on the disk, not even an empty
// journal.
func (n *node) untouched() {
	n.Helper()
	if calls := n.calls(); len(calls) > 0 {
		n.Errorf("delegates were started: %v", calls)
	}
	if _, err := os.Lstat(n.stateDir); !os.IsNotExist(err) {
		n.Errorf("stateDir was made (%v)", err)
	}
}

// TestBadConfiguration: an ADD with any kind of wrong configuration is refused with a code and a
// message that says what is wrong, and takes nothing. Then the runtime's DEL of the pod passes,
// since there is nothing to undo.
func TestBadConfiguration(t *testing.T) {
	t.Parallel()
	type keys = map[string]any
	nested := func(plugin string) keys { return keys{"chain": json.RawMessage(`{"plugins": [` + plugin + `]}`)} }
	for _, tt := range []struct {
		name    string
		changes keys
		code    uint
		msg     string
	}{
		{"no chain", keys{"chain": nil}, 7, `unwind: neither "chain" nor "chainFile" is set; put the plugins to run into "chain": {"plugins": [...]}`},
		{"two chains", keys{"chainFile": "/etc/x"}, 7, `unwind: "chain" and "chainFile" are both set; keep one`},
		{"an empty chain", nested(``), 7, `unwind: key "chain": key "plugins" is empty; put the plugins to run there`},
		{"unwind in unwind", nested(`{"type": "unwind"}`), 7,
			`unwind: key "chain": plugins[0]: key "type": unwind cannot run inside itself; list the plugins of its chain here`},
		{"unwind as IPAM", nested(`{"type": "faulty", "ipam": {"type": "unwind"}}`), 7,
			`unwind: key "chain": plugins[0]: key "ipam.type": unwind cannot run inside itself; list the plugins of its chain here`},
		{"a path as type", nested(`{"type": "/bin/sh"}`), 7, `unwind: key "chain": plugins[0]: key "type": "/bin/sh" is not a plugin name`},
		{"another name", keys{"chain": json.RawMessage(`{"name": "other", "plugins": [{"type": "faulty"}]}`)}, 7,
			`unwind: key "chain": key "name" is "other", but the network is "NET"; they must be the same, because plugins keep ` +
				`addresses and rules under that name`},
		{"two wrong keys", keys{"gracePeriod": "abc", "stateDir": "state"}, 7,
			`unwind: key "gracePeriod": "abc" is not a duration such as "30s" or "10m"; key "stateDir": "state" is not an absolute path`},
		{"a previous plugin", keys{"prevResult": keys{}}, 7,
			`unwind: prevResult is set: unwind must be the first plugin of the list; move the plugins before it into "chain"`},
		{"5 MB", keys{"args": keys{"x": strings.Repeat("s3cret  ", 5<<17)}}, 7, `unwind: the configuration is too large: SIZE bytes, more than 4194304`},

		// skel's own words, as in every plugin.
		{"no name", keys{"name": nil}, 7, `missing network name`},
		{"a name that is a path", keys{"name": "../../etc"}, 7, `invalid characters found in network name`},
		{"a name that is not UTF-8", keys{"name": json.RawMessage("\"\xff\"")}, 7, `invalid characters found in network name`},
		{"a name that is a number", keys{"name": 5}, 6,
			`error unmarshall network config: json: cannot unmarshal number into Go struct field .name of type string`},
		{"a version of the future", keys{"cniVersion": "2.0.0"}, 1, `incompatible CNI versions`},

		{"a delegate is missing", nested(`{"type": "faulty"}, {"type": "gone"}`), 50,
			`plugin type="gone" failed (add): failed to find plugin "gone" in path [PATH]; unwind: nothing was started`},
		{"an IPAM plugin is missing", nested(`{"type": "faulty"}, {"type": "bridge", "ipam": {"type": "gone"}}`), 50,
			`plugin type="gone" failed (add): failed to find plugin "gone" in path [PATH]; unwind: nothing was started`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			chain := `{"plugins": [` + n.faulty("p0", "") + `]}`
			p := n.pod("a")
			in := p.input("ADD", n.entryOf(chain, tt.changes))
			out := n.start(in)
			want := strings.NewReplacer("NET", n.network, "PATH", strings.Join(n.path, " "), "SIZE", fmt.Sprint(len(in.stdin))).Replace(tt.msg)
			if out.said.Code != tt.code || out.said.Msg != want {
				t.Errorf("ADD: exit %d,\n     code %d, %s\nwant code %d, %s", out.code, out.said.Code, out.said.Msg, tt.code, want)
			}
			if strings.Contains(out.stdout+out.stderr, "s3cret") {
				t.Error("the configuration is shown")
			}
			n.untouched()
			if out := n.start(p.input("DEL", n.entryOf(chain, nil))); out.code != 0 {
				t.Errorf("DEL: %s", out.stdout)
			}
			n.nothingLeft()
		})
	}
}

// TestNoJSON: skel refuses input that is not JSON.
func TestNoJSON(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, stdin string }{
		{"nothing", ``},
		{"text", `s3cret`},
		{"cut off", `{"cniVersion": "1.0.0", "name": "podnet", "password": "s3cret`},
		{"more after it", `{"cniVersion": "1.0.0", "name": "podnet"} s3cret`},
		{"too deep", `{"name": "podnet", "x": ` + strings.Repeat(`[`, 20000) + strings.Repeat(`]`, 20000) + `}`},
		{"5 MB of a string", `"` + strings.Repeat("s3cret  ", 5<<17)},
	} {
		for _, command := range []string{"ADD", "DEL", "CHECK"} {
			t.Run(command+" "+tt.name, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				out := n.start(n.pod("a").input(command, tt.stdin))
				if out.said.Code != types.ErrDecodingFailure || strings.Contains(out.stdout+out.stderr, "s3cret") {
					t.Errorf("exit %d: %s", out.code, out.stdout)
				}
				n.untouched()
			})
		}
	}
}

// TestBadEnvironment runs ADD, DEL and CHECK with missing or hostile variables. None of them
// becomes part of a path.
func TestBadEnvironment(t *testing.T) {
	t.Parallel()
	all := []string{"ADD", "DEL", "CHECK"}
	for _, tt := range []struct {
		name     string
		commands []string
		env      map[string]string // "": not set
		code     uint
		msg      string
	}{
		{"no container ID", all, map[string]string{"CNI_CONTAINERID": ""}, 4, `required env variables [CNI_CONTAINERID] missing`},
		{"no interface", all, map[string]string{"CNI_IFNAME": ""}, 4, `required env variables [CNI_IFNAME] missing`},
		{"no path", all, map[string]string{"CNI_PATH": ""}, 4, `required env variables [CNI_PATH] missing`},
		{"no netns", []string{"ADD", "CHECK"}, map[string]string{"CNI_NETNS": ""}, 4, `required env variables [CNI_NETNS] missing`},
		{"nothing", []string{"ADD"}, map[string]string{"CNI_CONTAINERID": "", "CNI_NETNS": "", "CNI_IFNAME": "", "CNI_PATH": ""}, 4,
			`required env variables [CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH] missing`},
		{"another command", []string{"UNDO"}, nil, 4, `unknown CNI_COMMAND: UNDO`},
		{"a container ID that is a path", all, map[string]string{"CNI_CONTAINERID": "../../../etc/x"}, 4, `invalid characters in containerID`},
		{"a container ID of two lines", all, map[string]string{"CNI_CONTAINERID": "a\nb"}, 4, `invalid characters in containerID`},
		{"a container ID that is not UTF-8", all, map[string]string{"CNI_CONTAINERID": "a\xff"}, 4, `invalid characters in containerID`},
		{"an interface that is a path", all, map[string]string{"CNI_IFNAME": "../x"}, 4, `interface name contains / or : or whitespace characters`},
		{"an interface that is a parent", all, map[string]string{"CNI_IFNAME": ".."}, 4, `interface name is . or ..`},
		{"an interface with a long name", all, map[string]string{"CNI_IFNAME": "sixteen-bytes-it"}, 4, `interface name is too long`},
		{"an interface that is not UTF-8", []string{"ADD"}, map[string]string{"CNI_IFNAME": "eth\xff"}, 4,
			`unwind: CNI_IFNAME is not valid UTF-8, so the journal cannot keep it for the DEL`},
		{"arguments that are not UTF-8", []string{"ADD"}, map[string]string{"CNI_ARGS": "K8S_POD_NAME=\xff"}, 4,
			`unwind: CNI_ARGS is not valid UTF-8, so the journal cannot keep it for the DEL`},
		{"a path of a netns that is not UTF-8", []string{"ADD"}, map[string]string{"CNI_NETNS": "/run/netns/\xff"}, 4,
			`unwind: CNI_NETNS is not valid UTF-8, so the journal cannot keep it for the DEL`},
		{"the runtime's own netns", []string{"ADD"}, map[string]string{"CNI_NETNS": "/proc/self/ns/net"}, 8,
			`unwind: CNI_NETNS is the runtime's own network namespace`},
	} {
		for _, command := range tt.commands {
			t.Run(command+" "+tt.name, func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				in := n.pod("a").input(command, n.entryOf(`{"plugins": [`+n.faulty("p0", "")+`]}`, nil))
				maps.Copy(in.env, tt.env)
				maps.DeleteFunc(in.env, func(_, v string) bool { return v == "" })
				if out := n.start(in); out.said.Code != tt.code || out.said.Msg != tt.msg {
					t.Errorf("exit %d,\n     code %d, %s\nwant code %d, %s", out.code, out.said.Code, out.said.Msg, tt.code, tt.msg)
				}
				n.untouched()
			})
		}
	}
}

// TestOddInput: odd but valid input reaches the delegates at ADD, and the same at DEL.
func TestOddInput(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		extra string // in the delegate
		env   map[string]string
	}{
		{"64 levels", `, "deep": ` + strings.Repeat(`{"a":[`, 32) + strings.Repeat(`]}`, 32), nil},
		{"not UTF-8", ", \"bytes\": \"\xff\xfe\x80\"", nil},
		{"characters that JSON encoders change", `, "text": "<&>\u2028\ud800\u0000\/"`, nil},
		{"numbers", `, "n": [1e400, 12345678901234567890, -0, 1.10]`, nil},
		{"a key twice", `, "k": 1, "k": 2`, nil},
		{"3 MB", `, "big": "` + strings.Repeat("x", 3<<20) + `"`, nil},
		// The kernel takes no variable of more than 128 KiB.
		{"much CNI_ARGS", ``, map[string]string{"CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAME=a;X=" + strings.Repeat("y", 127<<10)}},
		{"a pod's name as no pod has one", ``, map[string]string{"CNI_ARGS": "K8S_POD_NAME=" + strings.Repeat("y", 127<<10)}},
		{"a long container ID", ``, map[string]string{"CNI_CONTAINERID": strings.Repeat("c", 230)}},
		{"an odd interface", ``, map[string]string{"CNI_IFNAME": "<é\x01\"%s>"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := n.pod("a")
			entry := `{"cniVersion": "1.0.0", "name": "` + n.network + `", "type": "unwind", "stateDir": "` + n.stateDir +
				`", "chain": {"plugins": [` + n.faulty("p0", tt.extra) + `]}}`
			add, del := p.input("ADD", entry), p.input("DEL", entry)
			maps.Copy(add.env, tt.env)
			maps.Copy(del.env, tt.env)
			if out := n.start(add); out.code != 0 || strings.Contains(out.stderr, "level=") {
				t.Fatalf("ADD: %s\n%s", out.stdout, out.stderr)
			}
			if entries := n.entries(); len(entries) != 1 || entries[0].State != journal.Live || entries[0].IfName != add.env["CNI_IFNAME"] {
				t.Errorf("the journal has %d entries", len(entries))
			}
			del.stdin = n.entryOf(`{"plugins": [`+n.faulty("other", "")+`]}`, nil)
			delete(del.env, "CNI_ARGS")
			if out := n.start(del); out.code != 0 {
				t.Fatalf("DEL: %s\n%s", out.stdout, out.stderr)
			}
			calls := n.callLog()
			if len(calls) != 2 || calls[0].Command != "ADD" || calls[1].Command != "DEL" {
				t.Fatalf("calls: %v", n.calls())
			}
			delete(calls[1].Stdin, "prevResult")
			for key, value := range calls[0].Stdin {
				if got := calls[1].Stdin[key]; !bytes.Equal(value, got) {
					t.Errorf("key %q: %.100q at ADD, %.100q at DEL", key, value, got)
				}
			}
			if calls[0].Args != calls[1].Args || calls[0].Args != add.env["CNI_ARGS"] || len(calls[0].Stdin) != len(calls[1].Stdin) {
				t.Errorf("the DEL got other arguments, or other keys: %.200q", calls[1].Args)
			}
			n.nothingLeft()
		})
	}
}

// TestBrokenKeysAtDEL: an edit of the configuration breaks a pod's network. Its DEL passes all the
// same.
func TestBrokenKeysAtDEL(t *testing.T) {
	t.Parallel()
	type keys = map[string]any
	for _, tt := range []struct {
		name    string
		changes keys
	}{
		{"gracePeriod", keys{"gracePeriod": "abc"}},
		{"delegateTimeout", keys{"delegateTimeout": -1}},
		{"onDelFailure", keys{"onDelFailure": "Defer"}},
		{"onJournalFailure", keys{"onJournalFailure": keys{}}},
		{"logLevel", keys{"logLevel": 7}},
		{"logFile", keys{"logFile": "relative"}},
		{"logFile in no folder", keys{"logFile": "/no/such/folder/log"}},
		{"capabilities", keys{"capabilities": []string{"ips"}}},
		{"runtimeConfig", keys{"runtimeConfig": "x"}},
		{"prevResult", keys{"prevResult": "x"}},
		{"a result that is none", keys{"prevResult": keys{"cniVersion": "7.0.0", "ips": 1}}},
		{"no chain", keys{"chain": nil}},
		{"a chain that is none", keys{"chain": 5}},
		{"two chains", keys{"chainFile": "/x"}},
		{"another name in the chain", keys{"chain": keys{"name": "other"}}},
		{"unwind in unwind", keys{"chain": keys{"plugins": []keys{{"type": "unwind"}}}}},
		{"unknown keys", keys{"who": "knows"}},
		{"5 MB", keys{"args": keys{"x": strings.Repeat("x", 5<<20)}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			chain := `{"plugins": [` + n.faulty("p0", "") + `]}`
			p := n.pod("a")
			if out := n.start(p.input("ADD", n.entryOf(chain, nil))); out.code != 0 || len(n.taken()) != 1 {
				t.Fatalf("ADD: %s", out.stdout)
			}
			out := n.start(p.input("DEL", n.entryOf(chain, tt.changes)))
			if out.code != 0 {
				t.Errorf("DEL: %s", out.stdout)
			}
			key := slices.Collect(maps.Keys(tt.changes))[0]
			// The journal has these.
			used := !slices.Contains([]string{"chain", "chainFile", "prevResult"}, key)
			if used != strings.Contains(out.stderr, "level=WARN") {
				t.Errorf("a warning of the key %q: want %t, got %s", key, used, out.stderr)
			}
			n.nothingLeft()
		})
	}
}

// TestStateDirAtDEL: stateDir is broken, so that the DEL does not find the journal. The DEL uses
// what the runtime gives, in the default directory. The entry in the right directory stays until a
// DEL names it.
func TestStateDirAtDEL(t *testing.T) {
	t.Parallel()
	for _, stateDir := range []any{"relative/state", 5, "/dev/null", "/proc/none", nil} {
		t.Run(fmt.Sprint(stateDir), func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			chain := `{"plugins": [` + n.faulty("p0", "") + `]}`
			p := n.pod("a")
			out := n.start(p.input("ADD", n.entryOf(chain, nil)))
			if out.code != 0 || len(n.taken()) != 1 {
				t.Fatalf("ADD: %s", out.stdout)
			}
			del := p.input("DEL", n.entryOf(chain, map[string]any{"stateDir": stateDir, "prevResult": json.RawMessage(out.stdout)}))
			del.varLib = filepath.Join(n.dir, "varlib")
			n.mkdir(del.varLib)
			if out := n.start(del); out.code != 0 || len(n.taken()) != 0 {
				t.Errorf("DEL: %s, %v", out.stdout, n.taken())
			}
			if out := n.start(p.input("DEL", n.entryOf(chain, nil))); out.code != 0 {
				t.Errorf("DEL with the right stateDir: %s", out.stdout)
			}
			n.nothingLeft()
		})
	}
}

// TestWarnings: a problem that is no error is logged, with what to do about it.
func TestWarnings(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		changes map[string]any
		want    string
	}{
		{"unknown keys", map[string]any{"statedir": "/x"},
			`level=WARN msg="unknown key \"statedir\" has no effect; keys for a delegate belong in its entry of the chain"`},
		{"capabilities that do not arrive", map[string]any{"capabilities": map[string]bool{"mac": true}},
			`write="\"capabilities\": {\"ips\": true, \"portMappings\": true}"`},
		{"a log that cannot be written", map[string]any{"logFile": "/no/such/folder/log"},
			`level=WARN msg="key \"logFile\": open /no/such/folder/log: no such file or directory; logging to stderr"`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			chain := `{"plugins": [` + n.faulty("p0", `, "capabilities": {"ips": true, "portMappings": true, "mac": true}`) + `]}`
			p := n.pod("a")
			for _, command := range []string{"ADD", "DEL"} {
				out := n.start(p.input(command, n.entryOf(chain, tt.changes)))
				if out.code != 0 || command == "ADD" && !strings.Contains(out.stderr, tt.want) {
					t.Errorf("%s: exit %d, log:\n%swant %s", command, out.code, out.stderr, tt.want)
				}
			}
			n.nothingLeft()
		})
	}
}

// TestVERSION: VERSION touches no file and does not wait for a configuration.
func TestVERSION(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	cmd := exec.Command(filepath.Join(n.path[0], netconf.Name))
	cmd.Env = []string{"CNI_COMMAND=VERSION", "GORACE=" + os.Getenv("GORACE")}
	cmd.Stdin = r
	timer := time.AfterFunc(30*time.Second, func() { w.Close() })
	out, err := cmd.Output()
	if err != nil || !timer.Stop() {
		t.Fatalf("%v: it failed, or waited for its input", err)
	}
	info, err := (&version.PluginDecoder{}).Decode(out)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(version.All.SupportedVersions(), info.SupportedVersions()); diff != "" {
		t.Errorf("(-libcni +unwind):\n%s", diff)
	}
	in := &input{env: map[string]string{"CNI_COMMAND": "VERSION"}, stdin: n.entryOf(`{"plugins": [`+n.faulty("p0", "")+`]}`,
		map[string]any{"logFile": filepath.Join(n.dir, "log")})}
	if again := n.start(in); again.stdout != string(out) {
		t.Errorf("with a configuration: %s", again.stdout)
	}
	if _, err := os.Lstat(filepath.Join(n.dir, "log")); !os.IsNotExist(err) {
		t.Errorf("logFile was made (%v)", err)
	}
	n.untouched()
}

// TestNoCommand starts unwind by hand: it says what it is, as every plugin does.
func TestNoCommand(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	out := n.start(&input{})
	if out.code != 0 || out.stdout != "" || !strings.HasPrefix(out.stderr, "unwind under test\nCNI protocol versions supported: 0.1.0, ") {
		t.Errorf("exit %d, stdout %q, stderr %q", out.code, out.stdout, out.stderr)
	}
	n.untouched()
}

// TestErrorOfADD: a delegate fails its ADD with every kind of message. unwind's error begins with
// the message, has the delegate's code and details, says which DELs are pending, and stays within
// its bounds (start checks that).
func TestErrorOfADD(t *testing.T) {
	t.Parallel()
	cniError := func(code int, msg, details string) string {
		return string(netconf.Marshal(map[string]any{"code": code, "msg": msg, "details": details}))
	}
	const pending = `; unwind: pending DEL: words (code 42)`
	for _, tt := range []struct {
		name, add, del string // what it prints when it fails; if del is "", DEL does not fail
		code           uint
		msg, details   string // how they begin
		end            string // how msg ends
	}{
		{"short", cniError(11, "no room", "ask later"), ``, 11, `no room`, `ask later`, `no room`},
		{"short and pending", cniError(11, "no room", "ask later"), cniError(42, "not now", "s3cret"), 11, `no room`, `ask later`, `no room` + pending},
		{"10 KB", cniError(11, strings.Repeat("long ", 2000), "ask later"), ``, 11, `long long`, ``, `…`},
		{"10 KB and pending", cniError(11, strings.Repeat("long ", 2000), "ask later"), cniError(42, "not now", ""), 11, `long long`, ``, `…` + pending},
		{"10 KB of details", cniError(11, "no room", strings.Repeat("long ", 2000)), ``, 11, `no room`, `long long`, `no room`},
		// Three bytes less than the bound, with details: they have no room, not even for an
		// ellipsis.
		{"as much as fits", cniError(11, strings.Repeat("x", maxMessage-3-len(`plugin type="words" failed (add): `)), "ask later"), ``,
			11, `xxx`, ``, `xxx`},
		{"not UTF-8", "{\"code\": 11, \"msg\": \"\xff\xfe" + strings.Repeat("\xff", 2000) + "\"}", ``, 11, "\ufffd\ufffd", ``, `…`},
		{"characters of several bytes", cniError(11, strings.Repeat("é€😀", 200), strings.Repeat("é", 500)), cniError(42, "é", ""), 11, `é€😀é€😀`, ``, `…` + pending},
		{"no code", `{"msg": "no code"}`, ``, 999, `no code`, ``, `no code`},
		{"no JSON", "\x00\xffoops", ``, 999, `netplugin failed but error parsing its diagnostic message "\x00\xffoops"`, ``, ``},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.script("words", `cat >/dev/null; cat "$0.$CNI_COMMAND" 2>/dev/null && exit 1; exit 0`)
			n.write(filepath.Join(n.path[0], "words.ADD"), tt.add)
			chain := `{"plugins": [` + n.faulty("p0", "") + `, {"type": "words"}]}`
			if tt.del != "" {
				n.write(filepath.Join(n.path[0], "words.DEL"), tt.del)
			}
			p := n.pod("a")
			out := n.start(p.input("ADD", n.entryOf(chain, nil)))
			msg, ok := strings.CutPrefix(out.said.Msg, `plugin type="words" failed (add): `)
			if !ok || out.said.Code != tt.code || !strings.HasPrefix(msg, tt.msg) || !strings.HasSuffix(msg, tt.end) {
				t.Errorf("code %d, %q", out.said.Code, out.said.Msg)
			}
			if !strings.HasPrefix(out.said.Details, tt.details) || tt.details == "" && out.said.Details != "" || strings.Contains(out.stdout, "s3cret") {
				t.Errorf("details %q", out.said.Details)
			}
			if tt.del != "" {
				if e := p.entry(); e == nil || e.Pending() != 1 {
					t.Errorf("the journal has %+v", e)
				}
				if err := os.Remove(filepath.Join(n.path[0], "words.DEL")); err != nil {
					t.Fatal(err)
				}
			}
			if out := n.start(p.input("DEL", n.entryOf(chain, nil))); out.code != 0 {
				t.Errorf("DEL: %s", out.stdout)
			}
			n.nothingLeft()
		})
	}
}

// TestErrorWithin: with messages, details and pending DELs of every length, an ADD's error stays
// within its bounds and keeps its beginning, whatever else has no room.
func TestErrorWithin(t *testing.T) {
	for _, letter := range []string{"x", "é", "\xff", "a\xffb"} {
		for _, steps := range []int{0, 1, 40} {
			e := &journal.Entry{Generations: []journal.Generation{{}}}
			for i := range steps {
				e.Generations[0].Steps = append(e.Generations[0].Steps, journal.Step{Index: i, Type: "some-plugin", State: journal.StepFailed, LastError: "x", LastCode: 11})
			}
			for length := range 1100 {
				f := &delegate.Failure{Plugin: "p", Command: "ADD", Code: 11, Msg: strings.Repeat(letter, length), Details: strings.Repeat(letter, 1100-length)}
				err := addError(f, e)
				if len(err.Error()) > maxMessage || err.Code != 11 || !strings.HasPrefix(err.Msg, `plugin type="p" failed (add): `) {
					t.Fatalf("%d × %q, %d steps: code %d, %d bytes: %s", length, letter, steps, err.Code, len(err.Error()), err)
				}
				if short := len(letter) == 1 && steps < 2; short && strings.Contains(err.Msg, "pending DEL: some-plugin (code 11)") != (steps == 1) {
					t.Fatalf("%d × %q, %d steps: %s", length, letter, steps, err)
				}
			}
		}
	}
}
