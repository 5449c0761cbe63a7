package term

import "fmt"

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
