package main

import "github.com/containernetworking/cni/pkg/skel"

// delKubeOVN follows the DEL of kube-ovn 1.16.2, pkg/daemon/handler.go, handleDel: without
// CNI_NETNS, the daemon returns "no content" and does nothing. With CNI_NETNS, deleteNic
// (ovs_linux.go) removes the port by the container's ID, and opens the namespace only for a VF.
func delKubeOVN(c conf, args *skel.CmdArgs) error {
	if args.Netns == "" {
		return nil
	}
	return c.free(args)
}
