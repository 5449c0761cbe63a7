package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/metrics"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// reconciler keeps unwind installed: the binary in its place, and our conflist in step with the
// provider's file.
type reconciler struct {
	install.Setup
	paths     node.Runtime
	conf      string // as --conf has it
	interval  time.Duration
	log       *dedupLogger
	find      func() (node.Runtime, error)
	heartbeat *heartbeat
	stateDir  func() string // of the journal
	state     atomic.Value  // of metrics.InUse: whether pods go through unwind

	lock     *journal.Lock // nil as long as this agent does not have it
	verified bool          // the binary to install is the plugin, for this machine
	gone     time.Time     // since when the provider's file is not there
	// the file that sorted before the one that ours named when the agent began; "" if none did
	passed   *string
	named    string      // the provider's file that ours named the last time
	source   fs.FileInfo // of that file, nil if ours was not there
	disabled bool        // somebody else has removed ours
	behind   bool        // another program goes on to put its plugin behind unwind
	repaired time.Time   // when a plugin behind unwind was last returned to the provider's file
}

// goneAfter is how long the provider's file may be away before our conflist is removed. Some
// providers remove their file before they write it again.
const goneAfter = 5 * time.Second

// debounce is the time between a change in the directory and the look at it. A provider writes its
// file in several steps.
const debounce = 200 * time.Millisecond

// retryAfter is the time after which a failed install is tried again although nothing has changed
// in the directory.
const retryAfter = 10 * time.Second

// run reconciles when something changes in the directory, and at each interval, until ctx ends.
func (r *reconciler) run(ctx context.Context) {
	defer r.unlock()
	watcher, err := fsnotify.NewWatcher()
	var events <-chan fsnotify.Event
	var lost <-chan error
	if err != nil {
		r.log.Warn("directories cannot be watched; they are looked at each interval", "err", err)
	} else {
		events, lost = watcher.Events, watcher.Errors
		defer watcher.Close()
	}
	look, soon := time.NewTimer(0), true
	defer look.Stop()
	for ctx.Err() == nil {
		r.heartbeat.beat()
		select {
		case <-ctx.Done():
			return
		case event := <-events:
			if !soon && !r.isTemporary(event.Name) {
				// the next change does not reset the timer: changes without end must not put the
				// look off
				look.Reset(debounce)
				soon = true
			}
		case err := <-lost:
			r.log.warnOnce("lost", "watching a directory", err)
			look.Reset(debounce)
			soon = true
		case <-look.C:
			if soon = false; watcher != nil {
				r.watch(watcher)
			}
			look.Reset(r.reconcile(ctx))
		}
	}
}

// watch watches the directories. A directory that was removed and made again has to be watched
// again.
func (r *reconciler) watch(w *fsnotify.Watcher) {
	err := w.Add(r.ConfDir)
	if r.conf != "" {
		err = errors.Join(err, w.Add(filepath.Dir(r.conf)))
	}
	r.log.warnOnce("watch", "a directory cannot be watched; it is looked at each interval", err)
}

// isTemporary reports whether durable.Replace makes a file of that name. On a full disk these files
// would make the reconciler look without end.
func (r *reconciler) isTemporary(path string) bool {
	return strings.HasPrefix(filepath.Base(path), "."+filepath.Base(r.Path())+".")
}

// reconcile puts the binary and our conflist right, and returns the time until the next look.
//
//  1. Somebody has switched unwind off if our conflist was there, is not there now, and the
//     provider's file is unchanged: a person, unwindctl uninstall, or a provider that tolerates no
//     other file beside its own (cilium's cni.exclusive). The reconciler does nothing until our
//     conflist is there again.
//  2. As long as another agent has the lock, the reconciler does nothing else.
//  3. If cilium has copied our file into its own, in which unwind would call itself, ours is
//     removed, and unwind taken out of cilium's. This switches unwind off, too.
//  4. If the provider's file is gone for longer than goneAfter, the next one of the directory
//     takes its place. If there is none, our conflist is removed: a runtime without a network says
//     so, while one with ours could attach no pod.
//  5. The binary is put in place, then our conflist. A provider's file that cannot be read
//     leaves our conflist as it is.
func (r *reconciler) reconcile(ctx context.Context) (again time.Duration) {
	if r.switchedOff() {
		if r.state.Load() != metrics.CiliumChaining {
			r.state.Store(metrics.RemovedByHand)
		}
		return r.interval
	}
	if !r.alone() {
		r.state.Store(metrics.AnotherAgent)
		return lockEach
	}
	defer r.remember()
	if r.stepAside() {
		r.state.Store(metrics.CiliumChaining)
		return r.interval
	}
	r.Source = r.provider()
	lost := false
	if r.Source == "" || !missing(r.Source) {
		r.gone = time.Time{}
	} else {
		if r.gone.IsZero() {
			r.gone = time.Now()
		}
		if left := goneAfter - time.Since(r.gone); left > 0 {
			return left
		}
		lost, r.Source = true, r.conf
	}
	r.refind(ctx)
	err := r.install(ctx)
	if ctx.Err() != nil {
		return 0
	}
	if err != nil && !lost && r.Source != "" && missing(r.Source) { // it went meanwhile
		r.gone = time.Now()
		return goneAfter
	}
	r.log.warnOnce("install", "unwind is not installed as it should be", err)
	r.state.Store(r.stateAfter(err, lost))
	if err != nil && lost {
		r.removeConflist()
	}
	if err != nil {
		return min(retryAfter, r.interval)
	}
	return r.interval
}

// stateAfter says whether pods go through unwind after an install that ended with err. Our file
// stays where an install fails, so pods may go through unwind all the same.
func (r *reconciler) stateAfter(err error, lost bool) metrics.InUse {
	switch {
	case err == nil && r.behind:
		return metrics.MeshInTheWay
	case err == nil:
		return metrics.On
	case lost || r.firstOther() == "":
		return metrics.NoProvider
	}
	return metrics.Refused
}

// inUse says whether pods go through unwind.
func (r *reconciler) inUse() metrics.InUse {
	if is, known := r.state.Load().(metrics.InUse); known {
		return is
	}
	return metrics.Starting
}

// stepAside removes our file if cilium has copied it into its own, and reports whether it did.
func (r *reconciler) stepAside() bool {
	c := r.CiliumCopy()
	if c == nil || !c.OfOurs() || missing(r.Path()) {
		return false
	}
	_, said, err := r.Remove()
	r.disabled = true
	r.log.Error("unwind is switched off, so that pods can start", "because", c.Error(), "remedy",
		c.Remedy(), "done", said, "err", err)
	return true
}

func missing(path string) bool {
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// switchedOff reports whether somebody has removed our conflist.
func (r *reconciler) switchedOff() bool {
	if _, err := os.Lstat(r.Path()); err == nil || !errors.Is(err, fs.ErrNotExist) {
		r.disabled = false
		return false
	}
	if r.disabled || r.source == nil {
		return r.disabled
	}
	now, err := os.Stat(r.named)
	r.disabled = err == nil && os.SameFile(now, r.source) && now.ModTime().Equal(r.source.ModTime())
	if r.disabled {
		r.log.Warn("somebody has removed unwind's conflist: it stays switched off until unwindctl "+
			"install is run, or this agent is started anew",
			"removed", r.Path())
	}
	return r.disabled
}

// remember keeps what the next reconcile compares with.
func (r *reconciler) remember() {
	r.named, r.source = install.ChainFile(r.Path()), nil
	if r.named != "" {
		r.source, _ = os.Stat(r.named)
	}
}

// provider returns the provider's file: that of --conf, else the first of the directory, which the
// runtime would take without us; "" if there is none. It waits for the file that ours names while
// that is away. A file that unwindctl install --conf passed over before the agent began is still
// passed over.
func (r *reconciler) provider() string {
	named := install.ChainFile(r.Path())
	if r.conf != "" || named == "" {
		return r.conf
	}
	first := r.firstOther()
	if filepath.Dir(named) != r.ConfDir || first >= named {
		first = ""
	}
	if r.passed == nil {
		r.passed = &first
	}
	if first == *r.passed {
		return named
	}
	return cmp.Or(first, named)
}

// firstOther returns the first file of the directory beside ours, or "".
func (r *reconciler) firstOther() string {
	paths, _ := netconf.Conflists(r.ConfDir)
	i := slices.IndexFunc(paths, func(path string) bool { return path != r.Path() })
	if i < 0 {
		return ""
	}
	return paths[i]
}

// refind reads the runtime's configuration again, for a problem in it may have been corrected. The
// directories and our file stay those of the start.
func (r *reconciler) refind(ctx context.Context) {
	paths, err := r.find()
	if err == nil && (paths.ConfDir != r.ConfDir || paths.BinDirs[0] != r.BinDir) {
		err = fmt.Errorf("the runtime's directories are now %s and %s: start this agent anew",
			paths.ConfDir, paths.BinDirs[0])
	}
	r.log.warnOnce("find", "looking for the runtime's directories", err)
	if err == nil {
		r.paths = paths
		r.CNIVersion = paths.CNIVersion(ctx)
	}
}

func (r *reconciler) removeConflist() {
	if missing(r.Path()) {
		return
	}
	_, said, err := r.Remove()
	r.log.warnOnce("remove", "removing unwind's conflist", err)
	if err == nil {
		r.log.Info("the provider's file is gone: unwind's conflist is removed", "source", r.named,
			"removed", r.Path(), "said", said)
	}
}

func (r *reconciler) install(ctx context.Context) error {
	w, err := r.Plan()
	if err == nil {
		err = w.RefusedBy(r.paths)
	}
	if err == nil && !r.verified {
		_, err = r.VerifyBinary(ctx)
		r.verified = err == nil
	}
	if err != nil {
		return err
	}
	kept, err := r.KeepsInstalled(ctx)
	if err != nil {
		return err
	}
	binary := false
	if kept == "" {
		binary, err = r.InstallBinary()
	}
	if err != nil {
		return err
	}
	if r.log.changed("kept", kept) && kept != "" {
		r.log.Info("the plugin is left as it is", "why", kept)
	}
	const again = "another program goes on to put its plugin behind unwind, where it may run " +
		"twice: give this agent a --file that ends in .json"
	repairs := w.Repairs()
	r.behind = len(repairs) > 0 && time.Since(r.repaired) < r.interval
	switch {
	case len(repairs) == 0:
		r.log.warnOnce("repair", again, nil)
	case r.behind:
		r.log.warnOnce("repair", again, errors.New(strings.Join(repairs, "; ")))
		return nil
	default:
		r.repaired = time.Now()
		r.log.Warn("another program has put its plugin behind unwind", "repairs", repairs)
	}
	r.warnOfStateDir()
	conflist, err := r.WriteConflist()
	if err == nil && (binary || conflist) {
		r.log.Info("installed", "binary", binary, "conflist", conflist, "path", r.Path(), "source",
			w.Source.Path)
	}
	return err
}
