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
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// host-local has one directory for each network: the pool. It contains a file for each assigned
// address. The file contains the container ID, CR LF, and the interface (before version 0.8, only
// the container ID). host-local creates and writes the file while it holds the pool's lock. If
// host-local dies before it writes the owner, the file stays empty.

// Pool returns host-local's pool of a network, which must have a valid name. plugin is a delegate's
// IPAM plugin. Pool returns "" for other plugins, an invalid config, and a relative dataDir.
func Pool(plugin string, config json.RawMessage, network string) string {
	var conf struct {
		IPAM struct {
			DataDir string `json:"dataDir"`
		} `json:"ipam"`
	}
	if plugin != "host-local" || json.Unmarshal(config, &conf) != nil {
		return ""
	}
	dir := cmp.Or(conf.IPAM.DataDir, "/var/lib/cni/networks") // host-local's default
	if !filepath.IsAbs(dir) {
		return ""
	}
	return filepath.Join(dir, network)
}

// Path returns the path of the reservation's file.
func (r Reservation) Path() string { return filepath.Join(r.Pool, fileName(r.Address)) }

// fileName returns the name of an address's file, which is the address as net.IP prints it.
func fileName(address netip.Addr) string { return address.Unmap().WithZone("").String() }

// ParseName returns the address that a file's name stands for. ok is false if the name is not an
// address.
func ParseName(name string) (address netip.Addr, ok bool) {
	address, err := netip.ParseAddr(name)
	return address, err == nil && fileName(address) == name
}

// Made returns when the reservation was made, by the wall clock. This is the file's modification
// time, because host-local never rewrites the file.
func (r Reservation) Made() time.Time { return time.Unix(0, r.File.Mtime) }

// File identifies the file of a reservation: host-local creates a new file for each reservation.
type File struct {
	Ino   uint64
	Mtime int64 // nanoseconds
}

// Scan returns all reservations of a pool, sorted. It writes nothing and acquires no lock, so its
// result may be out of date. It opens only regular files whose name is an address, so it skips
// host-local's lock and last_reserved_ip.*. It omits files that it cannot read, and returns an
// error for them. A missing pool has no reservations.
func Scan(pool string) (found []Reservation, err error) {
	files, err := os.ReadDir(pool)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, f := range files {
		address, ok := ParseName(f.Name())
		if !ok || !f.Type().IsRegular() {
			continue
		}
		r, ok, readErr := readReservation(pool, address)
		if ok {
			found = append(found, r)
		}
		err = errors.Join(err, readErr)
	}
	slices.SortFunc(found, func(a, b Reservation) int { return a.Address.Compare(b.Address) })
	return found, err
}

// maxOwner limits the size of a reservation's file, in bytes. A container ID is never longer,
// because runtimes pass it in an environment string (MAX_ARG_STRLEN, 128 KiB).
const maxOwner = 128 << 10

// readReservation returns the reservation of an address. ok is false if the address has none. Like
// Scan, it writes nothing.
func readReservation(pool string, address netip.Addr) (r Reservation, ok bool, err error) {
	r = Reservation{Address: address, Pool: pool}
	content, st, err := readRegular(r.Path())
	if errors.Is(err, fs.ErrNotExist) {
		return r, false, nil
	}
	if err != nil {
		return r, false, err
	}
	r.content, r.File = string(content), File{st.Ino, st.Mtim.Nano()}
	id, ifname, _ := strings.Cut(textOf(r.content), "\r\n")
	r.Owner = Owner{strings.TrimSpace(id), strings.TrimSpace(ifname)}
	return r, true, nil
}

// textOf returns the text of a reservation's file, without the zero bytes that a power loss may
// leave at its end.
func textOf(content string) string { return strings.TrimSpace(strings.TrimRight(content, "\x00")) }

// readRegular reads a regular file. It rejects links, devices, pipes, and files of more than
// maxOwner bytes.
func readRegular(path string) (data []byte, st unix.Stat_t, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, st, err
	}
	defer f.Close()
	if err := unix.Fstat(int(f.Fd()), &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, st, errors.Join(err, fmt.Errorf("%s: not a regular file", path))
	}
	data, err = io.ReadAll(io.LimitReader(f, maxOwner+1))
	if err == nil && len(data) > maxOwner {
		err = fmt.Errorf("%s: too large: more than %d bytes", path, maxOwner)
	}
	return data, st, err
}

// Apply releases the planned reservations of a pool under host-local's own lock. It keeps a
// reservation that has changed since the caller read it. Apply returns the reservations that it
// released, and all errors. ctx limits the wait for the lock. A crash leaves each reservation
// either released or untouched.
func Apply(
	ctx context.Context, pool string, plan []Reservation,
) (released []Reservation, err error) {
	if len(plan) == 0 {
		return nil, nil
	}
	unlock, err := lock(ctx, pool)
	if err != nil {
		return nil, err
	}
	defer unlock()
	for _, r := range plan {
		now, there, readErr := readReservation(pool, r.Address)
		if readErr == nil && there && now == r {
			if readErr = os.Remove(r.Path()); readErr == nil {
				released = append(released, r)
			}
		}
		if !errors.Is(readErr, fs.ErrNotExist) {
			err = errors.Join(err, readErr)
		}
	}
	return released, err
}

// lock acquires host-local's lock of a pool, without which host-local assigns and releases no
// address. A missing pool needs no lock, because it has no addresses. If ctx ends first, lock
// returns an error, and releases the lock as soon as the kernel grants it.
func lock(ctx context.Context, pool string) (unlock func(), err error) {
	// host-local's library filemutex opens the file in the same way, but without O_CLOEXEC
	fd, err := unix.Open(filepath.Join(pool, "lock"), unix.O_CREAT|unix.O_RDONLY|unix.O_CLOEXEC, 0o750)
	if errors.Is(err, fs.ErrNotExist) {
		return func() {}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("pool %s: cannot open host-local's lock: %w", pool, err)
	}
	release := func() {
		_ = unix.Flock(fd, unix.LOCK_UN) // a child that is about to exec may have a copy of fd
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
	return nil, fmt.Errorf("pool %s: cannot take host-local's lock: %w", pool, err)
}
