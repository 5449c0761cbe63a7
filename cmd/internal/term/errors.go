package term

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// UsageError is an error in the command line: nothing was done.
type UsageError struct{ error }

// Usage returns a UsageError.
func Usage(format string, args ...any) error { return UsageError{fmt.Errorf(format, args...)} }

// Hinted is an error with what to do about it.
type Hinted struct {
	error
	Hint string
}

// Unwrap returns the error without its hint.
func (h *Hinted) Unwrap() error { return h.error }

// WithHint returns an error with what to do about it.
func WithHint(hint, format string, args ...any) error {
	return &Hinted{fmt.Errorf(format, args...), hint}
}

// HintOf returns what an error says is to be done about it, or "".
func HintOf(err error) string {
	var hinted *Hinted
	if errors.As(err, &hinted) {
		return hinted.Hint
	}
	return ""
}

// Coded is an error with an exit code of its own. Its text is empty if the output has said
// everything.
type Coded struct {
	Code int
	Text string
}

func (c Coded) Error() string { return c.Text }

// ExitCode returns the code.
func (c Coded) ExitCode() int { return c.Code }

// The exit codes of both programs. doctor has two more.
const (
	ExitError       = 1 // something could not be done or was not found, or is left to do
	ExitUsage       = 2 // the command line is wrong: nothing was done
	ExitInterrupted = 130
)

// Program returns a command as that of a program: without a command of its own it prints its help,
// and for a word that is none it names those that may be meant.
func Program(root *cobra.Command) *cobra.Command {
	root.Args = NoArgs
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	root.SilenceUsage, root.SilenceErrors = true, true
	root.SuggestionsMinimumDistance = 2
	root.Flags().Bool("version", false, "print the version of this program")
	root.SetVersionTemplate(root.Name() + " {{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return Usage("%w", err) })
	return root
}

// NoArgs is the rule of commands without arguments.
func NoArgs(cmd *cobra.Command, args []string) error {
	err := cobra.NoArgs(cmd, args)
	if err == nil {
		return nil
	}
	if like := cmd.SuggestionsFor(args[0]); len(like) > 0 {
		path := cmd.CommandPath() + " "
		return WithHint("did you mean "+path+strings.Join(like, ", or "+path)+"?", "%w", Usage("%w", err))
	}
	return Usage("%w", err)
}

// OneArg is the rule of commands about one thing, which may be left out if it is in brackets.
func OneArg(cmd *cobra.Command, args []string) error {
	_, name, _ := strings.Cut(cmd.Use, " ")
	if len(args) > 1 || len(args) == 0 && !strings.HasPrefix(name, "[") {
		return Usage("%s takes one argument: %s", cmd.CommandPath(), name)
	}
	return nil
}

// Main runs a program until it is done or a signal interrupts it, prints its error, with what to do
// about it if that is known, and returns the exit code. hint says more than HintOf, or returns "".
func Main(root *cobra.Command, hint func(error) string) (code int) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM,
		syscall.SIGHUP)
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	err := root.ExecuteContext(ctx)
	printError(root, err, hint(err))
	return exitCode(ctx, err)
}

// printError prints an error, and what to do about it.
func printError(root *cobra.Command, err error, hint string) {
	if err == nil || err.Error() == "" {
		return
	}
	fmt.Fprintf(root.ErrOrStderr(), "error: %s\n", strings.ReplaceAll(err.Error(), "\n", "\nerror: "))
	var usage UsageError
	if path := root.CommandPath(); hint == "" && errors.As(err, &usage) {
		hint = path + " --help lists the commands, " + path + " COMMAND --help the flags of a command"
	}
	if hint = cmp.Or(HintOf(err), hint); hint != "" {
		fmt.Fprintf(root.ErrOrStderr(), "hint: %s\n", hint)
	}
}

func exitCode(ctx context.Context, err error) int {
	var usage UsageError
	var coded interface{ ExitCode() int }
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		return ExitUsage
	case errors.As(err, &coded):
		return coded.ExitCode()
	case ctx.Err() != nil:
		return ExitInterrupted
	}
	return ExitError
}
