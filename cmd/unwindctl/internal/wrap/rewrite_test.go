package wrap

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"cni-unwind/cmd/internal/term"
)

// TestRewriteHint has one who may not read or write a configuration not told about the journal.
// Scripts run as root.
func TestRewriteHint(t *testing.T) {
	err := Rewrite{Change: func(Source) ([]byte, error) { return nil, fmt.Errorf("open: %w", fs.ErrPermission) }}.
		Run("../../../../testdata/conflists/cilium.conflist")
	var hinted *term.Hinted
	if !errors.As(err, &hinted) || hinted.Hint != "run this as root" {
		t.Errorf("%v: %+v", err, hinted)
	}
}
