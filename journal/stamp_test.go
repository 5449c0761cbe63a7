package journal

import (
	"errors"
	"os"
	"testing"
	"time"
)

// TestStamp: a transaction verifies the whole file, unless another transaction left it so.
func TestStamp(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(t *testing.T, s *Store)
		want   bool
	}{
		{"as it was left", func(*testing.T, *Store) {}, true},
		{"after a View", func(t *testing.T, s *Store) { check(t, s.View(t.Context(), look)) }, true},
		{"after an Update that wrote nothing", func(t *testing.T, s *Store) {
			_ = s.Update(t.Context(), func(*Tx) error { return errors.New("no") })
		}, true},
		{"touched", func(t *testing.T, s *Store) { check(t, os.Chtimes(s.Path(), time.Time{}, time.Now())) }, false},
		{"of another boot", func(t *testing.T, s *Store) {
			queue := s.Dir + "/" + queueName
			text, err := os.ReadFile(queue)
			check(t, err)
			text[0] ^= 1
			check(t, os.WriteFile(queue, text, 0o600))
		}, false},
		{"without a queue", func(t *testing.T, s *Store) { check(t, os.Remove(s.Dir+"/"+queueName)) }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStore(t)
			put(t, s, adding("a"))
			tt.change(t, s)
			queue, err := s.queue(t.Context(), false)
			check(t, err)
			defer queue.Close()
			f, err := os.Open(s.Path())
			check(t, err)
			defer f.Close()
			if got := s.stamped(queue, f); got != tt.want {
				t.Errorf("stamped: %t, want %t", got, tt.want)
			}
		})
	}
}
