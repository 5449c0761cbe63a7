package plugin

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/journal"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// cilium is a plugin of the type cilium-cni, and its queue of DELs.
type cilium struct {
	*node
	queue string
}

func newCilium(t *testing.T) *cilium {
	t.Helper()
	c := &cilium{node: newNode(t)}
	faulty := filepath.Join(toolsDir(t), "test", "faulty")
	if err := os.Symlink(faulty, filepath.Join(c.path[0], "cilium-cni")); err != nil {
		t.Fatal(err)
	}
	c.queue = filepath.Join(c.dir, "deleteQueue")
	c.mkdir(c.queue)
	c.conf["stores"] = map[string]string{"cilium-cni": c.queue}
	return c
}

func (c *cilium) list() *libcni.NetworkConfigList {
	cni := fmt.Sprintf(`{"type": "cilium-cni", "dir": %q, "instance": "cilium"}`, c.faultyDir())
	return c.unwind(cni, c.faulty("p1", ""))
}

// queued writes the file of a pod's DEL, as cilium-cni 1.20 does, and returns its path.
func (c *cilium) queued(containerID string) string {
	c.Helper()
	content := "cni-attachment-id:" + containerID + ":eth0"
	path := filepath.Join(c.queue, fmt.Sprintf("%x.delete", sha256.Sum256([]byte(content))))
	c.write(path, content)
	return path
}

// sweepAll sweeps as a person does, for whom no DEL waits.
func (c *cilium) sweepAll() {
	c.Helper()
	plugin := &Plugin{Stderr: c.Output(), Budgets: undo.DefaultBudgets, CacheDir: c.cacheDir()}
	if _, err := plugin.Sweep(c.Context(), c.stateDir, sweep.Job{}); err != nil {
		c.Fatal(err)
	}
}

// TestQueuedDEL: cilium-cni's DEL passes, and is only queued. It stays pending, and does not run
// again while its file is in the queue, whoever asks: each would take up to 43 s while the agent is
// away; nor do sweeps write its entry. Once the agent has taken the file, the DEL is done, and
// nothing runs.
func TestQueuedDEL(t *testing.T) {
	t.Parallel()
	c := newCilium(t)
	list, p := c.list(), c.pod("a")
	p.mustAdd(list)
	file := c.queued("a")
	p.mustDel(list)
	if why := p.unproven(); !strings.HasSuffix(why, file) {
		t.Fatalf("unproven: %q; the entry: %+v", why, p.entry())
	}
	if e := p.entry(); e.Pending() != 1 || e.State != journal.Removing {
		t.Errorf("%+v, want the DEL of cilium-cni alone", e)
	}
	p.mustDel(list)
	before := p.entry().Updated
	for range 3 {
		c.sweepAll()
	}
	if after := p.entry().Updated; after != before {
		t.Errorf("the sweeps have written the entry: %+v, was %+v", after, before)
	}
	if ran := c.dels("cilium"); ran != 1 || p.unproven() == "" {
		t.Errorf("%d DELs ran, want 1; unproven: %q", ran, p.unproven())
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	c.sweepAll()
	if ran := c.dels("cilium"); ran != 1 || p.entry() != nil {
		t.Errorf("the agent has taken the file: %d DELs ran, want 1; the entry: %+v", ran, p.entry())
	}
	c.nothingLeft()
}

// TestQueuedRollback: the DEL of a failed ADD's rollback is queued. Another pod starts, and that DEL
// does not run again.
func TestQueuedRollback(t *testing.T) {
	t.Parallel()
	c := newCilium(t)
	list, p, next := c.list(), c.pod("a"), c.pod("b")
	file := c.queued("a")
	c.plan(map[string]map[string]string{"p1": {"ADD": "fail"}})
	if _, err := p.add(list); err == nil {
		t.Fatal("ADD passed")
	}
	c.plan(nil)
	if why := p.unproven(); !strings.HasSuffix(why, file) {
		t.Fatalf("unproven: %q; the entry: %+v", why, p.entry())
	}
	next.mustAdd(list)
	if ran := c.dels("cilium"); ran != 1 {
		t.Errorf("%d DELs of cilium-cni, want 1", ran)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	next.mustDel(list)
	c.sweepAll()
	c.nothingLeft()
}
