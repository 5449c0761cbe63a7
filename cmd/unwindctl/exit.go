package main

import (
	"context"
	"errors"

	"cni-unwind/cmd/internal/term"
)

// The exit codes. doctor has two more.
const (
	exitError       = 1 // something could not be done or was not found, or is left to do
	exitUsage       = 2 // the command line is wrong: nothing was done
	exitInterrupted = 130
)

func exitCode(ctx context.Context, err error) int {
	var usage term.UsageError
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
