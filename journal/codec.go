package journal

import (
	"bytes"
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
//	meta        "format"                           → format
//	entries     network 00 containerID 00 ifname   → Outline, and Entry, JSON
//	pods        namespace 00 name 00 <entry key>   → nothing
//	addresses   address 00 <entry key>             → nothing
//	tombstones  <entry key>                        → sequence, 8 bytes, and Tombstone, JSON
//	expiry      sequence, 8 bytes                  → <entry key> of a tombstone; the oldest first
//	history     sequence, 8 bytes                  → Event, JSON; the oldest first
//	counters    name 00 label 00 label …           → value, 8 bytes
//
// The transaction that writes an entry also writes pods and addresses, from the entry alone.
var (
	bucketMeta       = []byte("meta")
	bucketEntries    = []byte("entries")
	bucketPods       = []byte("pods")
	bucketAddresses  = []byte("addresses")
	bucketTombstones = []byte("tombstones")
	bucketExpiry     = []byte("expiry")
	bucketHistory    = []byte("history")
	bucketCounters   = []byte("counters")
	keyFormat        = []byte("format")
	keyDigest        = []byte("digest")

	buckets = [][]byte{bucketMeta, bucketEntries, bucketPods, bucketAddresses,
		bucketTombstones, bucketExpiry, bucketHistory, bucketCounters}
)

// Version is the format that this code writes, and the newest that it reads.
const Version = 1

// format names the release that wrote the file and the oldest that can read it. A release that
// changes the format raises Writer, and raises OldestReader only one release later, so that going
// back by one release works.
type format struct {
	Writer       int `json:"writer"`
	OldestReader int `json:"oldestReader"`
}

// ErrNewer is returned for a file that only a newer release can read. The file stays as it is.
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

func encodeKey(k Key) []byte {
	return []byte(k.Network + "\x00" + k.ContainerID + "\x00" + k.IfName)
}

func decodeKey(b []byte) (Key, error) {
	var parts [3]string
	if !split(string(b), parts[:]) {
		return Key{}, fmt.Errorf("journal: key %q does not have three parts", b)
	}
	return Key{parts[0], parts[1], parts[2]}, nil
}

func podKey(p Pod) []byte { return []byte(p.Namespace + "\x00" + p.Name + "\x00") }

func addressKey(a netip.Addr) []byte { return []byte(a.Unmap().String() + "\x00") }

// indexKeys returns the keys of an entry in the buckets pods and addresses.
func indexKeys(e *Entry) (pods, addresses [][]byte) {
	if e == nil {
		return nil, nil
	}
	key := encodeKey(e.Key)
	if e.Pod.Name != "" {
		pods = append(pods, append(podKey(e.Pod), key...))
	}
	for _, a := range e.Addresses() {
		addresses = append(addresses, append(addressKey(a), key...))
	}
	return pods, addresses
}

// DamagedError is returned for an entry that cannot be read, in a file that otherwise can. Its
// bytes stay until the attachment's next ADD or DEL writes over them.
type DamagedError struct {
	Key Key
	Err error
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("journal: entry %s is damaged: %v", e.Key, e.Err)
}

func (e *DamagedError) Unwrap() error { return e.Err }

// encodeEntry writes an outline, then the entry. A reader of many entries decodes only the
// outlines.
//
//	state 00 boot ID 00 device 00 inode 00 path of the network namespace 00 JSON
//
// Neither JSON nor a path has a zero byte.
func encodeEntry(e *Entry) ([]byte, error) {
	outline, err := encodeOutline(e)
	if err != nil {
		return nil, err
	}
	data, err := json.Marshal(e)
	return append(outline, data...), err
}

func encodeOutline(e *Entry) ([]byte, error) {
	g := e.Newest()
	if key := string(encodeKey(e.Key)); !utf8.ValidString(key) {
		return nil, fmt.Errorf("%q is not valid UTF-8", key)
	}
	texts := []string{string(e.State), g.Host.BootID, g.NetNS.Path}
	if strings.ContainsRune(strings.Join(texts, ""), 0) {
		return nil, fmt.Errorf("%q contains a zero byte", texts)
	}
	return fmt.Appendf(nil, "%s\x00%s\x00%d\x00%d\x00%s\x00", e.State, g.Host.BootID, g.NetNS.Dev,
		g.NetNS.Ino, g.NetNS.Path), nil
}

func decodeEntry(key, value []byte) (*Entry, error) {
	k, err := decodeKey(key)
	if err != nil {
		return nil, err
	}
	e := &Entry{}
	if err := json.Unmarshal(value[bytes.LastIndexByte(value, 0)+1:], e); err != nil {
		return nil, &DamagedError{k, err}
	}
	if e.Key != k || len(e.Generations) == 0 {
		return nil, &DamagedError{k,
			fmt.Errorf("its value is of %s, with %d generations", e.Key, len(e.Generations))}
	}
	if _, err := encodeOutline(e); err != nil {
		return nil, &DamagedError{k, err}
	}
	return e, nil
}

// split divides a text at its zero bytes into exactly len(parts) parts.
func split(text string, parts []string) bool {
	for i := range parts {
		var more bool
		if parts[i], text, more = strings.Cut(text, "\x00"); more != (i < len(parts)-1) {
			return false
		}
	}
	return true
}

func decodeOutline(key, value []byte) (o Outline, err error) {
	if o.Key, err = decodeKey(key); err != nil {
		return o, err
	}
	var parts [5]string
	length := 0
	for range parts {
		length += bytes.IndexByte(value[length:], 0) + 1
	}
	if length == 0 || !split(string(value[:length-1]), parts[:]) {
		return o, &DamagedError{o.Key, errors.New("no outline")}
	}
	o.State, o.BootID, o.NetNS.Path = State(parts[0]), parts[1], parts[4]
	var errs [2]error
	o.NetNS.Dev, errs[0] = strconv.ParseUint(parts[2], 10, 64)
	o.NetNS.Ino, errs[1] = strconv.ParseUint(parts[3], 10, 64)
	if err := errors.Join(errs[:]...); err != nil {
		return o, &DamagedError{o.Key, err}
	}
	return o, nil
}

func sequence(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }
