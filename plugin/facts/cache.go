package facts

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/plugins/pkg/ns"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// cacheDir is the directory of libcni's cache with containerd, CRI-O, podman, nerdctl and cnitool.
const cacheDir = "/var/lib/cni/results"

// Cached is libcni's record of a successful ADD. libcni keeps it until the DEL has succeeded
// (libcni/api.go, cachedInfo).
type Cached struct {
	Network     string          `json:"networkName"`
	ContainerID string          `json:"containerId"`
	IfName      string          `json:"ifName"`
	NetNS       string          `json:"netns"` // with libcni before 1.1, the result's sandbox, or ""
	Args        [][2]string     `json:"cniArgs"`
	Config      []byte          `json:"config"` // the conflist
	Result      json.RawMessage `json:"result"`

	RuntimeConfig map[string]json.RawMessage `json:"capabilityArgs"`

	Path    string    `json:"-"` // the path of this file
	Written time.Time `json:"-"` // the file's modification time
}

func (c Cached) CNIArgs() string {
	var args []string
	for _, a := range c.Args {
		args = append(args, a[0]+"="+a[1])
	}
	return strings.Join(args, ";")
}

// Pod returns the ADD's pod, from CNI_ARGS (see isPod).
func (c Cached) Pod() journal.Pod { return netconf.PodOf(c.CNIArgs()) }

// Chain returns the chain that the runtime ran, and unwind's configuration for it. For a chain
// without unwind, through is false, and the configuration contains the defaults.
func (c Cached) Chain() (chain *netconf.Chain, conf *netconf.Conf, through bool, err error) {
	list, err := netconf.ParseConflist(c.Config)
	if err != nil {
		return nil, nil, false, err
	}
	list.Name = cmp.Or(list.Name, c.Network)
	if chain, conf, err = list.Chain(); err == nil && conf.Name != c.Network {
		err = fmt.Errorf("the file is for network %q, but contains the chain of network %q",
			c.Network, conf.Name)
	}
	if err == nil {
		conf.RuntimeConfig = c.RuntimeConfig
	}
	return chain, conf, list.Unwind != nil, err
}

func (c Cached) Key() journal.Key {
	return journal.Key{Network: c.Network, ContainerID: c.ContainerID, IfName: c.IfName}
}

// Cache returns all attachments in libcni's cache. The error names the files that cannot be read.
func (n *Node) Cache() ([]Cached, error) { return n.readCache("") }

// readCache is like Cache, but reads only the files whose names begin with a prefix.
func (n *Node) readCache(prefix string) (all []Cached, err error) {
	files, err := os.ReadDir(n.cacheDir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	errs := []error{err}
	for _, f := range files {
		if f.IsDir() || !strings.HasPrefix(f.Name(), prefix) || isLoopback(f.Name()) {
			continue
		}
		c, err := n.readCached(f.Name())
		errs = append(errs, err)
		if c != nil {
			all = append(all, *c)
		}
	}
	return all, errors.Join(errs...)
}

// isLoopback reports whether a file belongs to a runtime's loopback network, which each pod has and
// which owns no address. go-cni (cni.go) and ocicni (pkg/ocicni/ocicni.go) name that network
// cni-loopback.
func isLoopback(name string) bool {
	return strings.HasPrefix(name, "cni-loopback-") && strings.HasSuffix(name, "-lo")
}

func fileName(k journal.Key) string {
	return fmt.Sprintf("%s-%s-%s", k.Network, k.ContainerID, k.IfName)
}

// readCached reads a file of libcni's cache. It returns nil if there is no such file, if the file
// is incomplete, or if its content does not match its name. libcni writes files in place, so a file
// may be incomplete after a power loss, or while libcni writes it.
func (n *Node) readCached(name string) (*Cached, error) {
	c := &Cached{Path: filepath.Join(n.cacheDir(), name)}
	data, err := netconf.ReadFile(c.Path)
	info, infoErr := os.Stat(c.Path) // after the read, so the time is not older than the content
	switch err = cmp.Or(err, infoErr); {
	// there is no such file, for example after a DEL, or its name would be too long
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENAMETOOLONG):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("libcni's cache: %s: %w", name, err)
	case json.Unmarshal(data, c) != nil || fileName(c.Key()) != name:
		return nil, nil //nolint:nilerr // it proves nothing
	}
	c.NetNS = cmp.Or(c.NetNS, netconf.SandboxOf(c.Result, c.IfName))
	c.Written = info.ModTime()
	return c, nil
}

func (n *Node) cacheDir() string { return cmp.Or(n.CacheDir, cacheDir) }

// CachedOf returns the file of libcni's cache for a record's ADD. It returns nil if there is none,
// or if the file's network namespace path or addresses differ from the record's.
func (n *Node) CachedOf(e *journal.Record) (*Cached, error) {
	c, err := n.readCached(fileName(e.Key))
	if c == nil || err != nil || !SamePath(c.NetNS, e.Added.NetNS.Path) ||
		!slices.Equal(netconf.AddressesOf(c.Result), netconf.AddressesOf(e.Got.Result)) {
		return nil, err
	}
	return c, nil
}

// netNSThere reports whether the ADD's network namespace exists, or may exist.
func (c Cached) netNSThere() bool {
	return c.NetNS == "" || !IsNoNetNS(ns.IsNSorErr(c.NetNS))
}

// Later reports whether the attachment was added again by an ADD that the journal lacks. It lacks
// an ADD if unwind was off, or could not write the journal. In this case, unwind leaves both ADDs
// to the runtime's DEL: plugins find resources by container ID, so the DELs of the recorded ADD
// would also release the resources of the later ADD. The evidence is an interface (see
// CachedInterface) in a namespace that belongs to no record and is not the host's.
func (n *Node) Later(ctx context.Context, e *journal.Record) (bool, error) {
	seen, err := n.CachedInterface(e.Key)
	if !seen.There() || n.IsHost(seen.Netns) || n.IsAt(e, seen.Netns) {
		return false, err
	}
	all, _ := n.Journal.Snapshot(ctx).Records(e.Key) // a damaged record names no namespace
	known := slices.ContainsFunc(all,
		func(o *journal.Record) bool { return n.IsAt(o, seen.Netns) })
	return !known && !n.Anothers(ctx, e, seen.Netns), nil
}

// CachedInterface returns the interface of an attachment whose ADD is in libcni's cache. It returns
// the zero Interface if the ADD's network namespace has no such interface, or if the interface does
// not match the cached result (see Interface.Is).
func (n *Node) CachedInterface(key journal.Key) (Interface, error) {
	c, err := n.readCached(fileName(key))
	if c == nil || err != nil {
		return Interface{}, err
	}
	seen, err := InterfaceAt(c.NetNS, key.IfName)
	switch {
	case IsNoNetNS(err):
		return Interface{}, nil
	case err != nil || !seen.Is(netconf.AddressesOf(c.Result)):
		return Interface{}, err
	}
	return seen, nil
}
