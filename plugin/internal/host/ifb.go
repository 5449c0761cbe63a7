package host

import (
	"encoding/hex"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// IdleIFBs returns the names of bandwidth's ifb devices to which no ingress filter of an interface
// redirects packets. The kernel removes the filter with the interface, and leaves the ifb device.
func IdleIFBs() ([]string, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	names := map[int]string{}
	for _, link := range links {
		// bandwidth's names: plugins meta/bandwidth/main.go, getIfbDeviceName
		name := link.Attrs().Name
		digest, named := strings.CutPrefix(name, "bwp")
		_, notHex := hex.DecodeString(digest)
		if _, is := link.(*netlink.Ifb); is && named && len(digest) == 12 && notHex == nil {
			names[link.Attrs().Index] = name
		}
	}
	for _, link := range links {
		if len(names) == 0 {
			break
		}
		filters, err := netlink.FilterList(link, netlink.MakeHandle(0xffff, 0))
		if err != nil && !errors.Is(err, unix.ENODEV) { // it has just gone
			return nil, err
		}
		for _, filter := range filters {
			if u32, is := filter.(*netlink.U32); is {
				delete(names, u32.RedirIndex)
			}
		}
	}
	return slices.Sorted(maps.Values(names)), nil
}
