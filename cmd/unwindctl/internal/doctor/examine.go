package doctor

import (
	"context"
	"path/filepath"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
)

// Examine checks the runtime, the conflist and its chain, the plugins, the
// NetworkAttachmentDefinitions, the state directory, the journal and the pools. It is read-only.
func Examine(ctx context.Context, o Options) *Report {
	e := &examination{Options: o}
	r := e.runtime(ctx)
	e.plugin = install.Setup{BinDir: r.BinDirs[0]}.PluginVersion(ctx)
	conf, chain := e.network(ctx, r)
	given, _ := filepath.Abs(e.StateDir)
	switch {
	case e.StateDir == "" && conf != nil:
		e.StateDir = conf.StateDir
	case e.StateDir == "":
		e.StateDir = netconf.DefaultStateDir
	case conf != nil && given != filepath.Clean(conf.StateDir):
		e.add("journal", Warning, "omit --state-dir to examine that one",
			"examining the journal in %s, but unwind uses the one in %s", e.StateDir, conf.StateDir)
	}
	if chain != nil {
		e.plugins(ctx, r, chain)
	}
	e.multus(ctx, r)
	scope := inspect.Scope{Directories: node.Directories{ConfDir: r.ConfDir, StateDir: e.StateDir}}
	found := inspect.Look(ctx, term.Streams{Err: e.Stderr}, scope)
	if e.directory() {
		e.journal(ctx, found)
	}
	e.pools(found)
	return &e.Report
}
