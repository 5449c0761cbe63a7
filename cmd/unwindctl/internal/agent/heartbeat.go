package agent

import (
	"sync/atomic"
	"time"
)

// heartbeat is when a loop last made progress.
type heartbeat struct{ last atomic.Int64 }

func (h *heartbeat) beat()                { h.last.Store(time.Now().UnixNano()) }
func (h *heartbeat) since() time.Duration { return time.Since(time.Unix(0, h.last.Load())) }
