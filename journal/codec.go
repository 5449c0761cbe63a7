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

// The layout of the file, a bbolt database:
//
//	meta     "format"                                              → format
//	entries  network 00 containerID 00 ifname 00 number            → Outline, and Entry, JSON
//	index    "pod" 00 namespace 00 name 00 <entry key>             → nothing
//	         "address" 00 address 00 <entry key>                   → nothing
//
// A number takes 8 bytes, big-endian. The transaction that writes an entry also writes its index
// keys, which depend only on the entry. An undone entry is not in the index.
var (
	bucketMeta    = []byte("meta")
	bucketEntries = []byte("entries")
	bucketIndex   = []byte("index")
	keyFormat     = []byte("format")

	buckets = [][]byte{bucketMeta, bucketEntries, bucketIndex}
)

// Version is the format that this code writes, and the newest that it reads.
const Version = 2

// format says which releases can read the file. Writer is the format version of the release that
// wrote it. OldestReader is the oldest format version that can read it. A release that changes the
// format raises Writer. Only the release after it raises OldestReader, so users can go back by one
// release.
type format struct {
	Writer       int `json:"writer"`
	OldestReader int `json:"oldestReader"`
}

// ErrNewer is returned for a file that only a newer release can read. The file is not changed.
var ErrNewer = errors.New("journal: the file was written by a newer unwind; install that release " +
	"or a later one")

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

// indexKeys returns the keys of an entry in the index.
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

// DamagedError is returned for an entry that cannot be read, although the rest of the file can.
// The entry stays in the file until the attachment's next ADD or DEL overwrites it.
type DamagedError struct {
	Key Key
	Err error
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("journal: entry %s is damaged: %v", e.Key, e.Err)
}

func (e *DamagedError) Unwrap() error { return e.Err }

// encodeEntry encodes an entry, preceded by its outline. A reader of many entries decodes only
// their outlines.
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

// checkTexts rejects an entry that decoding would not restore as it was.
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
		return nil, &DamagedError{k, fmt.Errorf("the value belongs to %s, number %d", e.Key, e.Number)}
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
