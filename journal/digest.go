package journal

import (
	"crypto/sha256"
	"encoding/binary"
)

// digest is a sum over all that the buckets have, in any order, except for bucket meta, which
// stores the digest. So a transaction adds and removes only what it changes. verify recognizes by
// it a transaction whose meta page reached the disk before its other pages did: their old content
// may be a valid tree.
type digest [2]uint64

func (d *digest) add(bucket, key, value []byte) {
	sum := sumOf(bucket, key, value)
	d[0], d[1] = d[0]+sum[0], d[1]+sum[1]
}

func (d *digest) remove(bucket, key, value []byte) {
	sum := sumOf(bucket, key, value)
	d[0], d[1] = d[0]-sum[0], d[1]-sum[1]
}

// addSequence adds a bucket's sequence. No key is empty.
func (d *digest) addSequence(bucket []byte, n uint64) {
	if n > 0 {
		d.add(bucket, nil, sequence(n))
	}
}

// encode returns the digest as a transaction stores it. Its number belongs to it, because the old
// content of a page may be the root of an older tree, with the digest of that.
func (d *digest) encode(transaction uint64) (value []byte) {
	for _, n := range []uint64{d[0], d[1], transaction} {
		value = binary.BigEndian.AppendUint64(value, n)
	}
	return value
}

func decodeDigest(value []byte) (d digest) {
	if len(value) >= 16 {
		d = digest{binary.BigEndian.Uint64(value), binary.BigEndian.Uint64(value[8:])}
	}
	return d
}

// sumOf returns a hash of a key and its value.
func sumOf(parts ...[]byte) digest {
	var text []byte
	for _, part := range parts {
		text = append(binary.AppendUvarint(text, uint64(len(part))), part...)
	}
	sum := sha256.Sum256(text)
	return decodeDigest(sum[:])
}
