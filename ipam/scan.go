package ipam

import (
	"bytes"
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

// Reservation is a file of host-local that stands for an address. It is one of three kinds: owned, with a container ID and an
// interface; legacy, with a container ID alone, as host-local before 0.8 wrote it; ownerless, empty, after a crash of
// host-local between making and writing it: no DEL finds it ever again.
type Reservation struct {
	Address netip.Addr
	Owner   Owner // zero if ownerless
	Pool    string
	file    string // its name, as host-local writes the address
}

// Ownerless says whether nobody can ever ask for the reservation's release.
func (r Reservation) Ownerless() bool { return r.Owner == Owner{} }

// Changed returns when the file was written, by the wall clock. host-local never writes it again.
func (r Reservation) Changed() (time.Time, error) {
	info, err := os.Lstat(filepath.Join(r.Pool, r.file))
	if err != nil {
		return time.Time{}, err
	}
	return info.ModTime(), nil
}

// maxOwner bounds what is read of a reservation, in bytes. Container IDs have no bound of their own; runtimes use 64.
const maxOwner = 4096

// Scan returns the reservations in a pool, sorted. It writes nothing and takes no lock: what it returns may be old news. Only
// what looks like a reservation is opened: the lock, last_reserved_ip.*, folders and names that are no address are not
// host-local's reservations and are passed over. A pool that is not there has none. Files that cannot be read are
// left out, and told by the error.
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
	buf := make([]byte, maxOwner+1)
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
			found = append(found, Reservation{Address: address, Owner: owner, Pool: pool, file: name})
		}
	}
	slices.SortFunc(found, func(a, b Reservation) int { return a.Address.Compare(b.Address) })
	return found, errors.Join(errs...)
}

// reservationOf returns the reservation of one address.
func reservationOf(pool string, address netip.Addr) (r Reservation, ok bool, err error) {
	r = Reservation{Address: address, Pool: pool, file: address.Unmap().WithZone("").String()}
	path := filepath.Join(pool, r.file)
	r.Owner, ok, err = readOwner(unix.AT_FDCWD, path, make([]byte, maxOwner+1))
	if err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return r, ok, err
}

// parseName returns the address that a file's name stands for. host-local writes it as net.IP prints it.
func parseName(name string) (netip.Addr, bool) {
	address, err := netip.ParseAddr(name)
	return address, err == nil && address.Unmap().WithZone("").String() == name
}

// notAFile says whether an error of readOwner means a link, a folder, a socket: nothing of host-local's.
func notAFile(err error) bool { return err == unix.ELOOP || err == unix.EISDIR || err == unix.ENXIO }

// readOwner reads a reservation in an open folder. ok is false for what has just gone.
func readOwner(dir int, name string, buf []byte) (owner Owner, ok bool, err error) {
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	switch {
	case err == unix.ENOENT:
		return owner, false, nil
	case err != nil:
		return owner, false, err
	}
	defer unix.Close(fd)
	n, err := unix.Read(fd, buf)
	switch {
	case err != nil:
		return owner, false, err
	case n > maxOwner:
		return owner, false, fmt.Errorf("more than %d bytes; not written by host-local", maxOwner)
	}
	return parseOwner(buf[:n]), true, nil
}

// parseOwner reads what host-local wrote: the container ID, CR LF, the interface.
func parseOwner(data []byte) Owner {
	id, ifname, _ := strings.Cut(string(bytes.TrimSpace(data)), "\r\n")
	return Owner{ContainerID: strings.TrimSpace(id), IfName: strings.TrimSpace(ifname)}
}
