// Package pools reads host-local pools for the operator's commands: the pools that a node's
// conflists use, the number of addresses in their ranges, and the taken addresses.
package pools

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"cni-unwind/ipam"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

// Read returns the pools of the networks in conflist directories (/etc/cni/net.d), with or
// without unwind. If several files use the same pool, the file with unwind wins. Read leaves
// out the pools of a network that unwind runs with another state directory, because their owners
// are in another journal. The networks are those that unwind runs with this one. The error names
// the files and chains that cannot be read; Read still returns what the others contain.
func Read(
	stateDir string, confDirs ...string,
) (pools []sweep.Pool, networks []sweep.Network, err error) {
	var errs []error
	unread := map[string]bool{}    // files of which errs has the error
	elsewhere := map[string]bool{} // directories of pools that belong to another journal
	for _, dir := range confDirs {
		paths, err := Conflists(dir)
		errs = append(errs, err)
		for _, path := range paths {
			file, ours, err := readFile(path, stateDir)
			if err != nil {
				if at, _ := filepath.Abs(path); !unread[at] {
					errs = append(errs, fmt.Errorf("%s: %w", path, err))
				}
				if list, _ := netconf.ReadConflist(path); list != nil && list.Unwind != nil {
					unread[list.Unwind.ChainFile] = true
				}
				continue
			}
			if ours && !file.plain {
				networks = append(networks, file.Network)
			}
			for _, p := range file.pools {
				i := slices.IndexFunc(pools, func(o sweep.Pool) bool { return o.Dir == p.Dir })
				switch {
				case !ours:
					elsewhere[p.Dir] = true
				case i < 0:
					pools = append(pools, p)
				case pools[i].Plain:
					pools[i] = p
				}
			}
		}
	}
	pools = slices.DeleteFunc(pools, func(p sweep.Pool) bool { return elsewhere[p.Dir] })
	return pools, networks, errors.Join(errs...)
}

// Conflists returns the paths of all configurations in a directory: the runtime's, and those of
// nerdctl's own networks, which are in a directory for each containerd namespace (nerdctl 2.3.5
// pkg/netutil/store.go).
func Conflists(dir string) ([]string, error) {
	paths, err := netconf.Conflists(dir)
	nerdctls, globErr := filepath.Glob(filepath.Join(dir, "*", "nerdctl-*.conflist"))
	return append(paths, nerdctls...), errors.Join(err, globErr)
}

// file is a conflist with its pools. plain is set if a runtime runs it without unwind.
type file struct {
	sweep.Network
	pools []sweep.Pool
	plain bool
}

// readFile reads a conflist. ours is false if unwind runs it with another state directory.
func readFile(path, stateDir string) (f file, ours bool, err error) {
	list, err := netconf.ReadConflist(path)
	if err != nil {
		return file{}, true, err
	}
	chain, conf, err := list.Chain()
	if err != nil {
		return file{}, true, err
	}
	f = file{sweep.Network{Chain: chain, Conf: conf}, sweep.PoolsOf(chain, conf), list.Unwind == nil}
	for i := range f.pools {
		f.pools[i].Plain = f.plain
	}
	return f, f.plain || conf.StateDir == filepath.Clean(stateDir), nil
}

// Taken returns the addresses of a pool that host-local cannot assign now, because a file or a
// directory has the address as its name. It does not open these files.
func Taken(pool string) (all []netip.Addr, err error) {
	files, err := os.ReadDir(pool)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, f := range files {
		if a, ok := ipam.ParseName(f.Name()); ok {
			all = append(all, a)
		}
	}
	return all, nil
}
