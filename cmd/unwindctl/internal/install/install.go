package install

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/agentlock"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/node"
)

type Options struct {
	Target
	Conf, Binary, StateDir string
	Observe, DryRun        bool

	ProgramDir string // for unwindctl; "" to not copy it
	UnitDir    string // for systemd units; "" to write none
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
	p, err := s.Plan()
	if err != nil && r.Name == "" && !o.given() {
		return fmt.Errorf("%w (no runtime configuration found; using default directories)", err)
	} else if err != nil {
		return err
	}
	if o.UnitDir != "" && o.ProgramDir == "" {
		return term.Usage("--systemd needs --install-dir: the units run unwindctl from that directory")
	}
	if err := p.RefusedBy(r); err != nil {
		return err
	}
	if p.about, err = s.VerifyBinary(ctx); err != nil {
		return err
	}
	if err := s.checkBinDir(); err != nil {
		return err
	}
	if err := p.refuseMissing(r.BinDirs); err != nil {
		return err
	}
	if err := s.PassesOver(r, p.Source.Path); err != nil {
		p.warnings = append(p.warnings, err.Error())
	}
	for _, warning := range slices.Concat(p.warnings, r.Notes) {
		fmt.Fprintf(to.Err, "warning: %s\n", warning)
	}
	p.was = s.Obstacle("")
	if o.DryRun {
		return errors.Join(o.printPlan(to.Out, r, s, p), o.installForNode(to, s))
	}
	binary, err := s.InstallBinary()
	if err == nil {
		err = s.SwitchOn(s.stateDir())
	}
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	conflist, err := s.WriteConflist(p)
	if err != nil && durable.Exists(s.Path()) {
		return fmt.Errorf("the network is unchanged: %w", err)
	} else if err != nil {
		return fmt.Errorf("the network is unchanged, and unwind is not in use: %w", err)
	}
	return errors.Join(o.printDone(ctx, to.Out, r, s, p, binary, conflist), o.installForNode(to, s))
}

// onWithin is the time that an agent may take to install unwind after unwind was switched on.
const onWithin = 15 * time.Second

// SwitchOnNode switches unwind on. It installs unwind itself if no agent runs, with the
// configuration that off has kept, or that is still in use.
func SwitchOnNode(ctx context.Context, to term.Streams, o Options, output *term.Output) error {
	r, err := o.Find(ctx, "/")
	if err != nil {
		return err
	}
	s, err := o.Setup(ctx, r)
	if err != nil {
		return err
	}
	entry := s.Entry()
	o.Observe = o.Observe || entry.Observes()
	if chain := s.Provider(r); durable.Exists(chain) {
		o.Conf = cmp.Or(o.Conf, chain)
	}
	dir, out, done := s.stateDir(), to.Out, changes{}
	was := s.Obstacle("")
	if was != nil {
		done.add("on", "previously: %v", was)
	}
	before, _ := os.Stat(s.Path())
	pid := agentlock.Process(dir)
	if pid != "" {
		err = s.SwitchOn(dir)
	} else {
		to.Out = io.Discard
		err = Run(ctx, to, o)
	}
	if err != nil {
		return err
	}
	for end := time.Now().Add(onWithin); !durable.Exists(s.Path()); time.Sleep(onWithin / 100) {
		if time.Now().After(end) || ctx.Err() != nil {
			return term.WithHint("run unwindctl doctor", "the agent (process %s) has not installed unwind "+
				"within %s", pid, onWithin)
		}
	}
	if after, _ := os.Stat(s.Path()); was == nil && os.SameFile(before, after) {
		done.add("on", "unwind was already in use: %s is unchanged", s.Path())
	} else {
		done.add("on", "installed %s", s.Path())
	}
	return done.print(out, output)
}

// installForNode copies unwindctl to the node and, with --systemd, writes its units. Without
// --systemd, a failure is only a warning, because unwind itself is already in use.
func (o Options) installForNode(to term.Streams, s Setup) error {
	if o.ProgramDir == "" {
		return nil
	}
	written, err := s.InstallPrograms(o.ProgramDir)
	if err != nil && o.UnitDir == "" {
		fmt.Fprintf(to.Err, "warning: cannot install unwindctl on this node: %v; choose another "+
			"--install-dir\n", err)
		return nil
	}
	if err == nil && o.UnitDir != "" {
		var units []string
		units, err = s.installUnits(o.UnitDir, o.ProgramDir)
		written = append(written, units...)
	}
	word := map[bool]string{true: "would write", false: "written:  "}[s.DryRun]
	for _, path := range written {
		fmt.Fprintf(to.Out, "%s %s\n", word, path)
	}
	if err == nil && o.UnitDir != "" && !s.DryRun {
		fmt.Fprintf(to.Out, "To run sweeps with systemd, run systemctl daemon-reload && systemctl "+
			"enable --now unwind-sweep.timer unwind-sweep-boot.service\nTo run the agent with systemd, run "+
			"systemctl daemon-reload && systemctl enable --now unwind-agent.service "+
			"unwind-sweep-boot.service\n")
	}
	return err
}

// Setup returns the setup for a runtime with these options.
func (o Options) Setup(ctx context.Context, r node.Runtime) (Setup, error) {
	s := Setup{ConfDir: r.ConfDir, BinDir: r.BinDirs[0], Source: o.Conf,
		File: o.OwnFile(r), CNIVersion: r.CNIVersion(ctx), Binary: o.Binary,
		Observe: o.Observe, DryRun: o.DryRun}
	if o.StateDir == "" {
		return s, nil
	}
	var err error
	s.StateDir, err = filepath.Abs(o.StateDir)
	return s, err
}

func (o Options) printPlan(out io.Writer, r node.Runtime, s Setup, p *Plan) error {
	from, err := s.binary()
	if err != nil {
		return err
	}
	changed, err := s.InstallBinary()
	if err != nil {
		return err
	}
	var text strings.Builder
	fmt.Fprintf(&text, "Nothing is changed. %s\n", o.Origin(r))
	if changed {
		fmt.Fprintf(&text, "would install %s as %s\n", from, s.plugin())
	} else {
		fmt.Fprintf(&text, "%s is up to date\n", s.plugin())
	}
	if p.was != nil {
		fmt.Fprintf(&text, "would switch unwind on: %v\n", p.was)
	}
	for _, sentence := range p.Repairs() {
		fmt.Fprintf(&text, "would change: %s\n", sentence)
	}
	if p.changed {
		fmt.Fprintf(&text, "would write %s:\n%s", p.path, p.content)
	} else {
		fmt.Fprintf(&text, "%s is up to date\n", p.path)
	}
	_, err = io.WriteString(out, text.String())
	return err
}

// printDone prints what was done: whether the binary and the conflist were written.
func (o Options) printDone(ctx context.Context, out io.Writer, r node.Runtime, s Setup, p *Plan,
	binary, conflist bool) error {
	var text strings.Builder
	if !binary && !conflist {
		fmt.Fprintf(&text, "Nothing to do: unwind is in use.\n")
	} else {
		fmt.Fprintf(&text, "%s\n", o.Origin(r))
	}
	var types []string
	for _, d := range p.chain.Delegates {
		types = append(types, d.Type)
	}
	words := map[bool]string{true: "written:  ", false: "unchanged:"}
	fmt.Fprintf(&text, "%s %s (%s)\n", words[binary], s.plugin(), p.about)
	fmt.Fprintf(&text, "%s %s (network %s, chain %s of %s)\n", words[conflist], p.path,
		p.Source.Name, strings.Join(types, " → "), p.Source.Path)
	if p.was != nil {
		fmt.Fprintf(&text, "switched unwind on; previously: %v\n", p.was)
	}
	for _, sentence := range p.Repairs() {
		fmt.Fprintf(&text, "changed: %s\n", sentence)
	}
	if s.Observe {
		fmt.Fprintln(&text, "Observing: only unwindctl sweep releases dead attachments. To change that, "+
			"install again without --observe.")
	} else {
		fmt.Fprintln(&text, r.SweepAdvice(ctx))
	}
	fmt.Fprintf(&text, "To switch unwind off, run unwindctl off%s, or rm %s\n", o.again(r), p.path)
	_, err := io.WriteString(out, text.String())
	return err
}
