package journal

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/fnv"
	"os"
	"slices"
	"strings"
	"unicode/utf8"
)

// The layout of the journal file, a bbolt database. 00 is a zero byte, and a number takes 8 bytes,
// big-endian. A sum is the CRC-32 (IEEE) of the key and of the rest of the value: 4 bytes,
// big-endian.
//
//	bucket    key                                             value
//	meta      "format"                                        sum, the format as JSON
//	records   network 00 containerID 00 ifname 00 number      sum, Outline and Record: JSON, 2 lines
var (
	bucketMeta    = []byte("meta")
	bucketRecords = []byte("records")
	keyFormat     = []byte("format")

	buckets = [][]byte{bucketMeta, bucketRecords}
)

const sumSize = 4 // bytes

// sum returns the CRC-32 (IEEE) of a key and data. Each CNI verb runs in a new process, so unwind
// uses the standard library's checksum that takes the least time to initialize.
func sum(key, data []byte) uint32 {
	return crc32.Update(crc32.ChecksumIEEE(key), crc32.IEEETable, data)
}

// Seal returns the value that is stored under a key: a checksum, then the data.
func Seal(key, data []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, sum(key, data)), data...)
}

// unseal returns the data in a value, or an error if the checksum is not that of the key and data.
func unseal(key, value []byte) ([]byte, error) {
	if len(value) < sumSize || binary.BigEndian.Uint32(value) != sum(key, value[sumSize:]) {
		return nil, errors.New("wrong checksum")
	}
	return value[sumSize:], nil
}

// encodeKey returns the prefix of the keys of an attachment's records, or the malformed key itself.
func encodeKey(k Key) []byte {
	if k.Malformed() {
		return []byte(k.Network)
	}
	return []byte(k.Network + "\x00" + k.ContainerID + "\x00" + k.IfName + "\x00")
}

func recordKey(k Key, number uint64) []byte {
	return binary.BigEndian.AppendUint64(encodeKey(k), number)
}

// decodeKey returns the attachment and the number in a key. If a damaged key names no attachment,
// Network is the whole key (see Malformed).
func decodeKey(b []byte) (k Key, number uint64, err error) {
	n := max(0, len(b)-8)
	part := strings.Split(string(b[:n]), "\x00")
	if len(part) != 4 || part[3] != "" || part[1]+part[2] == "" {
		k = Key{Network: string(b)}
		return k, 0, &DamagedError{k, errors.New("its key names no attachment")}
	}
	return Key{part[0], part[1], part[2]}, binary.BigEndian.Uint64(b[n:]), nil
}

// Outline is the part of a record that is stored before the rest, and can be read alone.
type Outline struct {
	Key    `json:"-"`
	Number uint64 `json:"-"`
	State  State  `json:"state"`
	BootID string `json:"bootID"`
	NetNS  NetNS  `json:"netns"`
}

// DamagedError means that one record cannot be read. The next ADD or DEL of its attachment removes
// the record. If the record's key is malformed, only Delete removes it.
type DamagedError struct {
	Key Key
	Err error
}

func (e *DamagedError) Error() string {
	return fmt.Sprintf("journal: record %s is damaged: %v", e.Key, e.Err)
}

// encodeRecord returns the key and the value that are stored for a record.
func encodeRecord(e *Record) (key, value []byte, err error) {
	key = recordKey(e.Key, e.Number)
	if !utf8.Valid(encodeKey(e.Key)) {
		return nil, nil, errors.New("its key is not valid UTF-8") // JSON would change it
	}
	outline, err := json.Marshal(Outline{State: e.State, BootID: e.Added.Host.BootID,
		NetNS: e.Added.NetNS})
	data, entryErr := json.Marshal(e)
	return key, Seal(key, slices.Concat(outline, []byte("\n"), data)), errors.Join(err, entryErr)
}

// decodeLine decodes a line of a value: line 0 into an Outline, or line 1 into a Record.
func decodeLine(key, value []byte, line int, to any) (k Key, number uint64, err error) {
	if k, number, err = decodeKey(key); err != nil {
		return k, number, err
	}
	data, err := unseal(key, value)
	if err == nil {
		outline, record, _ := bytes.Cut(data, []byte("\n"))
		err = json.Unmarshal([][]byte{outline, record}[line], to)
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

func decodeRecord(key, value []byte) (e *Record, err error) {
	e = &Record{}
	if e.Key, e.Number, err = decodeLine(key, value, 1, e); err != nil {
		return nil, err
	}
	return e, nil
}

// isAbandoned reports whether an encoded record is abandoned. It decodes nothing.
func isAbandoned(value []byte) bool {
	return bytes.HasPrefix(value[min(sumSize, len(value)):], []byte(`{"state":"`+Abandoned+`"`))
}

// verify returns the content of a journal file, ErrDamaged if its structure is wrong, or another
// error if it cannot be read. It does not use bbolt's own check, which may crash.
func verify(path string) (data []byte, err error) {
	if data, err = os.ReadFile(path); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	if err := checkStructure(data); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return data, nil
}

// The pages of a bbolt file. The first two are meta pages. Each page begins with a header, whose
// kind determines the rest of the page. A number after a name is a size in bytes:
//
//	header    number 8  kind 2  count 2  overflow 4 (how many of the next pages belong to this one)
//	meta      magic 4  version 4  page size 4  flags 4  root 8  sequence 8  freelist 8  pages 8
//	          transaction 8  checksum 8
//	branch    count × (offset 4  key size 4  page 8), keys
//	leaf      count × (flags 4  offset 4  key size 4  value size 4), keys and values
//	freelist  count × (page 8); if the count is 65535, the real count comes first, in 8 bytes
//
// An offset is relative to its own element. bbolt writes keys and values without gaps. The value of
// a bucket is: root page 8, sequence 8. If the root is 0, a leaf page follows in the value itself.
const (
	pageSize     = 4096 // on every machine
	pageHeader   = 16
	kindBranch   = 0x01
	kindLeaf     = 0x02
	kindFreelist = 0x10
	flagBucket   = 0x01
)

var (
	u16 = binary.NativeEndian.Uint16
	u32 = binary.NativeEndian.Uint32
	u64 = binary.NativeEndian.Uint64
)

type meta struct {
	version                            uint32
	root, freelist, pages, transaction uint64
}

const bboltVersion = 2

func newestMeta(data []byte) (newest meta, ok bool) {
	for page := range 2 {
		b := data[min(len(data), page*pageSize+pageHeader):]
		if len(b) < 64 {
			break
		}
		sum := fnv.New64a()
		_, _ = sum.Write(b[:56])
		m := meta{version: u32(b[4:]), root: u64(b[16:]), freelist: u64(b[32:]), pages: u64(b[40:]),
			transaction: u64(b[48:])}
		if u32(b) == 0xED0CDAED && u32(b[8:]) == pageSize &&
			u64(b[56:]) == sum.Sum64() && (!ok || m.transaction > newest.transaction) {
			newest, ok = m, true
		}
	}
	return newest, ok
}

// pages is the state of a walk through a file.
type pages struct {
	data []byte
	used []bool // indexed by page number
}

// checkStructure checks the file as of the newest transaction: each page is used once or is free,
// keys and values fill the pages without gaps, keys ascend, and each key of a branch is the first
// key of its child page (bbolt relies on this when it writes). If no meta page is valid, or the
// file has another bbolt version, checkStructure returns nil, because bbolt itself rejects the
// file.
func checkStructure(data []byte) error {
	m, ok := newestMeta(data)
	if !ok || m.version != bboltVersion {
		return nil
	}
	if m.pages < 2 || m.pages > uint64(len(data))/pageSize {
		return fmt.Errorf("the meta page counts %d pages; the file has %d", m.pages, len(data)/pageSize)
	}
	p := &pages{data: data, used: make([]bool, m.pages)}
	p.used[0], p.used[1] = true, true
	if err := cmp.Or(p.walk(m.root, nil, new([]byte)), p.free(m.freelist)); err != nil {
		return err
	}
	if id := slices.Index(p.used, false); id >= 0 {
		return fmt.Errorf("page %d is neither used nor free", id)
	}
	return nil
}

func (p *pages) use(id uint64) error {
	if n := len(p.used); id >= uint64(n) {
		return fmt.Errorf("page %d is outside the file of %d pages", id, n)
	}
	if p.used[id] {
		return fmt.Errorf("page %d is referenced twice", id)
	}
	p.used[id] = true
	return nil
}

// take returns a page with its overflow pages, and marks them as used.
func (p *pages) take(id uint64) ([]byte, error) {
	if err := p.use(id); err != nil {
		return nil, err
	}
	page := p.data[id*pageSize:]
	if u64(page) != id {
		return nil, fmt.Errorf("its header belongs to page %d", u64(page))
	}
	end := id + 1 + uint64(u32(page[12:]))
	for over := id + 1; over < end; over++ {
		if err := p.use(over); err != nil {
			return nil, err
		}
	}
	return page[:(end-id)*pageSize], nil
}

// walk checks a page and the pages below it. If first is not nil, it must be the page's first key.
// Keys must ascend, and each must be greater than *last. walk sets *last to the greatest key.
func (p *pages) walk(id uint64, first []byte, last *[]byte) error {
	page, err := p.take(id)
	if err == nil {
		err = p.check(page, first, last)
	}
	if err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	return nil
}

func (p *pages) check(page, first []byte, last *[]byte) error {
	kind, count := u16(page[8:]), int(u16(page[10:]))
	if kind != kindLeaf && (kind != kindBranch || count == 0) || pageHeader+16*count > len(page) {
		return fmt.Errorf("invalid page of kind %#x with %d elements", kind, count)
	}
	start := pageHeader + 16*count
	for i := range count {
		element, key, value, ok := elementAt(page, i, start)
		if !ok {
			return fmt.Errorf("element %d has a wrong offset or size", i)
		}
		start += len(key) + len(value)
		if i == 0 && first != nil && !bytes.Equal(key, first) ||
			*last != nil && bytes.Compare(key, *last) <= 0 {
			return fmt.Errorf("key %d is out of order", i)
		}
		var err error
		if kind == kindBranch {
			err = p.walk(u64(element[8:]), key, last)
		} else if *last = key; u32(element)&flagBucket != 0 {
			err = p.bucket(value)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// elementAt returns element i of a page. ok is false if the element exceeds the page, or if its key
// is not at start.
func elementAt(page []byte, i, start int) (element, key, value []byte, ok bool) {
	element = page[pageHeader+16*i:]
	at, keySize, valueSize := u32(element), u32(element[4:]), uint32(0)
	if u16(page[8:]) == kindLeaf {
		at, keySize, valueSize = u32(element[4:]), u32(element[8:]), u32(element[12:])
	}
	if uint64(at)+uint64(keySize)+uint64(valueSize) > uint64(len(element)) ||
		pageHeader+16*i+int(at) != start {
		return nil, nil, nil, false
	}
	return element, element[at:][:keySize], element[at+keySize:][:valueSize], true
}

func (p *pages) bucket(value []byte) error {
	switch {
	case len(value) >= 16 && u64(value) != 0:
		return p.walk(u64(value), nil, new([]byte))
	case len(value) >= 16+pageHeader && u16(value[16+8:]) == kindLeaf:
		return p.check(value[16:], nil, new([]byte))
	}
	return fmt.Errorf("invalid bucket of %d bytes", len(value))
}

// free checks that the freelist contains only pages that the walk did not use.
func (p *pages) free(id uint64) error {
	page, err := p.take(id)
	if err != nil {
		return err
	}
	ids, count := page[pageHeader:], uint64(u16(page[10:]))
	if count == 0xFFFF {
		ids, count = ids[8:], u64(ids)
	}
	if u16(page[8:]) != kindFreelist || count > uint64(len(ids))/8 {
		return fmt.Errorf("invalid freelist: %d pages, kind %#x", count, u16(page[8:]))
	}
	for i := range count {
		if err := p.use(u64(ids[8*i:])); err != nil {
			return err
		}
	}
	return nil
}
