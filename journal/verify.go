package journal

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"os"
)

// verify reads a whole file and returns damage as ErrDamaged, and an error of the kernel unchanged.
// It runs before bbolt, which mistakes a meta page that the disk cannot read for a damaged one, and
// may do worse than panic on a damaged page.
func verify(f *os.File) error {
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	// bbolt would begin a new journal in it, or tell a reader that it cannot write.
	if info.Size() == 0 {
		return fmt.Errorf("%w: empty file", ErrDamaged)
	}
	data := make([]byte, info.Size())
	if _, err := f.ReadAt(data, 0); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	if err := verifyPages(data); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// The pages of a bbolt file. The first two are meta pages. Each page begins with a header of 16
// bytes:
//
//	number 8  kind 2  count 2  overflow 4 (the pages behind it that belong to it)
//
// and continues by its kind:
//
//	meta      magic 4  version 4  page size 4  flags 4  root 8  sequence 8  freelist 8  pages 8
//	          transaction 8  checksum 8
//	branch    count × (offset 4  key size 4  page 8), keys
//	leaf      count × (flags 4  offset 4  key size 4  value size 4), keys and values
//	freelist  count × (page 8); a count of 65535 stands for one that comes first, in 8 bytes
//
// An offset counts from its own element. The value of a bucket is its root page 8, sequence 8, and
// if the root is 0, a leaf page of its own.
const (
	pageHeader  = 16
	elementSize = 16
	metaSize    = 64

	kindBranch   = 0x01
	kindLeaf     = 0x02
	kindFreelist = 0x10

	flagBucket   = 0x01
	noFreelist   = math.MaxUint64
	metaMagic    = 0xED0CDAED
	metaVersion  = 2
	longFreelist = 0xFFFF
)

var (
	u16 = binary.NativeEndian.Uint16
	u32 = binary.NativeEndian.Uint32
	u64 = binary.NativeEndian.Uint64
)

type meta struct{ size, root, freelist, pages, transaction uint64 }

// pages is the state of a walk through a file.
type pages struct {
	data []byte
	size uint64 // of a page
	used []bool // by page number
}

// verifyPages returns what is wrong with the structure of a bbolt file. It follows the rules of
// bbolt's own check, and adds that a branch's key is the first key of its child, since bbolt relies
// on this when it writes. bbolt's own check, like all of bbolt, never ends in a graph that is no
// tree (stack) or on a page of 2³² (memory). verifyPages does not see damage within a key or a
// value: see DamagedError. If no meta page is valid it returns nil, and bbolt says why.
func verifyPages(data []byte) error {
	m, ok := newestMeta(data)
	if !ok {
		return nil
	}
	if m.pages < 2 || m.pages > uint64(len(data))/m.size {
		return fmt.Errorf("%d bytes instead of %d pages of %d", len(data), m.pages, m.size)
	}
	p := &pages{data, m.size, make([]bool, m.pages)}
	p.used[0], p.used[1] = true, true
	if err := p.walk(m.root, nil, nil); err != nil {
		return err
	}
	return p.free(m.freelist)
}

// newestMeta returns the valid meta page with the latest transaction.
func newestMeta(data []byte) (newest meta, ok bool) {
	newest, ok = metaAt(data, 0)
	for at := uint64(1024); at <= 1024<<14; at <<= 1 {
		if ok && at != newest.size {
			continue
		}
		if m, valid := metaAt(data, at); valid && m.size == at &&
			(!ok || m.transaction > newest.transaction) {
			return m, true
		}
	}
	return newest, ok
}

func metaAt(data []byte, at uint64) (m meta, ok bool) {
	if at+pageHeader+metaSize > uint64(len(data)) {
		return m, false
	}
	b := data[at+pageHeader:][:metaSize]
	sum := fnv.New64a()
	_, _ = sum.Write(b[:56])
	m = meta{size: uint64(u32(b[8:])), root: u64(b[16:]), freelist: u64(b[32:]), pages: u64(b[40:]),
		transaction: u64(b[48:])}
	return m, u32(b) == metaMagic && u32(b[4:]) == metaVersion && u64(b[56:]) == sum.Sum64() &&
		m.size >= 1024
}

// take returns a page with its overflow pages, and marks them used. None may be in use already.
func (p *pages) take(id uint64) ([]byte, error) {
	n := uint64(len(p.used))
	if id >= n {
		return nil, fmt.Errorf("page %d of %d does not exist", id, n)
	}
	header := p.data[id*p.size:][:pageHeader]
	length := uint64(u32(header[12:])) + 1
	if u64(header) != id || length > n-id {
		return nil, fmt.Errorf("page %d: invalid header: page %d, %d pages", id, u64(header), length)
	}
	for i := id; i < id+length; i++ {
		if err := p.use(i); err != nil {
			return nil, err
		}
	}
	return p.data[id*p.size:][:length*p.size], nil
}

func (p *pages) use(id uint64) error {
	if id >= uint64(len(p.used)) || p.used[id] {
		return fmt.Errorf("page %d of %d is referenced twice", id, len(p.used))
	}
	p.used[id] = true
	return nil
}

// walk checks a page and those below it. Their first key is low and all are less than high; nil
// means any.
func (p *pages) walk(id uint64, low, high []byte) error {
	page, err := p.take(id)
	if err != nil {
		return err
	}
	if err := p.check(page, low, high); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	return nil
}

func (p *pages) check(page, low, high []byte) error {
	kind := u16(page[8:])
	elements, err := elementsOf(page)
	if err != nil {
		return err
	}
	for i, e := range elements {
		next := high
		if i+1 < len(elements) {
			next = elements[i+1].key
		}
		if i == 0 && low != nil && !bytes.Equal(e.key, low) ||
			next != nil && bytes.Compare(e.key, next) >= 0 {
			return fmt.Errorf("key %d is out of order", i)
		}
		switch {
		case kind == kindBranch:
			err = p.walk(e.child, e.key, next)
		case e.bucket:
			err = p.bucket(e.value)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *pages) bucket(value []byte) error {
	switch {
	case len(value) >= 16 && u64(value) != 0:
		return p.walk(u64(value), nil, nil)
	case len(value) >= 16+pageHeader && u16(value[16+8:]) == kindLeaf:
		return p.check(value[16:], nil, nil)
	}
	return fmt.Errorf("invalid bucket of %d bytes", len(value))
}

// element is one element of a branch, with a child, or of a leaf, with a value.
type element struct {
	key, value []byte
	child      uint64
	bucket     bool
}

func elementsOf(page []byte) ([]element, error) {
	kind, count := u16(page[8:]), int(u16(page[10:]))
	if kind != kindLeaf && (kind != kindBranch || count == 0) ||
		pageHeader+count*elementSize > len(page) {
		return nil, fmt.Errorf("invalid page: %d elements of kind %#x", count, kind)
	}
	elements := make([]element, count)
	for i := range elements {
		b := page[pageHeader+i*elementSize:]
		e, offset, key, value := element{child: u64(b[8:])}, uint64(u32(b)), uint64(u32(b[4:])), uint64(0)
		if kind == kindLeaf {
			e = element{bucket: u32(b)&flagBucket != 0}
			offset, key, value = uint64(u32(b[4:])), uint64(u32(b[8:])), uint64(u32(b[12:]))
		}
		if offset+key+value > uint64(len(b)) {
			return nil, fmt.Errorf("element %d exceeds the page", i)
		}
		e.key, e.value = b[offset:][:key], b[offset+key:][:value]
		elements[i] = e
	}
	return elements, nil
}

// free checks the freelist against the pages that the walk did not use.
func (p *pages) free(id uint64) error {
	if id == noFreelist {
		return nil
	}
	page, err := p.take(id)
	if err != nil {
		return err
	}
	ids, count := page[pageHeader:], uint64(u16(page[10:]))
	if count == longFreelist {
		ids, count = ids[8:], u64(ids)
	}
	if u16(page[8:]) != kindFreelist || count > uint64(len(ids))/8 {
		return fmt.Errorf("page %d: invalid freelist: %d pages, kind %#x", id, count, u16(page[8:]))
	}
	for i := range count {
		if err := p.use(u64(ids[8*i:])); err != nil {
			return fmt.Errorf("page %d: %w", id, err)
		}
	}
	return nil
}
