package journal

import "testing"

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
