package wrap

import (
	"fmt"
	"io/fs"
	"testing"

	"cni-unwind/cmd/unwindctl/internal/term"
)

// TestRewriteHint has one who may not read or write a configuration not told about the journal.
// Scripts run as root.
func TestRewriteHint(t *testing.T) {
	err := Rewrite{Change: func(Source) ([]byte, error) { return nil, fmt.Errorf("open: %w", fs.ErrPermission) }}.
		Run("../../../../testdata/conflists/cilium.conflist")
	if err == nil || term.HintFor(err) != "run this as root" {
		t.Errorf("%v: hint %q", err, term.HintFor(err))
	}
}
