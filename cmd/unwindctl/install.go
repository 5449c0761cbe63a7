package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/plugin"
)

// placeFlags say where the runtime is.
type placeFlags struct{ runtime, confDir, binDir, file string }

// installFlags are those of the command, as given.
type installFlags struct {
	placeFlags
	conf, binary, stateDir string
	observe, dryRun        bool
}

func installCommand() *cobra.Command {
	var flags installFlags
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Put unwind in front of this node's network",
		Long: "Put unwind in front of this node's network: its binary among the plugins, and a conflist of its own that sorts first and\n" +
			"names the provider's as its chain. The provider's file is not touched, and its changes count from the next pod on.\n\n" +
			"The folders are those of the runtime's configuration: containerd (also GKE's), CRI-O (also OpenShift's), k3s, RKE2,\n" +
			"MicroK8s, nerdctl, podman, Nomad. Pods that run already are not touched. It can be run again at any time, and then\n" +
			"changes only what is not so yet; keys that were added to unwind's conflist stay.\n\n" +
			"The binary comes first and the conflist last, each put in place whole: cut off at any point, the node works.",
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return install(cmd, flags) },
	}
	addInstallFlags(cmd, &flags)
	cmd.Flags().BoolVar(&flags.dryRun, "dry-run", false, "say what would be done, and do nothing")
	return cmd
}

func addInstallFlags(cmd *cobra.Command, flags *installFlags) {
	addPlaceFlags(cmd, &flags.placeFlags)
	cmd.Flags().StringVar(&flags.conf, "conf", "", "the provider's conflist is `FILE` (default: the first of the folder)")
	cmd.Flags().StringVar(&flags.binary, "binary", "", "the plugin to install is `FILE` (default: unwind beside this program)")
	cmd.Flags().StringVar(&flags.stateDir, "state-dir", "", "the journal goes to `DIR` (default "+plugin.DefaultStateDir+")")
	cmd.Flags().BoolVar(&flags.observe, "observe", false, "keep the journal and undo failed ADDs, but sweep neither on STATUS nor on GC")
}

func addPlaceFlags(cmd *cobra.Command, flags *placeFlags) {
	cmd.Flags().StringVar(&flags.runtime, "runtime", "", "the folders are those of this `RUNTIME`, where there are several")
	cmd.Flags().StringVar(&flags.confDir, "conf-dir", "", "the runtime's conflists are in `DIR`")
	cmd.Flags().StringVar(&flags.binDir, "bin-dir", "", "the runtime's plugins are in `DIR`")
	cmd.Flags().StringVar(&flags.file, "file", ownFile, "the `NAME` of unwind's conflist, which must sort first")
}

// find returns the runtime that the flags mean, with the folders that they name.
func (p placeFlags) find(root string) (runtimePaths, error) {
	if filepath.Base(p.file) != p.file || filepath.Ext(p.file) != ".conflist" {
		return runtimePaths{}, usageError{fmt.Errorf("--file %q is not the name of a .conflist", p.file)}
	}
	found, err := findRuntimes(root)
	if p.given() {
		return p.place(found, root)
	}
	if err != nil {
		return runtimePaths{}, err
	}
	r, err := chooseRuntime(found, p.runtime)
	if err != nil || p.confDir == "" && p.binDir == "" {
		return r, err
	}
	if p.confDir != "" {
		r.ConfDir, err = filepath.Abs(p.confDir)
	} else {
		r.BinDirs[0], err = filepath.Abs(p.binDir)
	}
	return r, err
}

// given says whether no configuration has to be asked for folders.
func (p placeFlags) given() bool { return p.confDir != "" && p.binDir != "" && p.runtime == "" }

// place returns the folders as given. If a runtime has its conflists there, it is that one, and what is against any install
// stays so.
func (p placeFlags) place(found []runtimePaths, root string) (runtimePaths, error) {
	confDir, err := filepath.Abs(p.confDir)
	binDir, binErr := filepath.Abs(p.binDir)
	r := runtimePaths{MaxConfs: 1}
	if i := slices.IndexFunc(found, func(r runtimePaths) bool { return r.ConfDir == confDir }); i >= 0 {
		r = found[i]
		r.Problems = nil
		r.check(root)
	}
	r.ConfDir, r.BinDirs = confDir, []string{binDir}
	return r, errors.Join(err, binErr)
}

// again are the flags with which another command finds the same.
func (p placeFlags) again(r runtimePaths) string {
	text := ""
	for _, flag := range []struct{ name, given, value string }{
		{"runtime", p.runtime, p.runtime}, {"conf-dir", p.confDir, r.ConfDir}, {"bin-dir", p.binDir, r.BinDirs[0]},
	} {
		if flag.given != "" {
			text += fmt.Sprintf(" --%s %s", flag.name, flag.value)
		}
	}
	if p.file != ownFile {
		text += " --file " + p.file
	}
	return text
}

// whence says where the folders come from.
func (p placeFlags) whence(r runtimePaths) string {
	switch {
	case p.given():
		return "The folders are as given."
	case r.Name == "":
		return fmt.Sprintf("No runtime's configuration was found: %s and %s are taken, which most have.", r.ConfDir, strings.Join(r.BinDirs, ", "))
	case r.Config == "":
		return fmt.Sprintf("The runtime is %s, without a configuration: its defaults are taken.", r.Name)
	}
	return fmt.Sprintf("The runtime is %s, as %s has it.", r.Name, r.Config)
}

func install(cmd *cobra.Command, flags installFlags) error {
	r, err := flags.find("/")
	if err != nil {
		return err
	}
	i, err := flags.installation(r)
	if err != nil {
		return err
	}
	w, err := i.wrap()
	if err != nil && r.Name == "" && !flags.given() {
		return fmt.Errorf("%w (no runtime's configuration was found, so its folders were guessed)", err)
	} else if err != nil {
		return err
	}
	if err := r.accepts(w); err != nil {
		return err
	}
	about, err := i.verifyBinary(cmd.Context())
	if err != nil {
		return err
	}
	if err := i.checkBinDir(); err != nil {
		return err
	}
	warnMissing(w, r.BinDirs)
	for _, warning := range slices.Concat(w.warnings, r.Notes) {
		fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", warning)
	}
	if flags.dryRun {
		return flags.printPlan(cmd.OutOrStdout(), r, i, w)
	}
	binary, err := i.installBinary()
	if err != nil {
		return fmt.Errorf("nothing was changed: %w", err)
	}
	conflist, err := i.writeConflist()
	if err != nil {
		return fmt.Errorf("the network is as it was, unwind is not in use: %w", err)
	}
	return flags.printDone(cmd, r, i, w, about, binary, conflist)
}

func (f installFlags) installation(r runtimePaths) (installation, error) {
	i := installation{ConfDir: r.ConfDir, BinDir: r.BinDirs[0], Source: f.conf, File: f.file, Binary: f.binary, Observe: f.observe}
	if f.stateDir == "" {
		return i, nil
	}
	var err error
	i.StateDir, err = filepath.Abs(f.stateDir)
	return i, err
}

// accepts is an error if the runtime's configuration is against it.
func (r runtimePaths) accepts(w *wrapping) error {
	problems := slices.Clone(r.Problems)
	if r.DefaultNetwork != "" { // what findRuntimes said of the first conflist is about the chosen one now
		problems = slices.DeleteFunc(problems, func(p string) bool { return strings.HasPrefix(p, "cni_default_network") })
		if w.source.Name != r.DefaultNetwork {
			problems = append(problems, r.otherNetwork(w.source.Name, w.source.Path))
		}
	}
	if len(problems) == 0 {
		return nil
	}
	return refuse("nothing was changed", "%s", strings.Join(problems, "\n"))
}

// warnMissing warns of plugins of the chain that are not there: an ADD would fail, as it does without unwind.
func warnMissing(w *wrapping, dirs []string) {
	if missing := w.chain.Missing(strings.Join(dirs, ":")); len(missing) > 0 {
		w.warnings = append(w.warnings, fmt.Sprintf("not in %s: %s; until they are, no pod gets a network", strings.Join(dirs, ", "),
			strings.Join(missing, ", ")))
	}
}

func (f installFlags) printPlan(out io.Writer, r runtimePaths, i installation, w *wrapping) error {
	from, err := i.binary()
	if err != nil {
		return err
	}
	var text strings.Builder
	fmt.Fprintf(&text, "Nothing is changed. %s\n", f.whence(r))
	fmt.Fprintf(&text, "would install %s as %s\n", from, filepath.Join(i.BinDir, plugin.Name))
	if w.changed {
		fmt.Fprintf(&text, "would write %s:\n%s", w.path, w.content)
	} else {
		fmt.Fprintf(&text, "%s is as it should be\n", w.path)
	}
	_, err = io.WriteString(out, text.String())
	return err
}

func (f installFlags) printDone(cmd *cobra.Command, r runtimePaths, i installation, w *wrapping, about string, binary, conflist bool) error {
	var text strings.Builder
	var types []string
	for _, d := range w.chain.Delegates {
		types = append(types, d.Type)
	}
	to := filepath.Join(i.BinDir, plugin.Name)
	if !binary && !conflist {
		fmt.Fprintf(&text, "Nothing had to be done: unwind is in use.\n")
	} else {
		fmt.Fprintf(&text, "%s\n", f.whence(r))
	}
	for _, one := range []struct {
		changed    bool
		path, more string
	}{{binary, to, about}, {conflist, w.path, fmt.Sprintf("network %s, chain %s of %s", w.source.Name, strings.Join(types, " → "), w.source.Path)}} {
		fmt.Fprintf(&text, "%s %s (%s)\n", map[bool]string{true: "written:  ", false: "unchanged:"}[one.changed], one.path, one.more)
	}
	if i.Observe {
		fmt.Fprintln(&text, "It observes: what is dead is swept by unwindctl sweep alone. Install again without --observe to change that.")
	} else {
		fmt.Fprintln(&text, r.calls(cmd.Context()))
	}
	fmt.Fprintf(&text, "To switch it off: unwindctl uninstall%s, or rm %s\n", f.again(r), w.path)
	_, err := io.WriteString(cmd.OutOrStdout(), text.String())
	return err
}

// timer is how to have sweeps without the runtime.
const timer = "let systemd sweep (scripts/systemd/unwind-sweep.timer)"

// calls says whether the runtime asks for a sweep by itself: containerd calls STATUS since 2.0, with libcni 1.2 (go-cni
// cni.go Status), CRI-O calls GC at its start (cri-o internal/config/cnimgr/cnimgr.go), the others neither.
func (r runtimePaths) calls(ctx context.Context) string {
	major := r.Major
	if r.Socket != "" && r.Name != "cri-o" {
		if v := runtimeMajor(ctx, r.Socket); v != 0 {
			major = v
		}
	}
	switch {
	case r.Name == "cri-o":
		return "CRI-O has what is dead swept when it starts; for the time between, " + timer
	case r.Name == "" || r.Socket == "" && r.Name != "":
		return "If the runtime is not containerd 2 or later, " + timer
	case major >= 2:
		return "containerd has what is dead swept every few seconds (STATUS)."
	case major == 1:
		return "containerd 1 calls neither STATUS nor GC: " + timer
	}
	return "containerd 2 and later have what is dead swept every few seconds (STATUS). Of an earlier one, " + timer
}
