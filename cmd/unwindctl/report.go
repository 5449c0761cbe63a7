package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/bundle"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/netconf"
)

func reportCommand() *cobra.Command {
	var r reporter
	cmd := &cobra.Command{
		Use:        "report",
		SuggestFor: []string{"bugreport", "sosreport"},
		Short:      "Write a file for a bug report, without secrets",
		Long: "Write a compressed archive for a bug report, readable only by its owner, and list\n" +
			"what it contains:\n" +
			"  the versions of unwind, the kernel, the distribution and the runtime\n" +
			"  the output of doctor, list, ipam and history\n" +
			"  the conflists, and the attachments of their networks in libcni's cache\n" +
			"  the lines of iptables and nftables with chains of CNI plugins\n" +
			bundle.Redacted + " replaces certificates and, in the conflists and the cache, the\n" +
			"value of each key whose name contains token, passw, secret, key, kubeconfig, cert,\n" +
			"credential, private or auth, unless that value is the path of a file. The report\n" +
			"contains names of pods and addresses.\n\n" +
			"If a part cannot be read, report writes the others and exits 1. It changes nothing\n" +
			"on the node.",
		Example: "  unwindctl report\n" +
			"  kubectl -n kube-system exec POD -- /unwindctl --host report -o - >report.tgz",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if _, terminal := term.OnTerminal(cmd.OutOrStdout()); terminal && r.file == "-" {
				return term.Usage("-o - writes an archive to stdout, which is a terminal; redirect it")
			}
			return r.run(cmd)
		},
	}
	addPlaceFlags(cmd, &r.target)
	cmd.Flags().StringVar(&r.stateDir, "state-dir", "",
		"use the journal in `DIR` (default: the one that unwind's conflist names)")
	cmd.Flags().StringVarP(&r.file, "output", "o", "",
		"write the archive to `FILE`, which must not exist, or to stdout (-) "+
			"(default unwind-report-HOST-DATE.tar.gz)")
	return cmd
}

type reporter struct {
	target         install.Target
	stateDir, file string
	bundle         bundle.Bundle
	err            error // the errors of the parts that failed
}

func (r *reporter) run(cmd *cobra.Command) error {
	ctx, now, host := cmd.Context(), time.Now(), ""
	if name, err := os.Hostname(); err == nil {
		host = "-" + regexp.MustCompile(`[^\w.-]`).ReplaceAllString(name, "_")
	}
	name := "unwind-report" + host + now.UTC().Format("-20060102-150405")
	r.networks(ctx)
	r.versions(ctx)
	for _, command := range []string{"doctor --verbose", "list -o wide", "ipam -o wide",
		"history -o wide"} {
		args := strings.Fields(command)
		r.add(args[0]+".txt", func() ([]byte, error) { return r.output(ctx, args...) })
		r.add(args[0]+".json", func() ([]byte, error) { return r.output(ctx, args[0], "-o", "json") })
	}
	for _, program := range []string{"iptables-save", "ip6tables-save", "nft list ruleset"} {
		args := strings.Fields(program)
		r.add(args[0]+".txt", func() ([]byte, error) { return rules(ctx, args) })
	}
	if ctx.Err() != nil {
		return errors.New("interrupted; no report was written")
	}
	if r.err != nil {
		r.bundle.Add("errors.txt", []byte(r.err.Error()+"\n"))
	}
	list := cmd.OutOrStdout()
	var archive bytes.Buffer
	err := r.bundle.Write(&archive, name, now)
	if err != nil {
		return err
	}
	r.file = cmp.Or(r.file, name+".tar.gz")
	if r.file == "-" {
		list = cmd.ErrOrStderr()
		_, err = archive.WriteTo(cmd.OutOrStdout())
	} else if r.file, err = filepath.Abs(r.file); err == nil {
		err = writeNew(r.file, archive.Bytes())
	}
	if err != nil {
		return err
	}
	for _, f := range r.bundle.Files {
		fmt.Fprintf(list, "%8d  %s\n", len(f.Data), f.Name)
	}
	if r.file != "-" {
		fmt.Fprintf(list, "Wrote %s. Read it before you send it to anybody.\n", r.file)
	}
	return r.err
}

// writeNew creates a file, which must not exist. If writing fails, it removes the incomplete file.
func writeNew(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return term.WithHint("choose another file with -o", "%w", err)
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Close()); err != nil {
		_ = os.Remove(path)
	}
	return err
}

// add adds a part to the report. If part returns an error, add records it, and adds the data that
// part could read.
func (r *reporter) add(name string, part func() ([]byte, error)) {
	data, err := part()
	r.failed(name, err)
	r.bundle.Add(name, data)
}

func (r *reporter) failed(name string, err error) {
	if err != nil {
		r.err = errors.Join(r.err, fmt.Errorf("%s: %w", name, err))
	}
}

// output returns the output of another unwindctl command. An exit code that only reports doctor's
// findings is not an error.
func (r *reporter) output(ctx context.Context, args ...string) ([]byte, error) {
	var stdout, stderr bytes.Buffer
	root := rootCommand()
	flags := map[string]string{"conf-dir": r.target.ConfDir, "cni-bin-dir": r.target.BinDir,
		"state-dir": r.stateDir, "runtime": r.target.Runtime, "unwind-file": r.target.File}
	cmd, _, _ := root.Find(args)
	for name, value := range flags {
		if _, err := os.Stat(value); name == "state-dir" && err != nil {
			continue // commands refuse a directory that is missing, even the default one
		}
		if value != "" && cmd.Flags().Lookup(name) != nil {
			args = append(args, "--"+name, value)
		}
	}
	root.SetArgs(args)
	root.SetOut(&stdout)
	root.SetErr(&stderr)
	err := root.ExecuteContext(ctx)
	if errors.As(err, &term.Coded{}) {
		err = nil
	}
	if args[len(args)-1] != "json" {
		_, _ = stderr.WriteTo(&stdout)
	}
	return stdout.Bytes(), err
}

// networks adds the conflists to the report, and their networks' attachments from libcni's cache.
func (r *reporter) networks(ctx context.Context) {
	at := node.Directories{ConfDir: r.target.ConfDir, StateDir: r.stateDir}
	r.failed("conflists", at.Resolve(ctx))
	r.stateDir = at.StateDir
	names := map[string]bool{}
	for _, dir := range at.All() {
		paths, err := netconf.Conflists(dir)
		r.failed(dir, err)
		off, _ := filepath.Glob(filepath.Join(dir, "*"+node.OffSuffix))
		for _, path := range slices.Concat(paths, off) {
			data, err := netconf.ReadFile(path)
			if err == nil {
				err = r.bundle.AddJSON("conflists"+path, data)
			}
			r.failed(path, err)
			if c, _ := netconf.ParseConflist(data); c != nil {
				names[c.Name] = true
			}
		}
	}
	cached, err := new(facts.Node).Cache()
	r.failed("libcni's cache", err)
	attachments := []any{}
	for _, c := range cached {
		if names[c.Network] {
			attachments = append(attachments, map[string]any{"path": c.Path, "written": c.Written,
				"netns": c.NetNS, "cniArgs": c.Args, "capabilityArgs": c.RuntimeConfig, "result": c.Result,
				"config": json.RawMessage(c.Config)})
		}
	}
	data, err := json.Marshal(attachments)
	r.failed("cache.json", cmp.Or(err, r.bundle.AddJSON("cache.json", data)))
}

func (r *reporter) versions(ctx context.Context) {
	text := "unwindctl " + version + "\n"
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		text += fmt.Sprintf("kernel %s %s %s\n", unix.ByteSliceToString(name.Release[:]),
			unix.ByteSliceToString(name.Version[:]), unix.ByteSliceToString(name.Machine[:]))
	}
	release, err := os.ReadFile("/etc/os-release")
	r.failed("the distribution", err)
	found, err := node.Find(ctx, "/")
	r.failed("the runtime", err)
	for _, runtime := range found {
		text += fmt.Sprintf("runtime %s at %s: %s\n", runtime.Name, runtime.Socket, runtime.Release(ctx))
	}
	target, err := r.target.Find(ctx, "/")
	r.failed("the plugin", err)
	for _, dir := range target.BinDirs {
		text += fmt.Sprintf("plugin in %s: %s\n", dir,
			term.OrDash(install.Setup{BinDir: dir}.PluginVersion(ctx)))
	}
	r.bundle.Add("versions.txt", append([]byte(text), release...))
}

var ofCNI = regexp.MustCompile(`(?i)cni|^\*|^table|^\s*chain`)

// rules returns the lines of a program's output that mention CNI, or that begin a table or a chain.
func rules(ctx context.Context, args []string) (kept []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if _, err := exec.LookPath(args[0]); err != nil {
		return []byte(args[0] + " is not installed\n"), nil
	}
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).Output()
	for line := range bytes.Lines(out) {
		if ofCNI.Match(line) {
			kept = append(kept, line...)
		}
	}
	return kept, err
}
