package ipam

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// FuzzReservation reads a file in host-local's directory, under any name. Only an address is a
// reservation, and a release for one owner removes no file of another's.
func FuzzReservation(f *testing.F) {
	for _, name := range []string{"10.1.0.2", "fd00::2", "::ffff:10.1.0.2", "fe80::1%eth0", "lock", "last_reserved_ip.0", "10.1.0.02"} {
		f.Add(name, []byte("a\r\neth0"))
		f.Add(name, []byte("a"))
		f.Add(name, []byte("\r\n"))
	}
	f.Add("10.1.0.2", []byte(" a \r\n eth0 \r\n b"))
	f.Add("10.1.0.3", []byte(strings.Repeat("x", maxOwner+1)))
	f.Fuzz(func(t *testing.T, name string, content []byte) {
		if name == "" || strings.ContainsAny(name, "/\x00") || name == "." || name == ".." || len(name) > 255 {
			t.Skip()
		}
		pool := t.TempDir()
		if err := os.WriteFile(filepath.Join(pool, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
		found, _ := Scan(pool)
		address, err := netip.ParseAddr(name)
		if len(found) > 1 || len(found) == 1 && (err != nil || found[0].Address != address || found[0].Empty() && found[0].Owner != Owner{}) {
			t.Fatalf("%q is %+v", name, found)
		}
		for _, owner := range []Owner{{"a", "eth0"}, {"b", "eth0"}} {
			held, _ := HeldBy(pool, owner.ContainerID, owner.IfName)
			if is := len(found) == 1 && found[0].Owner.Is(owner.ContainerID, owner.IfName); (len(held) == 1) != is {
				t.Errorf("%s holds %v of %+v", owner, held, found)
			}
		}
		if _, err := Release(t.Context(), pool, Owner{"b", "eth0"}); err != nil && len(content) <= maxOwner {
			t.Error(err)
		}
		_, err = os.Lstat(filepath.Join(pool, name))
		if ours := len(found) == 1 && found[0].Owner.Is("b", "eth0"); os.IsNotExist(err) != ours {
			t.Errorf("after a release for b: %v, of %+v", err, found)
		}
	})
}
