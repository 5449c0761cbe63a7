// Standin is a CNI plugin. It stands in for providers' plugins that cannot run without their
// cluster. A test puts standin into CNI_PATH under the name of such a plugin. Standin's ADD and DEL
// then follow that plugin's rules. Each plugin's rules are in a separate file, which cites the
// provider's source code.
//
// Its network configuration:
//
//	{"type": "<name>", "dir": "/abs/dir", …}
//
// An ADD reserves one address of 192.0.2.0/24, in the file dir/<containerID>.<ifname>. A DEL
// removes the file if the provider's plugin would release the address, so a file that remains is a
// leak.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// rule carries out a plugin's ADD or DEL.
type rule func(c conf, args *skel.CmdArgs) error

// rules maps the name of a provider's plugin to its rules for ADD and DEL.
var rules = map[string][2]rule{
	"kube-ovn":            {conf.add, delKubeOVN},
	"ovn-k8s-cni-overlay": {conf.add, delOVNKubernetes},
	"sriov":               {addSRIOV, delSRIOV},
	"terway":              {conf.add, delTerway},
	"azure-vnet":          {addAzure, delAzure},
	"spiderpool":          {addSpiderpool, delSpiderpool},
}

func main() {
	name := filepath.Base(os.Args[0])
	of, known := rules[name]
	if !known {
		fmt.Fprintf(os.Stderr, "standin: no rule for %s; add it to rules in testdata/standin, and run make faulty\n", name)
		os.Exit(1)
	}
	skel.PluginMainFuncs(skel.CNIFuncs{Add: of[0].parsed, Del: of[1].parsed}, version.All, "stand-in for "+name)
}

// conf is the part of the network configuration that the rules read; MultiTenancy and the fields
// after it are for azure-vnet.
type conf struct {
	CNIVersion   string `json:"cniVersion"`
	Dir          string `json:"dir"`
	MultiTenancy bool   `json:"multiTenancy"`
	Addresses    int    `json:"addresses"`
	IPAM         struct {
		Type string `json:"type"`
	} `json:"ipam"`
}

func (do rule) parsed(args *skel.CmdArgs) error {
	var c conf
	if err := json.Unmarshal(args.StdinData, &c); err != nil {
		return err
	}
	if !filepath.IsAbs(c.Dir) {
		return fmt.Errorf("dir %q is not an absolute path", c.Dir)
	}
	return do(c, args)
}

// file returns the path of the file with an attachment's address.
func (c conf) file(args *skel.CmdArgs) string {
	return filepath.Join(c.Dir, filepath.Base(args.ContainerID)+"."+filepath.Base(args.IfName))
}

// add carries out an ADD that reserves an address and creates no interface.
func (c conf) add(args *skel.CmdArgs) error {
	result, err := c.hold(args)
	if err != nil {
		return err
	}
	return types.PrintResult(result, c.CNIVersion)
}

// hold reserves the lowest free address for an attachment.
func (c conf) hold(args *skel.CmdArgs) (*current.Result, error) {
	held := map[string]bool{}
	files, err := os.ReadDir(c.Dir)
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		address, err := os.ReadFile(filepath.Join(c.Dir, f.Name()))
		if err != nil {
			return nil, err
		}
		held[string(address)] = true
	}
	for last := byte(1); last < 255; last++ {
		address := net.IPv4(192, 0, 2, last)
		if held[address.String()] {
			continue
		}
		return resultOf(address), os.WriteFile(c.file(args), []byte(address.String()), 0o600)
	}
	return nil, errors.New("no address is free")
}

func resultOf(address net.IP) *current.Result {
	return &current.Result{CNIVersion: current.ImplementedSpecVersion, IPs: []*current.IPConfig{
		{Address: net.IPNet{IP: address, Mask: net.CIDRMask(24, 32)}},
	}}
}

// free releases the address of an attachment, if it has one.
func (c conf) free(args *skel.CmdArgs) error {
	if err := os.Remove(c.file(args)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
