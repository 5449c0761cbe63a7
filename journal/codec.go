package journal

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The layout of the journal file, a bbolt database. 00 is a zero byte, and a number takes 8 bytes,
// big-endian. A sum is the CRC-32C of the key and of the rest of the value: 4 bytes, big-endian.
//
//	bucket    key                                             value
//	meta      "format"                                        sum, the format as JSON
//	entries   network 00 containerID 00 ifname 00 number      sum, the Outline, the Entry as JSON
var (
	bucketMeta    = []byte("meta")
	bucketEntries = []byte("entries")
	keyFormat     = []byte("format")

	buckets = [][]byte{bucketMeta, bucketEntries}
)

// Version is the version of the file's format that this code writes. It is also the newest version
// that this code can read. No release wrote versions 1 and 2; this code cannot read them.
const Version = 3

// format records which releases can read the file. Writer is the Version of the release that
// created the file. OldestReader is the lowest Version that a reader needs. A release that changes
// the format raises Writer. Only the release after it raises OldestReader, so users can go back by
// one release. The value of the format keeps its layout in all releases.
type format struct {
	Writer       int `json:"writer"`
	OldestReader int `json:"oldestReader"`
}

// ErrNewer is returned for a file that only a newer release can read. The file stays unchanged.
var ErrNewer = errors.New("journal: journal.db was written by a newer unwind; install that " +
	"release or a later one")

func checkFormat(value []byte) error {
	var f format
	data, err := unseal(keyFormat, value)
	if err == nil {
		err = json.Unmarshal(data, &f)
	}
	if err != nil {
		return fmt.Errorf("%w, or from before the first release: format: %w", ErrDamaged, err)
	}
	if f.OldestReader > Version {
		return ErrNewer
	}
	return nil
}

const sumSize = 4 // bytes

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func sum(key, data []byte) uint32 {
	return crc32.Update(crc32.Checksum(key, castagnoli), castagnoli, data)
}

// Seal returns the value that is stored for data under a key: a checksum, then the data.
func Seal(key, data []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, sum(key, data)), data...)
}

// unseal returns the data in a value, or an error if the key or the value is not what Seal got.
func unseal(key, value []byte) ([]byte, error) {
	if len(value) < sumSize || binary.BigEndian.Uint32(value) != sum(key, value[sumSize:]) {
		return nil, errors.New("wrong checksum")
	}
	return value[sumSize:], nil
}

// encodeKey returns the prefix of the keys of all records of an attachment.
func encodeKey(k Key) []byte {
	return []byte(k.Network + "\x00" + k.ContainerID + "\x00" + k.IfName + "\x00")
}

func recordKey(k Key, number uint64) []byte {
	return binary.BigEndian.AppendUint64(encodeKey(k), number)
}

func decodeKey(b []byte) (k Key, number uint64, err error) {
	n := max(0, len(b)-9)
	network, rest, _ := strings.Cut(string(b[:n]), "\x00")
	containerID, ifName, whole := strings.Cut(rest, "\x00")
	if !whole || strings.Contains(ifName, "\x00") || b[n] != 0 {
		return k, 0, fmt.Errorf("journal: malformed entry key %s; run unwindctl doctor",
			shorten(strconv.Quote(string(b))))
	}
	return Key{network, containerID, ifName}, binary.BigEndian.Uint64(b[n+1:]), nil
}

// DamagedError is returned for an entry that cannot be read in an otherwise readable file. The
// entry stays in the file until the attachment's next ADD or DEL removes it.
type DamagedError struct {
	Key Key
	Err error
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("journal: entry %s is damaged: %v", e.Key, e.Err)
}

func (e *DamagedError) Unwrap() error { return e.Err }

// encodeEntry returns the key and the value that are stored for an entry. A reader of many entries
// decodes only their outlines.
//
//	sum, state 00 boot ID 00 device 00 inode 00 path of the network namespace 00 JSON
//
// Neither JSON nor any of these texts contains a zero byte.
func encodeEntry(e *Entry) (key, value []byte, err error) {
	if key = recordKey(e.Key, e.Number); !utf8.Valid(encodeKey(e.Key)) {
		return nil, nil, errors.New("its key is not valid UTF-8") // JSON would change it
	}
	outline := fmt.Appendf(nil, "%s\x00%s\x00%d\x00%d\x00%s\x00", e.Undo.State,
		e.Added.Host.BootID, e.Added.NetNS.Dev,
		e.Added.NetNS.Ino, e.Added.NetNS.Path)
	if bytes.Count(outline, []byte{0}) != outlineParts {
		return nil, nil, fmt.Errorf("%q contains a zero byte", outline)
	}
	data, err := json.Marshal(e)
	return key, Seal(key, append(outline, data...)), err
}

const outlineParts = 5

// openEntry returns the key of an encoded entry, its outline and its JSON.
func openEntry(key, value []byte) (k Key, number uint64, outline, data []byte, err error) {
	if k, number, err = decodeKey(key); err == nil {
		if data, err = unseal(key, value); err != nil {
			err = &DamagedError{k, err}
		}
	}
	n := bytes.LastIndexByte(data, 0) + 1
	return k, number, data[:n], data[n:], err
}

func decodeEntry(key, value []byte) (*Entry, error) {
	k, number, _, data, err := openEntry(key, value)
	if err != nil {
		return nil, err
	}
	e := &Entry{}
	if err := json.Unmarshal(data, e); err != nil {
		return nil, &DamagedError{k, err}
	}
	e.Key, e.Number = k, number
	return e, nil
}

func decodeOutline(key, value []byte) (Outline, error) {
	k, number, outline, _, err := openEntry(key, value)
	o := Outline{Key: k, Number: number}
	if err != nil {
		return o, err
	}
	part := strings.Split(string(outline), "\x00")
	if len(part) != outlineParts+1 {
		return o, &DamagedError{k, errors.New("the outline is missing")}
	}
	var devErr, inoErr error
	o.State, o.BootID, o.NetNS.Path = State(part[0]), part[1], part[4]
	o.NetNS.Dev, devErr = strconv.ParseUint(part[2], 10, 64)
	o.NetNS.Ino, inoErr = strconv.ParseUint(part[3], 10, 64)
	if err := cmp.Or(devErr, inoErr); err != nil {
		return o, &DamagedError{k, err}
	}
	return o, nil
}

// isUndone reports whether an encoded entry is undone.
func isUndone(value []byte) bool {
	return bytes.HasPrefix(value[min(sumSize, len(value)):], []byte(Undone+"\x00"))
}
