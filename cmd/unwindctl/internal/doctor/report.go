// Package doctor reports problems with unwind on a node and how to fix them.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
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
	Warning          // something may leak, or cannot be checked
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

// Report holds the findings. Examine returns them sorted, the worst first.
type Report struct {
	checks []check
	plugin string // the version of unwind's plugin, "" if unknown
}

func (r *Report) add(what string, s Severity, remedy, format string, args ...any) {
	text := strings.ReplaceAll(fmt.Sprintf(format, args...), "\n", "; ")
	r.checks = append(r.checks, check{what, s, term.Printable(text), remedy})
}

// Worst returns the highest severity.
func (r *Report) Worst() Severity { return r.checks[0].Severity }

// First returns the worst problem, and its remedy.
func (r *Report) First() (text, remedy string) {
	c := r.checks[0]
	return c.What + ": " + strings.TrimSuffix(c.Text, "."), c.Remedy
}

// Print prints a table of the problems, with their remedies. If all is set, it adds passed checks.
// As JSON, it prints all checks. As a Line, it prints the worst problem, and counts the others.
func (r *Report) Print(out io.Writer, o *term.Output, all bool) error {
	if o.IsObject() {
		return o.PrintObject(out, "checks", r.checks, "plugin", r.plugin)
	}
	t := term.NewTable(term.Column{}, term.Column{}, term.Column{Least: 20, Wrap: true})
	count := map[Severity]int{}
	for _, c := range r.checks {
		count[c.Severity]++
		if c.Severity == OK && !all {
			continue
		}
		t.Add(term.State(out, c.Severity.String()), c.What, c.Text)
		if c.Remedy != "" {
			t.Add("", "", "→ "+c.Remedy)
		}
	}
	var err error
	last := fmt.Sprintf("%s, %s, %s passed.", term.Plural(count[Failure], "error", "errors"),
		term.Plural(count[Warning], "warning", "warnings"), term.Plural(count[OK], "check", "checks"))
	if o.Format != term.Line {
		err = t.Print(out, o)
	} else if last = r.Worst().String(); r.Worst() != OK {
		last += ": " + r.checks[0].What + ": " + strings.TrimSuffix(r.checks[0].Text, ".")
		if more := len(r.checks) - count[OK] - 1; more > 0 {
			last += "; " + term.Plural(more, "more problem", "more problems")
		}
	}
	return errors.Join(err, term.Print(out, last+"\n"))
}

type Options struct {
	install.Target
	StateDir string    // of the journal; "" for the one in unwind's conflist
	Version  string    // this program's version
	Stderr   io.Writer // for the dry run of a sweep
}

type examination struct {
	Options
	Report
	binPath string            // the plugin directories, in CNI_PATH's format
	used    *netconf.Conflist // the conflist that runs unwind, or nil
	observe bool              // unwind's entry forbids sweeps on STATUS and GC
	agent   string            // the agent's process ID, or ""
}

// Examine checks the runtime, the conflist and its chain, the plugins, the state directory, the
// journal and the pools. It is read-only, but runs each plugin with CNI_COMMAND=VERSION. It returns
// a UsageError if the options do not select a runtime of this node.
func Examine(ctx context.Context, o Options) (*Report, error) {
	e := &examination{Options: o}
	r, err := e.runtime(ctx)
	if err != nil {
		return nil, err
	}
	e.binPath = strings.Join(r.BinDirs, ":")
	plugin, _ := netconf.FindPlugin(netconf.Name, e.binPath)
	binDir := filepath.Dir(cmp.Or(plugin, filepath.Join(r.BinDirs[0], netconf.Name)))
	e.plugin = install.Setup{BinDir: binDir}.PluginVersion(ctx)
	conf, chain := e.network(ctx, r)
	if e.StateDir != "" { // to compare it with conf.StateDir, which is absolute
		e.StateDir, _ = filepath.Abs(e.StateDir)
	}
	switch {
	case e.StateDir == "" && conf != nil:
		e.StateDir = conf.StateDir
	case e.StateDir == "": // unwindctl off keeps unwind's conflist, which names the directory
		kept := install.Setup{ConfDir: r.ConfDir, File: e.OwnFile(r)}.Entry()
		e.StateDir = cmp.Or(kept.StateDir, netconf.DefaultStateDir)
	case conf != nil && e.StateDir != conf.StateDir:
		e.add("journal", Warning, "omit --state-dir to examine unwind's journal",
			"examining the journal in %s, but unwind uses the one in %s", e.StateDir, conf.StateDir)
	}
	e.agent = install.AgentProcess(e.StateDir)
	if chain != nil {
		e.plugins(ctx, r, chain)
	}
	found, err := inspect.NewReport(ctx, term.Streams{Err: e.Stderr}, inspect.Scope{CRI: "auto",
		Sockets:     []string{r.Socket},
		Directories: node.Directories{ConfDir: r.ConfDir, StateDir: e.StateDir}})
	if err != nil {
		return nil, err
	}
	if found.ListErr != nil {
		e.add("runtime", Failure, term.HintOf(found.ListErr), "%v", found.ListErr)
	}
	e.degraded(found)
	e.rollbacks(found.Events)
	if e.directory(found) {
		e.journal(found)
	}
	e.pools(found)
	slices.SortStableFunc(e.checks, func(a, b check) int {
		if by := int(b.Severity - a.Severity); by != 0 || a.What == b.What {
			return by
		}
		switch "pods" { // failing ADDs are acute, so -o line prints them before other warnings
		case a.What:
			return -1
		case b.What:
			return 1
		}
		return 0
	})
	return &e.Report, nil
}
