package metrics

import (
	"context"
	"sync"
	"time"
)

// The bounds on what those who ask for metrics can have done.
const (
	keep   = 5 * time.Second // the text of one collection
	atMost = 9 * time.Second // for a collection: Prometheus gives up after 10 s
)

// Kept caches the text of the metrics for any number of callers. It runs one collection at a time,
// and keeps the text for a while, because a collection reads the journal and inspects all
// processes.
type Kept struct {
	// Collect returns the text, empty if nothing could be read.
	Collect func(context.Context) []byte

	mu      sync.Mutex
	text    []byte
	ended   time.Time     // of the last collection
	running chan struct{} // closed at the end of the running collection; nil if none runs
}

// Text returns the cached text, or the text of the next collection to finish. It waits as long as
// ctx allows. The collection does not end with ctx, because others wait for it, too.
func (k *Kept) Text(ctx context.Context) ([]byte, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.ended.IsZero() && time.Since(k.ended) < keep {
		return k.text, nil
	}
	if k.running == nil {
		k.running = make(chan struct{})
		go k.collect()
	}
	running := k.running
	k.mu.Unlock()
	select {
	case <-running:
	case <-ctx.Done():
	}
	k.mu.Lock()
	return k.text, ctx.Err()
}

func (k *Kept) collect() {
	ctx, cancel := context.WithTimeout(context.Background(), atMost)
	defer cancel()
	text := k.Collect(ctx)
	k.mu.Lock()
	defer k.mu.Unlock()
	k.text, k.ended = text, time.Now()
	close(k.running)
	k.running = nil
}
