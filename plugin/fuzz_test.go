package plugin

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/sandbox"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// fuzzDir is the directory in which the fuzzed verbs may write: a file system in memory, in the
// tests' mount namespace. It contains the default stateDir.
const fuzzDir = "/var/lib/cni"

// mountFuzzDir mounts fuzzDir. Only the process that starts the workers mounts it: a mount by a
// worker would hide the journal from another worker that is processing an input.
func mountFuzzDir(f *testing.F) {
	f.Helper()
	if worker := flag.Lookup("test.fuzzworker"); worker != nil && worker.Value.String() == "true" {
		return
	}
	must(f, errors.Join(os.MkdirAll(fuzzDir, 0o755), unix.Mount("tmpfs", fuzzDir, "tmpfs", 0, "mode=0755,size=64m")))
	f.Cleanup(func() { _ = unix.Unmount(fuzzDir, unix.MNT_DETACH) })
}

// alone makes the workers of a fuzz test run one at a time, because they share fuzzDir.
func alone(t *testing.T) {
	t.Helper()
	dir, err := os.Open(filepath.Dir(fuzzDir))
	must(t, err)
	t.Cleanup(func() { _ = dir.Close() })
	must(t, unix.Flock(int(dir.Fd()), unix.LOCK_EX))
}

// within reports whether a configuration makes unwind write only in fuzzDir.
func within(stdin []byte) (*netconf.Conf, bool) {
	c, err := netconf.ParseConf(stdin)
	ok := true
	for _, path := range []string{c.StateDir, c.LogFile} {
		ok = ok && (path == "" || strings.HasPrefix(path, fuzzDir+"/"))
	}
	chain, chainErr := c.LoadChain()
	if err != nil || chainErr != nil {
		return c, ok
	}
	for _, pool := range sweep.PoolsOf(chain, c) { // a release creates a lock file there
		ok = ok && strings.HasPrefix(pool.Dir, fuzzDir+"/")
	}
	return c, ok
}

// asked is a verb that this process runs through the plugin's entry point. Only one runs at a time.
type asked struct {
	env    map[string]string
	stdin  []byte
	budget time.Duration // of a STATUS
}

// do runs the verb, and returns its exit code and its output.
func (a *asked) do(t *testing.T, dir string) (code int, stdout []byte) {
	t.Helper()
	in, out := filepath.Join(dir, "stdin"), filepath.Join(dir, "stdout")
	must(t, os.WriteFile(in, a.stdin, 0o600))
	r, err := os.Open(in)
	must(t, err)
	w, err := os.Create(out)
	must(t, err)
	oldIn, oldOut, oldErr := os.Stdin, os.Stdout, os.Stderr
	os.Stdin, os.Stdout, os.Stderr = r, w, w // skel uses these
	defer func() {
		os.Stdin, os.Stdout, os.Stderr = oldIn, oldOut, oldErr
		_, _ = r.Close(), w.Close()
	}()
	for name, value := range a.env {
		if err := os.Setenv(name, value); err != nil { // a zero byte, which no environment can contain
			t.Skip(err)
		}
	}
	p := &Plugin{Env: undo.Env{Stderr: io.Discard, Budgets: undo.DefaultBudgets, Runner: &delegate.Processes{}}, Stdout: w}
	p.Budgets.Status, p.Budgets.HostLink = a.budget, time.Millisecond
	code = p.Main(context.Background(), "")
	if stdout, err = os.ReadFile(out); err != nil {
		t.Fatal(err)
	}
	return code, stdout
}

// wellFormed checks that a verb ended as a runtime expects: with success, or with a CNI error,
// which wellFormed returns.
func wellFormed(t *testing.T, code int, stdout []byte) (said types.Error) {
	t.Helper()
	if code == 0 {
		return said
	}
	if err := json.Unmarshal(stdout, &said); err != nil || code != 1 || said.Code == 0 || said.Msg == "" {
		t.Errorf("exit %d, and no CNI error (%v): %.500q", code, err, stdout)
	}
	if strings.Contains(said.Msg, "internal error") || strings.HasPrefix(said.Msg, "unwind: ") && len(said.Error()) > maxMessage {
		t.Errorf("code %d, %.2000s", said.Code, said.Error())
	}
	return said
}

// FuzzStdin passes arbitrary stdin and environment to each verb. The plugins of the chain have no
// binaries, so an ADD cannot succeed, and must leave no record. A record that a DEL leaves must
// contain every plugin of the chain. Each verb succeeds, or returns a CNI error.
func FuzzStdin(f *testing.F) {
	sandbox.Need(f)
	mountFuzzDir(f)
	verbs := []string{"ADD", "DEL", "CHECK", "GC", "STATUS", "VERSION", "UNDO"}
	whole := `{"cniVersion": "1.1.0", "name": "podnet", "type": "unwind", "stateDir": "` + fuzzDir + `/state", "gracePeriod": "0s",
		"capabilities": {"ips": true}, "runtimeConfig": {"ips": ["10.0.0.2/24"]}, "args": {"cni": {"ips": []}}, "onDelFailure": "defer",
		"cni.dev/valid-attachments": [{"containerID": "a", "ifname": "eth0"}], "prevResult": {"cniVersion": "1.1.0",
		"interfaces": [{"name": "eth0", "sandbox": "/x"}], "ips": [{"address": "10.0.0.2/24", "interface": 0}]},
		"chain": {"cniVersion": "1.1.0", "plugins": [{"type": "gone", "ipam": {"type": "host-local", "subnet": "10.0.0.0/24", "dataDir": "` +
		fuzzDir + `/networks"}}, {"type": "lost", "capabilities": {"ips": true}}]}}`
	for i := range verbs {
		f.Add(uint8(i), []byte(whole), "a", "eth0", "/none", "K8S_POD_NAMESPACE=b;K8S_POD_NAME=a")
		f.Add(uint8(i), []byte(`{"cniVersion": "0.3.1", "name": "podnet", "chain": {"plugins": [{"type": "gone"}]}}`), "a/../b", "..", "", "=;=")
		f.Add(uint8(i), []byte(whole), "a", "eth\xff", "/none", "X=\xff")
		f.Add(uint8(i), []byte(`{"cniVersion": "1.1.0", "name": "podnet", "chain": {"plugins": []}}`), "a", "eth0", "/none", "")
		f.Add(uint8(i), []byte(`{"NAME": "podnet", "name": "../x", "cniVersion": "1.0.0", "chainFile": "/dev/zero"}`), "", "a\nb", "/proc/self/ns/net", "")
	}
	f.Fuzz(func(t *testing.T, verb uint8, stdin []byte, containerID, ifname, netns, args string) {
		conf, ok := within(stdin)
		if !ok || strings.HasPrefix(netns, "/dev") {
			t.Skip()
		}
		alone(t)
		_ = os.RemoveAll(conf.StateDir)
		dir := t.TempDir()
		command := verbs[int(verb)%len(verbs)]
		a := asked{stdin: stdin, budget: 20 * time.Millisecond, env: map[string]string{
			"CNI_COMMAND": command, "CNI_CONTAINERID": containerID, "CNI_IFNAME": ifname, "CNI_NETNS": netns, "CNI_ARGS": args, "CNI_PATH": dir,
		}}
		code, stdout := a.do(t, dir)
		said := wellFormed(t, code, stdout)
		switch {
		case command == "VERSION" && code != 0, (command == "ADD" || command == "UNDO") && code == 0:
			t.Errorf("%s: exit %d, %s", command, code, stdout)
		case command != "VERSION" && code == 0 && len(stdout) > 0:
			t.Errorf("%s printed %q", command, stdout)
		}
		store := &journal.Store{Dir: conf.StateDir}
		entries := recordsOf(t, store)
		key := journal.Key{Network: conf.Name, ContainerID: containerID, IfName: ifname}
		for _, e := range entries {
			chain, err := conf.LoadChain()
			if command != "DEL" || err != nil || e.Key != key || e.State != journal.Deleting || len(e.Steps) != len(chain.Delegates) {
				t.Errorf("after %s (exit %d) the journal has %s: %s, %v (%v)", command, code, e.Key, e.State, undo.PendingSteps(e), err)
			}
		}
		if strings.Contains(said.Msg, "; see unwindctl show ") && len(entries) == 0 {
			t.Errorf("the DEL is incomplete, and the journal has nothing: %s", stdout)
		}
	})
}

// FuzzDelegate makes the second of three plugins print arbitrary stdout and stderr, and exit with
// any code. Either the ADD succeeds with all three plugins and a valid result, or it fails, and
// each plugin that was started gets its DEL.
func FuzzDelegate(f *testing.F) {
	sandbox.Need(f)
	mountFuzzDir(f)
	const result = `{"cniVersion": "1.0.0", "interfaces": [], "ips": [{"address": "10.0.0.7/24"}], "dns": {}}`
	const cniError = `{"cniVersion": "1.0.0", "code": 11, "msg": "no room", "details": "ask later"}`
	for _, stdout := range []string{
		result, cniError, result + cniError, cniError + result, "", "null", "[]", "{}", `""`, "garbage", result[:40], " \n" + result + "\n",
		strings.Replace(result, "1.0.0", "9.9.9", 1), strings.Replace(result, "1.0.0", "0.2.0", 1), strings.Replace(result, `"1.0.0"`, "1", 1),
		strings.Replace(result, `"10.0.0.7/24"`, `"10.0.0.7/99"`, 1), `{"code": 0, "msg": ""}`, `{"code": -1}`, `{"code": 4294967296, "msg": "x"}`,
		`{"ip4": {"ip": "10.0.0.7/24"}}`, "\x00\xff\xfe", `{"ips": [{"address": "10.0.0.7/24", "interface": 9}], "interfaces": null}`,
	} {
		f.Add([]byte(stdout), []byte("a warning"), uint8(0), "1.0.0")
		f.Add([]byte(stdout), []byte{}, uint8(1), "0.4.0")
	}
	f.Fuzz(func(t *testing.T, stdout, stderr []byte, exit uint8, outer string) {
		alone(t)
		dir := t.TempDir()
		scripts := map[string]string{
			"before": `echo "before $CNI_COMMAND" >>` + dir + `/calls; echo '{"cniVersion": "1.0.0", "ips": []}'`,
			"fuzzed": fmt.Sprintf(`echo "fuzzed $CNI_COMMAND" >>%s/calls; [ $CNI_COMMAND = ADD ] || exit 0; cat %s/err >&2; cat %s/out; exit %d`, dir, dir, dir, exit),
			"after":  `echo "after $CNI_COMMAND" >>` + dir + `/calls; echo '{"cniVersion": "1.0.0", "ips": []}'`,
		}
		for name, body := range scripts {
			must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+body+"\n"), 0o700))
		}
		for name, data := range map[string][]byte{"out": stdout, "err": stderr} {
			must(t, os.WriteFile(filepath.Join(dir, name), data, 0o600))
		}
		store := &journal.Store{Dir: filepath.Join(fuzzDir, "delegate")}
		_ = os.RemoveAll(store.Dir)
		path := "/usr/bin:/bin"
		a := asked{
			stdin: netconf.Marshal(map[string]any{
				"cniVersion": strings.ToValidUTF8(outer, ""), "name": "podnet", "type": netconf.Name, "stateDir": store.Dir,
				"chain": json.RawMessage(`{"cniVersion": "1.0.0", "plugins": [{"type": "before"}, {"type": "fuzzed"}, {"type": "after"}]}`),
			}),
			env: map[string]string{
				"CNI_COMMAND": "ADD", "CNI_CONTAINERID": "a", "CNI_IFNAME": "eth0", "CNI_NETNS": "/none", "CNI_ARGS": "", "CNI_PATH": dir, "PATH": path,
			},
		}
		code, printed := a.do(t, dir)
		wellFormed(t, code, printed)
		data, err := os.ReadFile(filepath.Join(dir, "calls"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		calls := strings.Split(strings.TrimSpace(string(data)), "\n")
		entries := recordsOf(t, store)
		undone := slices.Equal(calls, []string{"before ADD", "fuzzed ADD", "fuzzed DEL", "before DEL"}) ||
			slices.Equal(calls, []string{"before ADD", "fuzzed ADD", "after ADD", "after DEL", "fuzzed DEL", "before DEL"}) || len(data) == 0
		switch {
		case code == 0:
			_, err := netconf.ParseResult(printed)
			added := len(entries) == 1 && entries[0].State == journal.Live && len(entries[0].Steps) == 3
			if err != nil || exit != 0 || !added || !slices.Equal(calls, []string{"before ADD", "fuzzed ADD", "after ADD"}) {
				t.Errorf("success with %q (%v), calls %v, %d entries", printed, err, calls, len(entries))
			}
		case !undone || len(entries) > 0:
			t.Errorf("failed with %q, calls %v, %d entries", printed, calls, len(entries))
		}
	})
}

// FuzzConflist reads an arbitrary file in two ways: as a chainFile, and as unwindctl reads a
// conflist. If it is valid as a chainFile, unwindctl must find the same plugins in it.
func FuzzConflist(f *testing.F) {
	f.Add([]byte(`{"name": "podnet", "cniVersion": "1.0.0", "cniVersions": ["0.4.0"], "plugins": [{"type": "a", "ipam": {"type": "i"}}]}`))
	f.Add([]byte(`{"name": "podnet", "cniVersion": "9.0.0", "type": "a", "disableCheck": "TRUE"}`))
	f.Add([]byte(`{"name": "podnet", "plugins": [{"type": "unwind", "chain": {"plugins": [{"type": "a"}]}}]}`))
	f.Add([]byte(`{"plugins": [null, 1, {}], "name": null}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "list")
		must(t, os.WriteFile(path, data, 0o600))
		list, listErr := netconf.ReadConflist(path)
		c := &netconf.Conf{Name: "podnet", ChainFile: path}
		chain, err := c.LoadChain()
		switch {
		case err == nil && (list == nil || listErr != nil || list.Unwind != nil || len(list.Types) != len(chain.Delegates)):
			t.Errorf("a chain of %d, and not as a list: %+v, %v", len(chain.Delegates), list, listErr)
		case err == nil && list.Name != "" && list.Name != "podnet":
			t.Errorf("the chain of another network: %q", list.Name)
		case err != nil && !strings.HasPrefix(err.Error(), "chainFile "+path+": "):
			t.Errorf("the error does not name the file: %v", err)
		}
	})
}
