package plugin

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/version"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/sandbox"
)

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

		// skel checks the last name in any case, unwind uses the last one in lower case.
		{"NAME and name", "ADD", `{"NAME": "good", "name": "../x", ENTRY`, 7, ``},

		{"nothing", all, ``, 6, ``},
		{"cut off", all, `{"cniVersion": "1.0.0", "name": "podnet", "password": "s3cret`, 6, ``},
		{"too deep", all, `{"name": "podnet", "x": ` + strings.Repeat(`[`, 20000) + strings.Repeat(`]`, 20000) + `}`, 6, ``},

		{"a delegate is missing", "ADD", chain(`{"type": "faulty"}, {"type": "gone"}`), 50,
			`plugin type="gone" failed (add): failed to find plugin "gone" in path [PATH]; unwind: no plugin was started`},
		{"an IPAM plugin is missing", "ADD", chain(`{"type": "faulty"}, {"type": "bridge", "ipam": {"type": "gone"}}`), 50,
			`plugin type="gone" failed (add): failed to find plugin "gone" in path [PATH]; unwind: no plugin was started`},

		{"no netns", "ADD CHECK", env{"CNI_NETNS": ""}, 4, `required env variables [CNI_NETNS] missing`},
		{"no variable", "ADD", env{"CNI_CONTAINERID": "", "CNI_NETNS": "", "CNI_IFNAME": "", "CNI_PATH": ""}, 4,
			`required env variables [CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH] missing`},
		{"another command", "UNDO", env{}, 4, `unknown CNI_COMMAND: UNDO`},
		{"a container ID that is a path", all, env{"CNI_CONTAINERID": "../../../etc/x"}, 4, `invalid characters in containerID`},
		{"a container ID of two lines", all, env{"CNI_CONTAINERID": "a\nb"}, 4, `invalid characters in containerID`},
		{"an interface that is a path", all, env{"CNI_IFNAME": "../x"}, 4, `interface name contains / or : or whitespace characters`},
		{"an interface that is not UTF-8", "ADD", env{"CNI_IFNAME": "eth\xff"}, 4,
			`unwind: CNI_IFNAME is not valid UTF-8, so the journal cannot store it for the DEL`},
		{"arguments that are not UTF-8", "ADD", env{"CNI_ARGS": "K8S_POD_NAME=\xff"}, 4,
			`unwind: CNI_ARGS is not valid UTF-8, so the journal cannot store it for the DEL`},
		{"a path of a netns that is not UTF-8", "ADD", env{"CNI_NETNS": "/run/netns/\xff"}, 4,
			`unwind: CNI_NETNS is not valid UTF-8, so the journal cannot store it for the DEL`},
		{"the runtime's own netns", "ADD", env{"CNI_NETNS": "/proc/self/ns/net"}, 8, `unwind: CNI_NETNS is the runtime's own network namespace; set it to the container's`},
	}
	for _, name := range []string{"../x", "a/b", "a\x00b", "a\nb", "a\u202eb"} {
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
	odd := strings.NewReplacer("DEEP", strings.Repeat(`{"a":[`, 32)+strings.Repeat(`]}`, 32), "BYTES", "\xff\xfe\x80", "ODD", "<é\x01\"%s>",
		"3MB", strings.Repeat("x", 3<<20), "128KB", strings.Repeat("y", 127<<10), "230B", strings.Repeat("c", 230))
	stories(t, odd.Replace(`
	let extra; let edit
	either 64 levels: let extra , "deep": DEEP
	or not UTF-8: let extra , "bytes": "BYTES"
	or characters that JSON encoders change: let extra , "text": "<&>\u2028\ud800\u0000\/"
	or numbers: let extra , "n": [1e400, 12345678901234567890, -0, 1.10]
	or a key twice: let extra , "k": 1, "k": 2
	or much of a key: let extra , "big": "3MB"
	# The kernel takes no variable of more than 128 KiB.
	or much CNI_ARGS: let edit 'CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAME=128KB'
	or much environment: environment 15 128KB
	or a long container ID: let edit CNI_CONTAINERID=230B
	or an odd interface: let edit 'CNI_IFNAME=ODD'
	chain p0$extra; give add a logLevel= $edit; warned level= 0
	chain other; give del a $edit CNI_ARGS=; same 1`), acts{"environment": func(s *story, w []string) { // N variables
		for i := range s.number(w[0]) {
			s.env = append(s.env, fmt.Sprintf("MUCH%d=%s", i, w[1]))
		}
	}})
}

// TestBrokenKeysAtDEL: an edit of the configuration breaks a pod's network. Its DEL passes all the
// same. It warns of a key, unless the journal has what it says.
func TestBrokenKeysAtDEL(t *testing.T) {
	stories(t, `
	chain p0; give add a; taken a.eth0.p0; big; let warns 1
	either gracePeriod: let edit gracePeriod=abc
	or delegateTimeout: let edit delegateTimeout=-1
	or logFile: let edit logFile=relative
	or logFile in no folder: let edit logFile=/no/such/folder/log
	or capabilities: let edit capabilities=["ips"]
	or unknown keys: let edit who="knows"
	or 5 MB: let edit args={"x":"$big"}
	or journaled prevResult: let edit prevResult="x"
	or journaled, no chain: let edit chain=
	or journaled, a chain that is none: let edit chain=5
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
	let level level=WARN
	either unknown keys, in JSON: let edit statedir=/x logFormat=json; let level '"level":"WARN"'
		let says '"msg":"unknown key \"statedir\" has no effect'
	or unknown keys: let edit statedir=/x
		let says 'msg="unknown key \"statedir\" has no effect; keys for a plugin belong in its entry of the chain"'
	or capabilities that do not arrive: let edit capabilities={"mac":true}
		let says lost="ips, portMappings" declare="\"capabilities\": {\"ips\": true, \"mac\": true, \"portMappings\": true}"
	or a log that cannot be written: let edit logFile=/no/such/folder/log
		let says 'msg="key \"logFile\": open /no/such/folder/log: no such file or directory; logging to stderr"'
	give add a $edit; warned '$level' 1; warned '$says' 1
	give del a $edit`)
}

// TestVERSION: VERSION touches no file, whatever its configuration says, and does not wait for one. Without
// a command unwind says what it is, as every plugin does.
func TestVERSION(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	r, w, err := os.Pipe()
	must(t, err)
	defer r.Close()
	cmd := exec.Command(filepath.Join(n.path[0], netconf.Name))
	cmd.Env, cmd.Stdin = []string{"CNI_COMMAND=VERSION", "GORACE=" + os.Getenv("GORACE")}, r
	timer := time.AfterFunc(sandbox.Patience, func() { w.Close() })
	out, err := cmd.Output()
	if err != nil || !timer.Stop() {
		t.Fatalf("%v: it failed, or waited for its input", err)
	}
	in := &input{env: map[string]string{"CNI_COMMAND": "VERSION"}, stdin: n.entryOf(`{"plugins": []}`, keys{"logFile": n.stateDir + "/log"})}
	info, err := (&version.PluginDecoder{}).Decode(out)
	if again := n.start(in); err != nil || !slices.Equal(version.All.SupportedVersions(), info.SupportedVersions()) || again.stdout != string(out) {
		t.Errorf("%s, %v; with a configuration %s", out, err, again.stdout)
	}
	if by := n.start(&input{}); by.code != 0 || by.stdout != "" || !strings.HasPrefix(by.stderr, "CNI plugin unwind dev: under test\nCNI protocol versions supported: 0.1.0, ") {
		t.Errorf("by hand: %+v", by)
	}
	n.untouched()
}

// TestErrorOfADD: unwind's error of an ADD begins with the delegate's message, has its code and details,
// says which DELs are pending, and stays within its bounds (start checks that).
func TestErrorOfADD(t *testing.T) {
	stories(t, strings.ReplaceAll(`
	chain p0 | {"type": "words"}; let begins no room; let details ask later; let ends no room
	script words 'cat >/dev/null; cat "$0.$CNI_COMMAND" 2>/dev/null && exit 1; exit 0'
	either short: file $dir/bin/words.ADD {"code": 11, "msg": "no room", "details": "ask later"}
	or long, pending: let begins long; let details; let ends '…; unwind: pending DEL: words (code 42)'
		file $dir/bin/words.ADD {"code": 11, "msg": "LONG", "details": "ask later"}; file $dir/bin/words.DEL {"code": 42}
	fails give add a code=11 'plugin type="words" failed (add): $begins' '$ends'; details '$details'
	if pending: entry a rolling-back 1; lose $dir/bin/words.DEL
	give del a`, "LONG", strings.Repeat("long ", 2000)), details)
}
