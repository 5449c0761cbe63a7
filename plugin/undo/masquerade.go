package undo

import (
	"context"
	"net/netip"
	"slices"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/delegate"
)

// delStrayRules repeats a failed DEL of bridge or ptp for each address with a rule that jumps to
// the container's chain, in a scratch namespace whose interface has that address. An unrecorded ADD
// may have left such a rule; the kernel removes no chain that is in use, and the plugin gives up at
// its first address. delStrayRules does nothing if another interface of the container shares the
// chain. If the last DEL fails too, it returns the first failure.
func (u *undoing) delStrayRules(
	ctx context.Context, step *journal.Step, f *delegate.Failure,
) *delegate.Failure {
	stray := u.masqueraded(ctx, u.Entry.Key, step.Type)
	if len(stray) == 0 || u.sharesChain(ctx) {
		return f
	}
	defer func() { u.stray = netip.Prefix{} }()
	again := f
	for _, u.stray = range stray {
		again = u.delWith(ctx, step, step.Config)
	}
	if again != nil {
		return f
	}
	u.Log.Info("DEL passed after removing rules of unrecorded ADDs", "plugin", step.Type,
		"addresses", stray)
	return nil
}

// sharesChain reports whether the container has, or may have, another interface in the network.
func (u *undoing) sharesChain(ctx context.Context) bool {
	all, err := u.Node.CachedAttachments(u.Entry.Network, u.Entry.ContainerID)
	shared := err != nil || slices.ContainsFunc(all, func(c alive.CacheFile) bool {
		return c.Key() != u.Entry.Key && c.ContainerID == u.Entry.ContainerID
	})
	u.Journal.Read(ctx, func(tx *journal.Tx) error {
		return tx.Outlines(func(o journal.Outline, _ error) error {
			shared = shared || o.Network == u.Entry.Network && o.Key != u.Entry.Key &&
				o.ContainerID == u.Entry.ContainerID
			return nil
		})
	})
	return shared
}
