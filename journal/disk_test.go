package journal

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"cni-unwind/testdata/sandbox"

	"golang.org/x/sys/unix"
)

func TestDiskFull(t *testing.T) {
	sandbox.Need(t)
	disk := t.TempDir()
	check(t, unix.Mount("tmpfs", disk, "tmpfs", 0, "size=512k"))
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
	ballast := filepath.Join(disk, "ballast")
	fill := func(size int) error { return os.WriteFile(ballast, make([]byte, size), 0o600) }
	s := &Store{Dir: filepath.Join(disk, "state")}
	var want []string
	// tried puts an entry and reports whether there was room. Without an error the entry must be
	// there.
	tried := func(e *Entry) bool {
		t.Helper()
		err := s.Update(t.Context(), func(tx *Tx) error { return tx.Put(e) })
		if err == nil {
			want = append(want, e.ContainerID)
		} else if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("got error %v, want ENOSPC", err)
		}
		wantEntries(t, s, want...)
		return err == nil
	}

	if err := fill(1 << 20); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if tried(big(0)) {
		t.Error("there was room for the file")
	}
	check(t, fill(128<<10))
	failed := 0
	for i := 1; failed < 10 && i < 1000; i++ {
		if !tried(big(i)) {
			failed++
		}
	}
	if failed < 10 || len(want) == 0 {
		t.Errorf("there was room for %d entries, and %d times none", len(want), failed)
	}
	check(t, os.Remove(ballast))
	if !tried(big(1000)) {
		t.Error("there is no room though there is")
	}
	if aside := setAside(t, s); aside != nil {
		t.Errorf("set aside: %v", aside)
	}
}

func TestReadOnlyDisk(t *testing.T) {
	sandbox.Need(t)
	dir := t.TempDir()
	s := &Store{Dir: filepath.Join(dir, "state")}
	put(t, s, adding("a"))
	tryAcquire(t, s, keyOf("a")).Release()
	check(t, unix.Mount(dir, dir, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	check(t, unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))

	changed := untouched(t, dir)
	if err := s.Update(t.Context(), look); !errors.Is(err, syscall.EROFS) {
		t.Errorf("Update: %v, want EROFS", err)
	}
	if _, err := s.TryAcquire(keyOf("a")); !errors.Is(err, syscall.EROFS) {
		t.Errorf("TryAcquire: %v, want EROFS", err)
	}
	if locked, exists, err := s.Locked(keyOf("a")); locked || !exists || err != nil {
		t.Errorf("locked %t, exists %t, %v", locked, exists, err)
	}
	wantEntries(t, s, "a")
	changed()

	check(t, unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT, ""))
	put(t, s, adding("b"))
	wantEntries(t, s, "a", "b")
}

// helpEIO reads the journal, and writes to it, while the kernel reports EIO for all reads.
func helpEIO(s *Store, _ []string) error {
	if err := failReads(); err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	for _, run := range []func(context.Context, func(*Tx) error) error{s.View, s.Update} {
		if err := run(context.Background(), look); errors.Is(err, syscall.EIO) {
			tell("EIO")
		} else {
			tell(fmt.Sprint(err))
		}
	}
	return nil
}

// failReads makes read and pread of a kilobyte and more fail with EIO, in all threads of this
// process and for good. Smaller reads, such as of the queue's file, succeed, as from a cache.
func failReads() error {
	runtime.LockOSThread()
	const nr, args2 = 0, 16 + 2*8 // in struct seccomp_data
	code := func(c ...int) (code uint16) {
		for _, c := range c {
			code |= uint16(c)
		}
		return code
	}
	load, ret := code(unix.BPF_LD, unix.BPF_W, unix.BPF_ABS), code(unix.BPF_RET, unix.BPF_K)
	equal, atLeast := code(unix.BPF_JMP, unix.BPF_JEQ, unix.BPF_K), code(unix.BPF_JMP, unix.BPF_JGE, unix.BPF_K)
	program := []unix.SockFilter{
		{Code: load, K: nr},
		{Code: equal, K: unix.SYS_PREAD64, Jt: 1},
		{Code: equal, K: unix.SYS_READ, Jf: 3},
		{Code: load, K: args2},
		{Code: atLeast, K: 1024, Jf: 1},
		{Code: ret, K: unix.SECCOMP_RET_ERRNO | uint32(syscall.EIO)},
		{Code: ret, K: unix.SECCOMP_RET_ALLOW},
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return err
	}
	filter := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&filter)))
	if errno != 0 {
		return errno
	}
	return nil
}

// TestEIO: a disk that fails to read proves nothing about its content, since it may come back.
func TestEIO(t *testing.T) {
	for _, tt := range []struct {
		name    string
		prepare func(t *testing.T, s *Store)
	}{
		{"whole", func(*testing.T, *Store) {}},
		{"whole, not as it was left", func(t *testing.T, s *Store) {
			check(t, os.Chtimes(s.Path(), time.Time{}, time.Now()))
		}},
		{"cut, which is a fault in memory", func(t *testing.T, s *Store) {
			check(t, os.Truncate(s.Path(), int64(3*os.Getpagesize())))
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStore(t)
			check(t, populate(s))
			tt.prepare(t, s)
			changed := untouched(t, s.Dir)
			p := start(t, "eio", s.Dir)
			p.expect("EIO")
			p.expect("EIO")
			changed()
		})
	}
}

func TestClassify(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOMEM, syscall.EACCES, syscall.EMFILE, syscall.ELOOP} {
		for _, err := range []error{errno, &os.PathError{Op: "open", Path: "p", Err: errno}, fmt.Errorf("mmap: %w", errno)} {
			if got := classify(err); errors.Is(got, ErrDamaged) || !errors.Is(got, errno) {
				t.Errorf("%v is %v", err, got)
			}
		}
	}
}
