package metrics

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"
)

// TestKept: one collection serves all who ask while it runs, and those who ask soon after. It goes on
// when the one who asked first is gone.
func TestKept(t *testing.T) {
	t.Parallel()
	begun, goOn := make(chan struct{}, 100), make(chan struct{})
	collections := 0
	k := &Kept{Collect: func(context.Context) []byte {
		collections++
		n := collections
		begun <- struct{}{}
		<-goOn
		return fmt.Append(nil, n)
	}}
	gone, leave := context.WithCancel(t.Context())
	first := make(chan error)
	go func() { _, err := k.Text(gone); first <- err }()
	<-begun
	leave()
	if err := <-first; !errors.Is(err, context.Canceled) {
		t.Errorf("the one who is gone got %v", err)
	}
	ask := func(many int, want string) {
		t.Helper()
		var all sync.WaitGroup
		for range many {
			all.Go(func() {
				if text, err := k.Text(t.Context()); err != nil || string(text) != want {
					t.Errorf("%q, %v, want %q", text, err, want)
				}
			})
		}
		if want == "1" && many > 1 {
			time.Sleep(10 * time.Millisecond) // most of them wait by now
			goOn <- struct{}{}
		}
		all.Wait()
	}
	ask(500, "1")
	ask(1, "1")
	k.mu.Lock()
	k.ended = time.Now().Add(-keep)
	k.mu.Unlock()
	go func() { goOn <- struct{}{} }()
	ask(200, "2")
	if collections != 2 {
		t.Errorf("%d collections for 702 who asked, want 2", collections)
	}
}
