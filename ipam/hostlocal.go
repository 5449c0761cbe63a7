// Package ipam looks at what the node-local IPAM plugin host-local keeps on the disk, and releases what is dead there.
package ipam

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/allocator"
	"github.com/containernetworking/plugins/plugins/ipam/host-local/backend/disk"
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
		if err != nil || address.Unmap().WithZone("").String() != f.Name() || !f.Type().IsRegular() {
			continue // the lock, the last address that was given, or none of host-local's files
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

// Release gives back all addresses of an attachment in a pool, under host-local's own lock. Each file is read again there,
// and removed only if it still names this attachment. Without a pool there is nothing to do, and none is made. The wait
// for the lock is bounded by ctx.
func Release(ctx context.Context, pool, containerID, ifname string) error {
	if containerID == "" || ifname == "" {
		return errors.New("no container ID or no interface is named")
	}
	held, err := HeldBy(pool, containerID, ifname)
	if err != nil || len(held) == 0 {
		return err
	}
	unlock, err := lock(ctx, pool)
	if err != nil {
		return err
	}
	defer unlock()
	for _, address := range held {
		owner, given, err := OwnerOf(pool, address)
		if err != nil {
			return err
		}
		if given && owner.Is(containerID, ifname) {
			if err := os.Remove(filepath.Join(pool, address.String())); err != nil {
				return err
			}
		}
	}
	return nil
}

// lock takes host-local's lock of a pool. On a deadline the lock is given back as soon as it is had.
func lock(ctx context.Context, pool string) (unlock func(), err error) {
	file, err := disk.NewFileLock(pool)
	if err != nil {
		return nil, err
	}
	locked := make(chan error, 1)
	go func() { locked <- file.Lock() }()
	select {
	case err := <-locked:
		if err != nil {
			_ = file.Close()
			return nil, err
		}
		return func() { _ = file.Close() }, nil
	case <-ctx.Done():
		go func() {
			<-locked
			_ = file.Close()
		}()
		return nil, fmt.Errorf("the lock of pool %s: %w", pool, ctx.Err())
	}
}

// Exhausted says whether host-local has no address left to give out of one of its sets of ranges, given the configuration
// of the delegate that calls it. It only looks.
func Exhausted(config json.RawMessage, network string) (bool, error) {
	conf, _, err := allocator.LoadIPAMConfig(config, "")
	if err != nil {
		return false, err
	}
	pool := Pool(config, network)
	files, err := os.ReadDir(pool)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	for _, set := range conf.Ranges {
		free := new(big.Int)
		for _, r := range set {
			free.Add(free, size(r))
		}
		for _, f := range files {
			ip := net.ParseIP(f.Name())
			if ip == nil || ip.String() != f.Name() { // as host-local writes it
				continue
			}
			if slices.ContainsFunc(set, func(r allocator.Range) bool { return r.Contains(ip) && !ip.Equal(r.Gateway) }) {
				free.Sub(free, big.NewInt(1))
			}
		}
		if free.Sign() <= 0 {
			return true, nil
		}
	}
	return false, nil
}

// size returns how many addresses of a range can be given out: all from its start to its end but the gateway's.
func size(r allocator.Range) *big.Int {
	n := new(big.Int).Sub(new(big.Int).SetBytes(r.RangeEnd.To16()), new(big.Int).SetBytes(r.RangeStart.To16()))
	if !r.Contains(r.Gateway) {
		n.Add(n, big.NewInt(1))
	}
	return n
}
