package agent

import (
	"context"
	"fmt"
	"log/slog"
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

// dedupHandler passes on the warnings and errors of a sweep that the previous sweep did not log.
type dedupHandler struct {
	slog.Handler
	*rounds
	attrs string // the attributes of WithAttrs
}

type rounds struct {
	mu          sync.Mutex
	before, now map[string]bool
}

func (r *rounds) nextRound() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before, r.now = r.now, map[string]bool{}
}

func (h *dedupHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelWarn && h.Handler.Enabled(ctx, level)
}

func (h *dedupHandler) Handle(ctx context.Context, record slog.Record) error {
	text := record.Message + h.attrs
	record.Attrs(func(a slog.Attr) bool {
		text += " " + a.String()
		return true
	})
	h.mu.Lock()
	known := h.before[text] || h.now[text]
	h.now[text] = true
	h.mu.Unlock()
	if known {
		return nil
	}
	return h.Handler.Handle(ctx, record)
}

func (h *dedupHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &dedupHandler{h.Handler.WithAttrs(attrs), h.rounds, h.attrs + fmt.Sprint(attrs)}
}

// Write logs what a plugin writes to its stderr.
func (h *dedupHandler) Write(p []byte) (int, error) {
	if text := strings.TrimSpace(string(p)); text != "" {
		slog.New(h).Warn(text)
	}
	return len(p), nil
}
