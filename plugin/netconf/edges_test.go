package netconf

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
)

// file creates a file in a new directory that has the given permissions.
func file(t *testing.T, mode os.FileMode, name, content string) (path string) {
	t.Helper()
	dir := t.TempDir()
	path = filepath.Join(dir, name)
	if err := errors.Join(os.WriteFile(path, []byte(content), 0o600), os.Chmod(dir, mode)); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReadFile(t *testing.T) {
	linkTo := func(target string, mode os.FileMode) string {
		path := filepath.Join(filepath.Dir(file(t, mode, "x", "")), "link")
		if target == "" {
			target = path
		}
		if err := os.Symlink(target, path); err != nil {
			t.Fatal(err)
		}
		return path
	}
	link := func(mode os.FileMode) string { return linkTo(file(t, 0o700, "target", "text"), mode) }
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ name, path, want, err string }{
		{"a file", file(t, 0o777, "f", "text"), "text", ""},
		{"a link in a directory that only the owner can write", link(0o755), "text", ""},
		{"a link in a directory that the group can write", link(0o775), "", "a symbolic link in a directory that other users can write to; run chmod go-w "},
		{"a link in a directory that all can write", link(0o757), "", "a symbolic link in a directory that other users can write to; run chmod go-w "},
		{"a link to a device", linkTo("/dev/zero", 0o700), "", "not a regular file"},
		{"a link to an unreadable file", linkTo("/proc/self/mem", 0o700), "", "input/output error"},
		{"a directory", t.TempDir(), "", "not a regular file"},
		{"a pipe", pipe, "", "not a regular file"},
		{"a missing file", "/none/f", "", "has not written it, or has removed it"},
		{"a file of the maximum size", file(t, 0o700, "f", strings.Repeat("x", MaxConfig)), strings.Repeat("x", MaxConfig), ""},
		{"a file that is one byte larger", file(t, 0o700, "f", strings.Repeat("x", MaxConfig+1)), "", "more than 4194304 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ReadFile(tt.path)
			if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) || err == nil && string(got) != tt.want {
				t.Errorf("%.40q, %v", got, err)
			}
		})
	}
	if _, err := ReadAll(iotest.ErrReader(syscall.EIO)); !errors.Is(err, syscall.EIO) {
		t.Errorf("ReadAll lost the reader's error: %v", err)
	}
}

// TestPluginsBesideChainFile: next to chainFile, a directory with the network's name contains more
// plugins of the list, as in libcni. LoadChain loads these plugins too, unless the list sets
// loadOnlyInlinedPlugins to true.
func TestPluginsBesideChainFile(t *testing.T) {
	const list = `"plugins": [{"type": "a"}]`
	for _, tt := range []struct{ name, keys, want string }{
		{"by default", list, "[a b c]"},
		{"loadOnlyInlinedPlugins is false", list + `, "loadOnlyInlinedPlugins": false`, "[a b c]"},
		{"loadOnlyInlinedPlugins is true", list + `, "loadOnlyInlinedPlugins": true`, "[a]"},
		{"loadOnlyInlinedPlugins is a string", list + `, "loadOnlyInlinedPlugins": "True"`, "[a]"},
		{"no inlined plugins", `"loadOnlyInlinedPlugins": false`, "[b c]"},
		{"one plugin", `"type": "a"`, "[a]"},
	} {
		path := file(t, 0o700, "f", `{"cniVersion": "1.0.0", "name": "podnet", `+tt.keys+`}`)
		dir := filepath.Join(filepath.Dir(path), "podnet")
		err := errors.Join(os.MkdirAll(filepath.Join(dir, "3.conf"), 0o700), os.WriteFile(dir+"/2.conf", []byte(`{"type": "c"}`), 0o600),
			os.WriteFile(dir+"/1.conf", []byte(`{"type": "b"}`), 0o600), os.WriteFile(dir+"/0.conflist", []byte(`x`), 0o600))
		c, errConf := parse(fmt.Sprintf(`"chainFile": %q`, path))
		chain, errChain := c.LoadChain()
		if err := errors.Join(err, errConf, errChain); err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, d := range chain.Delegates {
			got = append(got, d.Type)
		}
		if fmt.Sprint(got) != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
		if err := errors.Join(os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.LoadChain(); (err != nil) != (tt.want != "[a]") {
			t.Errorf("%s, the directory cannot be read: %v", tt.name, err)
		}
		if err := errors.Join(os.Remove(dir), os.Mkdir(dir, 0o700), os.Symlink("/none", dir+"/1.conf")); err != nil {
			t.Fatal(err)
		}
		if _, err := c.LoadChain(); (err != nil) != (tt.want != "[a]") {
			t.Errorf("%s, a file cannot be read: %v", tt.name, err)
		}
		if err := os.Remove(dir + "/1.conf"); err != nil {
			t.Fatal(err)
		}
		if _, err := c.LoadChain(); (err != nil) != (tt.want == "[b c]") {
			t.Errorf("%s, the directory is empty: %v", tt.name, err)
		}
	}
}

// TestBounds covers, for each limit, the largest input within it and the smallest beyond it.
func TestBounds(t *testing.T) {
	c := DefaultConf()
	c.Name = "podnet"
	chain := func(plugins int) error {
		_, err := c.ParseChain([]byte(`{"plugins": [`+strings.Repeat(`{"type": "a"}, `, plugins-1)+`{"type": "a"}]}`), "1.0.0")
		return err
	}
	conf := func(size int) error {
		const head, tail = `{"name": "podnet", "args": {"x": "`, `"}}`
		_, err := ParseConf([]byte(head + strings.Repeat("x", size-len(head)-len(tail)) + tail))
		return err
	}
	list := func(size int) error {
		const head, tail = `{"name": "`, `"}`
		_, err := ParseConflist([]byte(head + strings.Repeat("x", size-len(head)-len(tail)) + tail))
		return err
	}
	for name, err := range map[string]error{"plugins": chain(500), "configuration": conf(MaxConfig), "conflist": list(MaxConfig)} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, err := range map[string]error{"plugins": chain(501), "configuration": conf(MaxConfig + 1), "conflist": list(MaxConfig + 1)} {
		if err == nil || !strings.Contains(err.Error(), "more than") && !strings.Contains(err.Error(), "at most") {
			t.Errorf("%s, one more than allowed: %v", name, err)
		}
	}
	for n, want := range map[int]string{6: "abcdef", 5: "ab…", 3: "…", 2: "", 0: ""} {
		if got := Shorten("abcdef", n); got != want {
			t.Errorf("%d bytes: %q, want %q", n, got, want)
		}
	}
	for value, want := range map[string]string{
		``: "nothing", `{}`: "an object", `[1]`: "a list", `5`: "5",
		strings.Repeat("1", 40): strings.Repeat("1", 40), strings.Repeat("1", 41): "a value of 41 bytes",
	} {
		if got := excerpt(json.RawMessage(value)); got != want {
			t.Errorf("%s: %s", value, got)
		}
	}
}

func TestParseConflist(t *testing.T) {
	const entry = `{"type": "unwind", "chain": {"plugins": [{"type": "a"}]}, "gracePeriod": "1s"}`
	for _, tt := range []struct{ name, data, types, unwind, err string }{
		{"a list", `{"name": "n", "cniVersion": "1.0.0", "plugins": [{"type": "a"}, {"type": "b"}]}`, "[a b]", "", ""},
		{"one plugin", `{"name": "n", "cniVersion": "1.0.0", "type": "a"}`, "[a]", "", ""},
		{"unwind", `{"name": "n", "cniVersion": "1.0.0", "plugins": [` + entry + `, {"type": "b"}]}`, "[unwind b]", "1s", ""},
		{"unwind twice", `{"name": "n", "cniVersion": "1.0.0", "plugins": [` + entry + `, {"type": "unwind"}]}`, "[unwind unwind]", "1s", ""},
		{"unwind's own error", `{"name": "n", "cniVersion": "1.0.0", "plugins": [{"type": "unwind", "gracePeriod": 5}]}`, "[unwind]", "10m0s", `key "gracePeriod"`},
		{"no JSON", `{`, "", "", "not valid JSON"},
		{"a plugin that is a number", `{"plugins": [{"type": "a"}, 5]}`, "", "", "plugins[1]: a number, not an object"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			path := file(t, 0o700, "f", tt.data)
			c, err := ReadConflist(path)
			if (err == nil) != (tt.err == "") || err != nil && !strings.Contains(err.Error(), tt.err) || (c == nil) != (tt.types == "") {
				t.Fatalf("%+v, %v", c, err)
			}
			if c == nil {
				return
			}
			unwind := ""
			if c.Unwind != nil {
				unwind = c.Unwind.GracePeriod.String()
			}
			if fmt.Sprint(c.Types) != tt.types || unwind != tt.unwind || c.Path != path || c.Name != "n" || c.CNIVersion != "1.0.0" {
				t.Errorf("%+v, unwind %s", c, unwind)
			}
			if _, conf, err := c.Chain(); c.Unwind != nil && tt.err == "" && (conf != c.Unwind || err != nil) {
				t.Errorf("its chain's configuration is %+v, %v", conf, err)
			}
		})
	}
	if _, err := ReadConflist("/none/f"); err == nil {
		t.Error("ReadConflist returned no error for a missing file")
	}
	for name, good := range map[string]bool{"podnet": true, "a/b": false, "": false} {
		list := &Conflist{Name: name, Data: []byte(`{"cniVersion": "1.0.0", "plugins": [{"type": "a"}]}`), Path: file(t, 0o700, "f", "")}
		chain, conf, err := list.Chain()
		if (err == nil) != good || good && (len(chain.Delegates) != 1 || conf.Name != name || conf.ChainFile != list.Path) {
			t.Errorf("%q: %+v, %+v, %v", name, chain, conf, err)
		}
	}
}

func TestOnly(t *testing.T) {
	for types, want := range map[string]int{"": -1, "b": -1, "a": 0, "b a": 1, "a b": 0, "a a": -1, "a b a": -1, "b a a": -1} {
		chain := &Chain{}
		for _, plugin := range strings.Fields(types) {
			chain.Delegates = append(chain.Delegates, Delegate{Type: plugin})
		}
		if got := chain.Only("a"); got != want {
			t.Errorf("%s: %d, want %d", types, got, want)
		}
	}
	for raw, want := range map[string]int{``: 0, `null`: 0, `5`: 0, `[1]`: 0, `{"a": 1, "b": 2}`: 2} {
		if got := ObjectOf(json.RawMessage(raw)); got == nil || len(got) != want {
			t.Errorf("%s: %v", raw, got)
		}
	}
}

// TestConditions covers the conditions that depend on several keys, and the parser of lists of
// valid attachments.
func TestConditions(t *testing.T) {
	for _, tt := range []struct {
		keys   string
		is     func(*Conf) bool
		expect bool
	}{
		{`"disableGC": true, "sweepOnStatus": false`, (*Conf).Observes, true},
		{`"disableGC": true, "sweepOnStatus": true`, (*Conf).Observes, false},
		{`"disableGC": false, "sweepOnStatus": false`, (*Conf).Observes, false},
		{``, (*Conf).NeverAdded, true},
		{`"prevResult": {}`, (*Conf).NeverAdded, false},
		{`"cniVersion": "0.4.0"`, (*Conf).NeverAdded, true},
		{`"cniVersion": "0.3.1"`, (*Conf).NeverAdded, false},
		{`"cniVersion": "0.3.1", "prevResult": {}`, (*Conf).NeverAdded, false},
		{`"cniVersion": "x"`, (*Conf).NeverAdded, false},
	} {
		if c, err := parse(tt.keys); err != nil || tt.is(c) != tt.expect {
			t.Errorf("%s: want %t (%v)", tt.keys, tt.expect, err)
		}
	}
	for list, good := range map[string]bool{
		`[]`: true, `[{"containerID": "a", "ifname": "b"}]`: true, `null`: false, `{}`: false, `"[]"`: false, `[null]`: false, `[{}]`: false,
		`[{"ifname": "b"}]`: false, `[{"containerID": "a"}]`: false, `[{"containerID": "a", "ifname": "b"}, {"containerID": "a"}]`: false,
	} {
		if valid, err := ParseValid(json.RawMessage(list)); (err == nil) != good || good && valid == nil {
			t.Errorf("%s: %v, %v", list, valid, err)
		}
	}
}

// TestSandboxOf covers results that name the path of the container's namespace, and results that
// don't.
func TestSandboxOf(t *testing.T) {
	for _, tt := range []struct{ name, result, sandbox string }{
		{"in a namespace", `{"interfaces": [{"name": "lo", "sandbox": "/m"}, {"name": "eth0", "sandbox": "/n"}]}`, "/n"},
		{"on the host", `{"interfaces": [{"name": "eth0"}]}`, ""},
		{"in a virtual machine", `{"interfaces": [{"name": "eth0", "sandbox": "vm"}]}`, ""},
		{"no result", `[`, ""},
	} {
		if sandbox := SandboxOf(json.RawMessage(tt.result), "eth0"); sandbox != tt.sandbox {
			t.Errorf("%s: %q", tt.name, sandbox)
		}
	}
}

func TestPodOf(t *testing.T) {
	for _, tt := range []struct {
		args string
		want [3]string
	}{
		{"IgnoreUnknown=1;K8S_POD_NAMESPACE=n;K8S_POD_NAME=p;K8S_POD_UID=u", [3]string{"n", "p", "u"}},
		{"K8S_POD_NAME=a=b;K8S_POD_NAME", [3]string{}},
		{"K8S_POD_NAMESPACE=" + strings.Repeat("n", 500) + ";K8S_POD_NAME=" + strings.Repeat("p", 500), [3]string{strings.Repeat("n", 500), strings.Repeat("p", 500)}},
		{"K8S_POD_NAMESPACE=" + strings.Repeat("n", 500) + ";K8S_POD_NAME=" + strings.Repeat("p", 501), [3]string{}},
		{"", [3]string{}},
	} {
		if p := PodOf(tt.args); !reflect.DeepEqual([3]string{p.Namespace, p.Name, p.UID}, tt.want) {
			t.Errorf("%.60s: %+v", tt.args, p)
		}
	}
}

// TestVersionsOfResults: SameVersion treats an absent version as 0.1.0. If a result has an invalid
// version, ConvertResult returns an error and the unchanged result.
func TestVersionsOfResults(t *testing.T) {
	for _, tt := range []struct {
		a, b string
		same bool
	}{
		{"1.0.0", "1.0.0", true}, {"1.0.0", "1.1.0", false}, {"", "0.1.0", true}, {"0.1.0", "", true}, {"", "", true},
		{"", "1.0.0", false}, {"1.0.0", "", false}, {"0.1.0", "1.0.0", false}, {"1.0.0", "0.1.0", false}, {"0.1.0", "0.1.0", true},
	} {
		if SameVersion(tt.a, tt.b) != tt.same {
			t.Errorf("%q and %q: want %t", tt.a, tt.b, tt.same)
		}
	}
	if raw, err := ConvertResult(json.RawMessage(`{"cniVersion": 5}`), "1.0.0"); string(raw) != `{"cniVersion": 5}` || err == nil {
		t.Errorf("%s, %v", raw, err)
	}
}
