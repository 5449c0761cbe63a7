package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"cni-unwind/plugin/plugintest/sandbox"
)

// blockDevice is a FUSE file that holds a disk image and backs a loop device. It records each
// write, and can fail selected ones.
type blockDevice struct {
	fs.Inode
	mu     sync.Mutex
	data   []byte
	log    []request
	refuse func(block []byte) bool // a write fails if refuse is true for one of its blocks
}

// request is a write to a block device, or a flush if data is nil.
type request struct {
	at   int64
	data []byte
}

func (d *blockDevice) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode, out.Size, out.Nlink = syscall.S_IFREG|0o600, uint64(len(d.data)), 1
	return 0
}

func (d *blockDevice) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, 0, 0
}

func (d *blockDevice) Read(_ context.Context, _ fs.FileHandle, dest []byte, at int64) (fuse.ReadResult, syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return fuse.ReadResultData(bytes.Clone(d.data[at:min(int64(len(d.data)), at+int64(len(dest)))])), 0
}

func (d *blockDevice) Write(_ context.Context, _ fs.FileHandle, data []byte, at int64) (uint32, syscall.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for block := range slices.Chunk(data, page) {
		if d.refuse != nil && d.refuse(block) {
			return 0, syscall.EIO
		}
	}
	d.log = append(d.log, request{at, bytes.Clone(data)})
	return uint32(copy(d.data[at:], data)), 0
}

func (d *blockDevice) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.log = append(d.log, request{})
	return 0
}

func (d *blockDevice) Flush(context.Context, fs.FileHandle) syscall.Errno { return 0 }

// refusing makes the device fail writes of the blocks for which refuse is true. If refuse is nil,
// no write fails.
func (d *blockDevice) refusing(refuse func(block []byte) bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.refuse = refuse
}

// content returns a copy of the disk's content, and the list of the requests so far.
func (d *blockDevice) content() ([]byte, []request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return bytes.Clone(d.data), slices.Clone(d.log)
}

// bboltKind returns the kind of the bbolt page in a block, or 0 if the block is not a bbolt page.
func bboltKind(block []byte) uint16 {
	const kindMeta, most = 0x04, 1 << 16
	kind := u16(block[8:])
	if u64(block) > most || !slices.Contains([]uint16{kindBranch, kindLeaf, kindMeta, kindFreelist}, kind) {
		return 0
	}
	return kind
}

// mountLoop mounts the ext4 file system that a file contains.
func mountLoop(t *testing.T, file, at string) (unmount func()) {
	t.Helper()
	device, err := attachLoop(file)
	check(t, err)
	defer device.Close() // LO_FLAGS_AUTOCLEAR: the unmount detaches the device
	if err := unix.Mount(device.Name(), at, "ext4", 0, ""); err != nil {
		t.Fatalf("mount %s: %v", device.Name(), err)
	}
	unmount = sync.OnceFunc(func() { check(t, unix.Unmount(at, 0)) })
	t.Cleanup(unmount)
	return unmount
}

// attachLoop attaches a file to a free loop device.
func attachLoop(file string) (device *os.File, err error) {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, err
		}
		if device, err = os.OpenFile(fmt.Sprint("/dev/loop", n), os.O_RDWR, 0); err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(device.Fd()), &unix.LoopConfig{
			Fd: uint32(f.Fd()), Size: page, Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR},
		})
		if err == nil {
			return device, nil
		}
		if _ = device.Close(); !errors.Is(err, unix.EBUSY) { // EBUSY: another process took it first
			return nil, err
		}
	}
}

// TestPowerLossOnExt4 runs the journal on a real ext4 file system. During one commit, the disk
// fails the writes of all bbolt pages, or only the write of the meta page. Another process then
// runs more transactions.
//
// The test simulates a power loss after each later write to the disk: of the writes since the last
// flush, some reach the disk and some don't. The journal must then contain exactly the records as
// of the last successful Update, or as of a later Update that failed or was still running.
//
// Here, the kernel's ext4 decides when it writes each page and the metadata of the file system.
// TestPowerLoss, in contrast, also simulates the file system.
func TestPowerLossOnExt4(t *testing.T) {
	if testing.Short() {
		t.Skip("it mounts hundreds of disks: make test")
	}
	needDisk(t)
	mkfs, err := exec.LookPath("mkfs.ext4")
	if _, loopErr := os.Stat("/dev/loop-control"); err != nil || loopErr != nil {
		t.Skip(errors.Join(err, loopErr))
	}
	for name, refuse := range map[string]func(block []byte) bool{
		"meta page": func(block []byte) bool { return bboltKind(block) == 0x04 },
		"pages":     func(block []byte) bool { return bboltKind(block) != 0 },
	} {
		t.Run(name, func(t *testing.T) { loseExt4(t, mkfs, refuse) })
	}
}

func loseExt4(t *testing.T, mkfs string, refuse func([]byte) bool) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"fuse", "mnt", "lost"} {
		check(t, os.Mkdir(path(name), 0o700))
	}
	check(t, os.WriteFile(path("image"), make([]byte, 16<<20), 0o600))
	if out, err := exec.Command(mkfs, "-q", "-b", fmt.Sprint(page), path("image")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	empty, err := os.ReadFile(path("image"))
	check(t, err)

	device := &blockDevice{data: empty}
	root := &fs.Inode{}
	server, err := fs.Mount(path("fuse"), root, &fs.Options{
		OnAdd: func(ctx context.Context) {
			root.AddChild("disk", root.NewPersistentInode(ctx, device, fs.StableAttr{Mode: syscall.S_IFREG}), true)
		},
		MountOptions: fuse.MountOptions{DirectMountStrict: true, Name: "disk", FsName: "disk"},
	})
	check(t, err)
	t.Cleanup(func() { check(t, server.Unmount()) })
	unmount := mountLoop(t, path("fuse/disk"), path("mnt"))

	p, q := start(t, "act", path("mnt/state")), start(t, "act", path("mnt/state"))
	t.Cleanup(func() { // a file system that the actors use cannot be unmounted
		p.kill()
		q.kill()
		unmount()
	})
	p.fill().ok()
	promised := []string{p.list().text()}
	device.refusing(refuse)
	p.spread().fails("input/output error")
	device.refusing(nil)
	certain, log := device.content()
	first := len(log)
	ends := []int{first} // by transaction: the number of requests at its end
	for i := range 4 {
		q.put(fmt.Sprint("x", i)).ok()
		promised = append(promised, p.list().text())
		_, log = device.content()
		ends = append(ends, len(log))
	}

	// reopen mounts an image of the disk after a power loss, and checks the records of its journal.
	// requests is the number of requests to the disk before the power loss.
	reopen := func(image []byte, requests int) error {
		check(t, os.WriteFile(path("image"), image, 0o600))
		defer mountLoop(t, path("image"), path("lost"))()
		s := &Store{Dir: path("lost/state"), boot: "next"}
		got, err := (&actor{Store: s}).list(t.Context())
		if err = errors.Join(err, s.View(t.Context(), (*Tx).Check)); err != nil {
			return err
		}
		step := 0
		for step+1 < len(ends) && ends[step+1] <= requests {
			step++
		}
		may := promised[step:min(step+2, len(promised))]
		if step == 0 {
			failed := strings.Fields(promised[0])
			for _, e := range bigs(populated, spread) {
				failed = append(failed, e.ContainerID)
			}
			slices.Sort(failed)
			may = append(slices.Clone(may), strings.Join(failed, " "))
		}
		if !slices.Contains(may, got) {
			return fmt.Errorf("it holds\n%s\nand may hold\n%s", got, strings.Join(may, "\n"))
		}
		return nil
	}
	random, disks, tries := rand.New(rand.NewPCG(*seedFlag, 0)), 0, 2
	if sandbox.Long() {
		tries = 8
	}
	var pending []request
	for i := first; i < len(log) && !t.Failed(); i++ {
		if log[i].data == nil {
			for _, r := range pending {
				copy(certain[r.at:], r.data)
			}
			pending = nil
			continue
		}
		pending = append(pending, log[i])
		for try := range tries {
			image := bytes.Clone(certain)
			for _, r := range pending {
				if try == 0 || random.IntN(2) == 0 {
					copy(image[r.at:], r.data)
				}
			}
			disks++
			if err := reopen(image, i+1); err != nil {
				t.Errorf("request %d, after %v: %v", i+1, ends, err)
			}
		}
	}
	t.Logf("%d disks (seed %d)", disks, *seedFlag)
}
