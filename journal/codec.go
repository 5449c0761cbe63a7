package journal

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The layout of the journal file, a bbolt database. 00 is a zero byte, and a number takes 8 bytes,
// big-endian.
//
//	bucket    key                                             value
//	meta      "format"                                        the format, as JSON
//	entries   network 00 containerID 00 ifname 00 number      the Outline, then the Entry as JSON
//	index     "pod" 00 namespace 00 name 00 <entry key>       empty
//	          "address" 00 address 00 <entry key>             empty
//
// The transaction that writes an entry also writes its index keys, which depend only on the entry.
// The index omits undone entries.
var (
	bucketMeta    = []byte("meta")
	bucketEntries = []byte("entries")
	bucketIndex   = []byte("index")
	keyFormat     = []byte("format")

	buckets = [][]byte{bucketMeta, bucketEntries, bucketIndex}
)

// Version is the version of the file's format that this code writes. It is also the newest version
// that this code can read.
const Version = 2

// format records which releases can read the file. Writer is the Version of the release that
// created the file. OldestReader is the lowest Version that a reader needs. A release that changes
// the format raises Writer. Only the release after it raises OldestReader, so users can go back by
// one release.
type format struct {
	Writer       int `json:"writer"`
	OldestReader int `json:"oldestReader"`
}

// ErrNewer is returned for a file that only a newer release can read. The file stays unchanged.
var ErrNewer = errors.New("journal: journal.db was written by a newer unwind; install that " +
	"release or a later one")

func checkFormat(data []byte) error {
	var f format
	if err := json.Unmarshal(data, &f); err != nil || f.OldestReader < 1 {
		return fmt.Errorf("%w: no format version", ErrDamaged)
	}
	if f.OldestReader > Version {
		return ErrNewer
	}
	return nil
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
		return k, 0, fmt.Errorf("journal: malformed entry key %q; run unwindctl doctor", b)
	}
	return Key{network, containerID, ifName}, binary.BigEndian.Uint64(b[n+1:]), nil
}

func podKey(p Pod) string { return "pod\x00" + p.Namespace + "\x00" + p.Name + "\x00" }

func addressKey(a netip.Addr) string { return "address\x00" + a.Unmap().String() + "\x00" }

// indexKeys returns the keys under which the index lists an entry.
func indexKeys(e *Entry) (keys []string) {
	if e == nil || e.State == Undone {
		return nil
	}
	key := string(recordKey(e.Key, e.Number))
	if e.Pod.Name != "" {
		keys = append(keys, podKey(e.Pod)+key)
	}
	for _, a := range e.Addresses() {
		keys = append(keys, addressKey(a)+key)
	}
	return keys
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

// encodeEntry returns the value that is stored for an entry: its outline, then the entry as JSON. A
// reader of many entries decodes only their outlines.
//
//	state 00 boot ID 00 device 00 inode 00 path of the network namespace 00 JSON
//
// Neither JSON nor a path contains a zero byte.
func encodeEntry(e *Entry) ([]byte, error) {
	if err := checkTexts(e); err != nil {
		return nil, err
	}
	data, err := json.Marshal(e)
	return append(fmt.Appendf(nil, "%s\x00%s\x00%d\x00%d\x00%s\x00", e.State, e.Host.BootID,
		e.NetNS.Dev, e.NetNS.Ino, e.NetNS.Path), data...), err
}

// checkTexts rejects an entry if encoding and decoding would change one of its texts.
func checkTexts(e *Entry) error {
	if key := string(encodeKey(e.Key)); !utf8.ValidString(key) {
		return fmt.Errorf("%q is not valid UTF-8", key)
	}
	if text := string(e.State) + e.Host.BootID + e.NetNS.Path; strings.ContainsRune(text, 0) {
		return fmt.Errorf("%q contains a zero byte", text)
	}
	return nil
}

func decodeEntry(key, value []byte) (*Entry, error) {
	k, number, err := decodeKey(key)
	if err != nil {
		return nil, err
	}
	e := &Entry{}
	if err := json.Unmarshal(value[bytes.LastIndexByte(value, 0)+1:], e); err != nil {
		return nil, &DamagedError{k, err}
	}
	if e.Key != k || e.Number != number {
		return nil, &DamagedError{k, fmt.Errorf("its value belongs to %s, number %d", e.Key, e.Number)}
	}
	if err := checkTexts(e); err != nil {
		return nil, &DamagedError{k, err}
	}
	return e, nil
}

func decodeOutline(key, value []byte) (o Outline, err error) {
	if o.Key, o.Number, err = decodeKey(key); err != nil {
		return o, err
	}
	parts := bytes.SplitN(value, []byte{0}, 6)
	if len(parts) < 6 {
		return o, &DamagedError{o.Key, errors.New("the outline is missing")}
	}
	dev, devErr := strconv.ParseUint(string(parts[2]), 10, 64)
	ino, inoErr := strconv.ParseUint(string(parts[3]), 10, 64)
	if err := cmp.Or(devErr, inoErr); err != nil {
		return o, &DamagedError{o.Key, err}
	}
	o.State, o.BootID = State(parts[0]), string(parts[1])
	o.NetNS = NetNS{Path: string(parts[4]), Dev: dev, Ino: ino}
	return o, nil
}

// isUndone reports whether an encoded entry is undone.
func isUndone(value []byte) bool { return bytes.HasPrefix(value, []byte(Undone+"\x00")) }
