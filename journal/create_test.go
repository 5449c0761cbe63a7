package journal

import (
	"bytes"
	"errors"
	"os"
	"testing"
)

// TestCrash: a crash at any point, of the first or of a later Update, leaves either the state
// before it or the state that it was to write. The process crashes, not the kernel: the test does
// not see what is lost with the kernel's cache.
func TestCrash(t *testing.T) {
	tellStories(t, []story{
		{"first Update, created", `
			p die created = ok; p put b = signal: killed; we list = ; we put c = ok; we list = c; we aside = 0`},
		{"first Update, renamed", `
			p die renamed = ok; p put b = signal: killed; we list = ; we put c = ok; we list = c; we aside = 0`},
		{"first Update, commit", `
			p die commit = ok; p put b = signal: killed; we list = ; we put c = ok; we list = c; we aside = 0`},
		{"first Update, committed", `
			p die committed = ok; p put b = signal: killed; we list = b; we put c = ok; we list = b c; we aside = 0`},
		{"later Update, commit", `we put a = ok
			p die commit = ok; p put b = signal: killed; we list = a; we put c = ok; we list = a c; we aside = 0`},
		{"later Update, committed", `we put a = ok
			p die committed = ok; p put b = signal: killed; we list = a b; we put c = ok; we list = a b c; we aside = 0`},
	})
}

// TestStaleNew: a journal.db.new, left by a crash in a creation, is never taken for the journal and
// hinders nobody.
func TestStaleNew(t *testing.T) {
	whole := newStore(t)
	put(t, whole, adding("stale"))
	data, err := os.ReadFile(whole.Path())
	check(t, err)
	for name, data := range map[string][]byte{
		"whole": data, "cut": data[:len(data)/2+1], "garbage": bytes.Repeat([]byte{0xa5}, 12345), "empty": nil,
	} {
		t.Run(name, func(t *testing.T) {
			first, later := newStore(t), newStore(t)
			put(t, later, adding("a"))
			for s, want := range map[*Store][]string{first: {"b"}, later: {"a", "b"}} {
				check(t, errors.Join(os.MkdirAll(s.Dir, 0o700), os.WriteFile(s.Path()+".new", data, 0o600)))
				put(t, s, adding("b"))
				wantEntries(t, s, want...)
			}
		})
	}
}
