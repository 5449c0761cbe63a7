package main

import (
	"bytes"
	"io"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"unicode"
)

// once logs what a program that runs for long finds again and again: each state of a thing when it begins, and not while it
// lasts.
type once struct {
	log  *slog.Logger
	mu   sync.Mutex
	said map[string]string
}

func newOnce(log *slog.Logger) *once { return &once{log: log, said: map[string]string{}} }

// begins says whether a thing's state is another one than at the last call. "" is the one that nothing has to be said of.
func (o *once) begins(thing, state string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	before := o.said[thing]
	o.said[thing] = state
	return before != state
}

// warn logs an error about a thing, and that it is over. Errors that differ in their numbers alone (of a port, a temporary file,
// a time) are the same.
func (o *once) warn(thing, msg string, err error) {
	switch {
	case err == nil && o.begins(thing, ""):
		o.log.Info("in order again", "was", msg)
	case err != nil && o.begins(thing, withoutNumbers(err.Error())):
		o.log.Warn(msg, "err", err)
	}
}

func withoutNumbers(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsDigit(r) {
			return -1
		}
		return r
	}, s)
}

// unrepeated passes on what is written in one turn and was not in the one before. A log's line is known without its time.
type unrepeated struct {
	to          io.Writer
	mu          sync.Mutex
	before, now map[string]bool
}

// turn begins the next turn.
func (u *unrepeated) turn() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.before, u.now = maps.Clone(u.now), map[string]bool{}
}

func (u *unrepeated) Write(p []byte) (int, error) {
	text := p
	if rest, isLog := bytes.CutPrefix(p, []byte("time=")); isLog {
		_, text, _ = bytes.Cut(rest, []byte(" "))
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.now[string(text)] = true
	if u.before[string(text)] {
		return len(p), nil
	}
	return u.to.Write(p)
}
