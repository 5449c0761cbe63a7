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

// AWS is the probe of the AWS VPC CNI. Its daemon ipamd records assigned addresses in a checkpoint,
// with a separate one for each additional network card (amazon-vpc-cni-k8s 1.23.2,
// pkg/ipamd/datastore/data_store.go). ipamd replaces the file before it responds to a plugin, so
// the file no longer has an address that a DEL freed.
type AWS struct{}

const (
	// awsCheckpoint is where ipamd keeps its checkpoint by default.
	awsCheckpoint = "/var/run/aws-node/ipam.json"
	// awsFormat is the version of the checkpoint that AWS reads: of ipamd 1.12 to 1.23.
	awsFormat = "vpc-cni-ipam/1"
	// maxCheckpoint bounds a checkpoint, in bytes: some 300 for each pod of a node.
	maxCheckpoint = 4 << 20
)

// Held reads the checkpoints. Without one, or in another format, there is no store to query: the
// directory is in memory, so a reboot empties it. A file that cannot be read is an error, unless
// another file has the attachment.
func (AWS) Held(_ context.Context, q Query) (held []netip.Addr, asked bool, err error) {
	first := cmp.Or(q.Store, awsCheckpoint)
	ext := filepath.Ext(first)
	others, err := filepath.Glob(strings.TrimSuffix(first, ext) + "-nic-*" + ext)
	if err != nil {
		return nil, true, err
	}
	var errs []error
	for _, path := range append([]string{first}, others...) {
		allocations, known, err := readCheckpoint(path)
		for _, one := range allocations {
			if one.Network == q.Network && one.ContainerID == q.ContainerID && one.IfName == q.IfName {
				addresses, oddErr := one.addresses()
				held, err = append(held, addresses...), errors.Join(err, oddErr)
			}
		}
		asked = asked || known
		if err != nil {
			errs = append(errs, fmt.Errorf("ipamd's checkpoint %s: %w", path, err))
		}
	}
	if len(held) > 0 {
		return held, true, nil
	}
	return nil, asked || len(errs) > 0, errors.Join(errs...)
}

// allocation is an entry of a checkpoint (CheckpointEntry).
type allocation struct {
	Network     string          `json:"networkName"`
	ContainerID string          `json:"containerID"`
	IfName      string          `json:"ifName"`
	IPv4        json.RawMessage `json:"ipv4"`
	IPv6        json.RawMessage `json:"ipv6"`
}

// addresses returns the addresses of an entry. An entry with none, or with an invalid one, is an
// error, because the attachment is in the store nevertheless.
func (a allocation) addresses() (all []netip.Addr, err error) {
	for _, text := range []json.RawMessage{a.IPv4, a.IPv6} {
		var address netip.Addr
		if text != nil {
			err = errors.Join(err, json.Unmarshal(text, &address))
		}
		if address.IsValid() {
			all = append(all, address)
		}
	}
	if len(all) == 0 && err == nil {
		err = errors.New("the entry of the attachment has no address")
	}
	return all, err
}

// readCheckpoint reads one checkpoint. known is false if there is none in a known format. It skips
// entries that ipamd did not write.
func readCheckpoint(path string) (all []allocation, known bool, err error) {
	data, err := readRegular(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, true, err
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
	var entries []json.RawMessage
	if checkpoint.Allocations != nil {
		err = json.Unmarshal(checkpoint.Allocations, &entries)
	}
	if err == nil && entries == nil { // ipamd writes [] for none
		err = errors.New("no allocations")
	}
	if err != nil {
		return nil, true, err
	}
	for _, entry := range entries {
		var one allocation
		if json.Unmarshal(entry, &one) == nil {
			all = append(all, one)
		}
	}
	return all, true, nil
}

// readRegular reads the file of a checkpoint. It rejects links, devices and pipes.
func readRegular(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(err, errors.New("not a regular file"))
	}
	data, err := io.ReadAll(io.LimitReader(f, maxCheckpoint+1))
	if err == nil && len(data) > maxCheckpoint {
		err = fmt.Errorf("more than %d bytes", maxCheckpoint)
	}
	return data, err
}
