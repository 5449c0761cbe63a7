package main

import (
	"net"
	"os"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
)

// addSpiderpool follows the ADD of the IPAM plugin spiderpool 1.2.2, pkg/ipam/allocate.go,
// Allocate: if the pod's interface already has an address, spiderpool's agent returns that address,
// whichever sandbox the ADD is for.
func addSpiderpool(c conf, args *skel.CmdArgs) error {
	ofPod, err := podFor(args)
	if err != nil {
		return err
	}
	if address, err := os.ReadFile(c.file(ofPod)); err == nil {
		return types.PrintResult(resultOf(net.ParseIP(string(address))), c.CNIVersion)
	}
	return c.add(ofPod)
}

// delSpiderpool follows the DEL of spiderpool, pkg/ipam/release.go, Release: unless the pod is
// alive, the agent releases the pod's addresses, whichever sandbox the DEL is for. This stand-in
// treats every pod as terminating.
func delSpiderpool(c conf, args *skel.CmdArgs) error {
	ofPod, err := podFor(args)
	if err != nil {
		return err
	}
	return c.free(ofPod)
}

// podFor returns a copy of a call's arguments with the pod's name instead of the container's ID.
func podFor(args *skel.CmdArgs) (*skel.CmdArgs, error) {
	k8s := struct {
		types.CommonArgs
		K8S_POD_NAMESPACE, K8S_POD_NAME types.UnmarshallableString //nolint:revive // keys of CNI_ARGS
	}{}
	err := types.LoadArgs(args.Args, &k8s)
	ofPod := *args
	ofPod.ContainerID = string(k8s.K8S_POD_NAMESPACE + "_" + k8s.K8S_POD_NAME)
	return &ofPod, err
}
