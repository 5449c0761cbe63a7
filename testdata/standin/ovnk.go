package main

import (
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/plugins/pkg/ns"
)

// delOVNKubernetes follows the DEL of ovn-kubernetes 1.3.0, go-controller/pkg/cni/helper_linux.go,
// UnconfigureInterface: it fails if it cannot open the namespace in CNI_NETNS. Otherwise it removes
// the port by the container's ID, whether or not the interface is in the namespace.
func delOVNKubernetes(c conf, args *skel.CmdArgs) error {
	netns, err := ns.GetNS(args.Netns)
	if err != nil {
		return err
	}
	defer netns.Close()
	return c.free(args)
}
