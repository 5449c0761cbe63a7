// Package trial checks that the network of a node works: it adds an attachment of its own through
// the runtime's conflist, uses it, and deletes it.
package trial

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/doctor"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
)

type Options struct {
	install.Target
	Network string        // "" for the one that the runtime uses
	Plain   bool          // run the chain without unwind
	Timeout time.Duration // of each step
	Version string        // this program's version
	Stderr  io.Writer     // receives the stderr of the plugins that a sweep runs
	Report  func(Step)    // is called at the end of each step
}

// Step is the outcome of one step of a check.
type Step struct {
	Name     string          `json:"step"`
	Severity doctor.Severity `json:"severity"`
	Text     string          `json:"text"`
	Remedy   string          `json:"remedy,omitempty"`
	Millis   int64           `json:"milliseconds"`
}

// Worst returns the first step with the highest severity, or the zero Step if all are OK.
func Worst(steps []Step) (worst Step) {
	for _, s := range steps {
		if s.Severity > worst.Severity {
			worst = s
		}
	}
	return worst
}

type check struct {
	Options
	steps   []Step
	ctx     context.Context
	lock    *os.File
	runtime node.Runtime
	file    *netconf.Conflist // the conflist that the runtime uses
	conf    *netconf.Conf     // unwind's entry, or the defaults for a file without unwind
	chain   *netconf.Chain

	deletesLink bool  // the chain's DEL removes the interface
	left        error // why something that this check created remains
}

// warning is an error that does not stop a check.
type warning struct{ error }

func (w warning) Unwrap() error { return w.error }

// Run checks the network in these steps:
//
//  1. Wait for other checks, and remove what killed checks have left.
//  2. Add an attachment through the runtime's conflist, test it, and delete it.
//  3. Unless Plain is set, add an attachment through the same chain, with an additional last plugin
//     that fails, and with a separate journal. unwind must roll back the ADD. The failing plugin's
//     DEL must stay pending until the plugin is repaired.
//
// An interrupted check deletes its attachments. If a check is killed, the next check deletes them:
// their records, files and network namespaces have names that begin with unwind-check-.
func Run(ctx context.Context, o Options) ([]Step, error) {
	c := &check{Options: o, ctx: ctx}
	switch {
	case os.Geteuid() != 0:
		return nil, term.WithHint("run this as root", "only root can run the network's plugins")
	case !node.OnHost():
		return nil, term.WithHint("run this on the host, or as unwindctl --host check",
			"this process is not in the namespaces of process 1")
	}
	r, err := o.Find(ctx, "/")
	if err != nil {
		return nil, err
	}
	c.runtime, c.ConfDir = r, cmp.Or(r.ConfDir, node.DefaultConfDir)
	c.Network = cmp.Or(c.Network, r.DefaultNetwork)
	if len(c.runtime.BinDirs) == 0 {
		c.runtime.BinDirs = []string{node.DefaultBinDir}
	}
	waiting, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	if c.lock, err = lock(waiting); err != nil {
		return nil, err
	}
	defer func() {
		_ = os.Remove(WorkDir) // it is empty, unless a DEL has failed
		_ = c.lock.Close()
	}()
	c.run()
	switch {
	case ctx.Err() != nil && c.left != nil:
		return nil, term.WithHint("the next check tries again", "interrupted; cannot remove everything "+
			"that check created: %w", c.left)
	case ctx.Err() != nil:
		return nil, errors.New("interrupted; check removed everything it created")
	}
	return c.steps, nil
}

func (c *check) run() {
	if !c.step("configuration", c.choose) {
		return
	}
	left, err := c.recover()
	if left > 0 && err == nil {
		c.step("clean-up", func(context.Context) (string, error) {
			return "removed what " + term.Plural(left, "killed check", "killed checks") + " left", nil
		})
	}
	c.cleanUpFailed(err)
	if c.in(c.runtimeList, (*space).works) && !c.Plain {
		c.in(c.failingList, (*space).isUndone)
	}
}

// step runs a step, unless the check was interrupted, and reports the step's outcome. It returns
// false if the check must not go on. An interrupt does not kill a running plugin: unwind sends a
// killed plugin another DEL later, so the attachment could outlast the check.
func (c *check) step(name string, do func(context.Context) (string, error)) bool {
	if c.ctx.Err() != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), c.Timeout)
	defer cancel()
	start := time.Now()
	text, err := do(ctx)
	if c.ctx.Err() != nil {
		return false
	}
	s := Step{Name: name, Text: text, Millis: time.Since(start).Milliseconds()}
	if err != nil {
		s.Severity, s.Text, s.Remedy = doctor.Failure, term.Printable(err.Error()), term.HintOf(err)
		if errors.As(err, new(warning)) {
			s.Severity = doctor.Warning
		} else if s.Remedy == "" {
			s.Remedy = c.remedy(s.Text)
		}
	}
	c.steps = append(c.steps, s)
	c.Report(s)
	return s.Severity < doctor.Failure
}

// remedy returns a hint for a step's error: what doctor reports, or how to find the cause.
func (c *check) remedy(text string) string {
	report, err := doctor.Examine(c.ctx, doctor.Options{Target: c.Target, Version: c.Version,
		Stderr: io.Discard})
	switch {
	case err == nil && report.Worst() == doctor.Failure:
		first, remedy := report.First()
		if strings.Contains(first, text) && remedy != "" {
			return remedy
		}
		return "unwindctl doctor reports " + strings.TrimSuffix(first+" → "+remedy, " → ")
	case c.Plain:
		return "unwind is not the cause: fix the plugin, its configuration or the node"
	}
	return "unwindctl check --plain shows whether this also fails without unwind"
}

// in creates an attachment with the plugin list that read returns, calls take to run steps with it,
// and removes it. The result is false if any step of the check has failed.
func (c *check) in(read func(*space) (*libcni.NetworkConfigList, error), take func(*space)) bool {
	s := c.space(fmt.Sprintf("%s%08x", prefix, rand.Uint32()))
	if c.step("namespace", func(context.Context) (_ string, err error) {
		if s.list, err = read(s); err == nil {
			err = s.make()
		}
		return s.id, err
	}) {
		take(s)
	}
	c.cleanUpFailed(s.remove())
	return Worst(c.steps).Severity < doctor.Failure
}

func (c *check) cleanUpFailed(err error) {
	c.left = errors.Join(c.left, err)
	if err != nil {
		c.step("clean-up", func(context.Context) (string, error) {
			return "", warning{term.WithHint("the next check tries again", "%w", err)}
		})
	}
}

// choose finds the conflist and its chain, as the runtime does: the first file in the directory
// or, if Network is set, the first file of that network.
func (c *check) choose(context.Context) (string, error) {
	paths, err := netconf.Conflists(c.ConfDir)
	var networks []string
	for _, path := range paths {
		file, readErr := netconf.ReadConflist(path)
		switch {
		case readErr != nil && c.Network == "" && c.file == nil:
			return "", term.WithHint("correct it: the runtime uses the first file in the directory",
				"%s: %w", path, readErr)
		case file != nil && c.file == nil && (c.Network == "" || c.Network == file.Name):
			c.file = file
		case file != nil:
			networks = append(networks, file.Name)
		}
	}
	switch {
	case err != nil:
		return "", err
	case c.file == nil && networks == nil:
		return "", term.WithHint("install the network's provider, or set --conf-dir",
			"no conflist in %s", c.ConfDir)
	case c.file == nil:
		return "", term.WithHint("the networks there: "+term.Join(slices.Compact(networks)),
			"no conflist of network %s in %s", c.Network, c.ConfDir)
	case c.file.Unwind == nil && !c.Plain:
		own := install.Setup{ConfDir: c.ConfDir, File: c.OwnFile(c.runtime)}
		if obstacle := own.Obstacle(""); obstacle != nil {
			return "", obstacle
		}
		return "", term.WithHint("run unwindctl install; unwindctl check --plain checks the network "+
			"without unwind", "%s does not run unwind", c.file.Path)
	}
	if c.chain, c.conf, err = c.file.Chain(); err != nil {
		return "", fmt.Errorf("%s: %w", c.file.Path, err)
	}
	return fmt.Sprintf("network %s in %s", c.file.Name, c.file.Path), nil
}

// runtimeList returns the conflist as a runtime reads it (go-cni opts.go loadFromConfDir) or, if
// Plain is set, the chain that a runtime would run without unwind.
func (c *check) runtimeList(*space) (*libcni.NetworkConfigList, error) {
	switch {
	case c.Plain:
		return c.list(c.chain.CNIVersion, c.chain.DisableCheck, c.delegates())
	case filepath.Ext(c.file.Path) != ".conflist":
		return c.list(c.file.CNIVersion, false, []any{json.RawMessage(c.file.Data)})
	}
	read, err := libcni.NetworkConfFromFile(c.file.Path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.file.Path, err)
	}
	var plugins []any
	for _, p := range read.Plugins { // including those in the network's directory
		plugins = append(plugins, json.RawMessage(p.Bytes))
	}
	return c.list(read.CNIVersion, read.DisableCheck, plugins)
}

// failingList returns a list in which unwind runs the chain and then a plugin that fails. In this
// list, unwind uses a separate journal and must not sweep: the journal lacks all other attachments,
// so their addresses would seem to have no owner.
func (c *check) failingList(s *space) (*libcni.NetworkConfigList, error) {
	return c.list(cmp.Or(c.file.CNIVersion, c.chain.CNIVersion), false, []any{map[string]any{
		"type": netconf.Name, "stateDir": s.stateDir(), "onJournalFailure": "fail",
		"disableGC": true, "sweepOnStatus": false,
		"chain": map[string]any{"cniVersion": c.chain.CNIVersion,
			"plugins": append(c.delegates(), map[string]any{"type": PluginName})},
	}})
}

func (c *check) delegates() (all []any) {
	for i := range c.chain.Delegates {
		all = append(all, c.chain.Config(i, c.conf))
	}
	return all
}

func (c *check) list(version string, disableCheck bool, plugins []any) (
	*libcni.NetworkConfigList, error,
) {
	data, err := json.Marshal(map[string]any{"name": c.file.Name, "cniVersion": version,
		"disableCheck": disableCheck, "loadOnlyInlinedPlugins": true, "plugins": plugins})
	if err != nil {
		return nil, err
	}
	return libcni.NetworkConfFromBytes(data)
}
