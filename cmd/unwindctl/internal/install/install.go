package install

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/journal"
	"cni-unwind/plugin/netconf"
)

// Options are the flags of install, on, off and uninstall.
type Options struct {
	Target
	Conf, Binary, StateDir string
	Observe, DryRun        bool

	ProgramDir string // of unwindctl and the plugin; if "", neither is copied or removed
	UnitDir    string // of the systemd units; if "", none is written or removed
	Output     term.Output

	// Only for off and uninstall.
	OffOnly      bool   // off: only take unwind's conflist out of use
	CacheDir     string // libcni's
	By           string // who switches unwind off
	StateDirFlag bool   // StateDir comes from --state-dir, not from an agent's environment
}

// Run installs unwind on the node. With DryRun it only prints the changes.
func Run(ctx context.Context, to term.Streams, o Options) error {
	r, err := o.Find(ctx, "/")
	if err != nil {
		return err
	}
	s, err := o.Setup(ctx, r)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx, to, r, s)
	if err != nil {
		return err
	}
	done := &Changes{DryRun: o.DryRun}
	err = o.install(ctx, to, r, s, p, done)
	done.Record(s.stateDir(), journal.Install, User(), err)
	if done.List == nil {
		return err
	}
	header := o.Origin(r)
	if err == nil && done.none() {
		header = "Nothing to do: unwind is in use."
	}
	if o.Output.IsObject() {
		return errors.Join(err, done.print(to.Out, &o.Output))
	}
	printErr := term.Print(to.Out, header+"\n"+done.String())
	if err == nil && !o.DryRun {
		_ = term.Print(to.Out, o.advice(ctx, r, s))
	}
	return errors.Join(err, printErr)
}

// plan plans an install and prints warnings. It returns an error if the install is refused.
func (o Options) plan(
	ctx context.Context, to term.Streams, r node.Runtime, s Setup,
) (*Plan, error) {
	p, err := s.Plan()
	if err != nil && r.Name == "" && !o.given() {
		err = fmt.Errorf("%w (no runtime configuration found; using default directories)", err)
	}
	if err != nil {
		return nil, err
	}
	if o.UnitDir != "" && o.ProgramDir == "" {
		err = term.Usage("--systemd needs --install-dir, because the units run unwindctl " +
			"from that directory; a deb or rpm contains units of its own")
	}
	err = cmp.Or(err, keptOff(s.stateDir()), p.RefusedBy(r), s.VerifyBinary(ctx), s.checkBinDir(),
		s.checkJournal(), p.refuseMissing(r.BinDirs))
	if err != nil {
		return nil, err
	}
	if _, err := s.PassesOver(r, p.Source.Path); err != nil {
		p.warnings = append(p.warnings, err.Error())
	}
	for _, warning := range slices.Concat(p.warnings, r.Notes) {
		_ = term.Print(to.Err, "warning: "+warning+"\n")
	}
	return p, nil
}

// checkJournal returns an error if unwind could not write to its journal.
func (s Setup) checkJournal() error {
	if err := inspect.Unwritable(s.stateDir()); err != nil {
		return term.WithHint(term.HintOf(err)+", or choose another directory with --state-dir; nothing "+
			"was changed", "unwind could not write its journal: %w", err)
	}
	return nil
}

// install carries out a plan. It copies unwindctl only once unwind is in use. If the copy fails, it
// prints a warning or, with --systemd, returns an error, because the units need unwindctl. It also
// prints a warning if it replaced the plugin, but a running agent will replace the plugin again.
func (o Options) install(
	ctx context.Context, to term.Streams, r node.Runtime, s Setup, p *Plan, done *Changes,
) error {
	if err := done.Make(ctx, s.InstallBinary); err != nil {
		return s.withoutPlugin(err)
	}
	if err := done.Make(ctx, s.switchOn); err != nil {
		return fmt.Errorf("unwind's conflist was not written: %w", err)
	}
	if err := done.Make(ctx, s.WriteConflist(p)); err != nil {
		text := "unwind's conflist was not written"
		if !durable.Exists(s.Path()) {
			text += ", and unwind is not in use"
		}
		return fmt.Errorf("%s: %w", text, err)
	}
	var err error
	if o.ProgramDir != "" {
		err = done.Make(ctx, s.InstallPrograms(o.ProgramDir))
	}
	switch {
	case o.UnitDir == "" && err != nil:
		_ = term.Print(to.Err, fmt.Sprintf("warning: cannot install unwindctl on this node: %v; choose "+
			"another --install-dir\n", err))
		err = nil
	case o.UnitDir != "" && err == nil:
		err = done.Make(ctx, o.installUnits(s))
	}
	if p.CopyErr != nil {
		err = errors.Join(err, term.WithHint("run unwindctl install again once "+s.stateDir()+" is "+
			"writable: unwind needs the copy if an installer replaces the provider's file",
			"unwind is in use, but the provider's file could not be copied: %w", p.CopyErr))
	}
	pid := AgentProcess(s.stateDir())
	if pid != "" && slices.Contains(done.Find("written"), s.plugin()) {
		_ = term.Print(to.Err, fmt.Sprintf("warning: an agent (process %s) runs on this node, and "+
			"installs its own version of the plugin: upgrade the agent, too\n", pid))
	}
	return errors.Join(err, s.checkVersion(r, p))
}

// withoutPlugin adds to an error of InstallBinary what it means for the pods of the node.
func (s Setup) withoutPlugin(err error) error {
	hint := cmp.Or(term.HintOf(err), MakeRoom)
	switch {
	case !durable.Exists(s.Path()):
		return term.WithHint(hint, "unwind's conflist was not written: %w", err)
	case s.PluginMissing():
		return term.WithHint(hint+"; unwindctl off lets pods start without unwind", "the plugin was not "+
			"installed, and unwind's conflist is in use, so no pod can start: %w", err)
	}
	return term.WithHint(hint, "installing the plugin failed: %w", err)
}

// checkVersion returns an error if unwind's conflist has an old cniVersion because the runtime's
// version is unknown. It accepts a list (.conflist), which offers CNI 1.0.0 and 1.1.0.
func (s Setup) checkVersion(r node.Runtime, p *Plan) error {
	written, _ := netconf.ParseConflist(p.content)
	if filepath.Ext(p.path) != ".json" || r.Socket == "" || s.CNIVersion != "" || written == nil ||
		written.CNIVersion == "1.1.0" {
		return nil
	}
	return term.WithHint("start "+r.Name+", then run unwindctl install again", "unwind is in "+
		"use, but %[1]s has cniVersion %[2]s, because the version of %[3]s is unknown; with that "+
		"cniVersion, no runtime calls STATUS or GC", p.path, written.CNIVersion, r.Name)
}

// onWithin is the time that an agent may take to install unwind after unwind was switched on.
const onWithin = 15 * time.Second

// SwitchOnNode switches unwind on. If an agent runs, SwitchOnNode waits until the agent has
// installed unwind. Otherwise, it installs unwind itself, with the configuration of the conflist
// that is in use or that unwindctl off has kept.
func SwitchOnNode(ctx context.Context, to term.Streams, o Options) error {
	r, err := o.FindInstalled(ctx, "/", time.Minute)
	if err != nil {
		return err
	}
	s, err := o.Setup(ctx, r)
	if err != nil {
		return err
	}
	entry := s.Entry()
	s.Observe = o.Observe || entry.Observes()
	if chain := s.Provider(r); durable.Exists(chain) {
		s.Source = cmp.Or(s.Source, chain)
	}
	done := &Changes{DryRun: o.DryRun}
	if pid := AgentProcess(s.stateDir()); pid != "" {
		err = done.Make(ctx, s.switchOn, s.awaitAgent(pid))
	} else {
		var p *Plan
		if p, err = o.plan(ctx, to, r, s); err == nil {
			err = o.install(ctx, to, r, s, p, done)
		}
	}
	done.Record(s.stateDir(), journal.On, User(), err)
	if done.List == nil {
		return err
	}
	if err == nil && done.none() {
		done.List = append(done.List, &Change{Change: "unchanged", What: "unwind is already in use"})
	}
	return errors.Join(err, done.print(to.Out, &o.Output))
}

// switchOn is the step that switches unwind on, if it is off. It returns an error if an agent keeps
// unwind off.
func (s Setup) switchOn(context.Context) ([]*Change, error) {
	was := s.Obstacle("")
	if was == nil {
		return nil, nil
	}
	return []*Change{{Change: "on", What: fmt.Sprintf("previously: %v", was),
		apply: func(*Change) error { return s.SwitchOn(s.stateDir()) }}}, keptOff(s.stateDir())
}

// awaitAgent is the step that waits until an agent has written unwind's conflist.
func (s Setup) awaitAgent(pid string) Step {
	return func(ctx context.Context) ([]*Change, error) {
		if durable.Exists(s.Path()) {
			return []*Change{{Change: "unchanged", What: s.Path()}}, nil
		}
		what := fmt.Sprintf("%s (by the agent, process %s)", s.Path(), pid)
		return []*Change{{Change: "written", What: what, apply: func(*Change) error {
			for end := time.Now().Add(onWithin); !durable.Exists(s.Path()); time.Sleep(onWithin / 100) {
				const hint = "run unwindctl doctor"
				kept := keptOff(s.stateDir())
				switch {
				case kept != nil:
					return kept
				case ctx.Err() != nil:
					return term.WithHint(hint, "interrupted: unwind is switched on, but the agent (process %s) "+
						"has not installed it yet", pid)
				case time.Now().After(end):
					return term.WithHint(hint, "the agent (process %s) did not install unwind within %s", pid,
						onWithin)
				}
			}
			return nil
		}}}, nil
	}
}

// Setup returns the setup for a runtime with these options.
func (o Options) Setup(ctx context.Context, r node.Runtime) (Setup, error) {
	source, sourceErr := absolute(o.Conf)
	stateDir, stateErr := absolute(o.StateDir)
	return Setup{ConfDir: r.ConfDir, BinDir: r.BinDirs[0], Source: source, StateDir: stateDir,
		File: o.OwnFile(r), CNIVersion: r.CNIVersion(ctx), ByName: o.byName(r),
		Binary: o.Binary, Observe: o.Observe}, errors.Join(sourceErr, stateErr)
}

// advice tells the user what to do after an install.
func (o Options) advice(ctx context.Context, r node.Runtime, s Setup) (text string) {
	if o.UnitDir != "" {
		text = "To run sweeps with systemd, run systemctl daemon-reload && systemctl enable --now " +
			"unwind-sweep.timer unwind-sweep-boot.service\nTo run the agent with systemd, run systemctl " +
			"daemon-reload && systemctl enable unwind-agent.service unwind-sweep-boot.service && " +
			"systemctl restart unwind-agent.service\n"
	}
	switch {
	case o.Observe:
		text += "Because of --observe, STATUS and GC release nothing. Dead attachments stay until " +
			"unwindctl sweep, its timer or an agent releases them. To change that, install again " +
			"without --observe.\n"
	case o.UnitDir != "":
	case s.ByName:
		text += "nerdctl, podman and Nomad trigger no sweep: " + node.Timer + "\n"
	default:
		text += r.SweepAdvice(ctx) + "\n"
	}
	off := "unwindctl off"
	if o.Target != (Target{}) {
		off += " with the same --runtime, --conf-dir, --cni-bin-dir and --unwind-file"
	}
	return text + "To switch unwind off, run " + off + "\n"
}
