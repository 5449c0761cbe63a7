package ipam

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"strings"
)

// AWS is the probe of the AWS VPC CNI. Its daemon ipamd records assigned addresses in a checkpoint
// file, and in a separate one for each additional network card (amazon-vpc-cni-k8s 1.23.2,
// pkg/ipamd/datastore/data_store.go). ipamd replaces the file before it responds to a plugin, so an
// address that a DEL freed is no longer in the file.
type AWS struct{}

const (
	// awsCheckpoint is where ipamd keeps its checkpoint by default.
	awsCheckpoint = "/var/run/aws-node/ipam.json"
	// awsFormat is the only checkpoint version that the probe reads. ipamd 1.12 to 1.23 write it.
	awsFormat = "vpc-cni-ipam/1"
	// maxCheckpoint limits the size of a checkpoint, in bytes. A pod takes about 300 bytes.
	maxCheckpoint = 4 << 20
)

// Held reads the checkpoints. asked is false if no checkpoint in a known format exists: the
// directory is in memory, so a reboot empties it. A file that cannot be read is an error, unless
// another file lists the attachment.
func (AWS) Held(_ context.Context, q Query) (held []netip.Addr, asked bool, err error) {
	first := cmp.Or(q.Store, awsCheckpoint)
	ext := filepath.Ext(first)
	others, err := filepath.Glob(strings.TrimSuffix(first, ext) + "-nic-*" + ext)
	for _, path := range append([]string{first}, others...) {
		addresses, known, readErr := readCheckpoint(path, q)
		held, asked = append(held, addresses...), asked || known
		if readErr != nil {
			err = errors.Join(err, fmt.Errorf("ipamd's checkpoint %s: %w", path, readErr))
		}
	}
	if len(held) > 0 {
		return held, true, nil
	}
	return nil, asked, err
}

// readCheckpoint returns an attachment's addresses in one checkpoint (CheckpointEntry in ipamd's
// code). known is false if the checkpoint is missing or its format is unknown. If the attachment's
// entry contains no valid address, readCheckpoint returns an error. It skips entries that it cannot
// decode.
func readCheckpoint(path string, q Query) (held []netip.Addr, known bool, err error) {
	data, _, err := readRegular(path, maxCheckpoint)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	var checkpoint struct {
		Version     string            `json:"version"`
		Allocations []json.RawMessage `json:"allocations"` // ipamd writes [] if there are none
	}
	if err == nil {
		err = json.Unmarshal(data, &checkpoint)
	}
	switch {
	case checkpoint.Version != awsFormat && (err == nil || checkpoint.Version != ""):
		return nil, false, nil
	case err == nil && checkpoint.Allocations == nil:
		err = errors.New(`key "allocations" is missing or null`)
	}
	for _, raw := range checkpoint.Allocations {
		var entry struct {
			Network     string `json:"networkName"`
			ContainerID string `json:"containerID"`
			IfName      string `json:"ifName"`
			IPv4        string `json:"ipv4"`
			IPv6        string `json:"ipv6"`
		}
		_ = json.Unmarshal(raw, &entry) // if this fails, entry names no attachment
		if entry.Network != q.Network || entry.ContainerID != q.ContainerID || entry.IfName != q.IfName {
			continue
		}
		before := len(held)
		for _, text := range []string{entry.IPv4, entry.IPv6} {
			if address, err := netip.ParseAddr(text); err == nil {
				held = append(held, address)
			}
		}
		if len(held) == before {
			err = errors.New("the attachment's entry contains no valid address")
		}
	}
	return held, true, err
}
