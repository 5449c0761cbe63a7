package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"cni-unwind/plugin"
)

// binary is the path of the plugin to install.
func (i installation) binary() (string, error) {
	if given := cmp.Or(i.Binary, os.Getenv(binaryEnv)); given != "" {
		return filepath.Abs(given)
	}
	self, err := os.Executable()
	return filepath.Join(filepath.Dir(self), plugin.Name), err
}

// verifyTimeout bounds a plugin that is asked for its version.
const verifyTimeout = 10 * time.Second

// verifyBinary runs the plugin to install, and returns what it says of itself: one of another architecture, or another file,
// is an error before anything is changed.
func (i installation) verifyBinary(ctx context.Context) (about string, err error) {
	path, err := i.binary()
	if err != nil {
		return "", err
	}
	const hint = "give the plugin with --binary; make build puts it beside unwindctl"
	about, versions, err := askVersion(ctx, path)
	switch {
	case err != nil:
		return "", refuse(hint, "plugin %s: %w", path, err)
	case !strings.Contains(about, plugin.Name) || !slices.Contains(versions, "1.0.0"):
		return "", refuse(hint, "plugin %s: it is not unwind, but says: %s", path, oneLine(about))
	}
	return about, nil
}

// askVersion has a plugin say what it is (without CNI_COMMAND) and which versions it speaks (SPEC 1.1 §2 VERSION).
func askVersion(ctx context.Context, path string) (about string, versions []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, verifyTimeout)
	defer cancel()
	run := func(env ...string) (stdout, stderr bytes.Buffer, err error) {
		cmd := exec.CommandContext(ctx, path)
		cmd.Env = append(slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "CNI_") }), env...)
		cmd.Stdin = strings.NewReader(`{"cniVersion": "1.0.0"}`)
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		cmd.WaitDelay = time.Second
		err = cmd.Run()
		if ctx.Err() != nil {
			err = fmt.Errorf("no answer within %s", verifyTimeout)
		}
		var path *fs.PathError
		if errors.As(err, &path) {
			err = path.Err
		}
		return stdout, stderr, err
	}
	answer, _, err := run("CNI_COMMAND=VERSION")
	if err != nil {
		return "", nil, fmt.Errorf("it does not run here: %w", err)
	}
	var version struct {
		Versions []string `json:"supportedVersions"`
	}
	if err := json.Unmarshal(answer.Bytes(), &version); err != nil {
		return "", nil, errors.New("it is no CNI plugin: it gives no answer to VERSION")
	}
	_, words, _ := run() // some releases of skel call it an error
	about, _, _ = strings.Cut(strings.TrimSpace(words.String()), "\n")
	return about, version.Versions, nil
}

// program is the FileInfo of an executable of this process's owner.
type program struct{ fs.FileInfo }

func (program) Mode() fs.FileMode { return 0o755 }
func (program) Sys() any          { return nil }

// installBinary puts the plugin into place, whole: a runtime that runs the one before goes on with that. If the same bytes are
// there, nothing is done.
func (i installation) installBinary() (changed bool, err error) {
	from, err := i.binary()
	if err != nil {
		return false, err
	}
	content, err := os.Open(from)
	if err != nil {
		return false, err
	}
	defer content.Close()
	to := filepath.Join(i.BinDir, plugin.Name)
	if info, err := os.Stat(to); err == nil && info.Mode().Perm()&0o555 == 0o555 && sameContent(content, to) {
		return false, nil
	}
	if err := i.checkBinDir(); err != nil {
		return false, err
	}
	if _, err := content.Seek(0, io.SeekStart); err != nil {
		return false, err
	}
	return true, replaceFile(to, content, program{})
}

// sameContent compares a file with the one at a path, a piece at a time: the agent does so each minute. Whatever cannot be read is
// not the same.
func sameContent(a *os.File, path string) bool {
	b, err := os.Open(path)
	if err != nil {
		return false
	}
	defer b.Close()
	var pieces [2][64 << 10]byte
	for {
		n, errA := io.ReadFull(a, pieces[0][:])
		m, errB := io.ReadFull(b, pieces[1][:])
		if !bytes.Equal(pieces[0][:n], pieces[1][:m]) {
			return false
		}
		if errA != nil || errB != nil {
			ended := func(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }
			return ended(errA) && ended(errB)
		}
	}
}

// checkBinDir sees that there is a folder for the plugin.
func (i installation) checkBinDir() error {
	info, err := os.Stat(i.BinDir)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
		return refuse("give the runtime's with --bin-dir", "there is no folder %s of plugins", i.BinDir)
	}
	return err
}
