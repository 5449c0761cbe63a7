package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"cni-unwind/plugin/plugintest/sandbox"

	"golang.org/x/sys/unix"
)

// smallDisk mounts a tmpfs of 1 MiB.
func smallDisk(t *testing.T) (path string) {
	t.Helper()
	sandbox.Need(t)
	path = t.TempDir()
	check(t, unix.Mount("tmpfs", path, "tmpfs", 0, "size=1m"))
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

func TestDiskFull(t *testing.T) {
	disk := smallDisk(t)
	ballast := filepath.Join(disk, "ballast")
	fill := func(size int) error { return os.WriteFile(ballast, make([]byte, size), 0o600) }
	s := &Store{Dir: filepath.Join(disk, "state")}
	var want []string
	// tried tries to put a record, and reports whether the record fits. If it does, the journal must
	// contain the record afterwards.
	tried := func(e *Record) bool {
		t.Helper()
		err := s.Update(t.Context(), func(tx *Tx) error { return tx.Put(e) })
		if err == nil {
			want = append(want, e.ContainerID)
		} else if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("got error %v, want ENOSPC", err)
		}
		wantRecords(t, s, want...)
		return err == nil
	}

	if err := fill(2 << 20); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if tried(big(0)) {
		t.Error("the journal was created on a full disk")
	}
	check(t, fill(640<<10)) // leaves room for the journal's file and for one copy of it
	failed := 0
	for i := 1; failed < 10 && i < 1000; i++ {
		if !tried(big(i)) {
			failed++
		}
	}
	if failed < 10 || len(want) == 0 {
		t.Errorf("%d records fitted and %d did not", len(want), failed)
	}
	check(t, os.Remove(ballast))
	if !tried(big(1000)) {
		t.Error("a record does not fit although the disk has room again")
	}
	wantAside(t, s, 0)
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
	if lock, err := s.LookAtLock(keyOf("a")); lock != (LockState{}) || err != nil {
		t.Errorf("%+v, %v", lock, err)
	}
	wantRecords(t, s, "a")
	changed()

	check(t, unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT, ""))
	put(t, s, adding("b"))
	wantRecords(t, s, "a", "b")
}

// TestEIO: after read errors of the disk, the journal does not set its file aside, because the
// errors may be temporary and the file intact.
func TestEIO(t *testing.T) {
	needDisk(t)
	for name, stamp := range map[string]string{"last commit succeeded": "", "last commit unknown": "?"} {
		t.Run(name, func(t *testing.T) {
			mnt := t.TempDir()
			d := mountDisk(t, mnt)
			s := &Store{Dir: filepath.Join(mnt, "state")}
			p, q := start(t, "act", s.Dir), start(t, "act", s.Dir)
			p.populate().ok()
			p.put("a").ok()
			queue, err := os.OpenFile(filepath.Join(s.Dir, queueName), os.O_WRONLY, 0)
			check(t, err)
			_, err = queue.WriteString(stamp)
			check(t, errors.Join(err, queue.Close()))
			_, changes := d.seen()
			d.broken.Store(true)
			p.list().fails("input/output error")
			p.put("b").fails("input/output error")
			q.put("b").fails("input/output error")
			if _, now := d.seen(); now > changes {
				t.Errorf("changed: %v", d.log[changes:])
			}
			d.broken.Store(false)
			p.look("a").is("free, no file")
			p.put("b").ok()
			p.setAside().is("0")
		})
	}
}

// TestBlame: the journal never treats an errno from the kernel as damage to the file.
func TestBlame(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOMEM, syscall.EACCES, syscall.EMFILE, syscall.ELOOP} {
		for _, err := range []error{errno, &os.PathError{Op: "open", Path: "p", Err: errno}, fmt.Errorf("mmap: %w", errno)} {
			if got := newStore(t).blame(err); errors.Is(got, ErrDamaged) || !errors.Is(got, errno) {
				t.Errorf("%v is %v", err, got)
			}
		}
	}
}
