package main

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/skel"
)

// addSRIOV follows the ADD of sriov-cni 2.10.0, pkg/cnicommands/cni.go, CmdAdd, for a VF in DPDK
// mode, which has no interface in the container. An address stands in for the VF. Like sriov-cni,
// it caches the configuration for the DEL.
func addSRIOV(c conf, args *skel.CmdArgs) error {
	err := os.MkdirAll(filepath.Dir(c.cache(args)), 0o700)
	if err := errors.Join(err, os.WriteFile(c.cache(args), args.StdinData, 0o600)); err != nil {
		return err
	}
	return c.add(args)
}

// delSRIOV follows CmdDel in pkg/cnicommands/cni.go: without the cached configuration, CmdDel does
// nothing. Without CNI_NETNS, it removes that configuration, but doesn't reset the VF.
func delSRIOV(c conf, args *skel.CmdArgs) error {
	if _, err := os.Stat(c.cache(args)); err != nil {
		return nil // sriov-cni exits 0, too
	}
	if args.Netns != "" {
		if err := c.free(args); err != nil {
			return err
		}
	}
	return os.Remove(c.cache(args))
}

// cache returns the path of an attachment's cached configuration.
func (c conf) cache(args *skel.CmdArgs) string {
	return filepath.Join(c.Dir+".cache", filepath.Base(c.file(args)))
}
