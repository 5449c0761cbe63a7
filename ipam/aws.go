package ipam

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// AWS is the probe of the AWS VPC CNI. Its daemon ipamd keeps what it gave out in a checkpoint, and
// a second one for each further network card (amazon-vpc-cni-k8s 1.23.2,
// pkg/ipamd/datastore/data_store.go). ipamd replaces the file before it answers a plugin, so after a
// DEL that freed the address the file does not have it.
type AWS struct {
	Checkpoint string // path of ipamd's checkpoint; "" is the default one
}

const (
	awsType = "aws-cni"
	// awsCheckpoint is where ipamd keeps its checkpoint by default.
	awsCheckpoint = "/var/run/aws-node/ipam.json"
	// awsFormat is the version of the checkpoint that AWS reads: of ipamd 1.12 to 1.23.
	awsFormat = "vpc-cni-ipam/1"
	// maxCheckpoint bounds a checkpoint, in bytes: some 300 for each pod of a node.
	maxCheckpoint = 4 << 20
)

// Held reads the checkpoints. Without one, and in another format, there is no store to ask: the
// directory is in memory, so a reboot empties it.
func (a AWS) Held(_ context.Context, config json.RawMessage, network, containerID, ifname string) (
	held []netip.Addr, asked bool, err error) {
	if delegate, _ := typesOf(config); delegate != awsType {
		return nil, false, nil
	}
	first := cmp.Or(a.Checkpoint, awsCheckpoint)
	ext := filepath.Ext(first)
	others, err := filepath.Glob(strings.TrimSuffix(first, ext) + "-nic-*" + ext)
	if err != nil {
		return nil, false, err
	}
	for _, path := range append([]string{first}, others...) {
		allocations, known, err := readCheckpoint(path)
		if err != nil {
			return nil, true, fmt.Errorf("ipamd's checkpoint %s: %w", path, err)
		}
		asked = asked || known
		for _, one := range allocations {
			if one.Network != network || one.ContainerID != containerID || one.IfName != ifname {
				continue
			}
			for _, address := range []netip.Addr{one.IPv4, one.IPv6} {
				if address.IsValid() {
					held = append(held, address)
				}
			}
		}
	}
	return held, asked, nil
}

// allocation is an entry of a checkpoint (CheckpointEntry).
type allocation struct {
	Network     string     `json:"networkName"`
	ContainerID string     `json:"containerID"`
	IfName      string     `json:"ifName"`
	IPv4        netip.Addr `json:"ipv4"`
	IPv6        netip.Addr `json:"ipv6"`
}

// readCheckpoint reads one checkpoint. known is false if there is none in a known format.
func readCheckpoint(path string) (all []allocation, known bool, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, true, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, true, errors.Join(err, errors.New("not a regular file"))
	}
	data, err := io.ReadAll(io.LimitReader(f, maxCheckpoint+1))
	if err != nil {
		return nil, true, err
	}
	if len(data) > maxCheckpoint {
		return nil, true, fmt.Errorf("more than %d bytes", maxCheckpoint)
	}
	var checkpoint struct {
		Version     string          `json:"version"`
		Allocations json.RawMessage `json:"allocations"`
	}
	if err := json.Unmarshal(data, &checkpoint); err != nil {
		return nil, true, err
	}
	if checkpoint.Version != awsFormat {
		return nil, false, nil
	}
	return all, true, json.Unmarshal(checkpoint.Allocations, &all)
}
