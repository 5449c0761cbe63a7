package term

import (
	"errors"
	"fmt"
	"io/fs"

	"cni-unwind/journal"
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

// HintFor returns what to do about an error, "" if there is nothing to say.
func HintFor(err error) string {
	var damaged *journal.DamagedError
	var usage UsageError
	var hinted *Hinted
	switch {
	case errors.As(err, &hinted):
		return hinted.Hint
	case errors.As(err, &usage):
		return "unwindctl --help lists the commands, unwindctl COMMAND --help the flags of one"
	case errors.Is(err, fs.ErrPermission):
		return "the journal is root's; run this as root"
	case errors.Is(err, journal.ErrDamaged):
		return "the next ADD, DEL or sweep of unwind's sets the file aside, keeps it, and begins " +
			"a new one; pods that run are not touched"
	case errors.Is(err, journal.ErrBusy):
		return "another program has held the journal for some seconds; try again"
	case errors.As(err, &damaged):
		return "its next ADD or DEL writes over it; the DEL goes by what the runtime sends"
	}
	return ""
}
