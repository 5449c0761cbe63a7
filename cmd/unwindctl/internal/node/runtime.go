// Package node finds the runtimes of a node, and the directories of their conflists and plugins. It
// queries runtimes over CRI.
package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/pelletier/go-toml/v2"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/plugin/netconf"
)

// The default directories of runtimes (containerd internal/cri/config/config_unix.go, CRI-O
// pkg/config/config_unix.go).
const (
	DefaultConfDir = "/etc/cni/net.d"
	DefaultBinDir  = "/opt/cni/bin"
)

// Runtime is a runtime as it reports itself or as its configuration describes it. Its paths omit
// the root that was passed to Find.
type Runtime struct {
	Name     string   // containerd, cri-o, k3s, ...
	Config   string   // the socket or file that names the directories; "" for defaults
	ConfDir  string   // the directory of conflists
	BinDirs  []string // the plugin directories; unwind is, or will be, installed into the first
	Searched []string // where the runtime searches for plugins; nil if it reports nothing yet
	Socket   string   // CRI socket; "" if no runtime was found
	MaxConfs int      // containerd's max_conf_num; 1 for other runtimes
	Problems []string // reasons not to install unwind: "PROBLEM; REMEDY"

	DefaultNetwork string   // the only network that the runtime uses; "" if it uses the first conflist
	Notes          []string // facts to report that do not prevent an install
	Kubelet        bool     // a kubelet runs here, and requests the runtime's status
	StatusGrace    bool     // CRI-O's cni_status_grace_period is more than 0

	responds bool // over CRI
}

// Check adds a problem if containerd would run the provider's file in addition to unwind's.
func (r *Runtime) Check() {
	if r.MaxConfs != 1 {
		r.Problems = append(r.Problems, fmt.Sprintf("max_conf_num is %d according to %s: "+
			"containerd uses more than one file in %s for each pod, so the provider's file would also run, "+
			"without unwind; set max_conf_num to 1", r.MaxConfs, cmp.Or(r.Config, r.Name), r.ConfDir))
	}
}

// Skips returns a problem if the runtime would not use the network of a conflist, or else "".
func (r *Runtime) Skips(c *netconf.Conflist) string {
	if r.DefaultNetwork == "" || r.DefaultNetwork == c.Name {
		return ""
	}
	return fmt.Sprintf("cni_default_network is %q in %s, but %s is for network %q, so %s would not "+
		"use that file; set --provider-conf to the default network's file", r.DefaultNetwork, r.Config,
		c.Path, c.Name, r.Name)
}

func (r *Runtime) clean() {
	r.ConfDir = filepath.Clean(r.ConfDir)
	for i := range r.BinDirs {
		r.BinDirs[i] = filepath.Clean(r.BinDirs[i])
	}
	r.Socket = socketPath(r.Socket)
}

// Timer is the advice if the runtime does not trigger sweeps.
const Timer = "run sweeps with systemd (repeat unwindctl install with --systemd)"

// Known reports whether the directories come from the runtime: it reported them, or it is CRI-O,
// whose directories come from its configuration files.
func (r Runtime) Known() bool { return r.Config != "" || r.Name == crio }

// Silent reports whether the runtime reported no directories, so its usual ones are assumed.
func (r Runtime) Silent() bool { return r.Socket != "" && !r.Known() }

// SkipsInvalid reports whether the runtime uses the next conflist if one is invalid, as CRI-O does
// (ocicni pkg/ocicni/ocicni.go loadNetworks). containerd fails instead.
func (r Runtime) SkipsInvalid() bool { return r.Name == crio }

// ByName reports whether containers may select their networks by name, as with nerdctl, podman and
// Nomad: there is no kubelet, and either no CRI runtime was found, or only a containerd.
func (r Runtime) ByName() bool {
	return !r.Kubelet && (r.Socket == "" || r.Name == containerd)
}

// OnlyByName is like ByName, but also reports false if the machine has a kubelet whose runtime is
// unknown.
func (r Runtime) OnlyByName() bool { return r.ByName() && !hasKubelet("/") }

// CNIVersion returns the newest CNI version that the runtime supports, or "" if it is unknown.
// Version 1.1.0 came with libcni 1.2. containerd has had it since 2.0, and CRI-O since 1.34 at the
// latest.
func (r Runtime) CNIVersion(ctx context.Context) string {
	major, minor := r.version(ctx)
	switch {
	case major == 0:
		return ""
	case r.Name == crio && major == 1 && minor < 34, r.Name != crio && major < 2:
		return "1.0.0"
	}
	return "1.1.0"
}

var versionNumber = regexp.MustCompile(`\bv?(\d+)\.(\d+)\.\d`)

// version returns the first two numbers of the runtime's version, or 0, 0 if it is unknown. If
// containerd or CRI-O does not respond, version runs its program with --version.
func (r Runtime) version(ctx context.Context) (major, minor int) {
	major, minor = runtimeVersion(ctx, r.Socket)
	program := strings.ReplaceAll(r.Name, "-", "")
	if major > 0 || r.Name != crio && r.Name != containerd {
		return major, minor
	}
	ctx, cancel := context.WithTimeout(ctx, criTimeout)
	defer cancel()
	out, _ := exec.CommandContext(ctx, program, "--version").Output()
	if number := versionNumber.FindSubmatch(out); number != nil {
		major, _ = strconv.Atoi(string(number[1]))
		minor, _ = strconv.Atoi(string(number[2]))
	}
	return major, minor
}

// SweepAdvice says whether the runtime triggers sweeps itself, and if not, what to do. containerd
// 2.0 and later calls STATUS each time that a kubelet requests containerd's status (go-cni cni.go
// Status). CRI-O calls GC when it starts. CRI-O 1.36 and later also calls STATUS every few
// seconds if cni_status_grace_period is set (cri-o internal/config/cnimgr/cnimgr.go). Other
// runtimes call neither STATUS nor GC.
func (r Runtime) SweepAdvice(ctx context.Context) string {
	major, minor := r.version(ctx)
	switch {
	case r.Name == crio && r.StatusGrace && (major > 1 || minor >= 36):
		return "CRI-O triggers a sweep every few seconds (STATUS)."
	case r.Name == crio:
		return "CRI-O triggers a sweep only when it starts, so also " + Timer
	case r.Name == "":
		return "If the runtime is not containerd 2 or later, " + Timer
	case major == 1:
		return "containerd 1 calls neither STATUS nor GC: " + Timer
	case !r.Kubelet:
		return "This machine has no kubelet, and containerd calls STATUS only when kubelet asks: " + Timer
	case major >= 2:
		return "containerd triggers a sweep every few seconds (STATUS)."
	}
	return "From version 2, containerd triggers a sweep every few seconds (STATUS). With an " +
		"earlier version, " + Timer
}

func anyExists(root string, paths ...string) bool {
	return slices.ContainsFunc(paths, func(path string) bool {
		_, err := os.Stat(filepath.Join(root, path))
		return err == nil
	})
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// readTOML reads a file below root into a struct. Fields whose key is not in the file keep their
// values. A missing file is not an error. An error does not quote the file, which may contain
// secrets.
func readTOML(root, path string, into any) error {
	data, err := netconf.ReadFile(filepath.Join(root, path))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if err := toml.Unmarshal(data, into); err != nil {
		var where *toml.DecodeError
		if errors.As(err, &where) {
			row, column := where.Position()
			return fmt.Errorf("%s: not valid TOML at line %d, column %d", path, row, column)
		}
		return fmt.Errorf("%s: not valid TOML", path)
	}
	return nil
}

// Find returns the runtimes that have a configuration, state directory or socket below root, which
// is "/" outside tests. A runtime's directories are those that it reports over CRI. If it reports
// none, they are the usual ones of its distribution, and Problems says so. CRI-O's directories come
// from its configuration. If that cannot be read, Find returns an error along with the runtimes.
func Find(ctx context.Context, root string) ([]Runtime, error) {
	return find(root, func(r *Runtime) bool { return r.ask(ctx, root) })
}

// Read is like Find, but does not query the runtimes, so it returns their usual directories.
func Read(root string) ([]Runtime, error) {
	return find(root, func(*Runtime) bool { return true })
}

// find returns those runtimes below root for which ask returns true.
func find(root string, ask func(*Runtime) bool) ([]Runtime, error) {
	var all []*Runtime
	for _, d := range distributions {
		all = append(all, d.find(root))
	}
	found, err := findCRIO(root)
	all = slices.DeleteFunc(append(all, found), func(r *Runtime) bool { return r == nil })
	asked, is := sync.WaitGroup{}, make([]bool, len(all)) // in parallel, because each may hang
	for i, r := range all {
		asked.Go(func() { is[i] = ask(r) })
	}
	asked.Wait()
	var runtimes []Runtime
	for i, r := range all {
		if is[i] {
			r.settle(root)
			r.Check()
			runtimes = append(runtimes, *r)
		}
	}
	return runtimes, err
}

// Choose returns the runtime with the given name or, without a name, the only runtime. Several
// runtimes that share their directories count as one. If one of them responds, it does not matter
// that another one, such as a containerd that is no longer used, has not confirmed its directories.
func Choose(found []Runtime, name string) (Runtime, error) {
	var names []string
	several := "this machine has several runtimes with different directories:"
	for _, r := range found {
		names = append(names, r.Name)
		if r.Name == name {
			return r, nil
		}
		several += fmt.Sprintf("\n  %s: conflists in %s, plugins in %s", r.Name, r.ConfDir,
			strings.Join(r.BinDirs, ", "))
	}
	if name != "" {
		return Runtime{}, term.Usage("runtime %q is not on this machine; found: %s", name,
			term.Join(names))
	}
	if len(found) == 0 {
		return Runtime{ConfDir: DefaultConfDir, BinDirs: []string{DefaultBinDir}, MaxConfs: 1,
			Kubelet: InPod()}, nil
	}
	for _, r := range found[1:] {
		if r.ConfDir != found[0].ConfDir || r.BinDirs[0] != found[0].BinDirs[0] {
			return Runtime{}, term.WithHint("choose one: --runtime "+strings.Join(names, " or "),
				"%s", several)
		}
	}
	if slices.ContainsFunc(found, func(r Runtime) bool { return r.responds && !r.Silent() }) {
		found = slices.DeleteFunc(slices.Clone(found), Runtime.Silent)
	}
	one := found[0]
	for _, r := range found[1:] {
		one.Problems = append(slices.Clone(one.Problems), r.Problems...)
		one.Notes = append(slices.Clone(one.Notes), r.Notes...)
	}
	return one, nil
}
