package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"cni-unwind/plugin/plugintest/sandbox"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// The units of a disk, in bytes. After a power loss, an unflushed page may be written in part; a
// sector is written whole or not at all.
const (
	page   = 4096
	sector = 512
)

// rootFolder is the inode number of the root directory, which always exists.
const rootFolder = 1

// change is one change of a file or directory, as the kernel requested it:
//
//   - wrote: a page or a part of one
//   - resized: a file's size; a write past the end of a file is a resize and a write
//   - renamed: a directory loses the entry "old", gets the entry "name", or both
//   - synced: the file's earlier changes are on the disk now
//   - failed: a sync failed. The kernel then treats the file's pages as written, so no later sync
//     writes them: their changes are lost.
type change struct {
	kind   changeKind
	file   int // the number of the changed file or directory
	at     int64
	data   []byte
	size   int64
	old    string // the name removed
	name   string // the name set
	target int    // the file that the name refers to
	made   bool   // the file is new
	folder bool   // target is a directory
	lost   bool   // a sync of this change failed
	mark   mark
}

type changeKind int

const (
	wrote changeKind = iota
	resized
	renamed
	synced
	failed
	marked // the test's record of its progress, which changes nothing on the disk
)

// image is the content of a disk: its files and directories, by inode number.
type image struct {
	folders map[int]map[string]int
	files   map[int][]byte
}

func newImage() *image {
	return &image{folders: map[int]map[string]int{rootFolder: {}}, files: map[int][]byte{}}
}

// clone returns a copy. The copy shares the files' bytes, which apply never changes in place.
func (i *image) clone() *image {
	c := &image{folders: map[int]map[string]int{}, files: maps.Clone(i.files)}
	for n, names := range i.folders {
		c.folders[n] = maps.Clone(names)
	}
	return c
}

func (i *image) apply(c change) {
	switch c.kind {
	case wrote: // data past the end of the file is dropped: the resize did not reach the disk
		old := i.files[c.file]
		if c.at >= int64(len(old)) {
			return
		}
		data := bytes.Clone(old)
		copy(data[c.at:], c.data)
		i.files[c.file] = data
	case resized:
		data := make([]byte, c.size)
		copy(data, i.files[c.file])
		i.files[c.file] = data
	case renamed:
		names := i.folders[c.file]
		if names == nil {
			names = map[string]int{}
			i.folders[c.file] = names
		}
		delete(names, c.old)
		if c.target != 0 {
			names[c.name] = c.target
		}
		if c.folder && i.folders[c.target] == nil {
			i.folders[c.target] = map[string]int{}
		}
	}
}

// walk calls fn for the file or directory n at a path, and for everything in it, in the order of
// the paths.
func (i *image) walk(path string, n int, fn func(path string, folder bool, data []byte) error) error {
	names, folder := i.folders[n]
	err := fn(path, folder, i.files[n])
	for _, name := range slices.Sorted(maps.Keys(names)) {
		err = errors.Join(err, i.walk(filepath.Join(path, name), names[name], fn))
	}
	return err
}

// journals returns, by name, the contents of the journal file and of all files whose names begin
// with its name, such as a file that was set aside.
func (i *image) journals() map[string][]byte {
	all := map[string][]byte{}
	_ = i.walk("", rootFolder, func(path string, folder bool, data []byte) error {
		if !folder && strings.HasPrefix(path, "state/"+fileName) {
			all[filepath.Base(path)] = data
		}
		return nil
	})
	return all
}

// write writes the disk's content into a directory that does not exist yet.
func (i *image) write(dir string) error {
	return i.walk(dir, rootFolder, func(path string, folder bool, data []byte) error {
		if folder {
			return os.Mkdir(path, 0o700)
		}
		return os.WriteFile(path, data, 0o600)
	})
}

// sum returns a hash of all paths on the disk, and of the content of each file.
func (i *image) sum(seed maphash.Seed) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	_ = i.walk("", rootFolder, func(path string, _ bool, data []byte) error {
		fmt.Fprintf(&h, "%q %d\n", path, len(data))
		_, _ = h.Write(data)
		return nil
	})
	return h.Sum64()
}

// disk is a FUSE file system in memory that records all changes in order. It implements only the
// operations that a journal needs. The running program always sees every change; only the images
// that the test builds from the log lack some changes.
type disk struct {
	mu   sync.Mutex
	now  *image // as a program sees it
	log  []change
	last int // the last inode number assigned
	// broken makes reads fail if the file is larger than a page. Files that are opened while it is set
	// are read from the disk again instead of from the page cache.
	broken atomic.Bool
	// If failing is n, the n-th sync from now fails. If failing is 0, no sync fails.
	failing atomic.Int64
}

// needDisk skips a test that may not mount file systems, and creates /dev/fuse if it is missing.
func needDisk(t *testing.T) {
	sandbox.Need(t)
	if _, err := os.Stat("/dev/fuse"); err != nil {
		check(t, unix.Mknod("/dev/fuse", unix.S_IFCHR|0o600, int(unix.Mkdev(10, 229))))
	}
}

// mountDisk mounts a disk for the duration of the test. Only other processes may use its files.
// This process serves the files, so in a page fault, it would wait for itself forever.
func mountDisk(t *testing.T, path string) *disk {
	t.Helper()
	d := &disk{now: newImage(), last: rootFolder}
	never := time.Duration(0)
	server, err := fs.Mount(path, &diskFile{disk: d, number: rootFolder}, &fs.Options{
		AttrTimeout: &never, EntryTimeout: &never,
		MountOptions: fuse.MountOptions{DirectMountStrict: true, Name: "power", FsName: "power"},
	})
	check(t, err)
	t.Cleanup(func() {
		if err := server.Unmount(); err != nil {
			t.Error(err)
		}
	})
	return d
}

func (d *disk) note(c change) {
	d.now.apply(c)
	d.log = append(d.log, c)
}

func (d *disk) locked() (unlock func()) {
	d.mu.Lock()
	return d.mu.Unlock
}

// seen returns the disk as a program sees it now, and the number of changes so far.
func (d *disk) seen() (now *image, changes int) {
	defer d.locked()()
	return d.now.clone(), len(d.log)
}

// mark records the progress of the program in the log.
func (d *disk) mark(m mark) {
	defer d.locked()()
	d.note(change{kind: marked, mark: m})
}

// diskFile is a file or a directory.
type diskFile struct {
	fs.Inode
	disk   *disk
	number int
	mtime  time.Time
}

func (f *diskFile) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	defer f.disk.locked()()
	f.attr(&out.Attr)
	return 0
}

func (f *diskFile) attr(out *fuse.Attr) {
	out.Ino, out.Mode, out.Nlink = uint64(f.number), syscall.S_IFREG|0o600, 1
	if _, ok := f.disk.now.folders[f.number]; ok {
		out.Mode = syscall.S_IFDIR | 0o700
	}
	out.Size = uint64(len(f.disk.now.files[f.number]))
	out.Blocks = (out.Size + 511) / 512
	out.SetTimes(nil, &f.mtime, &f.mtime)
}

func (f *diskFile) Setattr(_ context.Context, _ fs.FileHandle, in *fuse.SetAttrIn, out *fuse.AttrOut) syscall.Errno {
	defer f.disk.locked()()
	if size, ok := in.GetSize(); ok && int(size) != len(f.disk.now.files[f.number]) {
		f.mtime = time.Now()
		f.disk.note(change{kind: resized, file: f.number, size: int64(size)})
	}
	f.attr(&out.Attr)
	return 0
}

// Allocate implements fallocate. It changes only the size.
func (f *diskFile) Allocate(_ context.Context, _ fs.FileHandle, off, size uint64, _ uint32) syscall.Errno {
	defer f.disk.locked()()
	if end := int64(off + size); end > int64(len(f.disk.now.files[f.number])) {
		f.mtime = time.Now()
		f.disk.note(change{kind: resized, file: f.number, size: end})
	}
	return 0
}

func (f *diskFile) Create(ctx context.Context, name string, _, _ uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	return f.make(ctx, name, false, out), nil, fuse.FOPEN_KEEP_CACHE, 0
}

func (f *diskFile) Mkdir(ctx context.Context, name string, _ uint32, out *fuse.EntryOut) (*fs.Inode, syscall.Errno) {
	return f.make(ctx, name, true, out), 0
}

func (f *diskFile) make(ctx context.Context, name string, folder bool, out *fuse.EntryOut) *fs.Inode {
	defer f.disk.locked()()
	f.disk.last++
	made := &diskFile{disk: f.disk, number: f.disk.last, mtime: time.Now()}
	f.disk.note(change{kind: renamed, file: f.number, name: name, target: made.number, made: true, folder: folder})
	made.attr(&out.Attr)
	return f.NewInode(ctx, made, fs.StableAttr{Mode: out.Mode, Ino: uint64(made.number)})
}

// Rename works only within a directory.
func (f *diskFile) Rename(_ context.Context, name string, parent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	if parent.EmbeddedInode() != f.EmbeddedInode() || flags != 0 {
		return syscall.EXDEV
	}
	defer f.disk.locked()()
	target := f.disk.now.folders[f.number][name]
	f.disk.note(change{kind: renamed, file: f.number, old: name, name: newName, target: target})
	return 0
}

func (f *diskFile) Unlink(_ context.Context, name string) syscall.Errno {
	defer f.disk.locked()()
	f.disk.note(change{kind: renamed, file: f.number, old: name})
	return 0
}

func (f *diskFile) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if f.disk.broken.Load() {
		return nil, 0, 0
	}
	return nil, fuse.FOPEN_KEEP_CACHE, 0
}

func (f *diskFile) Read(_ context.Context, _ fs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	defer f.disk.locked()()
	data := f.disk.now.files[f.number]
	if len(data) > page && f.disk.broken.Load() {
		return nil, syscall.EIO
	}
	data = data[min(off, int64(len(data))):]
	return fuse.ReadResultData(bytes.Clone(data[:min(len(data), len(dest))])), 0
}

func (f *diskFile) Write(_ context.Context, _ fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	defer f.disk.locked()()
	f.mtime = time.Now()
	if end := off + int64(len(data)); end > int64(len(f.disk.now.files[f.number])) {
		f.disk.note(change{kind: resized, file: f.number, size: end})
	}
	written := uint32(len(data))
	for data = bytes.Clone(data); len(data) > 0; {
		n := min(int(page-off%page), len(data))
		f.disk.note(change{kind: wrote, file: f.number, at: off, data: data[:n]})
		data, off = data[n:], off+int64(n)
	}
	return written, 0
}

// Fsync implements fsync and fdatasync, of a file or a directory. It treats the two calls alike,
// because fdatasync also flushes the metadata that is needed to read the data, such as the size
// (fdatasync(2)).
func (f *diskFile) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	defer f.disk.locked()()
	if n := f.disk.failing.Load(); n > 0 && f.disk.failing.Add(-1) == 0 {
		f.disk.note(change{kind: failed, file: f.number})
		return syscall.EIO
	}
	f.disk.note(change{kind: synced, file: f.number})
	return 0
}

func (f *diskFile) Flush(context.Context, fs.FileHandle) syscall.Errno { return 0 }
