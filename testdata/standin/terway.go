package main

import (
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/vishvananda/netlink"
)

// delTerway follows the DEL of terway 1.17.5:
//
//   - plugin/terway/cni.go, cmdDel: without CNI_NETNS it exits 0 and does nothing.
//   - plugin/terway/cni_linux.go, getCmdArgs: a path without a network namespace is an error.
//   - plugin/driver/utils/utils_linux.go, GenericTearDown: it deletes the links in the namespace. If
//     that fails, doCmdDel exits 0 and releases nothing.
//   - daemon/daemon.go, ReleaseIP: it finds the address by the pod and the container's ID.
func delTerway(c conf, args *skel.CmdArgs) error {
	if args.Netns == "" {
		return nil
	}
	netns, err := ns.GetNS(args.Netns)
	if err != nil {
		return err
	}
	defer netns.Close()
	if err := netns.Do(tearDown); err != nil {
		return nil // terway exits 0, too
	}
	return c.free(args)
}

func tearDown(ns.NetNS) error {
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	for _, l := range links {
		switch l.(type) {
		case *netlink.IPVlan, *netlink.Vlan, *netlink.Veth, *netlink.Ifb, *netlink.Dummy:
			if err := netlink.LinkDel(l); err != nil {
				return err
			}
		}
	}
	return nil
}
