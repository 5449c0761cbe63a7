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

// TestRefused: each verb refuses invalid input with a code, and with a message that names the
// problem. The verb starts no plugin, and reveals nothing of the configuration. It creates no file,
// except for the history of an ADD whose chain cannot start. A DEL of the pod with valid input
// succeeds afterwards, because there is nothing to undo.
func TestRefused(t *testing.T) {
	t.Parallel()
	const all, every = "ADD CHECK DEL", "ADD CHECK DEL GC STATUS"
	type env = map[string]string
	type refused struct {
		name, verbs string
		given       any // keys of unwind's entry, env ("" removes a variable), or all of stdin
		code        uint
		msg         string // "": any
	}
	chain := func(plugins string) keys { return keys{"chain": json.RawMessage(`{"plugins": [` + plugins + `]}`)} }
	table := []refused{
		{"no chain", "ADD STATUS", keys{"chain": nil}, 7,
			`unwind: neither "chain" nor "chainFile" is set; list the plugins in "chain": {"plugins": [...]}`},
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

		// skel's own message, as from every plugin.
		{"no name", "ADD", keys{"name": nil}, 7, `missing network name`},

		// skel ignores the case of a key, and reads the last "NAME" or "name". unwind reads only "name".
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
					for _, name := range []string{"history.jsonl", "locks", ""} { // stateDir contains nothing else
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

// TestOddInput: plugins get the same unusual but valid input at ADD and at DEL.
func TestOddInput(t *testing.T) {
	type test struct {
		name string
		keys string // of the plugin, in JSON
		env  map[string]string
		much int // additional environment variables of 127 KiB
	}
	deep := strings.Repeat(`{"a":[`, 32) + strings.Repeat(`]}`, 32)
	tests := []test{
		{"64 levels", `"deep": ` + deep, nil, 0},
		{"not UTF-8", `"bytes": "` + "\xff\xfe\x80" + `"`, nil, 0},
		{"characters that JSON encoders change", `"text": "<&>\u2028\ud800\u0000\/"`, nil, 0},
		{"numbers", `"n": [1e400, 12345678901234567890, -0, 1.10]`, nil, 0},
		{"a key twice", `"k": 1, "k": 2`, nil, 0},
		{"much of a key", `"big": "` + strings.Repeat("x", 3<<20) + `"`, nil, 0},
		// The kernel accepts no environment variable longer than 128 KiB.
		{"much CNI_ARGS", ``, map[string]string{
			"CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAME=" + strings.Repeat("y", 127<<10)}, 0},
		{"much environment", ``, nil, 15},
		{"a long container ID", ``, map[string]string{"CNI_CONTAINERID": strings.Repeat("c", 230)}, 0},
		{"an odd interface", ``, map[string]string{"CNI_IFNAME": "<é\x01\"%s>"}, 0},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		for i := range tt.much {
			n.env = append(n.env, fmt.Sprintf("MUCH%d=%s", i, strings.Repeat("y", 127<<10)))
		}
		odd := p0
		if tt.keys != "" {
			odd = p0.with("%s", tt.keys)
		}
		n.chain(odd)
		a := n.newPod("a")
		a.give("ADD", given{env: tt.env, keys: keys{"logLevel": nil}})
		n.wantNotWarned("level=")
		n.chain(faulty("other"))
		del := given{env: maps.Clone(tt.env)}
		if del.env == nil {
			del.env = map[string]string{}
		}
		del.env["CNI_ARGS"] = ""
		a.give("DEL", del)
		n.wantSameInput(1)
		n.wantClean()
	})
}

// TestBrokenKeysAtDEL: an operator makes the configuration of a pod's network invalid. The pod's
// DEL succeeds nevertheless. It logs a warning about an invalid key, unless it uses data from the
// journal instead of that key.
func TestBrokenKeysAtDEL(t *testing.T) {
	type test struct {
		name  string
		edit  keys
		warns bool
	}
	big := rawJSON(`{"x":"%s"}`, strings.Repeat("x", 5<<20))
	tests := []test{
		{"gracePeriod", keys{"gracePeriod": "abc"}, true},
		{"delegateTimeout", keys{"delegateTimeout": rawJSON(`-1`)}, true},
		{"logFile", keys{"logFile": "relative"}, true},
		{"logFile in no folder", keys{"logFile": "/no/such/folder/log"}, true},
		{"capabilities", keys{"capabilities": rawJSON(`["ips"]`)}, true},
		{"unknown keys", keys{"who": "knows"}, true},
		{"5 MB", keys{"args": big}, true},
		{"journaled prevResult", keys{"prevResult": "x"}, false},
		{"journaled, no chain", keys{"chain": nil}, false},
		{"journaled, a chain that is none", keys{"chain": 5}, false},
		{"journaled, unwind in unwind", keys{"chain": rawJSON(`{"plugins":[{"type":"unwind"}]}`)}, false},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.chain(p0)
		a := n.newPod("a")
		a.give("ADD", given{})
		n.wantTaken("a.eth0.p0")
		a.give("DEL", given{keys: tt.edit})
		if tt.warns {
			n.wantWarned("level=WARN")
		} else {
			n.wantNotWarned("level=WARN")
		}
		n.wantClean()
	})
}

// TestStateDirAtDEL: stateDir is invalid or missing, so a DEL doesn't find the journal, and uses
// the runtime's input. The record stays until a DEL with the right stateDir.
func TestStateDirAtDEL(t *testing.T) {
	type test struct {
		name     string
		stateDir any
	}
	tests := []test{
		{"relative", "relative/state"},
		{"a number", 5},
		{"a device", "/dev/null"},
		{"not to be made", "/proc/none"},
		{"absent", nil},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.chain(p0)
		a := n.newPod("a")
		a.give("ADD", given{})
		n.wantTaken("a.eth0.p0")
		a.give("DEL", given{
			keys:   keys{"stateDir": tt.stateDir, "prevResult": a.prevResult()},
			varLib: n.varLib(),
		})
		n.wantTaken()
		a.wantRecord(journal.Live)
		a.give("DEL", given{})
		n.wantClean()
	})
}

// TestWarnings: unwind logs problems that don't make the verb fail.
func TestWarnings(t *testing.T) {
	type test struct {
		name  string
		edit  keys
		level string
		says  string
	}
	tests := []test{
		{"unknown keys, in JSON", keys{"statedir": "/x", "logFormat": "json"}, `"level":"WARN"`,
			`"msg":"unknown key \"statedir\" has no effect`},
		{"unknown keys", keys{"statedir": "/x"}, "level=WARN",
			`msg="unknown key \"statedir\" has no effect; keys for a plugin belong in its entry of the chain"`},
		{"capabilities that do not arrive", keys{"capabilities": rawJSON(`{"mac":true}`)}, "level=WARN",
			`lost="ips, portMappings" declare="\"capabilities\": {\"ips\": true, \"mac\": true, \"portMappings\": true}"`},
		{"a log that cannot be written", keys{"logFile": "/no/such/folder/log"}, "level=WARN",
			`msg="key \"logFile\": open /no/such/folder/log: no such file or directory; logging to stderr"`},
	}
	each1(t, tests, func(t *testing.T, tt test) {
		n := newNode(t)
		n.chain(p0.with(`"capabilities": {"ips": true, "portMappings": true, "mac": true}`))
		a := n.newPod("a")
		a.give("ADD", given{keys: tt.edit})
		n.wantWarned(tt.level)
		n.wantWarned(tt.says)
		a.give("DEL", given{})
		n.wantClean()
	})
}

// TestVERSION: VERSION touches no file, whatever the configuration says, and doesn't wait for a
// configuration on stdin. Without CNI_COMMAND, unwind prints what it is, as every plugin does.
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

// TestErrorOfADD: an ADD's error has the plugin's code, begins with the plugin's message, and names
// pending DELs. It has the plugin's details if they fit. node.start checks the error's length.
func TestErrorOfADD(t *testing.T) {
	each1(t, oneOf("short", "long, pending"), func(t *testing.T, message choice) {
		n := newNode(t)
		n.chain(p0, named("words"))
		n.script("words", `cat >/dev/null; cat "$0.$CNI_COMMAND" 2>/dev/null && exit 1; exit 0`)
		words := filepath.Join(n.path[0], "words")
		begins, ends, details := "no room", "no room", "ask later"
		if message.is("short") {
			n.write(words+".ADD", `{"code": 11, "msg": "no room", "details": "ask later"}`)
		} else {
			begins, ends, details = "long", "…; unwind: pending DEL: words (code 42)", ""
			long := strings.Repeat("long ", 2000)
			n.write(words+".ADD", `{"code": 11, "msg": "`+long+`", "details": "ask later"}`)
			n.write(words+".DEL", `{"code": 42}`)
		}
		a := n.newPod("a")
		n.wantCode(a.tryGive("ADD", given{}), 11, `plugin type="words" failed (add): `+begins, ends)
		n.wantDetails(details)
		if message.is("long, pending") {
			a.wantRecord(journal.RollingBack, 1)
			n.remove(words + ".DEL")
		}
		a.give("DEL", given{})
		n.wantClean()
	})
}
