package plugin

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
)

// onceInUse looks through the network namespaces when it is first asked.
type onceInUse struct {
	*op
	addresses map[netip.Addr]bool
	err       error
}

func (l *onceInUse) has(a netip.Addr) answer {
	if l.addresses == nil && l.err == nil {
		for range 5 { // a process may end while it is looked at
			if l.addresses, l.err = addressesInUse(); l.err == nil {
				break
			}
		}
		if l.err != nil {
			l.log.Warn("looking for addresses in use", "err", l.err)
		}
	}
	return answerOf(l.addresses[a.Unmap()], l.err)
}

// addressesInUse returns the addresses of all interfaces in all network namespaces that a process is in or that are mounted
// somewhere. An error means that there may be more.
func addressesInUse() (map[netip.Addr]bool, error) {
	paths, err := netNSPaths()
	if err != nil {
		return nil, err
	}
	all := map[netip.Addr]bool{}
	for _, path := range paths {
		if err := collectAddressesAt(path, all); err != nil { // also one that is gone: its process may have shared it with others
			return nil, fmt.Errorf("network namespace %s: %w", path, err)
		}
	}
	return all, nil
}

func collectAddressesAt(path string, to map[netip.Addr]bool) error {
	netns, err := ns.GetNS(path)
	if err != nil {
		return err
	}
	defer netns.Close()
	return collectAddresses(netns, to)
}

// collectAddresses adds the addresses of all interfaces in a network namespace.
func collectAddresses(netns ns.NetNS, to map[netip.Addr]bool) error {
	return inNetNS(netns, func() error {
		addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
		for _, a := range addrs {
			if ip, ok := netip.AddrFromSlice(a.IP); ok {
				to[ip.Unmap()] = true
			}
		}
		return err
	})
}

// netNSPaths returns a path to each network namespace that there is a way to.
func netNSPaths() ([]string, error) {
	byLink := map[string]string{}
	err := eachProcess(func(_ int, proc string) (bool, error) {
		link, err := os.Readlink(proc + "/ns/net")
		if err == nil {
			byLink[link] = proc + "/ns/net"
		}
		return false, ignoreGone(err)
	})
	if err != nil {
		return nil, err
	}
	mounts, err := nsfsMounts()
	if err != nil {
		return nil, err
	}
	for link, path := range mounts {
		byLink[link] = path
	}
	var paths []string
	for _, path := range byLink {
		paths = append(paths, path)
	}
	return paths, nil
}

// nsfsMounts returns the network namespaces that are mounted, by what a link to each would say.
func nsfsMounts() (map[string]string, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	found := map[string]string{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		// 36 35 98:0 ROOT MOUNTPOINT options … - nsfs nsfs rw (proc_pid_mountinfo(5))
		fields := strings.Fields(lines.Text())
		if len(fields) < 5 || !strings.HasPrefix(fields[3], "net:[") {
			continue
		}
		path, err := strconv.Unquote(`"` + strings.ReplaceAll(fields[4], `"`, `\"`) + `"`) // \040 for a blank
		if err != nil {
			return nil, fmt.Errorf("mount point %q: %w", fields[4], err)
		}
		found[fields[3]] = path
	}
	return found, lines.Err()
}
