package inspect

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"cni-unwind/journal"
)

// TestHint has the hints that no script can show: scripts run as root, and do not wait for locks.
func TestHint(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		want string
	}{
		{"not root", &fs.PathError{Op: "open", Path: "/var/lib/cni/unwind/journal.lock", Err: fs.ErrPermission}, "run this as root"},
		{"busy", journal.ErrBusy, "another process is using the journal; try again"},
		{"one of two", errors.Join(errors.New("other"), journal.ErrBusy), "another process is using the journal; try again"},
		{"nothing to do", errors.New("other"), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := HintFor(fmt.Errorf("journal: %w", tt.err)); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
