package alive

import (
	"sync"
	"time"

	"cni-unwind/ipam"
)

// Pools caches host-local's reservations. The workers of a verb share it.
type Pools struct {
	mu    sync.Mutex
	pools map[string]pooled
}

// reservations returns the reservations in a pool, as Scan does, at most a second old.
func (v *Pools) reservations(pool string) ([]ipam.Reservation, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if p, ok := v.pools[pool]; ok && time.Since(p.taken) < time.Second {
		return p.found, p.err
	}
	if v.pools == nil {
		v.pools = map[string]pooled{}
	}
	found, err := ipam.Scan(pool)
	v.pools[pool] = pooled{time.Now(), found, err}
	return found, err
}

// pooled is the result of a scan of a pool, with its time.
type pooled struct {
	taken time.Time
	found []ipam.Reservation
	err   error
}
