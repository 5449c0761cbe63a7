package journal

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestSyncFails: in a commit, the sync of the pages or of the meta page fails. From then on, the
// kernel treats the pages as written, whether or not they are on disk. Therefore the next Update,
// in another process, copies the file.
func TestSyncFails(t *testing.T) {
	needDisk(t)
	for i, after := range []string{"a c", "a b c"} {
		mnt := t.TempDir()
		d := mountDisk(t, mnt)
		s := &Store{Dir: filepath.Join(mnt, "state")}
		p, q := start(t, "act", s.Dir), start(t, "act", s.Dir)
		p.put("a").ok()
		before := d.inode(fileName)
		d.failing.Store(int64(i + 1))
		p.put("b").fails("input/output error")
		p.list().isAnything()
		q.put("c").ok()
		p.list().is(after)
		p.setAside().is("0")
		if d.inode(fileName) == before {
			t.Errorf("sync %d failed, and the file was not copied", i+1)
		}
		before = d.inode(fileName)
		p.put("d").ok()
		p.list().is(after + " d")
		if d.inode(fileName) != before {
			t.Error("the file was copied although its last commit succeeded")
		}
	}
}

// inode returns the inode number of a file in the journal's directory.
func (d *disk) inode(name string) int {
	defer d.locked()()
	return d.now.folders[d.now.folders[rootFolder]["state"]][name]
}

// TestLastCommit: the queue file records whether the last commit of this boot succeeded. A View,
// and an Update that writes nothing, do not change what the queue file records.
func TestLastCommit(t *testing.T) {
	writes := func(s *Store) error { return s.Update(t.Context(), func(tx *Tx) error { return tx.Put(adding("b")) }) }
	for _, tt := range []struct {
		name   string
		change func(t *testing.T, s *Store)
		want   byte
	}{
		{"after a commit", func(*testing.T, *Store) {}, succeeded},
		{"after a View", func(t *testing.T, s *Store) { check(t, s.View(t.Context(), look)) }, succeeded},
		{"after an Update that failed", func(t *testing.T, s *Store) {
			_ = s.Update(t.Context(), func(tx *Tx) error { return fmt.Errorf("no: %w", tx.Put(adding("b"))) })
		}, succeeded},
		{"after a reboot", func(_ *testing.T, s *Store) { s.boot = strings.Repeat("x", len(s.bootID())) }, rebooted},
		{"after a reboot and a commit", func(t *testing.T, s *Store) {
			s.boot = strings.Repeat("x", len(s.bootID()))
			check(t, writes(s))
		}, succeeded},
		{"without a queue file", func(t *testing.T, s *Store) { check(t, os.Remove(filepath.Join(s.Dir, queueName))) }, began},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStore(t)
			put(t, s, adding("a"))
			tt.change(t, s)
			queue, err := s.queue(t.Context(), false)
			check(t, err)
			defer queue.Close()
			if got := s.lastCommit(queue); got != tt.want {
				t.Errorf("%c, want %c", got, tt.want)
			}
		})
	}
}

// TestBegan: while a transaction commits or a journal is created, the queue file records that a
// commit began in this boot.
func TestBegan(t *testing.T) {
	s := newStore(t)
	put(t, s, adding("a"))
	s.boot = strings.Repeat("x", len(s.bootID()))
	seen := 0
	s.Point = func(name string) {
		queue, err := os.Open(filepath.Join(s.Dir, queueName))
		check(t, err)
		defer queue.Close()
		if got := s.lastCommit(queue); got != began {
			t.Errorf("%s: %c", name, got)
		}
		seen++
	}
	put(t, s, adding("b"))
	check(t, os.Remove(s.Path()))
	put(t, s, adding("c"))
	if seen != 6 {
		t.Errorf("%d points, want the 6 of two commits and a creation", seen)
	}
}

// TestFullDiskAfterReboot: after a reboot the page cache is empty, so an Update needs no copy of
// the file, whatever the last commit's outcome. The Update therefore works on a full disk.
func TestFullDiskAfterReboot(t *testing.T) {
	disk := smallDisk(t)
	s := &Store{Dir: filepath.Join(disk, "state")}
	put(t, s, bigs(populated, 4)...) // this also allocates space for the commits below
	if err := os.WriteFile(filepath.Join(disk, "ballast"), make([]byte, 2<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	for _, state := range []byte{succeeded, began} {
		queue, err := os.OpenFile(filepath.Join(s.Dir, queueName), os.O_WRONLY, 0)
		check(t, err)
		check(t, s.setCommit(queue, state))
		check(t, queue.Close())
		s.boot = strings.Repeat(string(state), len(s.bootID()))
		put(t, s, adding("a"))
	}
}
