package ipam

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// host-local has a file for each address, which contains the container ID, CR LF, and the interface
// (no interface before version 0.8). The file is empty if host-local died between creating and
// writing it. It does both under the lock of the pool, which is the directory of a network.

// Pool returns the pool of a network, given the configuration of a delegate, or "" if the delegate
// does not call host-local. network must be a valid network name.
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
	dir := cmp.Or(conf.IPAM.DataDir, "/var/lib/cni/networks") // host-local's default
	if !filepath.IsAbs(dir) {
		return ""
	}
	return filepath.Join(dir, network)
}

// Taken returns the addresses of a pool that host-local cannot assign now, because a file or
// anything else has their name. It opens none of them.
func Taken(pool string) (all []netip.Addr, err error) {
	files, err := os.ReadDir(pool)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for _, f := range files {
		if a, ok := parseName(f.Name()); ok {
			all = append(all, a)
		}
	}
	return all, nil
}

// Changed returns when the reservation was created (wall clock); host-local never rewrites its
// file.
func (r Reservation) Changed() (time.Time, error) {
	info, err := os.Lstat(filepath.Join(r.Pool, r.name))
	if err != nil {
		return time.Time{}, err
	}
	return info.ModTime(), nil
}

// maxOwner limits what is read of a reservation, in bytes. A container ID is never longer than an
// environment string (MAX_ARG_STRLEN, 128 KiB); runtimes use 64 bytes, and usualOwner has room for
// those and the interface.
const (
	maxOwner   = 128 << 10
	usualOwner = 4096
)

// Scan returns all reservations of a pool, sorted. It writes nothing and takes no lock, so its
// result may be out of date. It opens only files whose name is an address, and skips the lock,
// last_reserved_ip.* and directories. It omits files that it cannot read, and returns an error for
// them. A missing pool has no reservations.
func Scan(pool string) ([]Reservation, error) {
	dir, err := os.OpenFile(pool, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	found := make([]Reservation, 0, len(names))
	var errs []error
	buf := make([]byte, usualOwner)
	for _, name := range names {
		address, ok := parseName(name)
		if !ok {
			continue
		}
		owner, ok, err := readOwner(int(dir.Fd()), name, buf)
		if err != nil && !notAFile(err) {
			errs = append(errs, fmt.Errorf("%s: %w", filepath.Join(pool, name), err))
		}
		if ok {
			found = append(found, Reservation{Address: address, Owner: owner, Pool: pool, name: name})
		}
	}
	slices.SortFunc(found, func(a, b Reservation) int { return a.Address.Compare(b.Address) })
	return found, errors.Join(errs...)
}

// look returns the reservation of an address. Like Scan, it writes nothing.
func look(pool string, address netip.Addr) (r Reservation, ok bool, err error) {
	r = Reservation{Address: address, Pool: pool, name: address.Unmap().WithZone("").String()}
	path := filepath.Join(pool, r.name)
	r.Owner, ok, err = readOwner(unix.AT_FDCWD, path, make([]byte, usualOwner))
	if err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return r, ok, err
}

// parseName returns the address that a file's name stands for. host-local names the file as net.IP
// prints the address.
func parseName(name string) (netip.Addr, bool) {
	address, err := netip.ParseAddr(name)
	return address, err == nil && address.Unmap().WithZone("").String() == name
}

// notAFile reports whether an error of readOwner means a link, a directory, a socket or a named
// pipe, which host-local never creates.
func notAFile(err error) bool {
	return errors.Is(err, unix.ELOOP) || errors.Is(err, unix.EISDIR) || errors.Is(err, unix.ENXIO)
}

// readOwner reads a reservation in an open directory. ok is false if the file no longer exists. It
// reads into buf, or into a larger buffer if the file needs one.
func readOwner(dir int, name string, buf []byte) (owner Owner, ok bool, err error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	switch {
	case err == unix.ENOENT:
		return owner, false, nil
	case err != nil:
		return owner, false, err
	}
	defer unix.Close(fd)
	for size := 0; ; {
		n, err := unix.Read(fd, buf[size:])
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return owner, false, err
		case n == 0 && size == 0 && !isRegular(fd): // a named pipe; unread, it looks ownerless
			return owner, false, unix.ENXIO
		case n == 0:
			return parseOwner(buf[:size]), true, nil
		}
		if size += n; size > maxOwner {
			return owner, false, fmt.Errorf("more than %d bytes; not written by host-local", maxOwner)
		}
		if size == len(buf) {
			buf = slices.Grow(buf, size)[:2*size]
		}
	}
}

func isRegular(fd int) bool {
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG
}

// parseOwner reads the content of a reservation: the container ID, CR LF, the interface.
func parseOwner(data []byte) Owner {
	id, ifname, _ := strings.Cut(string(bytes.TrimSpace(data)), "\r\n")
	return Owner{ContainerID: strings.TrimSpace(id), IfName: strings.TrimSpace(ifname)}
}

// Apply carries out a plan for a pool under host-local's own lock. A reservation that changed since
// the scan stays. Apply returns what it released, and all errors. ctx bounds the wait for the lock.
// A crash leaves each reservation either released or untouched.
func Apply(ctx context.Context, pool string, plan []Planned) (released []Planned, err error) {
	if len(plan) == 0 {
		return nil, nil
	}
	unlock, err := Lock(ctx, pool)
	if err != nil {
		return nil, err
	}
	defer unlock()
	dir, err := os.OpenFile(pool, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	var errs []error
	buf := make([]byte, usualOwner)
	for _, r := range plan {
		owner, there, err := readOwner(int(dir.Fd()), r.name, buf)
		if err == nil && there && owner == r.Owner {
			if err = unix.Unlinkat(int(dir.Fd()), r.name, 0); err == nil {
				released = append(released, r)
			}
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("%s: %w", filepath.Join(pool, r.name), err))
		}
	}
	return released, errors.Join(errs...)
}

// Lock takes host-local's lock of a pool, which host-local needs to assign or release an address. A
// missing pool needs no lock, because it has no addresses. If the deadline passes first, Lock
// releases the lock as soon as the kernel grants it.
func Lock(ctx context.Context, pool string) (unlock func(), err error) {
	if _, err := os.Stat(pool); errors.Is(err, fs.ErrNotExist) {
		return func() {}, nil
	}
	// as filemutex opens it for host-local, but closed in the delegates that run meanwhile
	fd, err := unix.Open(filepath.Join(pool, "lock"), unix.O_CREAT|unix.O_RDONLY|unix.O_CLOEXEC, 0o750)
	if err != nil {
		return nil, fmt.Errorf("pool %s: lock: %w", pool, err)
	}
	release := func() {
		_ = unix.Flock(fd, unix.LOCK_UN) // a child that is about to execute its program may have it, too
		_ = unix.Close(fd)
	}
	locked := make(chan error, 1)
	go func() {
		err := unix.Flock(fd, unix.LOCK_EX)
		for err == unix.EINTR {
			err = unix.Flock(fd, unix.LOCK_EX)
		}
		locked <- err
	}()
	select {
	case err = <-locked:
		if err == nil {
			return release, nil
		}
		release()
	case <-ctx.Done():
		err = ctx.Err()
		go func() {
			<-locked
			release()
		}()
	}
	return nil, fmt.Errorf("pool %s: lock: %w", pool, err)
}
