package agent

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// reconciler keeps unwind installed: it restores the binary, and updates unwind's conflist when the
// provider's file changes.
type reconciler struct {
	*agent
	install.Setup
	paths node.Runtime
	found atomic.Pointer[status]
	fatal error // why the agent must exit

	lock     *install.AgentLock // nil while this agent does not hold it
	lockDir  string             // the state directory that contains the lock
	verified bool               // the plugin to install runs on this node
	placed   bool               // unwindctl is in ProgramDir
	gone     time.Time          // since when the provider's file has been missing
	named    string             // the provider's file that unwind's conflist last named
	source   fs.FileInfo        // of named; if nil, a missing conflist was not removed by hand
	unsure   time.Time          // since when it has seemed that only unwind's conflist was removed
	repaired time.Time          // when another program's file was last repaired
	repairs  int                // the number of repairs since the last Interval without a repair
}

// maxRepairs is the number of repairs after which the reconciler pauses repairs for an Interval, so
// that it and another program don't overwrite a file forever. It is more than two, because two
// repairs are normal with an installer that watches the directory's first file.
const maxRepairs = 4

type status struct {
	install.Reason          // whether pods go through unwind
	why            string   // why pods do not go through unwind, with a remedy
	plugin         string   // the version of the installed plugin, "" if unknown
	searched       []string // see node.Runtime
}

// agentName is the name of the agent in the history.
const agentName = "the agent"

// goneAfter is how long the provider's file must be missing before it counts as removed. Some
// providers remove their file before they write it again.
const goneAfter = 5 * time.Second

// debounce is the time that the reconciler waits after a change in the directory, because a
// provider may write its file in several steps.
const debounce = 200 * time.Millisecond

// retryAfter is the time after which a failed install is retried, even if the directory has not
// changed.
const retryAfter = 10 * time.Second

// run reconciles after a change in a watched directory, and at each interval, until ctx ends. If
// the agent must exit, run returns the reason.
func (r *reconciler) run(ctx context.Context) error {
	defer func() {
		if r.removed() { // since the last run of reconcile
			_ = r.recordRemoval()
		}
		r.unlock()
	}()
	watcher, err := fsnotify.NewWatcher()
	var events <-chan fsnotify.Event
	var lost <-chan error
	if err != nil {
		r.log.Warn("cannot watch the conflist and plugin directories for changes; checking them every "+
			r.Interval.String()+" instead (--interval)", "err", err)
	} else {
		events, lost = watcher.Events, watcher.Errors
		defer watcher.Close()
	}
	look, soon := time.NewTimer(0), true
	defer look.Stop()
	for ctx.Err() == nil && r.fatal == nil {
		r.reconciling.beat()
		select {
		case <-ctx.Done():
		case event := <-events:
			if filepath.Base(event.Name) == install.OffName {
				r.source = nil // unwindctl off, not a user, removed unwind's conflist
			}
			if !soon && r.matters(event.Name) {
				// further changes do not reset the timer, so a stream of changes cannot postpone
				// reconcile forever
				look.Reset(debounce)
				soon = true
			}
		case err := <-lost:
			r.log.warnOnce("lost", "may have missed changes in the watched directories; checking all "+
				"of them now", err)
			look.Reset(debounce)
			soon = true
		case <-look.C:
			soon = false
			if watcher != nil {
				r.watch(watcher)
			}
			look.Reset(r.reconcile(ctx))
		}
	}
	return r.fatal
}

// watch watches the directories. A directory that was recreated must be added to the watcher again.
func (r *reconciler) watch(w *fsnotify.Watcher) {
	err := errors.Join(w.Add(r.ConfDir), w.Add(r.BinDir))
	if r.Conf != "" {
		err = errors.Join(err, w.Add(filepath.Dir(r.Conf)))
	}
	r.alone() // creates the state directory
	_ = w.Add(r.journalDir(r.Setup))
	r.log.warnOnce("watch", "cannot watch all directories for changes; checking them every "+
		r.Interval.String()+" instead (--interval)", err)
}

// matters reports whether a change to a file triggers the reconciler. In the plugin directory, only
// unwind's plugin matters; in the state directory, only the off switch matters. Elsewhere, every
// file matters except durable.Replace's temporary files for unwind's conflist. On a full disk, they
// would make each failed attempt to write the conflist trigger the next attempt.
func (r *reconciler) matters(path string) bool {
	switch dir, file := filepath.Dir(path), filepath.Base(path); dir {
	case filepath.Clean(r.BinDir):
		return file == netconf.Name
	case filepath.Clean(r.journalDir(r.Setup)):
		return file == install.OffName
	default:
		return !strings.HasPrefix(file, "."+filepath.Base(r.Path())+".")
	}
}

// reconcile installs or updates the binary and unwind's conflist, and returns the time until the
// next run.
//
//  1. While another agent has the lock, the reconciler does nothing.
//  2. If unwind's conflist has disappeared and the provider's file is unchanged, somebody has
//     switched unwind off by hand. The reconciler records that, as "unwindctl off" does. But first
//     it waits for debounce, because an "rm -r" of the directory may be about to remove the
//     provider's file, too.
//  3. While unwind is switched off, the reconciler keeps unwind's conflist out of use. If cilium
//     has renamed unwind's conflist, the reconciler writes no new one.
//  4. If the provider's file has been missing for goneAfter, the reconciler uses the directory's
//     next conflist. If there is none, or if --provider-conf is set, it removes unwind's conflist,
//     because every ADD would fail. The runtime can then report that it has no network.
//  5. The reconciler writes the binary, even over a newer one, and then unwind's conflist. It
//     writes neither if the provider's file is unreadable, or if the journal needs a newer binary.
//     But while unwind's conflist is in use, the reconciler always restores a missing binary.
//  6. If unwind's conflist is worse than none (see worse), the reconciler takes it out of use. Each
//     later run tries to install the binary and the conflist again.
func (r *reconciler) reconcile(ctx context.Context) (again time.Duration) {
	if !r.alone() {
		r.found.Store(&status{Reason: install.AnotherAgent, searched: r.paths.Searched})
		return lockEach
	}
	if !r.removed() {
		r.unsure = time.Time{}
	} else if r.unsure.IsZero() {
		r.unsure = time.Now()
		return debounce
	} else if left := debounce - time.Since(r.unsure); left > 0 {
		return left
	} else if err := r.recordRemoval(); err != nil {
		return r.report(ctx, err)
	}
	r.remember(r.Entry().ChainFile)
	if o := r.obstacle(); o != nil {
		if r.Off { // unwindctl on may have removed a person's switch
			_ = install.WriteOff(r.journalDir(r.Setup), install.ByFlag)
		}
		r.removeConflist(ctx, o)
		return r.report(ctx, o)
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
		lost, r.Source = true, r.Conf
	}
	if err := r.refind(ctx); err != nil {
		r.fatal = err
		return 0
	}
	err := r.install(ctx)
	if ctx.Err() != nil {
		return 0
	}
	if err != nil && !lost && r.Source != "" && missing(r.Source) { // the file was removed meanwhile
		r.gone = time.Now()
		return goneAfter
	}
	if err != nil && (lost || r.worse()) {
		r.removeConflist(ctx, err)
	}
	if r.removed() {
		return debounce
	}
	return r.report(ctx, err)
}

// worse reports whether unwind's conflist is in use, but pods would be better off without it:
// containerd would also run the provider's file, so the chain would run twice, or the runtime
// cannot find the plugin, so every ADD would fail.
func (r *reconciler) worse() bool {
	return !missing(r.Path()) && (r.paths.MaxConfs != 1 || pluginMissing(r.paths.Searched))
}

// pluginMissing reports whether the plugin is missing from all directories that the runtime
// searches. It returns false if these are unknown.
func pluginMissing(searched []string) bool {
	return len(searched) > 0 && !slices.ContainsFunc(searched, func(dir string) bool {
		return !install.Setup{BinDir: dir}.PluginMissing()
	})
}

// report logs the result of a run of reconcile, and returns the time until the next run.
func (r *reconciler) report(ctx context.Context, err error) (again time.Duration) {
	found := &status{Reason: install.ReasonOf(err), plugin: r.PluginVersion(ctx),
		searched: r.paths.Searched}
	if err != nil {
		found.why = err.Error()
		if inspect.HintFor(err) != "" {
			found.why += ": " + inspect.HintFor(err)
		}
	}
	again = r.Interval
	if !found.Reason.Ready() {
		again = min(retryAfter, again)
	}
	r.found.Store(found)
	off := ""
	if found.Reason == install.Off { // switched off on purpose: no warning
		off, err = found.why, nil
		r.log.changed("install", "")
	}
	if r.log.changed("off", off) && off != "" {
		r.log.Info("unwind is off", "why", off)
	}
	r.log.warnOnce("install", "unwind is not installed correctly", err)
	return again
}

// status reports whether pods go through unwind. It reports a missing plugin immediately, because
// the reconciler reinstalls the plugin only after debounce, and may fail. While the plugin is
// missing and unwind's conflist is in use, no pod can start, which is worse than any other state.
func (r *reconciler) status() status {
	found := r.found.Load()
	switch {
	case found == nil:
		return status{Reason: install.Starting}
	case pluginMissing(found.searched) && !missing(r.Path()):
		return status{Reason: install.PluginMissing, why: "no pod can start: " + cmp.Or(found.why,
			"the agent is copying unwind's plugin again")}
	}
	return *found
}

func missing(path string) bool {
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// removed reports whether somebody has removed unwind's conflist, but left the provider's file
// unchanged. It returns false once the reconciler has recorded the removal.
func (r *reconciler) removed() bool {
	return r.source != nil && missing(r.Path()) && !r.changed() &&
		r.obstacle() == nil
}

// obstacle returns the reason not to use unwind on this node, or nil. With --off, unwind is off
// even if the agent cannot record that, for example on a read-only disk.
func (r *reconciler) obstacle() *install.Obstacle {
	o := r.Obstacle(r.journalDir(r.Setup))
	if o == nil && r.Off {
		o = install.NewObstacle(install.Off, "start the agent without --off", "the agent runs with --off")
	}
	return o
}

// recordRemoval records that somebody switched unwind off by removing its conflist. After an error,
// the next run tries again.
func (r *reconciler) recordRemoval() error {
	dir, by := r.journalDir(r.Setup), "rm "+r.Path()
	if err := install.WriteOff(dir, by); err != nil {
		return &install.Obstacle{Reason: install.Off, Err: err}
	}
	install.Record(dir, journal.Off, by)
	return nil
}

// changed reports whether the provider's file has changed since remember stored it.
func (r *reconciler) changed() bool {
	now, err := os.Stat(r.named)
	return err != nil || !os.SameFile(now, r.source) || !now.ModTime().Equal(r.source.ModTime())
}

// remember stores the provider's file that unwind's conflist names, so that changed can compare it.
func (r *reconciler) remember(named string) {
	source, _ := os.Stat(named)
	if named != "" && !missing(r.Path()) { // if the conflist is missing, named may have changed, too
		r.named, r.source = named, source
	}
}

// provider returns the provider's file: --provider-conf, or else the file that unwind's conflist
// names, even if that file is missing. It returns "" if, without unwind, the runtime would use a
// different file. Plan then chooses that file.
func (r *reconciler) provider() string { return cmp.Or(r.Conf, r.Provider(r.paths)) }

// refind reads the runtime's configuration again, because somebody may have changed it. While the
// runtime does not respond, the agent uses the runtime's last response. If the runtime that the
// agent found at its start reports other directories, refind returns an error: the agent must exit,
// and find its directories again when it is restarted. If that runtime is stopped and another one
// appears, nothing changes.
func (r *reconciler) refind(ctx context.Context) error {
	paths, err := r.find()
	if err == nil && !paths.Known() && r.paths.Known() {
		return nil
	}
	if err == nil && (paths.ConfDir != r.ConfDir || paths.BinDirs[0] != r.BinDir) {
		err = term.WithHint("start the agent again, unless Kubernetes or systemd does",
			"the runtime's directories are now %s and %s, not %s and %s", paths.ConfDir, paths.BinDirs[0],
			r.ConfDir, r.BinDir)
		if paths.Known() && (r.paths.Socket == "" || r.paths.Socket == paths.Socket) {
			return err
		}
	}
	r.log.warnOnce("find", "cannot switch to the runtime's directories; still using those that "+
		"were found at startup", err)
	if err == nil {
		r.paths = paths
		r.CNIVersion = paths.CNIVersion(ctx)
	}
	return nil
}

func (r *reconciler) removeConflist(ctx context.Context, why error) {
	r.source = nil
	done := &install.Changes{}
	err := r.Remove(ctx, done)
	r.log.warnOnce("remove", "cannot remove unwind's conflist", err)
	done.Record(r.journalDir(r.Setup), journal.Off, agentName, why)
	if err == nil && (done.Find("off") == nil || done.Find("changed") != nil) {
		r.log.Info("removed unwind's conflist", "why", why, "source", r.named, "changes", done)
	}
}

func (r *reconciler) install(ctx context.Context) error {
	w, err := r.Plan()
	if err == nil {
		err = w.RefusedBy(r.paths)
	}
	done := &install.Changes{}
	// even if the install is refused, no pod can start while unwind's conflist lacks the plugin
	if err == nil || pluginMissing(r.paths.Searched) && !missing(r.Path()) {
		err = cmp.Or(r.installBinary(ctx, done), err)
	}
	if err != nil {
		return err
	}
	if !r.placed && r.ProgramDir != "" { // may fail: on some nodes, no such directory is writable
		placeErr := done.Make(ctx, r.InstallPrograms(r.ProgramDir))
		r.log.warnOnce("programs", "cannot install unwindctl on this node; choose another "+
			"--install-dir", placeErr)
		r.placed = placeErr == nil
	}
	if time.Since(r.repaired) >= r.Interval {
		r.repairs = 0
	}
	if repairs := w.Repairs(); len(repairs) > 0 && r.repairs == maxRepairs {
		return install.NewObstacle(install.MeshInTheWay,
			"see that program's page in scripts/providers; if the program changes unwind's file, set "+
				"the agent's --unwind-file to a name that ends in .json",
			"another program keeps copying or changing unwind's file; the agent paused these repairs: %s",
			strings.Join(repairs, "; "))
	} else if len(repairs) > 0 {
		r.repaired, r.repairs = time.Now(), r.repairs+1
		r.log.Warn("another program has copied or changed unwind's file", "changing", repairs)
	}
	r.warnOfStateDir()
	if r.removed() { // since this run began
		return nil
	}
	if o := r.obstacle(); o != nil {
		return o
	}
	err = done.Make(ctx, r.WriteConflist(w))
	r.log.warnOnce("copy", "cannot keep a copy of the provider's file", w.CopyErr)
	if written := done.Find("written"); err == nil && written != nil {
		r.log.Info("installed", "written", written)
		done.Record(r.journalDir(r.Setup), journal.Install, agentName, nil)
	}
	if err == nil {
		r.remember(w.Source.Path)
		_, err := r.PassesOver(r.paths, w.Source.Path)
		r.log.warnOnce("bypassed", "pods may start without part of their network", err)
	}
	return err
}

// installBinary installs the plugin. Its error has the reason PluginMissing if unwind's conflist
// exists, even as taken out of use, but the plugin is missing.
func (r *reconciler) installBinary(ctx context.Context, done *install.Changes) (err error) {
	if !r.verified {
		err = r.VerifyBinary(ctx)
		r.verified = err == nil
	}
	if err == nil {
		err = done.Make(ctx, r.InstallBinary)
	}
	if err == nil || !pluginMissing(r.paths.Searched) || r.Entry().ChainFile == "" {
		return err
	}
	return install.NewObstacle(install.PluginMissing, cmp.Or(term.HintOf(err), install.MakeRoom),
		"unwind's plugin is missing and cannot be copied, so its conflist must not be in use: %w", err)
}
