package journal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// The write-ahead log holds versions of entries that are newer than those in the bbolt file. It is
// never synced: a process that is killed loses nothing, since the page cache has it, but a loss of
// power may take it. Each attachment has a file of its own, which only the holder of its lock
// writes. It is there while a verb runs, or after one was killed.
//
// A version counts as long as the bbolt file has the very entry that it was made from. Every
// transaction reads the newest version, and one that writes or deletes an entry then removes the
// file.
//
// A file is a sequence of versions, of which the last whole one counts:
//
//	length of the body, 4 bytes, big-endian
//	body: "1" 00 Updated of the stored entry, as text 00 entry key 00 Outline, and Entry, JSON
//	CRC-32C of the body, 4 bytes, big-endian
//
// What cannot be such a file is none: a link, a pipe, a directory, a file that is too large.

// layout is the first part of a body.
const layout = "1"

// maxLog bounds a file of the log, in bytes. One that would be larger is refused.
const maxLog = 1 << 20

// base is what a version is made from: an entry as the bbolt file has it.
type base struct {
	file    os.FileInfo // the bbolt file
	updated Time
}

// Errors of Append for what a transaction can still write.
var (
	ErrNotStored = errors.New("journal: the bbolt file does not have the entry")
	errLogFull   = errors.New("the log of the attachment is full")
)

// Append writes a newer version of an entry without a sync. It survives SIGKILL, but a loss of power
// may leave the stored entry. It refuses an illegal change of state, and returns ErrNotStored for an
// entry that did not come from a transaction on the bbolt file at the path. On an error the version
// before stays. The caller holds the attachment's lock.
func (s *Store) Append(e *Entry) error {
	there, err := os.Lstat(s.Path())
	if e.base.file == nil || err != nil || !os.SameFile(there, e.base.file) {
		return ErrNotStored
	}
	if err := CheckEdge(e.was, e.State); err != nil {
		return fmt.Errorf("%w (%s)", err, e.Key)
	}
	e.touch(e.was)
	value, err := encodeEntry(e)
	if err != nil {
		return fmt.Errorf("journal: entry %s: %w", e.Key, err)
	}
	if err := s.makeDirs(s.Dir, s.walDir()); err != nil {
		return err
	}
	v := version{key: encodeKey(e.Key), made: storedText(e.base.updated), value: value}
	if err := s.appendTo(s.walPath(e.Key), encodeVersion(v)); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	e.was = e.State
	s.at("appended")
	return nil
}

// appendTo writes a version behind the last whole one, in place of what follows.
func (s *Store) appendTo(path string, version []byte) error {
	f, err := openFile(path, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return err
	}
	defer f.Close()
	data, err := readWhole(f)
	if err != nil {
		return err
	}
	_, end := lastVersion(data)
	if end+len(version) > maxLog {
		return errLogFull
	}
	if end < len(data) {
		if err := f.Truncate(int64(end)); err != nil {
			return err
		}
	}
	_, err = f.WriteAt(version, int64(end))
	return err
}

// dropVersions removes an attachment's file, which the bbolt file has overtaken. One that stays does
// not count any more.
func (s *Store) dropVersions(k Key) { _ = os.Remove(s.walPath(k)) }

func (s *Store) walDir() string { return filepath.Join(s.Dir, walName) }

// walPath returns the path of an attachment's file. It has the name of the lock's file.
func (s *Store) walPath(k Key) string {
	return filepath.Join(s.walDir(), filepath.Base(s.LockPath(k)))
}

// version is a newer version of an entry, as encodeEntry made it.
type version struct {
	key   []byte // as encodeKey makes it
	made  string // from what, see storedText
	value []byte
}

// storedText identifies the stored version of an entry.
func storedText(updated Time) string {
	return fmt.Sprintf("%d %d", updated.Boot, updated.Wall.UnixMilli())
}

func encodeVersion(v version) []byte {
	body := bytes.Join([][]byte{[]byte(layout), []byte(v.made), v.key, v.value}, []byte{0})
	return appendSum(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...), body)
}

func decodeVersion(body []byte) (v version, ok bool) {
	parts := bytes.SplitN(body, []byte{0}, 6)
	if len(parts) < 6 || string(parts[0]) != layout {
		return v, false
	}
	return version{made: string(parts[1]), key: bytes.Join(parts[2:5], []byte{0}), value: parts[5]}, true
}

// sumSize is the size of a checksum.
const sumSize = crc32.Size

func appendSum(to, body []byte) []byte {
	return binary.BigEndian.AppendUint32(to, crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli)))
}

// lastVersion returns the body of the last whole version, nil if there is none, and where it ends.
func lastVersion(data []byte) (body []byte, end int) {
	for {
		rest := data[end:]
		if len(rest) < 4 {
			return body, end
		}
		n := int64(binary.BigEndian.Uint32(rest))
		if n == 0 || int64(len(rest)) < 4+n+sumSize { // zeros have a fitting checksum
			return body, end
		}
		next := rest[4 : 4+n]
		if !bytes.Equal(rest[4+n:4+n+sumSize], appendSum(nil, next)) {
			return body, end
		}
		body, end = next, end+4+len(next)+sumSize
	}
}

// readVersion returns the last whole version in a file of the log, if there is one.
func (s *Store) readVersion(name string) (v version, ok bool, err error) {
	f, err := openFile(filepath.Join(s.walDir(), name), os.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ELOOP) || errors.Is(err, errNotRegular) {
		return v, false, nil
	}
	if err != nil {
		return v, false, fmt.Errorf("journal: %w", err)
	}
	defer f.Close()
	data, err := readWhole(f)
	if errors.Is(err, errLogFull) {
		return v, false, nil
	}
	if err != nil {
		return v, false, fmt.Errorf("journal: %w", err)
	}
	body, _ := lastVersion(data)
	v, ok = decodeVersion(body)
	return v, ok, nil
}

// readWhole reads a file of the log in one go.
func readWhole(f *os.File) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() > maxLog {
		return nil, errLogFull
	}
	data := make([]byte, info.Size())
	n, err := io.ReadFull(f, data)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) { // it was made shorter since
		err = nil
	}
	return data[:n], err
}

// newer returns the version that is newer than a stored entry, as encodeEntry made it, or nil.
func (tx *Tx) newer(stored *Entry) ([]byte, error) {
	v, ok, err := tx.store.readVersion(filepath.Base(tx.store.walPath(stored.Key)))
	if !ok || err != nil || !bytes.Equal(v.key, encodeKey(stored.Key)) || v.made != storedText(stored.Updated) {
		return nil, err
	}
	if err := checkDir(tx.store.walDir()); err != nil {
		return nil, err
	}
	return v.value, nil
}

// newest returns the newest version of a stored entry.
func (tx *Tx) newest(stored *Entry) (*Entry, error) {
	value, err := tx.newer(stored)
	if value == nil || err != nil {
		return stored, err
	}
	e, err := decodeEntry(encodeKey(stored.Key), value)
	if err == nil {
		e.base, e.was = stored.base, e.State
	}
	return e, err
}

// logged returns the names of the files in the log, as they were when the transaction first asked.
func (tx *Tx) logged() ([]string, error) {
	if tx.names != nil {
		return tx.names, nil
	}
	files, err := os.ReadDir(tx.store.walDir())
	if !errors.Is(err, fs.ErrNotExist) {
		if err := checkDir(tx.store.walDir()); err != nil { // it says what to do
			return nil, err
		}
		if err != nil {
			return nil, fmt.Errorf("journal: %w", err)
		}
	}
	tx.names = make([]string, 0, len(files))
	for _, f := range files {
		tx.names = append(tx.names, f.Name())
	}
	return tx.names, nil
}

// isIn says whether the log has a file of an attachment, by its key as encodeKey makes it.
func isIn(files []string, key []byte) bool {
	return len(files) > 0 && slices.Contains(files, hashOf(key))
}

// claimedSince adds to the entries that the index of addresses has those that claim the address in a
// newer version alone.
func (tx *Tx) claimedSince(entries []*Entry, a netip.Addr) ([]*Entry, error) {
	names, err := tx.logged()
	if err != nil {
		return nil, err
	}
	indexed := map[string]bool{}
	for _, e := range entries {
		indexed[hashOf(encodeKey(e.Key))] = true
	}
	for _, name := range names {
		if indexed[name] {
			continue
		}
		v, ok, err := tx.store.readVersion(name)
		if err != nil {
			return nil, err
		}
		if !ok || !bytes.Contains(v.value, []byte(a.Unmap().String())) { // most need no decoding
			continue
		}
		k, err := decodeKey(v.key)
		if err != nil {
			continue
		}
		e, err := intact(tx.Get(k))
		if err != nil {
			return nil, err
		}
		if _, addresses := indexKeys(e); contains(addresses, append(addressKey(a), v.key...)) {
			entries = append(entries, e)
		}
	}
	return entries, nil
}
