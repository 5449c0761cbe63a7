//go:build e2e

package e2e_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

// TestE2EOcicniLeak: the ADD and the DEL of a pod's sandboxes fail. CRI-O sends only one DEL for
// each sandbox, and then removes libcni's cache entry. With unwind, nothing leaks while the plugin
// fails. Once the plugin works again, unwind retries the pending DELs at CRI-O's next STATUS, GC or
// ADD, or in a sweep.
func TestE2EOcicniLeak(t *testing.T) {
	table := e2e.NewTable(t, fmt.Sprintf("ocicni: %d sandboxes of a pod fail ADD and DEL on a /28 with a live pod; addresses/netns/veths/rules", e2e.Tries),
		"CHAIN", "CNI", "THEN", "MEANWHILE", "PENDING", "FIRST WITHOUT ADDRESS", "AFTER THE REPAIR", "PENDING")
	for _, c := range []struct {
		unwind  bool
		version string
		how     string
		then    func(o e2e.OcicniNode) error
	}{
		{false, "", "STATUS, GC, the next ADD", func(o e2e.OcicniNode) error {
			return errors.Join(o.Status(), o.GC("live"), o.NextADD())
		}},
		{true, "", "STATUS", func(o e2e.OcicniNode) error { return o.Status() }},
		{true, "", "GC", func(o e2e.OcicniNode) error { return o.GC("live") }},
		{true, "", "the next ADD", e2e.OcicniNode.NextADD},
		{true, "1.0.0", "the next ADD", e2e.OcicniNode.NextADD},
		{true, "1.0.0", "a sweep", func(o e2e.OcicniNode) error { o.Unwindctl("sweep"); return nil }},
	} {
		chain := e2e.ChainOf(c.unwind)
		t.Run(strings.TrimSpace(chain+" "+c.version+" "+c.how), func(t *testing.T) {
			t.Parallel()
			o := e2e.NewOcicniNode(t, c.unwind, c.version)
			o.Plan(map[string]string{"ADD": "fail", "DEL": "fail"})
			noAddress := 0
			for i := range e2e.Tries {
				err := o.Add("bad", fmt.Sprintf("bad%d", i))
				if err == nil {
					t.Fatalf("sandbox %d started", i)
				}
				if noAddress == 0 && strings.Contains(err.Error(), "no IP addresses available") {
					noAddress = i + 1
				}
			}
			during, pending := o.Beside()
			o.Plan(nil)
			after, left := e2e.Left{}, 0
			e2e.Eventually(t, 2*time.Minute, "nothing is pending", func() bool { // unwind pauses between retries
				check(t, c.then(o))
				after, left = o.Beside()
				return !c.unwind || left == 0
			})
			table.Row(chain, c.version, c.how, during, pending, noAddress, after, left)
			if !c.unwind {
				if during.Addresses == 0 || noAddress == 0 || after.Addresses == 0 {
					t.Errorf("without unwind %s leaks, later %s, so the test proves nothing", during, after)
				}
				return
			}
			if during != (e2e.Left{}) || noAddress != 0 || pending != e2e.Tries {
				t.Errorf("meanwhile unwind leaves %s, %d DELs pending; sandbox %d got no address", during, pending, noAddress)
			}
			if after != (e2e.Left{}) {
				t.Errorf("later unwind leaves %s", after)
			}
		})
	}
}

// TestE2EOcicniDEL: a pod's first DEL fails, and CRI-O removes libcni's cache entry. With unwind,
// the second DEL releases everything. After the first DEL, the address is still reserved, because
// the failing plugin may have to remove rules by address. unwind does not free the address before
// it has tried that plugin's DEL twice.
func TestE2EOcicniDEL(t *testing.T) {
	table := e2e.NewTable(t, "ocicni: a pod's first DEL fails; addresses/netns/veths/rules", "CHAIN", "AFTER DEL 1", "AFTER DEL 2")
	for _, unwind := range []bool{false, true} {
		o := e2e.NewOcicniNode(t, unwind, "")
		check(t, o.Add("pod", "one"))
		o.Plan(map[string]string{"DEL": "fail"})
		if err := o.Del("pod", "one"); err == nil {
			t.Error("the first DEL succeeds")
		}
		first, _ := o.Beside()
		o.Plan(nil)
		check(t, o.Del("pod", "one"))
		o.RemoveNetNS("one")
		second, pending := o.Beside()
		table.Row(e2e.ChainOf(unwind), first, second)
		switch {
		case !unwind && second.Rules == 0:
			t.Errorf("without unwind %s is left, so the test proves nothing", second)
		case unwind && (first.Addresses != 1 || second != (e2e.Left{}) || pending != 0):
			t.Errorf("unwind leaves %s after the first DEL, %s after the second, %d pending", first, second, pending)
		}
	}
}

// TestE2EOcicniGC: for a network that no listed pod uses, CRI-O's GC sends null instead of a list.
// During such a GC, a live pod must keep its resources even if it is not in libcni's cache.
func TestE2EOcicniGC(t *testing.T) {
	o := e2e.NewOcicniNode(t, true, "")
	results := o.File("/var/lib/cni/results")
	check(t, os.Rename(results, results+".away"))
	check(t, o.GC())
	if left, pending := o.Beside(); left != (e2e.Left{}) || pending != 0 {
		t.Errorf("GC changes the resources by %s, and the journal by %d entries", left, pending)
	}
	check(t, errors.Join(os.RemoveAll(results), os.Rename(results+".away", results)))
	check(t, errors.Join(o.GC("live"), o.Del("live", "live")))
	o.RemoveNetNS("live")
	if left := o.Settled(); left != (e2e.Left{}) || len(o.Journal()) != 0 {
		t.Errorf("left: %s, %+v", left, o.Journal())
	}
}
