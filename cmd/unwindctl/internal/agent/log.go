package agent

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"regexp"
	"strings"
	"sync"
)

// dedupLogger logs a state when it begins, but not again while it lasts.
type dedupLogger struct {
	*slog.Logger
	mu     sync.Mutex
	states map[string]string
}

func newDedupLogger(log *slog.Logger) *dedupLogger {
	return &dedupLogger{Logger: log, states: map[string]string{}}
}

// changed reports whether a thing's state differs from its previous one. "" is the normal state.
func (d *dedupLogger) changed(thing, state string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.states[thing]
	d.states[thing] = state
	return before != state
}

var digits = regexp.MustCompile(`\d+`)

// warnOnce logs an error about a thing when it first occurs, and "recovered" when it is over.
// Errors that differ only in numbers, such as a port or a time, count as the same.
func (d *dedupLogger) warnOnce(thing, msg string, err error) {
	switch {
	case err == nil && d.changed(thing, ""):
		d.Info("recovered", "was", msg)
	case err != nil && d.changed(thing, digits.ReplaceAllString(err.Error(), "")):
		d.Warn(msg, "err", err)
	}
}

// dedupWriter passes on the lines of a sweep that have at least its level and that the previous
// sweep did not write. It compares log lines without their time. Any other line, such as a plugin's
// stderr, counts as a warning.
type dedupWriter struct {
	to          io.Writer
	json        *slog.Logger // receives each line as text; nil if LogFormat is text
	level       slog.Level
	mu          sync.Mutex
	before, now map[string]bool
}

func (w *dedupWriter) nextRound() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.before, w.now = maps.Clone(w.now), map[string]bool{}
}

func (w *dedupWriter) Write(p []byte) (int, error) {
	text, level := string(p), slog.LevelWarn
	if strings.HasPrefix(text, "time=") {
		_, text, _ = strings.Cut(text, " ")
		word, _, _ := strings.Cut(strings.TrimPrefix(text, "level="), " ")
		_ = level.UnmarshalText([]byte(word)) // a line without a level stays a warning
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.now[text] = true
	switch {
	case w.before[text] || level < w.level:
		return len(p), nil
	case w.json != nil:
		w.json.Log(context.Background(), level, "sweep", "line", strings.TrimSpace(text))
		return len(p), nil
	}
	return w.to.Write(p)
}
