package agent

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

// TestDedupLogger: a state is said when it begins.
func TestDedupLogger(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	o := newDedupLogger(slog.New(slog.NewTextHandler(&log, nil)))
	for _, err := range []error{nil, fmt.Errorf("no a1"), fmt.Errorf("no a2"), fmt.Errorf("no b"), nil, nil, fmt.Errorf("no a3")} {
		o.warnOnce("thing", "looking", err)
	}
	var got []string
	for line := range strings.Lines(log.String()) {
		got = append(got, line[strings.Index(line, "level="):])
	}
	want := "level=WARN msg=looking err=\"no a1\"\nlevel=WARN msg=looking err=\"no b\"\nlevel=INFO msg=recovered was=looking\n" +
		"level=WARN msg=looking err=\"no a3\"\n"
	if strings.Join(got, "") != want {
		t.Errorf("got\n%s", strings.Join(got, ""))
	}
}

// TestDedupHandler: a line is passed on unless the round before had it, whatever its attributes are
// attached to.
func TestDedupHandler(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	h := &dedupHandler{Handler: slog.NewTextHandler(&out, nil), rounds: &rounds{}}
	for _, lines := range []string{"ab", "abc", "c", "a"} {
		h.nextRound()
		for _, line := range lines {
			slog.New(h).With("of", string(line)).Warn("m", "n", 1)
			slog.New(h).Info("not a warning")
		}
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, line[strings.Index(line, "level="):])
	}
	const want = "level=WARN msg=m of=a n=1\nlevel=WARN msg=m of=b n=1\nlevel=WARN msg=m of=c n=1\nlevel=WARN msg=m of=a n=1\n"
	if strings.Join(got, "") != want {
		t.Errorf("got\n%s", strings.Join(got, ""))
	}
}

// TestCounts: counts are said when they change.
func TestCounts(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s := &sweeper{agent: &agent{log: newDedupLogger(slog.New(slog.NewTextHandler(&log, nil)))}}
	for _, words := range []map[string]int{
		{}, {"pending": 3}, {"pending": 3, "live": 1}, {"pending": 2, "released": 1}, {"pending": 2}, {},
	} {
		s.reportCounts(words)
	}
	var got []string
	for line := range strings.Lines(log.String()) {
		got = append(got, line[strings.Index(line, "msg="):])
	}
	want := "msg=swept pending=3 live=0\nmsg=swept released=1 pending=2 live=0\nmsg=swept pending=2 live=0\n"
	if strings.Join(got, "") != want {
		t.Errorf("got\n%s", strings.Join(got, ""))
	}
}
