package journal

import (
	"errors"
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// makeRoom allocates disk space at the end of the file, behind the pages that are in use, so that
// neither this commit nor the reserved ones can fail because the disk is full. bbolt itself only sets
// the file's size, and the disk can be full when it writes a page there. A commit that fails would
// make the next writer copy the whole file (see began), for which a full disk has no space either.
//
// If the file already has the room, makeRoom costs one stat. A file system that cannot allocate
// space in advance gets none, and one that copies a page on each write (btrfs, ZFS) may still be
// full afterwards.
func (tx *Tx) makeRoom(file *os.File) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	end := tx.btx.Size() + int64(1+tx.reserved)*tx.pages()*pageSize
	blocks := info.Sys().(*syscall.Stat_t).Blocks // of 512 bytes; a sparse file has fewer than its size
	if info.Size() >= end && blocks >= end/512 {
		return nil
	}
	err = unix.EINTR
	for errors.Is(err, unix.EINTR) {
		err = unix.Fallocate(int(file.Fd()), 0, 0, end)
	}
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("no room for %d more KiB: %w", (end-tx.btx.Size())/1024, err)
	}
	return nil
}

// pages returns the most pages that a commit of this size writes. bbolt writes each changed page, and
// the pages above it, to another place. It splits a leaf of large records at the fifth; those of one
// network have about the same size. 12 pages are for the rest: two leaves that are split
// or merged, the index, the branches, the list of buckets, and the page that bbolt leaves free at the
// end. The list of the free pages, 8 bytes for each, is written whole.
func (tx *Tx) pages() int64 {
	return int64(5*(tx.size/pageSize+1)) + 12 + tx.btx.Size()/pageSize*8/pageSize
}
