package main

import (
	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/plugin/netconf"
)

// addStateFlag adds the flag of every command that reads the journal, and has the directories
// resolved before the command runs.
func addStateFlag(cmd *cobra.Command, at *node.Directories) {
	cmd.PreRunE = func(*cobra.Command, []string) error { return at.Resolve() }
	cmd.Flags().StringVar(&at.StateDir, "state-dir", "",
		"the journal is in `DIR` (default: as unwind's conflist has it, "+
			"else "+netconf.DefaultStateDir+")")
	_ = cmd.MarkFlagDirname("state-dir")
}

// addNetworkFlag adds the flag of commands about a network that the journal has.
func addNetworkFlag(cmd *cobra.Command, at *node.Directories, network *string, help string) {
	cmd.Flags().StringVar(network, "network", "", help)
	_ = cmd.RegisterFlagCompletionFunc("network",
		func(cmd *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			return beginning(begun, complete(cmd, *at, true).Networks), cobra.ShellCompDirectiveNoFileComp
		})
}

// addScopeFlags adds the flags of every command that judges attachments.
func addScopeFlags(cmd *cobra.Command, of *inspect.Scope) {
	cmd.Flags().StringVar(&of.CRI, "cri", "",
		"ask the runtime at `SOCKET` for its pods, such as /run/containerd/containerd.sock; auto "+
			"finds it")
	cmd.Flags().StringVar(&of.ConfDir, "conf-dir", "",
		"the conflists, which name the pools of host-local, are in `DIR` (default: the runtime's)")
	_ = cmd.MarkFlagDirname("conf-dir")
	_ = cmd.RegisterFlagCompletionFunc("cri", completeSockets)
	addStateFlag(cmd, &of.Directories)
}

// lookFormats are the formats of most commands that look.
var lookFormats = []term.Format{term.Plain, term.Wide, term.JSON, term.Name}

func addInstallFlags(cmd *cobra.Command, flags *install.Options) {
	addPlaceFlags(cmd, &flags.Target)
	cmd.Flags().StringVar(&flags.Conf, "conf", "",
		"the provider's conflist is `FILE` (default: the first of the directory)")
	cmd.Flags().StringVar(&flags.Binary, "binary", "",
		"the plugin to install is `FILE` (default: unwind beside this program)")
	cmd.Flags().StringVar(&flags.StateDir, "state-dir", "",
		"the journal goes to `DIR` (default "+netconf.DefaultStateDir+")")
	cmd.Flags().BoolVar(&flags.Observe, "observe", false,
		"keep the journal and undo failed ADDs, but sweep neither on STATUS nor on GC")
}

// programDir is where unwindctl goes on a node. The linker can set another.
var programDir = "/usr/local/bin"

// addNodeFlags adds the flags about what is on a node beside the runtime's own directories.
func addNodeFlags(cmd *cobra.Command, programs, units *string, unitDir string) {
	cmd.Flags().StringVar(programs, "program-dir", programDir,
		"unwindctl, with the plugin to install beside it, is in `DIR`; an empty one for nowhere")
	cmd.Flags().StringVar(units, "systemd", unitDir,
		"systemd's units for sweeps and the agent are in `DIR`; none is enabled")
	cmd.Flags().Lookup("systemd").NoOptDefVal = install.DefaultUnitDir
}

func addPlaceFlags(cmd *cobra.Command, flags *install.Target) {
	cmd.Flags().StringVar(&flags.Runtime, "runtime", "",
		"the directories are those of this `RUNTIME`, where there are several")
	cmd.Flags().StringVar(&flags.ConfDir, "conf-dir", "", "the runtime's conflists are in `DIR`")
	cmd.Flags().StringVar(&flags.BinDir, "bin-dir", "", "the runtime's plugins are in `DIR`")
	cmd.Flags().StringVar(&flags.File, "file", "",
		"the `NAME` of unwind's file, which must sort first (default 00-unwind.json; "+
			"00-unwind.conflist without a runtime of CRI)")
}
