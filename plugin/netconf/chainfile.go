package netconf

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
	"time"
)

// readDelay is the timeout of reading a chainFile. A disk under load may take seconds.
const readDelay = 10 * time.Second

// readChainFile reads the chain in chainFile at each call, because the file's owner may rewrite it
// at any time. It abandons a read that hangs (a mount whose server is gone) after readDelay; the
// read keeps a thread.
func (c *Conf) readChainFile() (*Chain, error) {
	var chain *Chain
	read := make(chan error, 1)
	go func() {
		data, err := ReadFile(c.ChainFile)
		switch {
		case err == nil:
			chain, err = c.ParseChain(data, "")
		case errors.Is(err, fs.ErrNotExist):
			chain, err = c.readRenamed(err)
		}
		read <- err
	}()
	select {
	case err := <-read:
		return chain, err
	case <-time.After(readDelay):
		return nil, fmt.Errorf("not read within %s; check that its file system responds", readDelay)
	}
}

// readRenamed reads the chain of a chainFile that is gone from the first configuration of its
// directory, in the order of a runtime, that has the same network and not unwind: a runtime without
// unwind follows a provider that renames its file. Another network would give pods other addresses
// under this name. Without a file to follow, readRenamed returns the error.
func (c *Conf) readRenamed(gone error) (*Chain, error) {
	paths, err := Conflists(filepath.Dir(c.ChainFile))
	if err != nil {
		return nil, gone
	}
	var other error
	for _, path := range paths {
		list, err := ReadConflist(path)
		switch {
		case err != nil || list.Unwind != nil || list.Name == "":
		case list.Name == c.Name:
			chain, err := c.ParseChain(list.Data, "")
			if err != nil {
				return nil, fmt.Errorf("%w; %s: %w", gone, path, err)
			}
			chain.Warning = fmt.Sprintf("chainFile %s is gone: using %s of the same network",
				c.ChainFile, path)
			return chain, nil
		case other == nil:
			other = fmt.Errorf("%w; run unwindctl install to change the network from %q to %q (%s), or "+
				"unwindctl off", syscall.ENOENT, c.Name, list.Name, path)
		}
	}
	return nil, cmp.Or(other, gone)
}
