package alive

import (
	"testing"

	"cni-unwind/journal"
	"cni-unwind/plugin/tristate"
)

func TestOtherHost(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		ours, theirs string
		want         tristate.Value
	}{
		{"dmi:1", "dmi:1", tristate.No}, {"dmi:1", "dmi:2", tristate.Yes}, {"machine-id:1", "machine-id:1", tristate.No}, {"machine-id:1", "machine-id:2", tristate.Yes},
		{"dmi:1", "machine-id:1", tristate.Unknown}, {"machine-id:1", "dmi:1", tristate.Unknown}, {"dmi:1", "machine-id:2", tristate.Unknown},
		{"", "", tristate.Unknown}, {"", "dmi:1", tristate.Unknown}, {"dmi:1", "", tristate.Unknown},
	} {
		o := &Node{Host: journal.Host{Machine: c.ours}}
		if got := o.otherHost(&journal.Generation{Host: journal.Host{Machine: c.theirs}}); got != c.want {
			t.Errorf("here %q, there %q: %d, want %d", c.ours, c.theirs, got, c.want)
		}
	}
}
