package facts

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/record"
)

var attachment = journal.Key{Network: "podnet", ContainerID: "a", IfName: "lo"}

// nodeAt returns a node with a journal of its own and an empty libcni cache.
func nodeAt(t *testing.T) *Node {
	t.Helper()
	store := &journal.Store{Dir: filepath.Join(t.TempDir(), "state"), Logger: slog.New(slog.DiscardHandler)}
	return &Node{
		Journal: &record.Recorder{Store: store}, Log: store.Logger, CacheDir: t.TempDir(), View: &View{},
		Host: journal.Host{BootID: "this"},
	}
}

// TestLater: if an ADD is not in the journal, Later detects it by its entry in libcni's cache. The
// entry must name an existing namespace that belongs to no record, and that contains the interface.
// If the cached result has addresses, the interface must have one of them. A file that is not a
// cache entry of the attachment proves nothing.
func TestLater(t *testing.T) {
	t.Parallel()
	const own = "/proc/self/ns/net"
	cached := func(netns, addresses string) string {
		return fmt.Sprintf(`{"networkName": "podnet", "containerId": "a", "ifName": "lo", "netns": %q, "result": {"cniVersion": "1.0.0", "ips": [%s]}}`,
			netns, addresses)
	}
	const its, anothers = `{"address": "127.0.0.1/8"}`, `{"address": "192.0.2.7/24"}`
	seen, err := InterfaceAt(own, "lo")
	if err != nil || !seen.There() {
		t.Skipf("no loopback here: %+v (%v)", seen, err)
	}
	another := journal.NetNS{Path: "/run/netns/a", Dev: seen.Netns.Dev, Ino: 1, Cookie: 1}
	for _, tt := range []struct {
		name  string
		cache string
		netns journal.NetNS // the record's namespace
		boot  string        // the record's boot
		want  decide.Truth
	}{
		{"no namespace in common", cached(own, its), another, "this", decide.True},
		{"no address cached", cached(own, ""), another, "this", decide.True},
		{"the record's namespace", cached(own, its), seen.Netns, "this", decide.False},
		{"the record's inode, in another boot", cached(own, its), seen.Netns, "another", decide.True},
		{"another address", cached(own, anothers), another, "this", decide.False},
		{"the namespace is gone", cached("/nonexistent", its), another, "this", decide.False},
		{"no namespace is cached", cached("", its), another, "this", decide.False},
		{"nothing is cached", "-", another, "this", decide.False},
		{"an empty file", "", another, "this", decide.False},
		{"a truncated file", cached(own, its)[:50], another, "this", decide.False},
		{"another attachment's", `{"networkName": "podnet", "containerId": "b", "ifName": "lo", "netns": "/proc/self/ns/net"}`, another, "this", decide.False},
		{"a directory", "/", another, "this", decide.Unclear},
	} {
		n := nodeAt(t)
		file := filepath.Join(n.CacheDir, "podnet-a-lo")
		switch tt.cache {
		case "-":
		case "/":
			err = os.Mkdir(file, 0o700)
		default:
			err = os.WriteFile(file, []byte(tt.cache), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		e := &journal.Record{Key: attachment, State: journal.Live, Added: journal.Added{NetNS: tt.netns, Host: journal.Host{BootID: tt.boot}}}
		if got, err := n.Later(t.Context(), e); decide.TruthOf(got, err) != tt.want {
			t.Errorf("%s: %t (%v), want %v", tt.name, got, err, tt.want)
		}
	}
}

// TestLaterBesideRecords: a cache entry does not prove that the journal lacks an ADD if the entry's
// namespace belongs to the runtime itself, to a record of the attachment, or to another attachment
// with the same interface name. An attachment that is being undone does not count.
func TestLaterBesideRecords(t *testing.T) {
	t.Parallel()
	seen, err := InterfaceAt("/proc/self/ns/net", "lo")
	if err != nil || !seen.There() {
		t.Skipf("no loopback here: %+v (%v)", seen, err)
	}
	for _, tt := range []struct {
		name   string
		change func(n *Node, other *journal.Record)
		want   decide.Truth
	}{
		{"a namespace of no record", func(_ *Node, other *journal.Record) { other.Added.NetNS.Ino, other.Added.NetNS.Cookie = 1, 1 }, decide.True},
		{"an earlier record's", func(*Node, *journal.Record) {}, decide.False},
		{"another attachment's", func(_ *Node, other *journal.Record) { other.ContainerID = "b" }, decide.False},
		{"another interface's", func(_ *Node, other *journal.Record) { other.ContainerID, other.IfName = "b", "eth1" }, decide.True},
		{"another attachment's that is being undone", func(_ *Node, other *journal.Record) { other.ContainerID, other.State = "b", journal.Deleting }, decide.True},
		{"the runtime's", func(n *Node, other *journal.Record) {
			n.Host.NetNS, other.Added.NetNS.Ino, other.Added.NetNS.Cookie = linkOf(seen.Netns), 1, 1
		}, decide.False},
	} {
		n := nodeAt(t)
		if err := os.WriteFile(filepath.Join(n.CacheDir, "podnet-a-lo"), []byte(`{"networkName": "podnet", "containerId": "a", "ifName": "lo",
			"netns": "/proc/self/ns/net"}`), 0o600); err != nil {
			t.Fatal(err)
		}
		e := &journal.Record{Key: attachment, State: journal.Live, Added: journal.Added{Host: n.Host}}
		other := &journal.Record{Key: attachment, State: journal.Live, Added: journal.Added{Host: n.Host, NetNS: seen.Netns}}
		tt.change(n, other)
		state := other.State
		err := n.Journal.Store.Update(t.Context(), func(tx *journal.Tx) error {
			for _, other.State = range []journal.State{journal.Adding, state} {
				if err := tx.Put(other); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := n.Later(t.Context(), e); decide.TruthOf(got, err) != tt.want {
			t.Errorf("%s: %t (%v), want %v", tt.name, got, err, tt.want)
		}
	}
}

// TestLoopback: libcni's cache may contain thousands of loopback attachments. Cache skips their
// files without reading them.
func TestLoopback(t *testing.T) {
	t.Parallel()
	n := nodeAt(t)
	for _, name := range []string{"cni-loopback-a-lo", "podnet-a-lo"} {
		if err := os.Symlink(name, filepath.Join(n.CacheDir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := n.Cache(); err == nil || strings.Contains(err.Error(), "cni-loopback") || !strings.Contains(err.Error(), "podnet-a-lo") {
		t.Errorf("%v", err)
	}
}

// TestLongNames: the cache file of a long container ID would need a name of more than 255 bytes,
// which no file can have. Later returns false without an error.
func TestLongNames(t *testing.T) {
	t.Parallel()
	n, key := nodeAt(t), attachment
	key.ContainerID = strings.Repeat("a", 256)
	if later, err := n.Later(t.Context(), &journal.Record{Key: key}); later || err != nil {
		t.Errorf("%t, %v", later, err)
	}
}
