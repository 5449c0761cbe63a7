package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"cni-unwind/ipam"
	"cni-unwind/plugin/netconf"
)

// Pool is the directory in which host-local keeps the addresses of a network.
type Pool struct {
	Network string
	Dir     string
	Config  json.RawMessage // of the delegate that calls host-local
	// GracePeriod is the network's.
	GracePeriod time.Duration
}

// poolsOf returns the pools of a chain.
func poolsOf(ch *netconf.Chain, c *netconf.Conf) []Pool {
	var pools []Pool
	for i := range ch.Delegates {
		config := ch.Config(i, c)
		dir := ipam.Pool(config, c.Name)
		if dir != "" && !slices.ContainsFunc(pools, func(p Pool) bool { return p.Dir == dir }) {
			pools = append(pools, Pool{c.Name, dir, config, c.GracePeriod})
		}
	}
	return pools
}

// full says whether the pool has no address left.
func (p Pool) full(log *slog.Logger) bool {
	full, err := ipam.Exhausted(p.Config, p.Network)
	if err != nil {
		log.Warn("looking for free addresses", "pool", p.Dir, "err", err)
	}
	return full
}

// ReadPools returns the pools of the networks in a directory of conflists (/etc/cni/net.d) that
// unwind runs with the given state directory. The error names the files and chains that cannot be
// read; ReadPools returns the pools of the others with it.
func ReadPools(confDir, stateDir string) ([]Pool, error) {
	paths, err := netconf.Conflists(confDir)
	errs := []error{err}
	var pools []Pool
	for _, path := range paths {
		found, err := readPools(path, stateDir)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", path, err))
		}
		for _, p := range found {
			if !slices.ContainsFunc(pools, func(o Pool) bool { return o.Dir == p.Dir }) {
				pools = append(pools, p)
			}
		}
	}
	return pools, errors.Join(errs...)
}

func readPools(path, stateDir string) ([]Pool, error) {
	data, err := netconf.ReadFile(path)
	if err != nil || !bytes.Contains(data, []byte(netconf.Name)) {
		return nil, err
	}
	list, err := netconf.ReadConflist(path)
	if err != nil || list.Unwind == nil || list.Unwind.StateDir != filepath.Clean(stateDir) {
		return nil, err
	}
	chain, err := list.Unwind.LoadChain()
	if err != nil {
		return nil, err
	}
	return poolsOf(chain, list.Unwind), nil
}

// poolView caches host-local's reservations. The workers of a verb share it.
type poolView struct {
	mu    sync.Mutex
	pools map[string]pooled
}

// reservations returns the reservations in a pool, as Scan does, at most a second old.
func (v *poolView) reservations(pool string) ([]ipam.Reservation, error) {
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
