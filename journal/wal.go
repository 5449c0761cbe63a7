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
//	body: Updated of the stored entry, as text 00 entry key 00 Outline, and Entry, JSON
//	CRC-32C of the body, 4 bytes, big-endian

// ErrNotStored is returned for an entry that the bbolt file has no version of.
var ErrNotStored = errors.New("journal: the entry is not stored yet")

// Append writes a newer version of an entry without a sync. It survives SIGKILL, but a loss of power
// may leave the stored entry. It refuses an illegal change of state, and an entry that did not come
// from a transaction. On an error the version before stays. The caller holds the attachment's lock.
func (s *Store) Append(e *Entry) error {
	if e.stored == (Time{}) {
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
	for _, dir := range []string{s.Dir, s.walDir()} {
		if err := checkDir(dir); err != nil {
			return err
		}
	}
	v := version{key: encodeKey(e.Key), stored: storedText(e.stored), value: value}
	if err := s.appendTo(s.walPath(e.Key), encodeVersion(v)); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	e.was = e.State
	s.at("appended")
	return nil
}

// appendTo writes a version behind the last whole one.
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
	key    []byte // as encodeKey makes it
	stored string // what it was made from, see storedText
	value  []byte
}

// storedText identifies the stored version of an entry.
func storedText(updated Time) string {
	return fmt.Sprintf("%d %d", updated.Boot, updated.Wall.UnixMilli())
}

func encodeVersion(v version) []byte {
	body := slices.Concat([]byte(v.stored), []byte{0}, v.key, []byte{0}, v.value)
	return appendSum(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...), body)
}

func decodeVersion(body []byte) (v version, ok bool) {
	parts := bytes.SplitN(body, []byte{0}, 5)
	if len(parts) < 5 {
		return v, false
	}
	return version{stored: string(parts[0]), key: bytes.Join(parts[1:4], []byte{0}), value: parts[4]}, true
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
	if errors.Is(err, fs.ErrNotExist) {
		return v, false, nil
	}
	if err != nil {
		return v, false, fmt.Errorf("journal: %w", err)
	}
	defer f.Close()
	data, err := readWhole(f)
	if err != nil {
		return v, false, fmt.Errorf("journal: %w", err)
	}
	body, _ := lastVersion(data)
	v, ok = decodeVersion(body)
	return v, ok, nil
}

// readWhole reads a file in one go.
func readWhole(f *os.File) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
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
	if !ok || err != nil || !bytes.Equal(v.key, encodeKey(stored.Key)) || v.stored != storedText(stored.Updated) {
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
		e.stored = stored.Updated
	}
	return e, err
}

// logged returns the names of the files in the log, as they were when the transaction first asked.
func (tx *Tx) logged() ([]string, error) {
	if tx.files == nil {
		files, err := os.ReadDir(tx.store.walDir())
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("journal: %w", err)
		}
		tx.files = []string{}
		for _, f := range files {
			tx.files = append(tx.files, f.Name())
		}
	}
	return tx.files, nil
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
