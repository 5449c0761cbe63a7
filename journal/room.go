package journal

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// chunk is the unit, in bytes, by which the file grows.
const chunk = 64 << 10

// makeRoom allocates disk space at the end of the file, behind the pages in use, so that neither
// this commit nor those that follow an intent can fail because the disk is full. bbolt itself only sets the
// file's size, so the disk can be full when bbolt writes a page there. After a commit that fails,
// the next writer must copy the whole file (see trust), for which a full disk has no space either.
//
// If the file already has the room, makeRoom costs one stat. It does nothing on a file system that
// cannot allocate space in advance. One that copies a page on each write (btrfs, ZFS) may be full
// nevertheless.
func (tx *Tx) makeRoom(file *os.File) error {
	var info unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &info); err != nil {
		return err
	}
	size := tx.pages() * pageSize
	if tx.begins {
		size *= 3
	}
	end := tx.btx.Size() + size
	// a sparse file has fewer blocks, of 512 bytes, than its size
	if info.Size >= end && info.Blocks >= end/512 {
		return nil
	}
	end = (end + chunk - 1) / chunk * chunk
	err := error(unix.EINTR)
	for errors.Is(err, unix.EINTR) {
		err = unix.Fallocate(int(file.Fd()), 0, 0, end)
	}
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("no room for %d more KiB: %w", (end-tx.btx.Size())/1024, err)
	}
	return nil
}

// pages returns the most pages that a commit of this size writes. bbolt writes each changed page,
// and the pages above it, to another place. It splits a leaf of large records at the fifth; those
// of one network have about the same size. 12 pages are for the rest: two leaves that are split or
// merged, the branches, the list of buckets, and the page that bbolt leaves free at the
// end. The list of the free pages, 8 bytes for each, is written whole.
func (tx *Tx) pages() int64 {
	return int64(5*(tx.size/pageSize+1)) + 12 + tx.btx.Size()/pageSize*8/pageSize
}
