package record

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
)

// TestTrouble covers the causes that no test can produce.
func TestTrouble(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]error{
		"permission": syscall.EACCES, "full": syscall.EDQUOT, "busy": context.DeadlineExceeded, "other": errors.New("other"),
	} {
		if got := trouble(fmt.Errorf("journal: %w", &os.PathError{Op: "open", Path: "p", Err: err})); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}
