package term

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// UsageError is an error in the command line. A command that returns it has changed nothing.
type UsageError struct{ error }

func Usage(format string, args ...any) error { return UsageError{fmt.Errorf(format, args...)} }

type Hinted struct {
	error
	Hint string
}

func (h *Hinted) Unwrap() error { return h.error }

func WithHint(hint, format string, args ...any) error {
	return &Hinted{fmt.Errorf(format, args...), hint}
}

// HintOf returns the hint that an error contains, or "".
func HintOf(err error) string {
	var hinted *Hinted
	if errors.As(err, &hinted) {
		return hinted.Hint
	}
	return ""
}

// Coded is an error with its own exit code. Its text is empty if the output already shows the
// reason.
type Coded struct {
	Code int
	Text string
}

func (c Coded) Error() string { return c.Text }

// The exit codes of unwindctl and kubectl-unwind. doctor, check and uninstall each have two more,
// and off has one more.
const (
	ExitError       = 1 // something failed, was not found, could not be read, or remains to be done
	ExitUsage       = 2 // usage error; nothing was changed
	ExitInterrupted = 130
)

// Program configures a program's root command: help, --version, and suggestions for unknown names.
func Program(root *cobra.Command) *cobra.Command {
	root.Args = NoArgs
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	root.SilenceUsage, root.SilenceErrors = true, true
	root.SuggestionsMinimumDistance = 2
	root.Flags().Bool("version", false, "print the version of this program")
	width := cmp.Or(Width(os.Stdout), 80)
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), ".FlagUsages",
		fmt.Sprintf(".FlagUsagesWrapped %d", width)))
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		text := strings.TrimSpace(reflow(cmp.Or(cmd.Long, cmd.Short))) + "\n\n" + cmd.UsageString()
		_, _ = io.WriteString(cmd.OutOrStdout(), Wrap(text, width))
	})
	root.SetVersionTemplate(root.Name() + " {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	return root
}

// flagError returns the usage error for pflag's error about a flag.
func flagError(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return Usage("%w", err)
	}
	flag, value := invalid.GetFlag(), invalid.GetValue()
	switch flag.Value.Type() {
	case "bool", "boolfunc":
		return Usage("--%s=%s: must be true or false", flag.Name, value)
	case "duration":
		return WithHint("a duration is a number with a unit, such as 90s, 10m or 2h, up to 2562047h",
			"%w", Usage("--%s %s: must be a duration", flag.Name, value))
	}
	return Usage("--%s %s: %w", flag.Name, value, invalid.Unwrap())
}

func NoArgs(cmd *cobra.Command, args []string) error {
	err := cobra.NoArgs(cmd, args)
	if err == nil {
		return nil
	}
	like := slices.DeleteFunc(cmd.SuggestionsFor(args[0]), func(name string) bool {
		sub, _, _ := cmd.Find([]string{name})
		// cobra suggests "on", "off" and "run" for almost any short word
		return len(name) < 4 && !strings.HasPrefix(args[0], name[:2]) &&
			!slices.Contains(sub.SuggestFor, args[0])
	})
	if len(like) > 0 {
		path := cmd.CommandPath() + " "
		return WithHint("did you mean "+path+strings.Join(like, ", or "+path)+"?", "%w", Usage("%w", err))
	}
	return Usage("%w", err)
}

// checkHelp makes cobra's own commands, "help" and "completion", reject unknown names. For shell
// completion, it removes the backquotes in the flags' help texts.
func checkHelp(root *cobra.Command) {
	if len(os.Args) > 1 && strings.HasPrefix(os.Args[1], cobra.ShellCompRequestCmd) {
		for _, cmd := range root.Commands() {
			cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
				f.Usage = strings.ReplaceAll(f.Usage, "`", "")
			})
		}
	}
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "help":
			cmd.Args = func(_ *cobra.Command, args []string) error {
				of, rest, err := root.Find(args)
				if err == nil && len(rest) > 0 {
					err = NoArgs(of, rest)
				}
				return err
			}
		case "completion":
			cmd.Args, cmd.RunE = NoArgs, root.RunE
		}
	}
}

// OneArg accepts one argument, or none if the argument is in brackets in cmd.Use.
func OneArg(cmd *cobra.Command, args []string) error {
	_, name, _ := strings.Cut(cmd.Use, " ")
	if len(args) > 1 || len(args) == 0 && !strings.HasPrefix(name, "[") {
		return Usage("%s takes one argument: %s", cmd.CommandPath(), name)
	}
	return nil
}

// Main runs a program until it finishes or a signal interrupts it, prints its error with a hint,
// and returns the exit code. hint returns a hint for an error that contains none, or "".
func Main(root *cobra.Command, hint func(error) string) (code int) {
	ctx, interrupt := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	go func() {
		<-signals
		signal.Stop(signals) // first, so that a second signal kills the program immediately
		interrupt()
	}()
	checkHelp(root)
	err := root.ExecuteContext(ctx)
	printError(root, err, hint(err))
	return exitCode(ctx, err)
}

func printError(root *cobra.Command, err error, hint string) {
	if err == nil || err.Error() == "" {
		return
	}
	_ = Print(root.ErrOrStderr(), "error: "+strings.ReplaceAll(err.Error(), "\n", "\nerror: ")+"\n")
	var usage UsageError
	if path := root.CommandPath(); hint == "" && errors.As(err, &usage) {
		hint = path + " --help lists the commands; " + path + " COMMAND --help lists a command's flags"
	}
	hint = cmp.Or(HintOf(err), hint)
	if errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0 && !strings.Contains(hint, "as root") {
		hint = "run this as root"
	}
	if hint != "" {
		_ = Print(root.ErrOrStderr(), "hint: "+hint+"\n")
	}
}

func exitCode(ctx context.Context, err error) int {
	var usage UsageError
	var coded Coded
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		return ExitUsage
	case errors.As(err, &coded):
		return coded.Code
	case ctx.Err() != nil:
		return ExitInterrupted
	}
	return ExitError
}
