package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/durable"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
)

// addStateFlag adds --state-dir, and makes the command resolve its directories before it runs.
func addStateFlag(cmd *cobra.Command, at *node.Directories) {
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error { return at.Resolve(cmd.Context()) }
	cmd.Flags().StringVar(&at.StateDir, "state-dir", "",
		"use the journal in `DIR` (default: stateDir in unwind's conflist, "+
			"else "+netconf.DefaultStateDir+")")
	_ = cmd.MarkFlagDirname("state-dir")
}

// addNetworkFlag adds --network. The shell completes it from the journal and past events.
func addNetworkFlag(cmd *cobra.Command, at *node.Directories, network *string, help string) {
	cmd.Flags().StringVar(network, "network", "", help)
	_ = cmd.RegisterFlagCompletionFunc("network",
		func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			_, networks := complete(cmd, *at, true)
			return networks, cobra.ShellCompDirectiveNoFileComp
		})
}

// addScopeFlags adds the flags of commands that judge attachments.
func addScopeFlags(cmd *cobra.Command, of *inspect.Scope) {
	addCRIFlag(cmd, &of.CRI)
	cmd.Flags().StringVar(&of.ConfDir, "conf-dir", "",
		"read the host-local pools from the conflists in `DIR` (default: the runtime's directory)")
	addStateFlag(cmd, &of.Directories)
	checkDirs(cmd, "conf-dir")
}

func addCRIFlag(cmd *cobra.Command, cri *string) {
	cmd.Flags().StringVar(cri, "cri", "auto",
		"get the list of pods from the runtime at `SOCKET`; auto finds the socket, none uses no list")
	_ = cmd.RegisterFlagCompletionFunc("cri", completeSockets)
}

// noCache is the value of --cache-dir for a runtime without a libcni cache.
const noCache = "none"

// checkDirs makes a command return a usage error if one of the named flags is set to a path that is
// not a directory, because the user has probably mistyped the path.
func checkDirs(cmd *cobra.Command, names ...string) {
	run := cmd.PreRunE
	cmd.PreRunE = func(cmd *cobra.Command, args []string) error {
		for _, name := range names {
			flag := cmd.Flags().Lookup(name)
			dir := flag.Value.String()
			if name == "cni-bin-dir" { // a list
				dir, _, _ = strings.Cut(dir, ":")
			}
			if !flag.Changed || dir == "" || name == "cache-dir" && dir == noCache {
				continue
			}
			if problem := durable.NotDirectory(dir); problem != "" {
				return term.WithHint("correct --"+name+", or omit it", "%w",
					term.Usage("--%s %s: %s", name, dir, problem))
			}
		}
		if run == nil {
			return nil
		}
		return run(cmd, args)
	}
	for _, name := range names {
		_ = cmd.MarkFlagDirname(name)
	}
}

// mayBeEmpty lists the flags that accept an empty value.
var mayBeEmpty = []string{"install-dir", "listen"}

// refuseEmpty returns an error if a flag that is not in mayBeEmpty is set to "", probably by a
// script with an empty variable.
func refuseEmpty(cmd *cobra.Command) (err error) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		isText := f.Value.Type() == "string"
		if isText && f.Value.String() == "" && !slices.Contains(mayBeEmpty, f.Name) {
			err = term.WithHint("set --"+f.Name+" to a value, or omit it", "%w",
				term.Usage("--%s is empty", f.Name))
		}
	})
	return err
}

// lookFormats are the formats of most read-only commands.
var lookFormats = []term.Format{term.Plain, term.Wide, term.JSON, term.Name}

func addInstallFlags(cmd *cobra.Command, flags *install.Options) {
	addPlaceFlags(cmd, &flags.Target)
	cmd.Flags().StringVar(&flags.Conf, "provider-conf", "",
		"use `FILE` as the provider's conflist (default: the directory's first that is not unwind's)")
	cmd.Flags().StringVar(&flags.Binary, "binary", "",
		"install the plugin `FILE` (default: unwind in the directory of this program)")
	cmd.Flags().StringVar(&flags.StateDir, "state-dir", "",
		"keep the journal in `DIR` (default "+netconf.DefaultStateDir+")")
	cmd.Flags().BoolVar(&flags.Observe, "observe", false,
		"record attachments and undo failed ADDs, but do not sweep on STATUS or GC")
}

// programDir is the default of --install-dir. A build can replace it with the linker's flag -X.
var programDir = "/usr/local/bin"

// addNodeFlags adds --install-dir and --systemd.
func addNodeFlags(cmd *cobra.Command, programs, units *string, unitDir string) {
	cmd.Flags().StringVar(programs, "install-dir", programDir,
		"copy unwindctl and the plugin to `DIR`; if empty, copy neither")
	cmd.Flags().StringVar(units, "systemd", unitDir,
		"write the systemd units for sweeps and the agent to `DIR`, without enabling them")
	cmd.Flags().Lookup("systemd").NoOptDefVal = install.DefaultUnitDir
	checkDirs(cmd, "install-dir", "systemd")
}

func addPlaceFlags(cmd *cobra.Command, flags *install.Target) {
	cmd.Flags().StringVar(&flags.Runtime, "runtime", "",
		"use the directories of this `RUNTIME` if the node has several runtimes")
	_ = cmd.RegisterFlagCompletionFunc("runtime", cobra.FixedCompletions(node.RuntimeNames(),
		cobra.ShellCompDirectiveNoFileComp))
	cmd.Flags().StringVar(&flags.ConfDir, "conf-dir", "",
		"set the runtime's conflist directory to `DIR` (default: detected)")
	cmd.Flags().StringVar(&flags.BinDir, "cni-bin-dir", "",
		"set the runtime's plugin directory to `DIR`, or to a list like CNI_PATH, whose first "+
			"directory gets unwind (default: detected)")
	cmd.Flags().StringVar(&flags.File, "unwind-file", "",
		"use `NAME` for unwind's file; it must sort first (default 00-unwind.json, or "+
			"00-unwind.conflist without a CRI runtime)")
}

func streams(cmd *cobra.Command) term.Streams {
	return term.Streams{In: cmd.InOrStdin(), Out: cmd.OutOrStdout(), Err: cmd.ErrOrStderr()}
}

// completeNames returns the completion of an argument that names an attachment, a pod or an
// address. The names come from the journal and, if history is set, also from past events.
func completeNames(at *node.Directories, history bool) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		names, _ := complete(cmd, *at, history)
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

// completeSockets completes --cri with auto, none, and the runtimes' default sockets on this node.
func completeSockets(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	sockets := slices.DeleteFunc(slices.Clone(node.CRISockets), func(path string) bool {
		return !durable.Exists(path)
	})
	return append(sockets, "auto", "none"), cobra.ShellCompDirectiveDefault
}

func complete(cmd *cobra.Command, at node.Directories, history bool) (args, networks []string) {
	if at.Resolve(cmd.Context()) != nil {
		return nil, nil
	}
	return inspect.Complete(cmd.Context(), at.StateDir, history)
}
