package metrics

import (
	"context"
	"sync"
	"time"
)

// Limits on the work that requests for metrics can cause.
const (
	keep   = 5 * time.Second // the time for which the text of one collection is served
	atMost = 9 * time.Second // the timeout of a collection; Prometheus times out after 10 s
)

// Kept caches the text of the metrics for any number of callers. It runs one collection at a time,
// and keeps the text for a while, because a collection reads the journal and inspects all
// processes.
type Kept struct {
	// Collect returns the text, empty if nothing could be read.
	Collect func(context.Context) []byte

	mu    sync.Mutex
	text  []byte
	ended time.Time // when the last collection ended
}

// Text returns the cached text, or waits for a collection. The collection continues if the caller's
// request ends, because other requests may wait for it.
func (k *Kept) Text() []byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ended.IsZero() || time.Since(k.ended) >= keep {
		ctx, cancel := context.WithTimeout(context.Background(), atMost)
		defer cancel()
		k.text = k.Collect(ctx)
		k.ended = time.Now()
	}
	return k.text
}
