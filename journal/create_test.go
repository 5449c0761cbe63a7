package journal

import (
	"bytes"
	"os"
	"syscall"
	"testing"
)

// TestCrash: a crash at any point, of the first or of a later Update, leaves either the state
// before it or the state that it was to write. The process crashes, not the kernel: the test does
// not see what is lost with the kernel's cache.
func TestCrash(t *testing.T) {
	for _, tt := range []struct {
		point         string
		first         bool // there is no journal yet
		before, after []string
	}{
		{"created", true, nil, []string{"c"}},
		{"renamed", true, nil, []string{"c"}},
		{"commit", true, nil, []string{"c"}},
		{"committed", true, []string{"b"}, []string{"b", "c"}},
		{"commit", false, []string{"a"}, []string{"a", "c"}},
		{"committed", false, []string{"a", "b"}, []string{"a", "b", "c"}},
	} {
		name := "later Update " + tt.point
		if tt.first {
			name = "first Update " + tt.point
		}
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			if !tt.first {
				put(t, s, adding("a"))
			}
			p := start(t, "act", s.Dir)
			p.say("die " + tt.point)
			p.say("put b")
			if _ = p.wait(); p.cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("it was not killed at point %s: %v", tt.point, p.cmd.ProcessState)
			}
			wantEntries(t, s, tt.before...)
			put(t, s, adding("c"))
			wantEntries(t, s, tt.after...)
			if aside := setAside(t, s); aside != nil {
				t.Errorf("set aside: %v", aside)
			}
		})
	}
}

// TestStaleNew: a journal.db.new, left by a crash in a creation, is never taken for the journal and
// hinders nobody.
func TestStaleNew(t *testing.T) {
	whole := newStore(t)
	put(t, whole, adding("stale"))
	data, err := os.ReadFile(whole.Path())
	check(t, err)
	for _, tt := range []struct {
		name string
		data []byte
	}{
		{"whole", data}, {"cut", data[:len(data)/2+1]}, {"garbage", bytes.Repeat([]byte{0xa5}, 12345)}, {"empty", nil},
	} {
		for _, first := range []bool{true, false} {
			name, want := tt.name+" beside a journal", []string{"a", "b"}
			if first {
				name, want = tt.name, []string{"b"}
			}
			t.Run(name, func(t *testing.T) {
				s := newStore(t)
				if !first {
					put(t, s, adding("a"))
				}
				check(t, os.MkdirAll(s.Dir, 0o700))
				check(t, os.WriteFile(s.Path()+".new", tt.data, 0o600))
				put(t, s, adding("b"))
				wantEntries(t, s, want...)
			})
		}
	}
}
