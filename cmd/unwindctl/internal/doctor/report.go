// Package doctor reports problems with unwind on a node and how to fix them.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
)

type Severity int

const (
	OK      Severity = iota
	Warning          // something may leak, or unwind cannot see it
	Failure          // pods cannot start, or unwind releases nothing
)

func (s Severity) String() string { return [...]string{"ok", "warning", "error"}[s] }

func (s Severity) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

type check struct {
	What     string   `json:"what"`
	Severity Severity `json:"severity"`
	Text     string   `json:"text"`
	Remedy   string   `json:"remedy,omitempty"`
}

// Report holds the findings in the order of the checks.
type Report struct {
	checks []check
	plugin string // the version of unwind's plugin, "" if unknown
}

func (r *Report) add(what string, s Severity, remedy, format string, args ...any) {
	r.checks = append(r.checks, check{what, s, term.OneLine(fmt.Sprintf(format, args...)), remedy})
}

// Worst returns the first check of the highest severity, and the number of other findings.
func (r *Report) Worst() (worst check, more int) {
	for _, c := range r.checks {
		if c.Severity != OK {
			more++
		}
		if c.Severity > worst.Severity {
			worst = c
		}
	}
	return worst, more - 1
}

// Print prints the checks with their remedies, as a table or as JSON, or the worst in one line.
func (r *Report) Print(out io.Writer, o *term.Output) error {
	switch {
	case o.IsObject():
		return o.PrintObject(out, "checks", r.checks, "plugin", r.plugin)
	case o.Format == term.Line:
		return r.printLine(out)
	}
	t := term.NewTable(term.Column{Severity: true}, term.Column{},
		term.Column{Least: 20, Wrap: true})
	count := map[Severity]int{}
	for _, c := range r.checks {
		count[c.Severity]++
		t.Add(c.Severity.String(), c.What, c.Text)
		if c.Remedy != "" {
			t.Add("", "", "→ "+c.Remedy)
		}
	}
	err := t.Print(out, o)
	_, sumErr := fmt.Fprintf(out, "%s, %s.\n", term.Plural(count[Failure], "error", "errors"),
		term.Plural(count[Warning], "warning", "warnings"))
	return errors.Join(err, sumErr)
}

func (r *Report) printLine(out io.Writer) error {
	worst, more := r.Worst()
	line := worst.Severity.String()
	if worst.Severity != OK {
		line += ": " + worst.What + ": " + worst.Text
	}
	if more > 0 {
		line += "; " + term.Plural(more, "more problem", "more problems")
	}
	_, err := fmt.Fprintln(out, line)
	return err
}

type Options struct {
	install.Target
	StateDir string    // of the journal; "" for the one in unwind's conflist
	Version  string    // this program's version
	Stderr   io.Writer // receives the log of the sweep's dry run
}

type examination struct {
	Options
	Report
	binPath string // the plugin directories, in CNI_PATH's format
}

// Examine checks the runtime, the conflist and its chain, the plugins, the state directory, the
// journal and the pools. It is read-only. It returns a UsageError if the options do not select a
// runtime of this node.
func Examine(ctx context.Context, o Options) (*Report, error) {
	e := &examination{Options: o}
	r, err := e.runtime(ctx)
	if err != nil {
		return nil, err
	}
	e.binPath = strings.Join(r.BinDirs, ":")
	e.plugin = install.Setup{BinDir: r.BinDirs[0]}.PluginVersion(ctx)
	conf, chain := e.network(ctx, r)
	given, _ := filepath.Abs(e.StateDir)
	switch {
	case e.StateDir == "" && conf != nil:
		e.StateDir = conf.StateDir
	case e.StateDir == "": // off keeps unwind's conflist, which names it
		kept := install.Setup{ConfDir: r.ConfDir, File: e.OwnFile(r)}.Entry()
		e.StateDir = cmp.Or(kept.StateDir, netconf.DefaultStateDir)
	case conf != nil && given != filepath.Clean(conf.StateDir):
		e.add("journal", Warning, "omit --state-dir to examine unwind's journal",
			"examining the journal in %s, but unwind uses the one in %s", e.StateDir, conf.StateDir)
	}
	if chain != nil {
		e.plugins(ctx, r, chain)
	}
	found, err := inspect.Look(ctx, term.Streams{Err: e.Stderr}, inspect.Scope{CRI: "auto",
		Sockets:     []string{r.Socket},
		Directories: node.Directories{ConfDir: r.ConfDir, StateDir: e.StateDir}})
	if err != nil {
		return nil, err
	}
	if found.ListErr != nil {
		e.add("runtime", Failure, term.HintOf(found.ListErr), "%v", found.ListErr)
	}
	if e.degraded(found); e.directory() {
		e.journal(found)
	}
	e.pools(found)
	return &e.Report, nil
}
