package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"

	"cni-unwind/plugin"
)

// keeper keeps unwind installed: the binary in its place, and our conflist as the provider's file wants it.
type keeper struct {
	installation
	paths    runtimePaths
	conf     string // as --conf has it
	interval time.Duration
	log      *slog.Logger
	once     *once
	find     func() (runtimePaths, error)
	beat     func()

	verified bool        // the binary to install is the plugin, for this machine
	gone     time.Time   // since when the provider's file is not there
	passed   *string     // what sorts before the file that ours named when the agent began, "" if nothing does
	named    string      // the provider's file that ours named in the last turn
	inUse    fs.FileInfo // of that file, nil if ours was not there
	off      bool        // somebody else has removed ours
}

// goneAfter is how long a provider's file may be away before ours is removed: some write it anew by removing it first.
const goneAfter = 5 * time.Second

// settle is how long after a change the folder is looked at: a file is written in several steps.
const settle = 200 * time.Millisecond

// retry is after what time an install that did not pass is tried again, though nothing has changed in the folder.
const retry = 10 * time.Second

// run looks at the folder when something changes in it, and each interval, until ctx ends.
func (k *keeper) run(ctx context.Context) {
	watcher, err := fsnotify.NewWatcher()
	var events <-chan fsnotify.Event
	var lost <-chan error
	if err != nil {
		k.log.Warn("folders cannot be watched; they are looked at each interval", "err", err)
	} else {
		events, lost = watcher.Events, watcher.Errors
		defer watcher.Close()
	}
	look, soon := time.NewTimer(0), true
	defer look.Stop()
	for ctx.Err() == nil {
		k.beat()
		select {
		case <-ctx.Done():
			return
		case event := <-events:
			if !soon && !k.isTemporary(event.Name) {
				look.Reset(settle) // and not again for the next one: changes that never end must not put it off
				soon = true
			}
		case err := <-lost:
			k.once.warn("lost", "watching a folder", err)
			look.Reset(settle)
			soon = true
		case <-look.C:
			if soon = false; watcher != nil {
				k.watch(watcher)
			}
			look.Reset(k.turn(ctx))
		}
	}
}

// watch has changes in the folders reported. One that was removed and made again has to be watched again.
func (k *keeper) watch(w *fsnotify.Watcher) {
	err := w.Add(k.ConfDir)
	if k.conf != "" {
		err = errors.Join(err, w.Add(filepath.Dir(k.conf)))
	}
	k.once.warn("watch", "a folder cannot be watched; it is looked at each interval", err)
}

// isTemporary says whether a file is one that replaceFile makes: on a full disk it would have us look without end.
func (k *keeper) isTemporary(path string) bool {
	return strings.HasPrefix(filepath.Base(path), "."+filepath.Base(k.path())+".")
}

// turn has the binary and our conflist be as they should, and returns after what time to look again.
//
//  1. If our conflist was there, the provider's file is as it was then, and ours is not there now, then somebody has switched
//     unwind off: a person, unwindctl uninstall, or a provider that wants no other's file beside its own (cilium's
//     cni.exclusive). Nothing is done until ours is there again.
//  2. If the provider's file is gone, and stays so, the next one of the folder takes its place. If there is none, ours is
//     removed: a runtime without a network says so, one with ours could attach no pod.
//  3. The binary is put in place, then our conflist. A provider's file that cannot be read leaves ours as it is.
func (k *keeper) turn(ctx context.Context) (again time.Duration) {
	defer k.remember()
	if k.switchedOff() {
		return k.interval
	}
	k.Source = k.provider()
	lost := false
	if k.Source == "" || !missing(k.Source) {
		k.gone = time.Time{}
	} else {
		if k.gone.IsZero() {
			k.gone = time.Now()
		}
		if left := goneAfter - time.Since(k.gone); left > 0 {
			return left
		}
		lost, k.Source = true, k.conf
	}
	k.refind()
	err := k.install(ctx)
	if ctx.Err() != nil {
		return 0
	}
	if err != nil && !lost && k.Source != "" && missing(k.Source) { // it went meanwhile
		k.gone = time.Now()
		return goneAfter
	}
	k.once.warn("install", "unwind is not installed as it should be", err)
	if err != nil && lost {
		k.removeConflist()
	}
	if err != nil {
		return min(retry, k.interval)
	}
	return k.interval
}

func missing(path string) bool {
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// switchedOff says whether somebody has removed our conflist.
func (k *keeper) switchedOff() bool {
	if _, err := os.Lstat(k.path()); err == nil || !errors.Is(err, fs.ErrNotExist) {
		k.off = false
		return false
	}
	if k.off || k.inUse == nil {
		return k.off
	}
	now, err := os.Stat(k.named)
	k.off = err == nil && os.SameFile(now, k.inUse) && now.ModTime().Equal(k.inUse.ModTime())
	if k.off {
		k.log.Warn("somebody has removed unwind's conflist: it stays switched off until unwindctl install is run, or this agent is started anew",
			"removed", k.path())
	}
	return k.off
}

// remember keeps what the next turn is to be compared with.
func (k *keeper) remember() {
	k.named, k.inUse = namedSource(k.path()), nil
	if k.named != "" {
		k.inUse, _ = os.Stat(k.named)
	}
}

// provider returns the provider's file: that of --conf, else the first of the folder, which the runtime would take without us;
// "" if there is none. While the one that ours names is away it is waited for. One that was passed over when the agent
// began, by unwindctl install --conf, stays so.
func (k *keeper) provider() string {
	named := namedSource(k.path())
	if k.conf != "" || named == "" {
		return k.conf
	}
	first := ""
	paths, _ := plugin.Conflists(k.ConfDir)
	for _, path := range paths {
		if path != k.path() {
			first = path
			break
		}
	}
	if filepath.Dir(named) != k.ConfDir || first >= named {
		first = ""
	}
	if k.passed == nil {
		k.passed = &first
	}
	if first == *k.passed {
		return named
	}
	return cmp.Or(first, named)
}

// namedSource returns the provider's file that our conflist names, or "".
func namedSource(path string) string {
	c, err := plugin.ReadConflist(path)
	if c == nil || err != nil || c.Unwind == nil {
		return ""
	}
	return c.Unwind.ChainFile
}

// refind reads the runtime's configuration again: what is in it against the install may be mended. Its folders stay.
func (k *keeper) refind() {
	paths, err := k.find()
	if err == nil && (paths.ConfDir != k.ConfDir || paths.BinDirs[0] != k.BinDir) {
		err = fmt.Errorf("the runtime's folders are now %s and %s: start this agent anew", paths.ConfDir, paths.BinDirs[0])
	}
	k.once.warn("find", "looking for the runtime's folders", err)
	if err == nil {
		k.paths = paths
	}
}

func (k *keeper) removeConflist() {
	if missing(k.path()) {
		return
	}
	err := k.remove()
	k.once.warn("remove", "removing unwind's conflist", err)
	if err == nil {
		k.log.Info("the provider's file is gone: unwind's conflist is removed", "source", k.named, "removed", k.path())
	}
}

func (k *keeper) install(ctx context.Context) error {
	w, err := k.wrap()
	if err == nil {
		err = k.paths.accepts(w)
	}
	if err == nil && !k.verified {
		_, err = k.verifyBinary(ctx)
		k.verified = err == nil
	}
	if err != nil {
		return err
	}
	binary, err := k.installBinary()
	if err != nil {
		return err
	}
	conflist, err := k.writeConflist()
	if err == nil && (binary || conflist) {
		k.log.Info("installed", "binary", binary, "conflist", conflist, "path", k.path(), "source", w.source.Path)
	}
	return err
}
