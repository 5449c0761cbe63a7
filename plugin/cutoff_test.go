package plugin

import (
	"testing"
)

// TestNamespaceOutOfReach: the pod's namespace exists, but no path leads the DEL to it, and it has
// no process: it is pinned by a mount elsewhere, or the kernel is about to remove it. Without a
// namespace bridge would leave its nat chain.
func TestNamespaceOutOfReach(t *testing.T) {
	stories(t, `
	hasty; chain bridge, "ipMasq": true
	add a; bind pin; unpin a
	del a; iptables 0; entries 0; reserved 0; leaves`, mounts())
}

// TestNamespaceGoesMeanwhile: the runtime removes the pod's namespace after unwind looked at it and
// before bridge does. bridge then succeeds and leaves its nat chain.
func TestNamespaceGoesMeanwhile(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true
	add a; script bridge 'umount -l $netns/a 2>/dev/null && rm $netns/a; exec $cni/bridge'
	del a; absent $netns/a`)
}
