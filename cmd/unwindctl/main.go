// Command unwindctl is the operator's program: it shows what unwind's journal holds, and releases
// what is dead.
//
// This package has the command lines, one file a command. The packages below internal do the work.
// Each uses only packages above it in this list:
//
//	term     texts, tables, formats, usage errors, hints; in cmd/internal
//	durable  files that are replaced and removed for good
//	node     the runtimes of a node, and where each keeps what
//	wrap     a chain moved into unwind's entry, and back
//	inspect  attachments and pools, sentences about them, and hints
//	install  the plan of an install, and how it is carried out
//	doctor   what is wrong on a node
//	metrics  for Prometheus
//	agent    unwindctl run
package main

import (
	"os"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/inspect"
	"cni-unwind/cmd/unwindctl/internal/install"
)

// init keeps the main thread for this goroutine. Other processes see the namespaces of that thread
// as those of this process, see install.EnterHost.
func init() { runtime.LockOSThread() }

func main() { os.Exit(term.Main(rootCommand(), inspect.HintFor)) }

// dirEnv has the defaults of flags. What is run in an agent's container so finds the agent's own.
var dirEnv = map[string]string{"conf-dir": "UNWIND_CONF_DIR", "bin-dir": "UNWIND_BIN_DIR",
	"state-dir": "UNWIND_STATE_DIR"}

func rootCommand() *cobra.Command {
	var host bool
	root := term.Program(&cobra.Command{
		Use: "unwindctl",
		Short: "Operate the CNI plugin unwind: see what it keeps and why, release what is dead, " +
			"install it, switch it off",
		Long: "Operate the CNI plugin unwind: see what it keeps and why, release what is dead,\n" +
			"install it, switch it off.\n\n" +
			"Results go to stdout; errors, each with a hint where there is one, to stderr.\n" +
			"The formats of -o:\n" +
			"  table  on a terminal it fits the width: texts that end in … are cut, and\n" +
			"         columns may be left out; elsewhere it is whole\n" +
			"  wide   all columns, nothing is cut\n" +
			"  json   an object with a version, which is 1: keys may be added within a\n" +
			"         version, none is removed or changes its meaning; --json is the same\n" +
			"  yaml   the same object\n" +
			"  name   arguments for show, sweep and forget, one a line\n" +
			"  line   doctor: the worst that it finds, in one line\n\n" +
			"UNWIND_CONF_DIR, UNWIND_BIN_DIR and UNWIND_STATE_DIR are the defaults of --conf-dir,\n" +
			"--bin-dir and --state-dir.\n\n" +
			"Every command can be cut off at any time, and be run again. The exit codes:\n" +
			"  0    done\n" +
			"  1    something could not be done or was not found, or is left to do\n" +
			"  2    the command line is wrong; nothing was done\n" +
			"  3    doctor: the worst is a warning (with --fail-on 0 or 1)\n" +
			"  4    doctor: the worst is an error (with --fail-on 1)\n" +
			"  130  interrupted",
		Example: "  unwindctl doctor\n" +
			"  unwindctl show default/web-0\n" +
			"  unwindctl sweep --dry-run",
		Version: version,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			for name, env := range dirEnv {
				if f := cmd.Flags().Lookup(name); f != nil && !f.Changed {
					_ = f.Value.Set(os.Getenv(env)) // a string
				}
			}
			if host {
				return install.EnterHost(cmd.Context(), cmd.Name() == "run")
			}
			return nil
		},
	})
	root.PersistentFlags().BoolVar(&host, "host", false,
		"from a container with hostPID: enter the host's mount and network namespaces first")
	for _, group := range []struct {
		id, title string
		commands  []*cobra.Command
	}{
		{"look", "See what is going on:", []*cobra.Command{doctorCommand(), listCommand(),
			showCommand(), historyCommand(), ipamCommand(), metricsCommand()}},
		{"act", "Release what is dead:", []*cobra.Command{sweepCommand(), forgetCommand()}},
		{"install", "Install and switch off:",
			[]*cobra.Command{installCommand(), onCommand(), offCommand(),
				uninstallCommand(), runCommand(), wrapCommand(), unwrapCommand()}},
	} {
		root.AddGroup(&cobra.Group{ID: group.id, Title: group.title})
		for _, cmd := range group.commands {
			cmd.GroupID = group.id
			if !strings.Contains(cmd.Use, " ") { // it takes no argument
				cmd.Args, cmd.ValidArgsFunction = term.NoArgs, cobra.NoFileCompletions
			}
			root.AddCommand(cmd)
		}
	}
	root.AddCommand(versionCommand())
	return root
}
