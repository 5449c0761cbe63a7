package metrics

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"
)

// TestKept: one collection serves all who ask while it runs, and those who ask soon after.
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
	go k.Text()
	<-begun
	ask := func(many int, want string) {
		t.Helper()
		var all sync.WaitGroup
		for range many {
			all.Go(func() {
				if text := k.Text(); string(text) != want {
					t.Errorf("%q, want %q", text, want)
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
