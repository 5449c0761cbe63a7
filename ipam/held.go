package ipam

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// heldMark is the last of the three lines in a file that Hold creates. The container ID and the
// interface come first, each followed by CR LF. For host-local, the file's name alone reserves the
// address. host-local's DEL and CHECK compare the whole content with the container ID and the
// interface, so they never match such a file (plugins v1.9 host-local/backend/disk).
const heldMark = "held"

// Hold reserves a free address while the DEL of its former attachment runs, so no other attachment
// gets the address during that DEL. Hold creates the address's file under host-local's own lock; it
// never creates a pool. The error is fs.ErrExist if the address is already reserved, except by an
// earlier Hold for the same owner.
//
// The caller holds the lock of the attachment, whose record is on the disk. release removes the
// file if its content is still the same. A crash leaves either a complete file or none. Scan
// returns such a file with its owner in HeldFor, and DropHeld removes it. A power loss may leave an
// empty file, as with host-local's own files.
func Hold(ctx context.Context, pool string, owner Owner, address netip.Addr) (
	release func(context.Context) error, err error,
) {
	if owner.ContainerID == "" || owner.IfName == "" {
		return nil, errUnnamed
	}
	unlock, err := lock(ctx, pool)
	if err != nil {
		return nil, err
	}
	defer unlock()
	content := strings.Join([]string{owner.ContainerID, owner.IfName, heldMark}, "\r\n")
	err = create(pool, fileName(address), content)
	if errors.Is(err, fs.ErrExist) {
		if r, _, lookErr := look(pool, address); lookErr == nil && r.HeldFor == owner {
			err = nil // a crash left the file
		}
	}
	if err != nil {
		return nil, fmt.Errorf("pool %s: cannot reserve address %s for a DEL: %w", pool, address, err)
	}
	return func(ctx context.Context) error { return DropHeld(ctx, pool, owner, address) }, nil
}

// DropHeld removes files that Hold created for an owner: those of the given addresses, or all if no
// address is given. The caller holds the lock of the attachment.
func DropHeld(ctx context.Context, pool string, owner Owner, addresses ...netip.Addr) error {
	_, err := remove(ctx, pool, owner, addresses,
		func(r Reservation, o Owner) bool { return r.HeldFor == o })
	return err
}

// create creates a file with its complete content, or no file:
//
//	openat(O_TMPFILE), write, linkat
func create(dir, name, content string) error {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	if _, err := f.WriteString(content); err != nil {
		return err
	}
	return unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(fd), unix.AT_FDCWD,
		filepath.Join(dir, name), unix.AT_SYMLINK_FOLLOW)
}
