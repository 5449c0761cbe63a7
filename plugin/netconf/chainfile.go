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

// readDelay is the timeout for reading a chainFile. A disk under load may take seconds.
const readDelay = 10 * time.Second

// readChainFile reads the chain in chainFile at each call, because the file's owner may rewrite it
// at any time. It abandons a read that hangs, for example because a mount's server is gone, after
// readDelay. The abandoned read occupies a thread.
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

// readRenamed finds the chain if the chainFile is gone. A provider may have renamed its file, and a
// runtime without unwind would read the new one. readRenamed returns the first configuration in the
// directory, in the runtime's order, that has the same network name and does not contain unwind. It
// never returns another network, because that would give pods other addresses under this name. If
// it finds no file, it returns an error.
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
			chain.Warning = fmt.Sprintf("chainFile %s is gone; using %s of the same network",
				c.ChainFile, path)
			return chain, nil
		case other == nil:
			other = fmt.Errorf("%w; run unwindctl install to switch from network %q to %q (%s), or "+
				"unwindctl off to bypass unwind", syscall.ENOENT, c.Name, list.Name, path)
		}
	}
	return nil, cmp.Or(other, gone)
}
