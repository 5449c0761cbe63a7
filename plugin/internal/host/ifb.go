package host

import (
	"errors"
	"maps"
	"regexp"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ifbName is a name that bandwidth gives to an ifb device (plugins meta/bandwidth/main.go,
// getIfbDeviceName).
var ifbName = regexp.MustCompile(`^bwp[0-9a-f]{12}$`)

// IdleIFBs returns the names of bandwidth's ifb devices to which no ingress filter of an interface
// redirects packets. The kernel removes the filter with the interface, and leaves the ifb device.
func IdleIFBs() ([]string, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	names := map[int]string{}
	for _, link := range links {
		if _, is := link.(*netlink.Ifb); is && ifbName.MatchString(link.Attrs().Name) {
			names[link.Attrs().Index] = link.Attrs().Name
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
