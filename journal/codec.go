package journal

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The layout of the journal file, a bbolt database. 00 is a zero byte, and a number takes 8 bytes,
// big-endian. A sum is the CRC-32C of the key and of the rest of the value: 4 bytes, big-endian.
//
//	bucket    key                                             value
//	meta      "format"                                        sum, the format as JSON
//	entries   network 00 containerID 00 ifname 00 number      sum, Outline and Entry: JSON, 2 lines
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

// Outline is the part of a record that can be read without decoding the rest.
type Outline struct {
	Key    `json:"-"`
	Number uint64 `json:"-"`
	State  State  `json:"state"`
	BootID string `json:"bootID"`
	NetNS  NetNS  `json:"netns"`
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

// encodeEntry returns the key and the value that are stored for an entry.
func encodeEntry(e *Entry) (key, value []byte, err error) {
	if key = recordKey(e.Key, e.Number); !utf8.Valid(encodeKey(e.Key)) {
		return nil, nil, errors.New("its key is not valid UTF-8") // JSON would change it
	}
	outline, err := json.Marshal(Outline{State: e.Undo.State, BootID: e.Added.Host.BootID,
		NetNS: e.Added.NetNS})
	data, entryErr := json.Marshal(e)
	lines := slices.Concat(outline, []byte("\n"), data)
	return key, Seal(key, lines), errors.Join(err, entryErr)
}

// decodeLine decodes one of the two lines of a value into an Outline or an Entry.
func decodeLine(key, value []byte, line int, to any) (k Key, number uint64, err error) {
	if k, number, err = decodeKey(key); err != nil {
		return k, number, err
	}
	data, err := unseal(key, value)
	if err == nil {
		outline, entry, _ := bytes.Cut(data, []byte("\n"))
		err = json.Unmarshal([][]byte{outline, entry}[line], to)
	}
	if err != nil {
		err = &DamagedError{k, err}
	}
	return k, number, err
}

func decodeOutline(key, value []byte) (o Outline, err error) {
	o.Key, o.Number, err = decodeLine(key, value, 0, &o)
	return o, err
}

func decodeEntry(key, value []byte) (*Entry, error) {
	e := &Entry{}
	k, number, err := decodeLine(key, value, 1, e)
	if err != nil {
		return nil, err
	}
	e.Key, e.Number = k, number
	return e, nil
}

// isUndone reports whether an encoded entry is undone. It decodes nothing, because most of a
// journal's records may be undone.
func isUndone(value []byte) bool {
	return bytes.HasPrefix(value[min(sumSize, len(value)):], []byte(`{"state":"`+Undone+`"`))
}
