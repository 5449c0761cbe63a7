// Package pools reads host-local pools for the operator's commands: the pools that a node's
// conflists use, the number of addresses in their ranges, and the taken addresses.
package pools

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/containernetworking/plugins/pkg/ip"
	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/allocator"

	"cni-unwind/ipam"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/sweep"
)

// Read returns the pools of all networks, with or without unwind, whose conflists are in confDirs,
// such as /etc/cni/net.d. If several files use the same pool, the file with unwind wins. Read omits
// the pools of a network that unwind runs with another state directory, because their owners are in
// another journal. networks contains the networks that unwind runs with stateDir. The error names
// the files and chains that cannot be read; Read still reads all others.
func Read(
	stateDir string, confDirs ...string,
) (pools []sweep.Pool, networks []sweep.Network, err error) {
	var errs []error
	unread := map[string]bool{}    // chain files whose error is already in errs
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
// nerdctl's own networks, which are in one subdirectory for each containerd namespace (nerdctl
// 2.3.5 pkg/netutil/store.go).
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

// Ranges returns the range sets in a configuration from OfNode, as host-local itself reads them. It
// returns nil if there are none, for example because the runtime passes them (capability ipRanges).
func Ranges(config json.RawMessage) (sets []Set, err error) {
	var given allocator.Net
	err = json.Unmarshal(config, &given)
	if of := given.IPAM; err == nil && of != nil && len(of.Ranges) == 0 &&
		len(given.RuntimeConfig.IPRanges) == 0 && (of.Range == nil || of.Range.Subnet.IP == nil) {
		return nil, nil
	}
	conf, _, err := allocator.LoadIPAMConfig(config, "")
	if err != nil {
		return nil, err
	}
	for i, set := range conf.Ranges {
		for _, r := range set {
			if ip.Cmp(r.RangeEnd, r.RangeStart) < 0 { // host-local accepts this
				return nil, fmt.Errorf("range set %d: %s is empty: its end is below its start", i, &r)
			}
		}
		sets = append(sets, Set(set))
	}
	return sets, nil
}

// podCIDR matches the keywords that calico replaces with the node's pod CIDRs, in upper or lower
// case.
var podCIDR = regexp.MustCompile(`(?i)"usePodCidr(IPv6)?"`)

// OfNode returns a plugin's configuration with the ranges that the plugin actually passes to
// host-local on this node. Two plugins do not pass on the configured ranges:
//   - flannel replaces all of them with the subnets in its file (flannel-io/cni-plugin 6f13a99d,
//     flannel_linux.go, getDelegateIPAM);
//   - calico replaces two keywords with its node's pod CIDRs, which only the Kubernetes API
//     provides (projectcalico/calico 0c474030, cni-plugin/internal/pkg/utils/utils.go,
//     replaceHostLocalIPAMPodCIDR).
//
// An error means that the ranges are unknown.
func OfNode(config json.RawMessage) (json.RawMessage, error) {
	var conf struct{ Type, SubnetFile string }
	_ = json.Unmarshal(config, &conf) // Ranges returns the error
	switch {
	case conf.Type == "flannel":
		return ofFlannel(cmp.Or(conf.SubnetFile, "/run/flannel/subnet.env"))
	case conf.Type == "calico" && podCIDR.Match(config):
		return nil, errors.New("calico's usePodCidr stands for the node's pod CIDR, which only the " +
			"Kubernetes API provides")
	}
	return config, nil
}

// ofFlannel returns the configuration that flannel creates from its subnet file for host-local.
func ofFlannel(path string) (json.RawMessage, error) {
	data, err := netconf.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var sets []string
	for _, key := range []string{"FLANNEL_SUBNET=", "FLANNEL_IPV6_SUBNET="} {
		for line := range strings.Lines(string(data)) {
			value, is := strings.CutPrefix(strings.TrimSpace(line), key)
			if !is || value == "" {
				continue
			}
			subnet, err := netip.ParsePrefix(value)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			sets = append(sets, fmt.Sprintf(`[{"subnet": %q}]`, subnet.Masked()))
		}
	}
	if sets == nil {
		return nil, fmt.Errorf("%s does not set FLANNEL_SUBNET", path)
	}
	return fmt.Appendf(nil, `{"ipam": {"type": "host-local", "ranges": [%s]}}`,
		strings.Join(sets, ",")), nil
}

// Set is a range set of one address family. An ADD gets an address from each set of its pool, and
// fails if one set has none left.
type Set allocator.RangeSet

// Has reports whether the set contains an address that host-local can assign: it is in a range, and
// not that range's gateway.
func (s Set) Has(a netip.Addr) bool {
	return slices.ContainsFunc(s, func(r allocator.Range) bool {
		return r.Contains(a.AsSlice()) && !r.Gateway.Equal(a.AsSlice())
	})
}

// Unbounded is the size of a set with 2^53 addresses or more, such as an IPv6 /64. No file
// system holds so many files. JSON readers represent all smaller numbers exactly (RFC 8259 §6).
const Unbounded = 1 << 53

// Size returns the number of assignable addresses of the set, at most Unbounded.
func (s Set) Size() int64 {
	size, unbounded := new(big.Int), big.NewInt(Unbounded)
	for _, r := range s {
		first, last := new(big.Int).SetBytes(r.RangeStart), new(big.Int).SetBytes(r.RangeEnd)
		size.Add(size, last.Sub(last, first))
		if !r.Contains(r.Gateway) {
			size.Add(size, big.NewInt(1))
		}
	}
	if size.Cmp(unbounded) >= 0 {
		return Unbounded
	}
	return size.Int64()
}
