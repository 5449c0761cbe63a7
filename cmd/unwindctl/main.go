// Command unwindctl is the operator's program: it shows unwind's journal, releases dead
// attachments, and installs unwind.
//
// This package defines the command lines, with one or a few commands in each file. The packages in
// internal do the work. Each imports only packages above it in this list:
//
//	term     tables, formats, usage errors, hints; in cmd/internal
//	durable  replaces and removes files durably
//	node     finds the runtimes of a node and their directories
//	pools    reads the ranges and the taken addresses of host-local pools
//	inspect  reads attachments and pools, and describes them
//	install  plans and carries out an install
//	doctor   reports problems of a node
//	trial    checks that the network works, with a test attachment
//	bundle   collects files for a bug report
//	metrics  exports metrics to Prometheus
//	agent    unwindctl run
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/cmd/unwindctl/internal/trial"
)

// init keeps other goroutines off the main thread, so that they cannot change its namespaces. Other
// processes see the main thread's namespaces as the whole process's (see install.EnterHost).
func init() { runtime.LockOSThread() }

func main() {
	if filepath.Base(os.Args[0]) == trial.PluginName { // unwind runs this program as a plugin
		trial.Plugin()
		return
	}
	os.Exit(term.Main(rootCommand(), inspect.HintFor))
}

// dirEnv maps flags to the environment variables that set their defaults. In an agent's container,
// these variables can make all commands use the agent's directories.
var dirEnv = map[string]string{"conf-dir": "UNWIND_CONF_DIR", "cni-bin-dir": "UNWIND_BIN_DIR",
	"state-dir": "UNWIND_STATE_DIR", "install-dir": "UNWIND_INSTALL_DIR"}

func rootCommand() *cobra.Command {
	var host bool
	root := term.Program(&cobra.Command{
		Use: "unwindctl",
		Short: "Operate the CNI plugin unwind: inspect attachments, release dead ones, " +
			"install unwind, switch it off",
		Long: "Operate the CNI plugin unwind: inspect attachments, release dead ones, install\n" +
			"unwind, switch it off.\n\n" +
			"Results go to stdout; errors and hints go to stderr. The formats of -o:\n" +
			"  table  a table that fits the terminal: long texts are cut and end in …, and\n" +
			"         columns may be left out; nothing is cut if the output is not a terminal\n" +
			"  wide   a table with all columns, in which nothing is cut\n" +
			"  json   an object with \"version\": 1, to which later releases may add keys, but\n" +
			"         remove none and change no key's meaning; the same as --json\n" +
			"  name   arguments for show, sweep and forget, one per line\n" +
			"  line   one line: for doctor, the worst problem; for ipam and sweep, a summary\n\n" +
			"UNWIND_CONF_DIR, UNWIND_BIN_DIR, UNWIND_STATE_DIR and UNWIND_INSTALL_DIR set the\n" +
			"defaults of --conf-dir, --cni-bin-dir, --state-dir and --install-dir.\n\n" +
			"Every command can be interrupted at any time and run again. " + describeExits("unwindctl"),
		Example: "  unwindctl doctor\n" +
			"  unwindctl show default/web-0\n" +
			"  unwindctl sweep --dry-run",
		Version: version,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			for name, env := range dirEnv {
				if f := cmd.Flags().Lookup(name); f != nil && !f.Changed && os.Getenv(env) != "" {
					_ = f.Value.Set(os.Getenv(env)) // never fails for a string
				}
			}
			if err := refuseEmpty(cmd); err != nil {
				return err
			}
			if cmd.Name() != "run" { // run prints no message about waiting, only its log
				cmd.SetContext(waiting(cmd))
			}
			if host {
				return install.EnterHost(cmd.Context(), cmd.Name() == "run")
			}
			return nil
		},
	})
	root.PersistentFlags().BoolVar(&host, "host", false,
		"in a container with hostPID: enter the host's mount and network namespaces first")
	for _, group := range []struct {
		id, title string
		commands  []*cobra.Command
	}{
		{"look", "Inspect:", []*cobra.Command{doctorCommand(), checkCommand(), listCommand(),
			showCommand(), historyCommand(), ipamCommand(), metricsCommand(), reportCommand()}},
		{"act", "Release:", []*cobra.Command{sweepCommand(), forgetCommand()}},
		{"install", "Install, switch on or off, uninstall:",
			[]*cobra.Command{installCommand(), onCommand(), offCommand(),
				uninstallCommand(), runCommand(), wrapCommand(), unwrapCommand()}},
	} {
		root.AddGroup(&cobra.Group{ID: group.id, Title: group.title})
		for _, cmd := range group.commands {
			cmd.GroupID = group.id
			if !strings.Contains(cmd.Use, " ") { // the command takes no argument
				cmd.Args, cmd.ValidArgsFunction = term.NoArgs, cobra.NoFileCompletions
			}
			root.AddCommand(cmd)
		}
	}
	root.AddCommand(versionCommand())
	return root
}

// waiting returns a command's context, with the socket of --cri and a time limit for queries.
func waiting(cmd *cobra.Command) context.Context {
	within, only := node.LookTimeout, ""
	if slices.Contains([]string{"sweep", "install", "on"}, cmd.Name()) {
		within = node.ActTimeout
	}
	if f := cmd.Flags().Lookup("cri"); f != nil && f.Value.String() != "auto" &&
		f.Value.String() != "none" {
		only = f.Value.String()
	}
	return node.Waiting(cmd.Context(), cmd.ErrOrStderr(), within, only)
}

// version is set by the linker.
var version = "dev"

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this program",
		Example: "  unwindctl version",
		Args:    term.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "unwindctl", version)
			return err
		},
	}
}
