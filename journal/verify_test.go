package journal

import (
	"bytes"
	"encoding/binary"
	"math"
	"os"
	"strings"
	"testing"
)

var native = binary.NativeEndian

// bboltFile is the content of a journal's file, and the pages and elements that tests damage.
type bboltFile struct {
	data           []byte
	branch         uint64 // the root page of the bucket of records
	freelist       uint64
	branchElements []element
	leaf           []element // the elements of the branch's first child
}

func newFile(t testing.TB) *bboltFile {
	t.Helper()
	s := newStore(t)
	check(t, populate(s))
	data, err := os.ReadFile(s.Path())
	check(t, err)
	m, ok := newestMeta(data)
	if !ok {
		t.Fatal("no meta page is valid")
	}
	f := &bboltFile{data: data, freelist: m.freelist}
	for _, e := range f.elements(t, m.root) {
		if bytes.Equal(e.key, bucketRecords) {
			f.branch = native.Uint64(e.value)
		}
	}
	f.branchElements = f.elements(t, f.branch)
	f.leaf = f.elements(t, f.branchElements[0].child)
	return f
}

func (f *bboltFile) page(id uint64) []byte { return f.data[id*pageSize:][:pageSize] }

func (f *bboltFile) elements(t testing.TB, id uint64) []element {
	t.Helper()
	var elements []element
	count := int(u16(f.page(id)[10:]))
	start := pageHeader + 16*count
	for i := range count {
		e, key, value, ok := elementAt(f.page(id), i, start)
		if !ok {
			t.Fatalf("page %d has no element %d", id, i)
		}
		start += len(key) + len(value)
		elements = append(elements, element{key, value, u64(e[8:])})
	}
	return elements
}

type element struct {
	key, value []byte
	child      uint64 // the child page, if the page is a branch
}

// element returns the bytes of an element of a page.
func (f *bboltFile) element(id uint64, i int) []byte {
	return f.page(id)[pageHeader+16*i:][:16]
}

// TestVerify: checkStructure finds each kind of damage that would make bbolt loop forever, exhaust
// memory, panic, or lose later writes.
func TestVerify(t *testing.T) {
	for _, tt := range []struct {
		name   string
		damage func(f *bboltFile)
		want   string
	}{
		{"a page that is its own child", func(f *bboltFile) {
			native.PutUint64(f.element(f.branch, 0)[8:], f.branch)
		}, "twice"},
		{"a page with two parents", func(f *bboltFile) {
			native.PutUint64(f.element(f.branch, 1)[8:], f.branchElements[0].child)
		}, "twice"},
		{"a child past the end of the file", func(f *bboltFile) {
			native.PutUint64(f.element(f.branch, 0)[8:], 1<<40)
		}, "page 1099511627776"},
		{"a child that is a meta page", func(f *bboltFile) {
			native.PutUint64(f.element(f.branch, 0)[8:], 1)
		}, "twice"},
		{"a page with too many overflow pages", func(f *bboltFile) {
			native.PutUint32(f.page(f.branch)[12:], math.MaxUint32)
		}, "is referenced twice"},
		{"a page with another page's number", func(f *bboltFile) { f.page(f.branch)[0]++ }, "header belongs to page"},
		{"a page of an unknown kind", func(f *bboltFile) { f.page(f.branch)[8] = 0x40 }, "kind 0x40"},
		{"a branch without children", func(f *bboltFile) { native.PutUint16(f.page(f.branch)[10:], 0) }, "0 elements"},
		{"more elements than fit", func(f *bboltFile) { native.PutUint16(f.page(f.branch)[10:], math.MaxUint16) }, "65535 elements"},
		{"a key that is too long", func(f *bboltFile) {
			native.PutUint32(f.element(f.branch, 0)[4:], math.MaxUint32)
		}, "element 0 has a wrong offset or size"},
		{"a value that is too long", func(f *bboltFile) {
			native.PutUint32(f.element(f.branchElements[0].child, 0)[12:], math.MaxUint32)
		}, "element 0 has a wrong offset or size"},
		{"a leaf that lost an element", func(f *bboltFile) {
			native.PutUint16(f.page(f.branchElements[0].child)[10:], uint16(len(f.leaf)-1))
		}, "element 0 has a wrong offset or size"},
		{"a value that is a byte shorter", func(f *bboltFile) {
			f.element(f.branchElements[0].child, 0)[12]--
		}, "element 1 has a wrong offset or size"},
		{"keys out of order", func(f *bboltFile) { f.leaf[1].key[0] = 0xff }, "out of order"},
		{"a leaf whose first key differs from its branch's", func(f *bboltFile) {
			key := f.branchElements[1].key
			key[len(key)-1]--
		}, "out of order"},
		{"a leaf that extends past the next leaf's first key", func(f *bboltFile) {
			f.leaf[len(f.leaf)-1].key[0] = 0xff
		}, "out of order"},
		{"a bucket without a root", func(f *bboltFile) {
			for i := range f.data {
				if bytes.HasPrefix(f.data[i:], append(bytes.Clone(bucketRecords), byte(f.branch), 0, 0, 0, 0, 0, 0, 0)) {
					f.data[i+len(bucketRecords)] = 0
				}
			}
		}, "invalid bucket of 16 bytes"},
		{"a freelist page of the wrong kind", func(f *bboltFile) { f.page(f.freelist)[8] = kindLeaf }, "kind 0x2"},
		{"a freelist with too many pages", func(f *bboltFile) {
			native.PutUint16(f.page(f.freelist)[10:], 0xFFFF)
			native.PutUint64(f.page(f.freelist)[pageHeader:], 1<<40)
		}, "invalid freelist: 1099511627776 pages"},
		{"a page in the freelist that is in use", func(f *bboltFile) {
			native.PutUint64(f.page(f.freelist)[pageHeader:], f.branch)
		}, "twice"},
		{"a page twice in the freelist", func(f *bboltFile) {
			native.PutUint64(f.page(f.freelist)[pageHeader:], native.Uint64(f.page(f.freelist)[pageHeader+8:]))
		}, "twice"},
		{"a free page missing from the freelist", func(f *bboltFile) { f.page(f.freelist)[10]-- }, "is neither used nor free"},
		{"a free page past the end of the file", func(f *bboltFile) {
			native.PutUint64(f.page(f.freelist)[pageHeader:], math.MaxUint64)
		}, "page 18446744073709551615"},
		{"a truncated file", func(f *bboltFile) { f.data = f.data[:3*pageSize] }, "the file has 3"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFile(t)
			check(t, checkStructure(f.data))
			tt.damage(f)
			if err := checkStructure(f.data); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q in it", err, tt.want)
			}
			check(t, suffer(newStore(t).Dir, f.data))
		})
	}
}

// TestVerifyOneMeta: one of the two meta pages is enough. If the newer meta page is damaged, bbolt
// uses the older one, which is that of the previous transaction.
func TestVerifyOneMeta(t *testing.T) {
	for id := range uint64(2) {
		f := newFile(t)
		clear(f.page(id))
		if _, ok := newestMeta(f.data); !ok {
			t.Errorf("without meta page %d the other is not found", id)
		}
		check(t, suffer(newStore(t).Dir, f.data))
	}
}

// FuzzVerify: checkStructure returns without a panic, whatever bytes are in the file.
func FuzzVerify(f *testing.F) {
	data := newFile(f).data
	f.Add(uint32(0), []byte{0})
	f.Add(uint32(len(data)/2), []byte("\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, at uint32, with []byte) {
		damaged := bytes.Clone(data)
		copy(damaged[int(at)%len(damaged):], with)
		_ = checkStructure(damaged)
	})
}
