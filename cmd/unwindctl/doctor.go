package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math/big"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin"
)

// severity says how much a check matters.
type severity int

const (
	fine    severity = iota
	warning          // something will leak, or is not seen
	failing          // pods cannot start, or nothing is released
)

func (s severity) String() string { return [...]string{"ok", "warning", "error"}[s] }

// MarshalText is how --json has it.
func (s severity) MarshalText() ([]byte, error) { return []byte(s.String()), nil } //nolint:unparam // encoding.TextMarshaler

// check is one thing that doctor has looked at.
type check struct {
	What     string   `json:"what"`
	Severity severity `json:"severity"`
	Text     string   `json:"text"`
	Remedy   string   `json:"remedy,omitempty"`
}

// unwell is the error of a doctor who has found something: all was said already.
type unwell struct{ worst severity }

func (unwell) Error() string   { return "" }
func (u unwell) ExitCode() int { return 2 + int(u.worst) }

// doctor looks at a node.
type doctor struct {
	ctx    context.Context
	place  placeFlags
	state  string
	stderr io.Writer
	checks []check
}

func doctorCommand() *cobra.Command {
	var asJSON bool
	d := &doctor{}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look for what is wrong with unwind on this node, with remedies",
		Long: "Look for what is wrong: the runtime and whether it will ever ask for a sweep, the conflist and its chain, the plugins and the\n" +
			"versions that they speak, the state folder and the journal, DELs that stay owed, and the pools. Nothing is changed.\n\n" +
			"The exit code is 0 if all is well, 3 if the worst is a warning, 4 if it is an error.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d.ctx, d.stderr = cmd.Context(), cmd.ErrOrStderr()
			worst := d.examine()
			err := d.print(cmd.OutOrStdout(), asJSON)
			if err == nil && worst != fine {
				return unwell{worst}
			}
			return err
		},
	}
	addPlaceFlags(cmd, &d.place)
	cmd.Flags().StringVar(&d.state, "state-dir", "", "the journal is in `DIR` (default: as unwind's conflist has it)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: version, checks")
	return cmd
}

func (d *doctor) say(what string, s severity, remedy, format string, args ...any) {
	d.checks = append(d.checks, check{what, s, oneLine(fmt.Sprintf(format, args...)), remedy})
}

// examine makes all checks and returns the worst severity.
func (d *doctor) examine() severity {
	r := d.runtime()
	conf, chain := d.network(r)
	if d.state == "" {
		d.state = plugin.DefaultStateDir
		if conf != nil {
			d.state = conf.StateDir
		}
	}
	if chain != nil {
		d.plugins(r, chain)
	}
	if d.folder() {
		d.journal()
	}
	d.pools(r)
	worst := fine
	for _, c := range d.checks {
		worst = max(worst, c.Severity)
	}
	return worst
}

// runtime looks for the runtime.
func (d *doctor) runtime() runtimePaths {
	r, err := d.place.find("/")
	var several interface{ Hint() string }
	switch {
	case errors.As(err, &several):
		d.say("runtime", warning, several.Hint(), "%v", err)
	case err != nil:
		d.say("runtime", warning, "put its configuration right, or give --conf-dir and --bin-dir", "%v", err)
	}
	if r.ConfDir == "" {
		r.ConfDir = defaultConfDir
	}
	if len(r.BinDirs) == 0 {
		r.BinDirs = []string{defaultBinDir}
	}
	for _, p := range r.Problems {
		d.say("runtime", failing, "see unwindctl install --help", "%s", p)
	}
	for _, n := range r.Notes {
		d.say("runtime", warning, "", "%s", n)
	}
	if err == nil {
		d.say("runtime", fine, "", "%s Conflists: %s; plugins: %s.", d.place.whence(r), r.ConfDir, strings.Join(r.BinDirs, ", "))
		d.say("runtime", fine, "", "%s", r.calls(d.ctx))
	}
	return r
}

// network looks at the conflist that the runtime takes, and returns unwind's entry and chain if they can be used.
func (d *doctor) network(r runtimePaths) (*plugin.Conf, *plugin.Chain) {
	paths, err := plugin.Conflists(r.ConfDir)
	if err != nil || len(paths) == 0 {
		d.say("network", failing, "install the network's provider, then unwindctl install", "no conflist in %s%s", r.ConfDir, because(errorText(err)))
		return nil, nil
	}
	var ours *plugin.Conflist
	for i, path := range paths {
		c, err := plugin.ReadConflist(path)
		switch {
		case c == nil && i == 0:
			d.say("network", failing, "put it right: the runtime takes the first file of the folder", "%s: %v", path, err)
		case c == nil || c.Unwind == nil:
			if i == 0 && c != nil {
				d.say("network", warning, "unwindctl install, with --file if that file must stay the first", "%s sorts first and is not unwind's: unwind is not in use", path)
			}
		case err != nil:
			d.say("network", failing, "correct that key", "%s: %v", path, err)
		case ours != nil:
			d.say("network", warning, "keep one of them", "%s has unwind too, after %s", path, ours.Path)
		default:
			ours = c
		}
	}
	if ours == nil {
		return nil, nil
	}
	return ours.Unwind, d.entry(r, ours)
}

// entry looks at unwind's conflist.
func (d *doctor) entry(r runtimePaths, c *plugin.Conflist) *plugin.Chain {
	for _, w := range c.Unwind.Warnings() {
		d.say("configuration", warning, "take it out of "+c.Path, "%s", w)
	}
	if len(c.Types) > 1 {
		d.say("configuration", failing, `move the others into its "chain"`, "%s has other plugins beside unwind (%s), which it cannot undo",
			c.Path, strings.Join(c.Types, ", "))
	}
	var list struct {
		CNIVersions []string `json:"cniVersions"`
		OnlyInlined bool     `json:"loadOnlyInlinedPlugins"`
	}
	_ = json.Unmarshal(c.Data, &list)
	if !slices.Contains(list.CNIVersions, "1.1.0") && c.CNIVersion != "1.1.0" {
		d.say("configuration", warning, `add "cniVersions": ["1.0.0", "1.1.0"]`, "%s does not offer version 1.1.0: no runtime sends STATUS or GC", c.Path)
	}
	if folder := filepath.Join(r.ConfDir, c.Name); !list.OnlyInlined && exists(folder) {
		d.say("configuration", failing, `add "loadOnlyInlinedPlugins": true`, "libcni adds the plugins of %s after unwind, which it cannot undo", folder)
	}
	chain, err := c.Unwind.LoadChain()
	if err != nil {
		d.say("configuration", failing, "no pod can start until it is put right", "%s: %v", c.Path, err)
		return nil
	}
	if lost := chain.LostCapabilities(c.Unwind); len(lost) > 0 {
		d.say("configuration", warning, "unwindctl install, or add them to its \"capabilities\"",
			"%s does not declare %s, which the chain asks for: the runtime does not pass them on", c.Path, strings.Join(lost, ", "))
	}
	if c.Unwind.DisableGC || chain.DisableGC {
		d.say("configuration", fine, "", "disableGC is set: a GC of the runtime releases nothing")
	}
	if !c.Unwind.SweepOnStatus {
		d.say("configuration", warning, "take sweepOnStatus out, or see to unwindctl sweep by a timer", "sweepOnStatus is false: a STATUS releases nothing")
	}
	var types []string
	for _, p := range chain.Delegates {
		types = append(types, p.Type)
	}
	d.say("configuration", fine, "", "%s: network %s, chain %s, version %s", c.Path, c.Name, strings.Join(types, " → "), chain.CNIVersion)
	return chain
}

// plugins asks every plugin of the chain for the versions that it speaks.
func (d *doctor) plugins(r runtimePaths, chain *plugin.Chain) {
	asked := map[string]bool{}
	ask := func(name, spoken string) {
		if name == "" || asked[name] {
			return
		}
		asked[name] = true
		path := inDirs(r.BinDirs, name)
		if path == "" {
			d.say("plugins", failing, "install it, or no pod can start", "%s is in none of %s", name, strings.Join(r.BinDirs, ", "))
			return
		}
		if info, err := os.Stat(path); err == nil && info.Mode().Perm()&0o022 != 0 {
			d.say("plugins", warning, "chmod go-w "+path, "%s can be written to by others", path)
		}
		about, versions, err := askVersion(d.ctx, path)
		switch {
		case err != nil:
			d.say("plugins", failing, "install it anew", "%s: %v", path, err)
		case !slices.Contains(versions, spoken):
			d.say("plugins", failing, "install a release of it that does, or lower the chain's cniVersion", "%s does not speak version %s of the chain, only %s",
				path, spoken, strings.Join(versions, ", "))
		case name == plugin.Name && !strings.Contains(about, " "+version+":"):
			d.say("plugins", warning, "unwindctl install", "%s is another release than this program (%s): %s", path, version, about)
		default:
			d.say("plugins", fine, "", "%s (%s)", path, orNone(about))
		}
	}
	ask(plugin.Name, "1.0.0")
	for _, p := range chain.Delegates {
		ask(p.Type, chain.CNIVersion)
		ask(p.IPAM, chain.CNIVersion)
	}
}

func inDirs(dirs []string, name string) string {
	for _, dir := range dirs {
		if path := filepath.Join(dir, name); exists(path) {
			return path
		}
	}
	return ""
}

// The least that is free on the disk of the journal, which is some MiB large, before it is told.
const (
	leastFree  = 64 << 20
	leastNodes = 100
)

// folder looks at the state folder and says whether there is a journal to look at.
func (d *doctor) folder() bool {
	info, err := os.Stat(d.state)
	if errors.Is(err, fs.ErrNotExist) {
		parent := filepath.Dir(d.state)
		for !exists(parent) {
			parent = filepath.Dir(parent)
		}
		if info, err := os.Stat(parent); err != nil || !info.IsDir() || unix.Access(parent, unix.W_OK) != nil {
			d.say("journal", failing, "set stateDir to a folder that can be made", "%s is not there, and cannot be made in %s", d.state, parent)
			return false
		}
		d.say("journal", fine, "", "there is none in %s yet: no pod was added through unwind", d.state)
		return false
	}
	if err != nil {
		d.say("journal", failing, "run this as root", "%v", err)
		return false
	}
	if info.Mode().Perm()&0o077 != 0 {
		d.say("journal", failing, "chmod 0700 "+d.state, "%s has mode %04o: others can read or write it", d.state, info.Mode().Perm())
	}
	var st unix.Statfs_t
	if err := unix.Statfs(d.state, &st); err == nil {
		free := st.Bavail * uint64(st.Bsize)
		switch {
		case st.Flags&unix.ST_RDONLY != 0:
			d.say("journal", failing, "mount it writable", "%s is on a read-only file system", d.state)
		case free < leastFree || st.Files > 0 && st.Ffree < leastNodes:
			d.say("journal", failing, "make room", "the disk of %s has %d MiB and %d files left", d.state, free>>20, st.Ffree)
		case st.Type == unix.TMPFS_MAGIC:
			d.say("journal", warning, "set stateDir to a folder on a disk", "%s is in memory: what a reboot leaves on the disk, as host-local's files, is not found again", d.state)
		}
	}
	for _, part := range []struct {
		name string
		dir  bool
	}{{"journal.db", false}, {"journal.lock", false}, {"locks", true}} {
		path := filepath.Join(d.state, part.name)
		if info, err := os.Lstat(path); err == nil && (info.IsDir() != part.dir || !info.IsDir() && !info.Mode().IsRegular()) {
			d.say("journal", failing, "move it away", "%s is not what unwind made there", path)
		}
	}
	aside, _ := filepath.Glob(filepath.Join(d.state, "journal.db.damaged-*"))
	if len(aside) > 0 {
		d.say("journal", warning, "keep it for a look at why, then remove it", "a damaged journal was set aside: %s", strings.Join(aside, ", "))
	}
	return exists(filepath.Join(d.state, "journal.db"))
}

// journal checks the file, and looks for DELs that stay owed.
func (d *doctor) journal() {
	store := &journal.Store{Dir: d.state}
	var swept, degraded uint64
	err := store.View(d.ctx, func(tx *journal.Tx) error {
		swept, degraded = tx.Counter(plugin.LastSweep), 0
		return errors.Join(tx.Check(), tx.Counters(func(name string, _ []string, n uint64) error {
			if name == plugin.CountDegraded {
				degraded += n
			}
			return nil
		}))
	})
	var damaged *journal.DamagedError
	switch {
	case errors.As(err, &damaged):
		d.say("journal", warning, "unwindctl forget "+damaged.Key.String()+", if its container is gone", "%v", err)
	case err != nil:
		d.say("journal", failing, hintFor(err), "%s: %v", store.Path(), err)
		return
	default:
		d.say("journal", fine, "", "%s is whole", store.Path())
	}
	if degraded > 0 {
		d.say("journal", warning, "unwindctl metrics shows why (unwind_degraded_operations_total)", "%s went on without the journal", plural(int(degraded), "ADD or DEL", "ADDs and DELs"))
	}
	d.attachments(store)
	d.rollbacks()
	switch age := time.Since(time.Unix(int64(swept), 0)); {
	case swept == 0 && d.young(store):
		d.say("sweep", fine, "", "none has come to its end yet; the journal is younger than %s", roughly(sweptLately))
	case swept == 0:
		d.say("sweep", warning, timer+"; or unwindctl run", "none has come to its end yet")
	case age > sweptLately:
		d.say("sweep", warning, timer+"; or unwindctl run", "none has come to its end for %s", roughly(age))
	default:
		d.say("sweep", fine, "", "the last one ended %s ago", roughly(age))
	}
}

// sweptLately is how long ago the last sweep may have ended.
const sweptLately = 10 * time.Minute

// young says whether the journal has no attachment that is old enough to have been swept over.
func (d *doctor) young(store *journal.Store) bool {
	attachments, _ := readJournal(d.ctx, store)
	return !slices.ContainsFunc(attachments, func(a attachment) bool { return time.Since(a.Created) > sweptLately })
}

// rollbacks says which plugins have failed ADDs lately: the commonest reason why pods do not start.
func (d *doctor) rollbacks() {
	events, _ := readHistory(d.ctx, d.state)
	count, last := map[string]int{}, map[string]string{}
	for _, e := range events {
		if e.Kind == journal.RolledBack && time.Since(e.At.Wall) < owedLong {
			of := orDash(e.Plugins)
			count[of]++
			last[of] = e.Reason
		}
	}
	for _, of := range slices.Sorted(maps.Keys(count)) {
		d.say("pods", warning, "unwindctl history --since "+roughly(owedLong)+" has them all", "%s in %s lately, at last: %s",
			plural(count[of], "ADD failed", "ADDs failed"), of, last[of])
	}
}

// owedLong is how long a DEL may be owed before it is told.
const owedLong = 15 * time.Minute

func (d *doctor) attachments(store *journal.Store) {
	attachments, _ := readJournal(d.ctx, store)
	var long []string
	owing := 0
	for _, a := range attachments {
		if a.owed() {
			owing++
		}
		if a.owed() && time.Since(a.Since) > owedLong {
			long = append(long, a.key().String())
		}
	}
	if len(long) > 0 {
		d.say("attachments", warning, "unwindctl show "+long[0], "%s for more than %s: %s", plural(len(long), "attachment owes DELs", "attachments owe DELs"),
			roughly(owedLong), strings.Join(long[:min(3, len(long))], ", "))
	}
	p := &plugin.Plugin{Stdout: io.Discard, Stderr: d.stderr, Budgets: plugin.DefaultBudgets}
	findings, err := judgeAll(d.ctx, p, d.state, nil)
	unknown := 0
	for _, f := range findings {
		if f.Fate == plugin.Unknown && f.Err == nil {
			unknown++
		}
	}
	switch {
	case err != nil:
		d.say("attachments", failing, "", "%v", err)
	case unknown > 0:
		d.say("attachments", warning, "run this on the host, or with --host", "nothing can be told from here of %d of %s", unknown, attachmentsOf(len(findings)))
	default:
		d.say("attachments", fine, "", "%s, of which %d owe DELs", attachmentsOf(len(findings)), owing)
	}
}

// pools looks at how full they are.
func (d *doctor) pools(r runtimePaths) {
	pools, err := readPools(d.ctx, d.stderr, nil, sweepFlags{where: where{r.ConfDir, d.state}})
	if err != nil {
		d.say("pools", warning, "", "%v", err)
	}
	for _, p := range pools {
		text := fmt.Sprintf("%s (%s): %s addresses, %d used, %d leaked, %d ownerless, %d unknown", p.Network, p.Dir, orMany(p.Size), p.Used, p.Leaked, p.Ownerless, p.Unknown)
		switch {
		case p.Free != nil && p.Free.Sign() <= 0:
			d.say("pools", failing, "unwindctl ipam shows who has them", "%s: none is free", text)
		case p.Free != nil && p.Free.Cmp(new(big.Int).Div(p.Size, big.NewInt(10))) < 0:
			d.say("pools", warning, "unwindctl ipam shows who has them", "%s: nearly full", text)
		case p.Leaked+p.Ownerless > 0:
			d.say("pools", warning, "unwindctl sweep releases them", "%s", text)
		default:
			d.say("pools", fine, "", "%s", text)
		}
	}
}

func (d *doctor) print(out io.Writer, asJSON bool) error {
	if asJSON {
		return printJSON(out, "checks", d.checks)
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	count := map[severity]int{}
	for _, c := range d.checks {
		count[c.Severity]++
		fmt.Fprintf(w, "%s\t%s\t%s\n", c.Severity, c.What, c.Text)
		if c.Remedy != "" {
			fmt.Fprintf(w, "\t\t→ %s\n", c.Remedy)
		}
	}
	_, err := fmt.Fprintf(w, "%s, %s.\n", plural(count[failing], "error", "errors"), plural(count[warning], "warning", "warnings"))
	return errors.Join(err, w.Flush())
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
