package e2e

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// CacheDir is libcni's cache of results.
const CacheDir = "/var/lib/cni/results"

// Cached returns the files of libcni's cache for a container, for all with "".
func (n *Node) Cached(id string) []string {
	n.Helper()
	files, err := filepath.Glob(n.File(CacheDir, n.netName+"-"+id+"*"))
	if err != nil {
		n.Fatal(err)
	}
	return files
}

// Age makes all that host-local and libcni keep older than the grace period of a plain chain, 10
// minutes.
func (n *Node) Age() {
	n.Helper()
	files := n.Cached("")
	for address := range n.Reserved() {
		files = append(files, n.File(n.pool, address))
	}
	then := time.Now().Add(-15 * time.Minute)
	for _, path := range files {
		if err := os.Chtimes(path, then, then); err != nil && !errors.Is(err, fs.ErrNotExist) {
			n.Fatal(err)
		}
	}
}
