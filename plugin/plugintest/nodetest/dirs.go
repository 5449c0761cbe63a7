package nodetest

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"cni-unwind/plugin/netconf"
)

// OwnFile is the name of unwind's conflist on a node without a CRI runtime.
const OwnFile = "00-unwind.conflist"

// Secret is part of every conflist that Conflist returns. No output or log may contain it.
const Secret = "s3cret"

// FakePlugin is a script that looks like the unwind binary to `unwindctl install`.
const FakePlugin = `#!/bin/sh
case $CNI_COMMAND in
VERSION) echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}' ;;
*) echo "unwind under test" >&2 ;;
esac
exit 0
`

// Dirs is a directory with a runtime's CNI directories, a provider's conflist, and a fake unwind to
// install.
type Dirs struct {
	testing.TB
	Dir string
}

// NewDirs creates the CNI directories, the conflist and the plugin in dir.
func NewDirs(t testing.TB, dir string) *Dirs {
	t.Helper()
	n := &Dirs{t, dir}
	for _, dir := range []string{n.ConfDir(), n.BinDir()} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	n.Write(filepath.Join(n.Dir, netconf.Name), FakePlugin)
	n.Write(n.InConf("10-bridge.conflist"), Conflist("podnet", "portMappings"))
	return n
}

// ConfDir is the directory of conflists.
func (n *Dirs) ConfDir() string { return filepath.Join(n.Dir, "net.d") }

// BinDir is the directory of plugins.
func (n *Dirs) BinDir() string { return filepath.Join(n.Dir, "plugins") }

// Own is the path of unwind's conflist.
func (n *Dirs) Own() string { return n.InConf(OwnFile) }

// InConf is the path of a file in ConfDir.
func (n *Dirs) InConf(file string) string { return filepath.Join(n.ConfDir(), file) }

// Write overwrites a file in place.
func (n *Dirs) Write(path, content string) {
	n.Helper()
	if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
		n.Fatal(err)
	}
}

// Rename replaces a file atomically, as a careful provider does.
func (n *Dirs) Rename(path, content string) {
	n.Helper()
	n.Write(path+".new", content)
	if err := os.Rename(path+".new", path); err != nil {
		n.Fatal(err)
	}
}

func (n *Dirs) Remove(path string) {
	n.Helper()
	if err := os.Remove(path); err != nil {
		n.Fatal(err)
	}
}

func raw(v any) string {
	data, _ := json.Marshal(v)
	return string(data)
}

// Conflist returns a provider's conflist whose second plugin declares the given capabilities.
func Conflist(name string, capabilities ...string) string {
	has := map[string]bool{}
	for _, c := range capabilities {
		has[c] = true
	}
	return raw(map[string]any{"cniVersion": "1.0.0", "name": name, "plugins": []any{
		map[string]any{"type": "bridge", "bridge": "unwindctl1", "password": Secret},
		map[string]any{"type": "portmap", "capabilities": has},
	}}) + strings.Repeat(" ", 100) + "\n"
}

// Installed describes unwind's conflist as "NETWORK of FILE with CAPABILITIES", or returns "" if
// there is none. The description leaves out the capabilities of CNI's conventions, which unwindctl
// always declares.
func (n *Dirs) Installed() string {
	n.Helper()
	data, err := os.ReadFile(n.Own())
	if os.IsNotExist(err) {
		return ""
	}
	var list struct {
		Name    string
		Plugins []struct {
			Type         string
			Capabilities map[string]bool
			ChainFile    string
		}
	}
	if err := json.Unmarshal(data, &list); err != nil || len(list.Plugins) != 1 ||
		list.Plugins[0].Type != netconf.Name {
		return fmt.Sprintf("%v in %s", err, data)
	}
	p := list.Plugins[0]
	for _, always := range []string{"aliases", "bandwidth", "cgroupPath", "deviceID", "dns",
		"infinibandGUID", "ipRanges", "ips", "mac", "portMappings"} {
		if !p.Capabilities[always] {
			return fmt.Sprintf("the capability %s is missing in %s", always, data)
		}
		delete(p.Capabilities, always)
	}
	return fmt.Sprintf("%s of %s with %s", list.Name, filepath.Base(p.ChainFile),
		raw(p.Capabilities))
}

// First is the result of Installed after unwind was installed for the conflist that NewDirs
// creates.
const First = `podnet of 10-bridge.conflist with {}`

// AlwaysThere checks continuously, until stop is called, that unwind's conflist exists, sorts
// first, and is complete.
func (n *Dirs) AlwaysThere() (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			default:
			}
			paths, err := netconf.Conflists(n.ConfDir())
			if err != nil || len(paths) == 0 || paths[0] != n.Own() {
				n.Errorf("unwind's conflist is not the first of %v (%v)", paths, err)
				return
			}
			if c, err := netconf.ReadConflist(n.Own()); err != nil || c.Unwind == nil ||
				c.Unwind.ChainFile == "" {
				n.Errorf("unwind's conflist is incomplete: %v", err)
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	var once sync.Once
	stop = func() { once.Do(func() { close(done) }); <-ended }
	n.Cleanup(stop)
	return stop
}
