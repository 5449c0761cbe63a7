package journal

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// state is what a file has, as verify found it.
type state struct {
	data []byte // of the whole file
	sum  digest // of its content
	// torn is set if the newest transaction is not whole, because the power went before its sync.
	// Then the one before counts, of which it has overwritten nothing.
	torn bool
}

// verify reads a whole file and returns damage as ErrDamaged, and an error of the kernel unchanged.
// It runs before bbolt, which mistakes a meta page that the disk cannot read for a damaged one, and
// may do worse than panic on a damaged page.
func verify(f *os.File) (*state, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	// bbolt would begin a new journal in it, or tell a reader that it cannot write.
	if info.Size() == 0 {
		return nil, fmt.Errorf("%w: empty file", ErrDamaged)
	}
	s := &state{data: make([]byte, info.Size())}
	if _, err := f.ReadAt(s.data, 0); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	if err := s.choose(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return s, nil
}

// choose chooses the newest transaction that is whole. If the structure of the newest is, but no
// content fits its digest, a value was damaged later, and the newest counts: see DamagedError. If
// no meta page is valid, choose returns nil, and bbolt says why.
func (s *state) choose() error {
	var first error
	metas := metasOf(s.data)
	for i, m := range metas {
		sum, whole, err := verifyPages(s.data, m)
		if i == 0 {
			s.sum, first = sum, err
		}
		if whole {
			s.sum, s.torn = sum, i > 0
			return nil
		}
	}
	return first
}

// newestSum returns the place of the checksum of the newest transaction, which makes it count.
func (s *state) newestSum() int64 {
	return int64(metasOf(s.data)[0].at + pageHeader + metaSize - 8)
}

// dropNewest makes the transaction before the newest one count.
func (s *state) dropNewest(f *os.File) error {
	if _, err := f.WriteAt(make([]byte, 8), s.newestSum()); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	return nil
}

// copyWithoutNewest returns a copy of the file, in memory, for a reader, which changes nothing.
func (s *state) copyWithoutNewest() (*os.File, error) {
	fd, err := unix.MemfdCreate(fileName, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", os.NewSyscallError("memfd_create", err))
	}
	f := os.NewFile(uintptr(fd), fileName)
	if _, err := f.WriteAt(s.data, 0); err != nil {
		return f, fmt.Errorf("journal: %w", err)
	}
	return f, s.dropNewest(f)
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

type meta struct{ at, size, root, freelist, pages, transaction uint64 }

// pages is the state of a walk through a file.
type pages struct {
	data   []byte
	size   uint64 // of a page
	used   []bool // by page number
	sum    digest // of the content
	stored []byte // the digest that the file has
}

// verifyPages checks the structure of a bbolt file as of a transaction, and reports whether that is
// whole: its content fits the digest, and each page is in use or free. It follows the rules of
// bbolt's own check, and adds that a branch's key is the first key of its child, since bbolt relies
// on this when it writes. bbolt's own check, like all of bbolt, never ends in a graph that is no
// tree (stack) or on a page of 2³² (memory).
func verifyPages(data []byte, m meta) (sum digest, whole bool, err error) {
	if m.pages < 2 || m.pages > uint64(len(data))/m.size {
		return sum, false, fmt.Errorf("%d bytes instead of %d pages of %d", len(data), m.pages, m.size)
	}
	p := &pages{data: data, size: m.size, used: make([]bool, m.pages)}
	p.used[0], p.used[1] = true, true
	if err := p.walk(nil, m.root, nil, nil); err != nil {
		return sum, false, err
	}
	if err := p.free(m.freelist); err != nil {
		return sum, false, err
	}
	whole = bytes.Equal(p.stored, p.sum.encode(m.transaction)) && !slices.Contains(p.used, false)
	return p.sum, whole, nil
}

// metasOf returns the valid meta pages, the one with the latest transaction first.
func metasOf(data []byte) (metas []meta) {
	if m, ok := metaAt(data, 0); ok {
		metas = append(metas, m)
	}
	for at := uint64(1024); at <= 1024<<14; at <<= 1 {
		if m, ok := metaAt(data, at); ok && m.size == at && (len(metas) == 0 || metas[0].size == at) {
			metas = append(metas, m)
			break
		}
	}
	slices.SortFunc(metas, func(a, b meta) int { return cmp.Compare(b.transaction, a.transaction) })
	return metas
}

// newestIn returns the number of a file's newest transaction, 0 if its meta pages do not tell. It
// reads these alone, and takes a page to have this machine's size.
func newestIn(f *os.File) (transaction uint64) {
	page := make([]byte, pageHeader+metaSize)
	for i := range int64(2) {
		_, _ = f.ReadAt(page, i*int64(os.Getpagesize()))
		if m, ok := metaAt(page, 0); ok {
			transaction = max(transaction, m.transaction)
		}
	}
	return transaction
}

func metaAt(data []byte, at uint64) (m meta, ok bool) {
	if at+pageHeader+metaSize > uint64(len(data)) {
		return m, false
	}
	b := data[at+pageHeader:][:metaSize]
	sum := fnv.New64a()
	_, _ = sum.Write(b[:56])
	m = meta{at: at, size: uint64(u32(b[8:])), root: u64(b[16:]), freelist: u64(b[32:]),
		pages: u64(b[40:]), transaction: u64(b[48:])}
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

// walk checks a page of a bucket and those below it. Their first key is low and all are less than
// high; nil means any. The bucket above all others has no name.
func (p *pages) walk(bucket []byte, id uint64, low, high []byte) error {
	page, err := p.take(id)
	if err != nil {
		return err
	}
	if err := p.check(bucket, page, low, high); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	return nil
}

func (p *pages) check(bucket, page, low, high []byte) error {
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
			err = p.walk(bucket, e.child, e.key, next)
		case e.bucket:
			err = p.bucket(e.key, e.value)
		case !bytes.Equal(bucket, bucketMeta):
			p.sum.add(bucket, e.key, e.value)
		case bytes.Equal(e.key, keyDigest):
			p.stored = e.value
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (p *pages) bucket(name, value []byte) error {
	if len(value) >= 16 {
		p.sum.addSequence(name, u64(value[8:]))
	}
	switch {
	case len(value) >= 16 && u64(value) != 0:
		return p.walk(name, u64(value), nil, nil)
	case len(value) >= 16+pageHeader && u16(value[16+8:]) == kindLeaf:
		return p.check(name, value[16:], nil, nil)
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
