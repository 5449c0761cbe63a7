package term

import (
	"context"
	"errors"
	"fmt"
	"testing"
)

// TestExitCode has the codes of errors that come together: the command line before all.
func TestExitCode(t *testing.T) {
	t.Parallel()
	alive := t.Context()
	interrupted, cancel := context.WithCancel(alive)
	cancel()
	usage, other := Usage("usage"), errors.New("other")
	for _, c := range []struct {
		name string
		ctx  context.Context
		err  error
		want int
	}{
		{"none", alive, nil, 0}, {"an error", alive, other, 1}, {"the command line", alive, usage, 2},
		{"both", alive, errors.Join(other, fmt.Errorf("wrapped: %w", usage)), 2},
		{"interrupted", interrupted, other, 130}, {"interrupted, and done all the same", interrupted, nil, 0},
	} {
		if got := exitCode(c.ctx, c.err); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}
