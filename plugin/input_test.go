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
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
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
	if errors.As(err, &exit) && exit.ExitCode() < 0 && (n.mayDie || in.mute) {
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

// give runs a verb of unwind with an input that no runtime would give: "give VERB POD [NAME=VALUE …]". A
// name in capitals is a variable of the environment, another one a key of unwind's entry; without a
// value, it is absent. varLib=DIR is /var/lib to it, first=COMMANDS are a shell's before it. $result is
// that of an ADD.
func (s *story) give(w []string) (rest []string, err error) {
	s.Helper()
	p, changes := s.who(w[1]), keys{}
	in := p.input(strings.ToUpper(w[0]), "")
	for _, v := range w[2:] {
		name, text, _ := strings.Cut(v, "=")
		switch {
		case !assignment.MatchString(v) || name == "code":
			rest = append(rest, v)
		case name == "varLib":
			in.varLib = text
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
	if in.varLib == "" {
		in.more = s.env // where libcni's cache is
	}
	in.stdin = s.entryOf(fmt.Sprintf(`{"cniVersion": %q, "plugins": [%s]}`, s.inner, strings.Join(s.plugins(s.node), ", ")), changes)
	if s.said = s.node.start(in); s.said.code != 0 {
		return rest, &s.said.said
	}
	if w[0] == "add" {
		s.vars["result"] = s.said.stdout
	}
	return rest, nil
}

var assignment = regexp.MustCompile(`^[\w./-]+=`)

// TestRefused: each verb refuses an input that it cannot work with, with a code and a message that says
// what is wrong. It starts nothing, makes no file except the history of an ADD whose chain cannot start,
// and shows no configuration. Then the DEL of the pod with its right input passes, since there is
// nothing to undo.
func TestRefused(t *testing.T) {
	t.Parallel()
	const all, every = "ADD CHECK DEL", "ADD CHECK DEL GC STATUS"
	type env = map[string]string
	type refused struct {
		name, verbs string
		given       any // keys of the entry; env, "" if absent; or a string, the whole input
		code        uint
		msg         string // "": any
	}
	chain := func(plugins string) keys { return keys{"chain": json.RawMessage(`{"plugins": [` + plugins + `]}`)} }
	table := []refused{
		{"no chain", "ADD STATUS", keys{"chain": nil}, 7,
			`unwind: neither "chain" nor "chainFile" is set; put the plugins to run into "chain": {"plugins": [...]}`},
		{"unwind in unwind", "ADD STATUS", chain(`{"type": "unwind"}`), 7,
			`unwind: key "chain": plugins[0]: key "type": unwind cannot run inside itself; list the plugins of its chain here`},
		{"chainFile gone", "ADD STATUS", keys{"chain": nil, "chainFile": "/none"}, 7,
			`unwind: chainFile /none: no such file or directory; the network's provider has not written it, or has removed it`},
		{"two wrong keys", "ADD STATUS", keys{"gracePeriod": "abc", "stateDir": "state"}, 7,
			`unwind: key "gracePeriod": "abc" is not a duration such as "30s" or "10m"; key "stateDir": "state" is not an absolute path`},
		{"a list that is none", "GC", keys{validKey: keys{}}, 7,
			`unwind: key "cni.dev/valid-attachments": expected a JSON list of {"containerID": "…", "ifname": "…"}: an object, not a list`},
		{"a list that is none beside one", "GC", keys{slipKey: []keys{{"containerID": "a"}}, validKey: []string{}}, 7,
			`unwind: key "cni.dev/attachments": element 0 lacks "containerID" or "ifname"`},
		{"a previous plugin", "ADD", keys{"prevResult": keys{}}, 7,
			`unwind: prevResult is set, but unwind must be the first plugin of the list; move the plugins before it into "chain"`},
		{"5 MB", "ADD", keys{"args": keys{"x": strings.Repeat("s3cret  ", 5<<17)}}, 7,
			`unwind: the configuration is too large: SIZE bytes; at most 4194304 are allowed`},

		// skel's own words, as in every plugin.
		{"no name", "ADD", keys{"name": nil}, 7, `missing network name`},
		{"a name that is not UTF-8", "ADD", keys{"name": json.RawMessage("\"\xff\"")}, 7, `invalid characters found in network name`},
		{"a name that is a number", "ADD", keys{"name": 5}, 6,
			`error unmarshall network config: json: cannot unmarshal number into Go struct field .name of type string`},
		{"a version of the future", "ADD", keys{"cniVersion": "2.0.0"}, 1, `incompatible CNI versions`},

		// skel checks the last name in any case, unwind uses the last one in lower case.
		{"NAME and name", "ADD", `{"NAME": "good", "name": "../x", ENTRY`, 7, ``},
		{"name and NAME", "ADD", `{"name": "../x", "NAME": "good", ENTRY`, 7, ``},
		{"three names", "ADD", `{"name": "../x", "name": "good", "nAme": "../y", ENTRY`, 7, ``},

		{"nothing", all, ``, 6, ``},
		{"text", all, `s3cret`, 6, ``},
		{"cut off", all, `{"cniVersion": "1.0.0", "name": "podnet", "password": "s3cret`, 6, ``},
		{"more after it", all, `{"cniVersion": "1.0.0", "name": "podnet"} s3cret`, 6, ``},
		{"too deep", all, `{"name": "podnet", "x": ` + strings.Repeat(`[`, 20000) + strings.Repeat(`]`, 20000) + `}`, 6, ``},
		{"5 MB of a string", all, `"` + strings.Repeat("s3cret  ", 5<<17), 6, ``},

		{"a delegate is missing", "ADD", chain(`{"type": "faulty"}, {"type": "gone"}`), 50,
			`plugin type="gone" failed (add): failed to find plugin "gone" in path [PATH]; unwind: nothing was started`},
		{"an IPAM plugin is missing", "ADD", chain(`{"type": "faulty"}, {"type": "bridge", "ipam": {"type": "gone"}}`), 50,
			`plugin type="gone" failed (add): failed to find plugin "gone" in path [PATH]; unwind: nothing was started`},

		{"no container ID", all, env{"CNI_CONTAINERID": ""}, 4, `required env variables [CNI_CONTAINERID] missing`},
		{"no interface", all, env{"CNI_IFNAME": ""}, 4, `required env variables [CNI_IFNAME] missing`},
		{"no path", all, env{"CNI_PATH": ""}, 4, `required env variables [CNI_PATH] missing`},
		{"no netns", "ADD CHECK", env{"CNI_NETNS": ""}, 4, `required env variables [CNI_NETNS] missing`},
		{"no variable", "ADD", env{"CNI_CONTAINERID": "", "CNI_NETNS": "", "CNI_IFNAME": "", "CNI_PATH": ""}, 4,
			`required env variables [CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH] missing`},
		{"another command", "UNDO", env{}, 4, `unknown CNI_COMMAND: UNDO`},
		{"a container ID that is a path", all, env{"CNI_CONTAINERID": "../../../etc/x"}, 4, `invalid characters in containerID`},
		{"a container ID of two lines", all, env{"CNI_CONTAINERID": "a\nb"}, 4, `invalid characters in containerID`},
		{"a container ID that is not UTF-8", all, env{"CNI_CONTAINERID": "a\xff"}, 4, `invalid characters in containerID`},
		{"an interface that is a path", all, env{"CNI_IFNAME": "../x"}, 4, `interface name contains / or : or whitespace characters`},
		{"an interface that is a parent", all, env{"CNI_IFNAME": ".."}, 4, `interface name is . or ..`},
		{"an interface with a long name", all, env{"CNI_IFNAME": "sixteen-bytes-it"}, 4, `interface name is too long`},
		{"an interface that is not UTF-8", "ADD", env{"CNI_IFNAME": "eth\xff"}, 4,
			`unwind: CNI_IFNAME is not valid UTF-8, so the journal cannot store it for the DEL`},
		{"arguments that are not UTF-8", "ADD", env{"CNI_ARGS": "K8S_POD_NAME=\xff"}, 4,
			`unwind: CNI_ARGS is not valid UTF-8, so the journal cannot store it for the DEL`},
		{"a path of a netns that is not UTF-8", "ADD", env{"CNI_NETNS": "/run/netns/\xff"}, 4,
			`unwind: CNI_NETNS is not valid UTF-8, so the journal cannot store it for the DEL`},
		{"the runtime's own netns", "ADD", env{"CNI_NETNS": "/proc/self/ns/net"}, 8, `unwind: CNI_NETNS is the runtime's own network namespace; set it to the container's`},
	}
	for _, name := range []string{"../x", "a/b", "..", ".", "a\x00b", "a\nb", " ", "-", "\u2028", "a\u202eb"} {
		table = append(table, refused{fmt.Sprintf("name %q", name), every, keys{"name": name}, 7, `invalid characters found in network name`})
	}
	recorded := []string{"no chain", "unwind in unwind", "chainFile gone", "a delegate is missing", "an IPAM plugin is missing"}
	for _, tt := range table {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			n.outer = "1.1.0"
			p, right := n.pod("a"), `{"plugins": [`+n.faulty("p0", "")+`]}`
			for _, command := range strings.Fields(tt.verbs) {
				in, code := p.input(command, n.entryOf(right, nil)), tt.code
				switch given := tt.given.(type) {
				case keys:
					in.stdin = n.entryOf(right, given)
				case env:
					maps.Copy(in.env, given)
					maps.DeleteFunc(in.env, func(_, v string) bool { return v == "" })
				case string:
					in.stdin = strings.Replace(given, "ENTRY", n.entryOf(right, keys{"name": nil})[1:], 1)
				}
				if command == "STATUS" && strings.HasPrefix(tt.msg, "unwind: ") {
					code = 50
				}
				want := strings.NewReplacer("[PATH]", fmt.Sprint(n.path), "SIZE", fmt.Sprint(len(in.stdin))).Replace(tt.msg)
				out := n.start(in)
				if out.said.Code != code || tt.msg != "" && out.said.Msg != want {
					t.Errorf("%s: exit %d,\n     code %d, %s\nwant code %d, %s", command, out.code, out.said.Code, out.said.Msg, code, want)
				}
				if strings.Contains(out.stdout+out.stderr, "s3cret") {
					t.Errorf("%s shows the configuration", command)
				}
				if events, err := n.store.History(); command == "ADD" && slices.Contains(recorded, tt.name) {
					if err != nil || len(events) != 1 || events[0].Kind != journal.RolledBack || events[0].Reason != want ||
						events[0].Key != (journal.Key{Network: n.network, ContainerID: p.ContainerID, IfName: p.IfName}) ||
						strings.Contains(tt.name, "missing") != slices.Equal(events[0].Plugins, []string{"gone"}) {
						t.Errorf("history: %+v, %v", events, err)
					}
					for _, name := range []string{"history.jsonl", "locks", ""} { // there is nothing else
						if err := os.Remove(filepath.Join(n.stateDir, name)); err != nil {
							t.Error(err)
						}
					}
				}
				n.untouched()
			}
			if out := n.start(p.input("DEL", n.entryOf(right, nil))); out.code != 0 {
				t.Errorf("DEL: %s", out.stdout)
			}
			n.nothingLeft()
		})
	}
}

// TestOddInput: odd but valid input reaches the delegates at ADD, and the same at DEL.
func TestOddInput(t *testing.T) {
	t.Parallel()
	much := map[string]string{} // nearly as much as the kernel allows
	for i := range 15 {
		much[fmt.Sprint("MUCH", i)] = strings.Repeat("x", 127<<10)
	}
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
		{"much environment", ``, much},
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
			if entries := n.entries(); len(entries) != 1 || entries[0].State != journal.Live || entries[0].IfName != add.env["CNI_IFNAME"] || len(n.taken()) != 1 {
				t.Errorf("the journal has %d entries, taken %v", len(entries), n.taken())
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
// same. It warns of a key, unless the journal has what it says.
func TestBrokenKeysAtDEL(t *testing.T) {
	stories(t, `
	chain p0; give add a; taken a.eth0.p0; big; let warns 1
	either gracePeriod: let edit gracePeriod=abc
	or delegateTimeout: let edit delegateTimeout=-1
	or onDelFailure: let edit onDelFailure=Defer
	or onJournalFailure: let edit onJournalFailure={}
	or logLevel: let edit logLevel=7
	or logFile: let edit logFile=relative
	or logFile in no folder: let edit logFile=/no/such/folder/log
	or capabilities: let edit capabilities=["ips"]
	or runtimeConfig: let edit runtimeConfig="x"
	or unknown keys: let edit who="knows"
	or 5 MB: let edit args={"x":"$big"}
	or journaled prevResult: let edit prevResult="x"
	or journaled, a result that is none: let edit prevResult={"cniVersion":"7.0.0","ips":1}
	or journaled, no chain: let edit chain=
	or journaled, a chain that is none: let edit chain=5
	or journaled, two chains: let edit chainFile=/x
	or journaled, another name in the chain: let edit chain={"name":"other"}
	or journaled, unwind in unwind: let edit chain={"plugins":[{"type":"unwind"}]}
	if journaled: let warns 0
	give del a $edit; warned level=WARN $warns`, acts{
		"big": func(s *story, _ []string) { s.vars["big"] = strings.Repeat("x", 5<<20) }})
}

// TestStateDirAtDEL: stateDir is broken, so that the DEL does not find the journal. The DEL uses
// what the runtime gives, in the default directory. The entry in the right directory stays until a
// DEL names it.
func TestStateDirAtDEL(t *testing.T) {
	stories(t, `
	chain p0; give add a; taken a.eth0.p0
	either relative: let edit stateDir=relative/state
	or a number: let edit stateDir=5
	or a device: let edit stateDir=/dev/null
	or not to be made: let edit stateDir=/proc/none
	or absent: let edit stateDir=
	give del a $edit 'prevResult=$result' varLib=$dir/varlib; taken; entry a live
	give del a`)
}

// TestWarnings: a problem that is no error is logged, with what to do about it.
func TestWarnings(t *testing.T) {
	stories(t, `
	chain p0, "capabilities": {"ips": true, "portMappings": true, "mac": true}
	either unknown keys: let edit statedir=/x
		let says 'msg="unknown key \"statedir\" has no effect; keys for a plugin belong in its entry of the chain"'
	or capabilities that do not arrive: let edit capabilities={"mac":true}
		let says add="\"capabilities\": {\"ips\": true, \"portMappings\": true}"
	or a log that cannot be written: let edit logFile=/no/such/folder/log
		let says 'msg="key \"logFile\": open /no/such/folder/log: no such file or directory; logging to stderr"'
	give add a $edit; warned 'level=WARN' 1; warned '$says' 1
	give del a $edit`)
}

// TestVERSION: VERSION touches no file, whatever its configuration says, and does not wait for one.
func TestVERSION(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd := exec.Command(filepath.Join(n.path[0], netconf.Name))
	cmd.Env, cmd.Stdin = []string{"CNI_COMMAND=VERSION", "GORACE=" + os.Getenv("GORACE")}, r
	timer := time.AfterFunc(30*time.Second, func() { w.Close() })
	out, err := cmd.Output()
	if err != nil || !timer.Stop() {
		t.Fatalf("%v: it failed, or waited for its input", err)
	}
	info, err := (&version.PluginDecoder{}).Decode(out)
	if err != nil || !slices.Equal(version.All.SupportedVersions(), info.SupportedVersions()) {
		t.Errorf("%s, %v", out, err)
	}
	in := &input{env: map[string]string{"CNI_COMMAND": "VERSION"}, stdin: n.entryOf(`{"plugins": []}`, keys{"logFile": n.stateDir + "/log"})}
	if again := n.start(in); again.stdout != string(out) {
		t.Errorf("with a configuration: %s", again.stdout)
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
		{"10 KB and pending", cniError(11, strings.Repeat("long ", 2000), "ask later"), cniError(42, "not now", ""), 11, `long long`, ``, `…` + pending},
		// Three bytes less than the bound, with details: they have no room, not even for an
		// ellipsis.
		{"as much as fits", cniError(11, strings.Repeat("x", maxMessage-3-len(`plugin type="words" failed (add): `)), "ask later"), ``,
			11, `xxx`, ``, `xxx`},
		{"not UTF-8", "{\"code\": 11, \"msg\": \"\xff\xfe" + strings.Repeat("\xff", 2000) + "\"}", ``, 11, "\ufffd\ufffd", ``, `…`},
		{"characters of several bytes", cniError(11, strings.Repeat("é€😀", 200), strings.Repeat("é", 500)), cniError(42, "é", ""), 11, `é€😀é€😀`, ``, `…` + pending},
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
				if e := p.entry(); e == nil || len(e.Steps) != 1 {
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
			e := &journal.Entry{}
			for i := range steps {
				e.Steps = append(e.Steps, journal.Step{Index: i, Type: "some-plugin", Last: "x", Code: 11})
			}
			for length := range 1100 {
				f := &delegate.Failure{Plugin: "p", Command: "ADD", Code: 11, Msg: strings.Repeat(letter, length), Details: strings.Repeat(letter, 1100-length)}
				lost := map[bool]error{true: errors.New(strings.Repeat("cause ", 100))}[length%2 == 1]
				err := addError(f, e, lost)
				if len(err.Error()) > maxMessage || err.Code != 11 || !strings.HasPrefix(err.Msg, `plugin type="p" failed (add): `) {
					t.Fatalf("%d × %q, %d steps: code %d, %d bytes: %s", length, letter, steps, err.Code, len(err.Error()), err)
				}
				pending := strings.Contains(err.Msg, "pending DEL: some-plugin (code 11)")
				unrecorded := strings.Contains(err.Msg, "(code 11), which the journal cannot record: cause ")
				if short := len(letter) == 1 && steps < 2; short && (pending != (steps == 1) || unrecorded != (pending && lost != nil)) {
					t.Fatalf("%d × %q, %d steps: %s", length, letter, steps, err)
				}
			}
		}
	}
}
