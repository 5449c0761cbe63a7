package plugin

import (
	"context"
	"net/netip"

	"cni-unwind/journal"
)

// replayParked runs the DELs that were parked because of addresses that have become free.
func (o *op) replayParked(ctx context.Context, freed []netip.Addr) {
	ctx, cancel := context.WithTimeout(ctx, o.Budgets.Settle)
	defer cancel()
	for _, address := range freed {
		for _, other := range o.othersWith(ctx, o.key, address) {
			if !hasParked(other) {
				continue
			}
			if err := o.settle(ctx, other.Key); err != nil {
				o.log.Info("left for later", "attachment", other.Key.String(), "err", err)
			}
		}
	}
}

func hasParked(e *journal.Entry) bool {
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			if s.Parked {
				return true
			}
		}
	}
	return false
}
