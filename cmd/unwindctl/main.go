// Command unwindctl is the operator's program: it shows what unwind's journal holds, and releases what is dead.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"runtime"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"cni-unwind/journal"
)

// version is set by the linker.
var version = "dev"

// init keeps the main thread for this goroutine: where that thread is, the process is for others, see stay.
func init() { runtime.LockOSThread() }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	err := rootCommand().ExecuteContext(ctx)
	if err != nil && err.Error() != "" {
		fmt.Fprintf(os.Stderr, "error: %s\n", strings.ReplaceAll(err.Error(), "\n", "\nerror: "))
		if hint := hintFor(err); hint != "" {
			fmt.Fprintf(os.Stderr, "hint: %s\n", hint)
		}
	}
	os.Exit(exitCode(ctx, err))
}

// The exit codes, of which doctor has two more.
const (
	exitError       = 1 // something could not be done, or is left to do
	exitUsage       = 2 // the command line is wrong: nothing was done
	exitInterrupted = 130
)

func exitCode(ctx context.Context, err error) int {
	var usage usageError
	var coded interface{ ExitCode() int }
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		return exitUsage
	case errors.As(err, &coded):
		return coded.ExitCode()
	case ctx.Err() != nil:
		return exitInterrupted
	}
	return exitError
}

// usageError is an error in the command line.
type usageError struct{ error }

// hintFor says what to do about an error that does not say so itself, or nothing.
func hintFor(err error) string {
	var damaged *journal.DamagedError
	var usage usageError
	var hinting interface{ Hint() string }
	switch {
	case errors.As(err, &hinting):
		return hinting.Hint()
	case errors.As(err, &usage):
		return "unwindctl --help lists the commands, unwindctl COMMAND --help the flags of one"
	case errors.Is(err, fs.ErrPermission):
		return "the journal is root's; run this as root"
	case errors.Is(err, journal.ErrDamaged):
		return "the next ADD, DEL or sweep of unwind's sets the file aside, keeps it, and begins a new one; pods that run are not touched"
	case errors.Is(err, journal.ErrBusy):
		return "another program has held the journal for some seconds; try again"
	case errors.As(err, &damaged):
		return "its next ADD or DEL writes over it; the DEL goes by what the runtime sends"
	}
	return ""
}

func rootCommand() *cobra.Command {
	var host bool
	root := &cobra.Command{
		Use:   "unwindctl",
		Short: "Operate the CNI plugin unwind: see what it keeps and why, release what is dead, install it, switch it off",
		Long: "Operate the CNI plugin unwind: see what it keeps and why, release what is dead, install it, switch it off.\n\n" +
			"Results go to stdout; errors, each with a hint where there is one, to stderr. --json prints an object with a version, which\n" +
			"is 1: keys may be added within a version, none is removed or changes its meaning.\n\n" +
			"Every command can be cut off at any time, and be run again. The exit codes:\n" +
			"  0    done\n" +
			"  1    something could not be done, or is left to do\n" +
			"  2    the command line is wrong; nothing was done\n" +
			"  3    doctor: the worst is a warning\n" +
			"  4    doctor: the worst is an error\n" +
			"  130  interrupted",
		Args:          noArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if host {
				return enterHost(cmd.Context(), cmd.Name() == "run")
			}
			return nil
		},
	}
	root.PersistentFlags().BoolVar(&host, "host", false, "from a container with hostPID: enter the host's mount and network namespaces first")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	for _, group := range []struct {
		id, title string
		commands  []*cobra.Command
	}{
		{"look", "See what is going on:", []*cobra.Command{doctorCommand(), listCommand(), showCommand(), historyCommand(), ipamCommand(), metricsCommand()}},
		{"act", "Release what is dead:", []*cobra.Command{sweepCommand(), forgetCommand()}},
		{"install", "Install and switch off:", []*cobra.Command{installCommand(), uninstallCommand(), runCommand(), wrapCommand(), unwrapCommand()}},
	} {
		root.AddGroup(&cobra.Group{ID: group.id, Title: group.title})
		for _, cmd := range group.commands {
			cmd.GroupID = group.id
			root.AddCommand(cmd)
		}
	}
	root.AddCommand(versionCommand())
	return root
}

// oneArg is what commands about one thing take.
func oneArg(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return usageError{fmt.Errorf("%s takes one argument: %s", cmd.CommandPath(), strings.TrimPrefix(cmd.Use, cmd.Name()+" "))}
	}
	return nil
}

// noArgs is what most commands take.
func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return usageError{err}
	}
	return nil
}
