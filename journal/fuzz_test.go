package journal

import (
	"bytes"
	"errors"
	"testing"
)

// FuzzDecodeEntry decodes any bytes under an entry's key. The result is an entry that can be used
// and written again, or a DamagedError that names the attachment.
func FuzzDecodeEntry(f *testing.F) {
	whole, err := encodeEntry(everything())
	if err != nil {
		f.Fatal(err)
	}
	key := encodeKey(everything().Key)
	f.Add(key, whole)
	f.Add(key, whole[:len(whole)/2])
	f.Add(key, []byte(`{"network":"podnet","containerID":"c0ffee","ifname":"eth0","generations":[{"claims":[{"address":""}],"steps":[{}]}]}`))
	f.Add([]byte("a\x00b\x00\x00"), []byte(`{"network":"a","containerID":"b","state":"?","generations":[{}]}`))
	f.Add([]byte("a\x00b\x00"), []byte(`{"network":"a","containerID":"b","state":"live","generations":[]}`))
	f.Add([]byte("a\x00b"), []byte(`null`))
	f.Fuzz(func(t *testing.T, key, value []byte) {
		k, err := decodeKey(key)
		if err == nil && string(encodeKey(k)) != string(key) {
			t.Errorf("key %q is %q", key, encodeKey(k))
		}
		_, _ = decodeOutline(key, value)
		e, err := decodeEntry(key, value)
		if err != nil {
			var damaged *DamagedError
			if e != nil || errors.As(err, &damaged) && damaged.Key != k {
				t.Errorf("%+v, %v, want a DamagedError of %q", e, err, k)
			}
			return
		}
		if e.Key != k || e.Newest() == nil {
			t.Fatalf("%+v under the key %q", e, key)
		}
		indexKeys(e)
		again, err := encodeEntry(e)
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", e, err)
		}
		o, err := decodeOutline(key, again)
		if err != nil || o.Key != k || o.State != e.State || o.BootID != e.Newest().Host.BootID || o.NetNS.Path != e.Newest().NetNS.Path {
			t.Fatalf("the outline is %+v, %v", o, err)
		}
		back, err := decodeEntry(key, again)
		if err != nil {
			t.Fatalf("written again: %v", err)
		}
		if twice, err := encodeEntry(back); err != nil || !bytes.Equal(again, twice) {
			t.Errorf("written once %q,\nand again %q (%v)", again, twice, err)
		}
	})
}
