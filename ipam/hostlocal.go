// Package ipam reads what the node-local IPAM plugin host-local keeps on the disk.
package ipam

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// defaultDataDir is where host-local keeps its networks if its configuration names no dataDir.
const defaultDataDir = "/var/lib/cni/networks"

// Owner is the attachment that host-local has given an address to. IfName is "" in files of host-local before 0.8.
type Owner struct {
	ContainerID string
	IfName      string
}

// Is says whether the owner is this attachment.
func (o Owner) Is(containerID, ifname string) bool {
	return o.ContainerID == containerID && (o.IfName == "" || o.IfName == ifname)
}

// Pool returns the folder in which host-local keeps the addresses of a network, given the configuration of the delegate
// that calls it, or "" if the delegate uses another IPAM. network is a valid network name.
func Pool(config json.RawMessage, network string) string {
	var conf struct {
		IPAM struct {
			Type    string `json:"type"`
			DataDir string `json:"dataDir"`
		} `json:"ipam"`
	}
	if json.Unmarshal(config, &conf) != nil || conf.IPAM.Type != "host-local" {
		return ""
	}
	if conf.IPAM.DataDir == "" {
		conf.IPAM.DataDir = defaultDataDir
	}
	if !filepath.IsAbs(conf.IPAM.DataDir) {
		return ""
	}
	return filepath.Join(conf.IPAM.DataDir, network)
}

// OwnerOf returns to whom the address is given in a pool. ok is false if it is given to no one, or if the file says no
// owner (host-local died between making and writing it). It writes nothing and takes no lock: what it returns may be
// old news, and serves only as a reason to keep.
func OwnerOf(pool string, address netip.Addr) (owner Owner, ok bool, err error) {
	path := filepath.Join(pool, address.Unmap().String())
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return Owner{}, false, nil
	}
	if err != nil {
		return Owner{}, false, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return Owner{}, false, err
	}
	id, ifname, _ := strings.Cut(strings.TrimSpace(string(data)), "\r\n")
	return Owner{ContainerID: strings.TrimSpace(id), IfName: strings.TrimSpace(ifname)}, id != "", nil
}

// HeldBy returns the addresses that are given to an attachment in a pool. As OwnerOf, it only looks.
func HeldBy(pool, containerID, ifname string) ([]netip.Addr, error) {
	files, err := os.ReadDir(pool)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var held []netip.Addr
	for _, f := range files {
		address, err := netip.ParseAddr(f.Name())
		if err != nil {
			continue // the lock, or the last address that was given
		}
		owner, given, err := OwnerOf(pool, address)
		if err != nil {
			return held, err
		}
		if given && owner.Is(containerID, ifname) {
			held = append(held, address)
		}
	}
	return held, nil
}
