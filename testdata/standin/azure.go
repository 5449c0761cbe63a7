package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
)

// addAzure follows the ADD of azure-vnet (Azure/azure-container-networking cbd7560c), and delAzure
// follows its DEL. The directory c.Dir stands in for Azure CNS, the daemon that assigns addresses.
//
//   - With multiTenancy, ADD uses the address of the pod's network container, and DEL releases
//     nothing (cni/network/network.go Add, Delete).
//   - With ipam.type azure-cns, azure-vnet calls CNS, not a plugin. CNS identifies an address by
//     the container and the interface: a repeated ADD gets the same address, and DEL releases it
//     with or without a namespace (invoker_cns.go). CNS has conf.Addresses addresses.
//   - With any other ipam.type, azure-vnet runs the plugin of that name (invoker_azure.go).
func addAzure(c conf, args *skel.CmdArgs) error {
	for _, name := range []string{"K8S_POD_NAME=", "K8S_POD_NAMESPACE="} {
		if !strings.Contains(";"+args.Args, ";"+name) { // network.go getPodInfo
			return fmt.Errorf("%s is not in CNI_ARGS", name)
		}
	}
	var r types.Result
	var err error
	switch {
	case c.MultiTenancy:
		r = &current.Result{CNIVersion: current.ImplementedSpecVersion, IPs: []*current.IPConfig{
			{Address: net.IPNet{IP: net.IPv4(198, 51, 100, 1), Mask: net.CIDRMask(24, 32)}}}}
	case c.IPAM.Type == "azure-cns":
		r, err = c.request(args)
	default:
		r, err = invoke.DelegateAdd(context.Background(), c.IPAM.Type, args.StdinData, nil)
	}
	if err != nil {
		return fmt.Errorf("IPAM Invoker Add failed with error: %w", err)
	}
	return types.PrintResult(r, c.CNIVersion)
}

// request requests an address from CNS.
func (c conf) request(args *skel.CmdArgs) (*current.Result, error) {
	if err := c.free(args); err != nil { // as with CNS, a repeated ADD keeps only one address
		return nil, err
	}
	held, err := os.ReadDir(c.Dir)
	if err == nil && len(held) >= c.Addresses {
		err = errors.New("not enough IPs available")
	}
	if err != nil {
		return nil, err
	}
	return c.hold(args)
}

func delAzure(c conf, args *skel.CmdArgs) error {
	switch {
	case c.MultiTenancy:
		return nil
	case c.IPAM.Type == "azure-cns":
		return c.free(args)
	}
	return invoke.DelegateDel(context.Background(), c.IPAM.Type, args.StdinData, nil)
}
