package inspect

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"strings"
	"testing"
	"time"

	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
)

// TestStepState covers states that depend on the current time, so scripts cannot test these states.
func TestStepState(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		step journal.Step
		next time.Duration
		want string
	}{
		{journal.Step{Tries: 1, Last: "no route.", Code: 11}, 2 * time.Minute, "failed (code 11); next try in 2m"},
		{journal.Step{Tries: 2, Last: "no", Code: 11}, -time.Hour, "failed (code 11)"},
		{journal.Step{Tries: 1}, -time.Hour, "killed, or still running"},
	} {
		tt.step.Next = journal.Next{Why: journal.ForBackoff, At: journal.BootNanos() + int64(tt.next+time.Second)}
		e := &journal.Record{State: journal.Deleting, Steps: []journal.Step{tt.step}}
		a := judged(e, &sweep.Finding{})
		if got := a.Steps[0].state(true); got != tt.want {
			t.Errorf("%q, want %q", got, tt.want)
		}
	}
}

// TestHint: HintFor returns the hint for an error, even if the error is wrapped or joined with
// another one.
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

// TestLeaks: leaksOfStep lists the resources that one plugin may leave behind.
func TestLeaks(t *testing.T) {
	e := &journal.Record{Key: journal.Key{Network: "podnet", ContainerID: "c", IfName: "eth0"},
		Got: journal.Got{Claims: []journal.Claim{{Address: netip.MustParseAddr("10.9.0.2")}}}}
	const anything = "anything that bridge created for container c, interface eth0"
	for _, tt := range []struct{ plugin, config, want string }{
		{"bridge", `{}`, anything}, {"bridge", `[`, anything}, {"loopback", `{}`, ""},
		{"bridge", `{"ipam": {"type": "whereabouts"}}`, "reserved by whereabouts for container c: 10.9.0.2\n" + anything},
		{"bridge", `{"ipam": {"type": "host-local", "dataDir": "/nonexistent"}}`, anything},
	} {
		got := leaksOfStep(e, &journal.Step{Type: tt.plugin, Config: json.RawMessage(tt.config)})
		if strings.Join(got, "\n") != tt.want {
			t.Errorf("%s %s: %q, want %q", tt.plugin, tt.config, got, tt.want)
		}
	}
}
