//go:build e2e

package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"cni-unwind/testdata/e2e"
)

// ocicniNode is a node with CRI-O's CNI library and one live pod.
type ocicniNode struct {
	*e2e.Node
	*e2e.Ocicni
	unwind bool
	live   e2e.Left // what the live pod has
}

// newOcicniNode makes a node whose chain may go through unwind, in these versions of CNI ("" for both).
func newOcicniNode(t *testing.T, unwind bool, version string) ocicniNode {
	n := e2e.NewNode(t)
	n.Configure(e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall, n.Faulty()}, Unwind: unwind})
	if version != "" {
		file := n.File(e2e.ConfDir, "10-podnet.conflist")
		text, err := os.ReadFile(file)
		check(t, err)
		const both = `"cniVersions": ["1.0.0", "1.1.0"]`
		if !strings.Contains(string(text), both) {
			t.Fatalf("no %s in %s", both, text)
		}
		check(t, os.WriteFile(file, []byte(strings.ReplaceAll(string(text), both, fmt.Sprintf(`"cniVersions": [%q]`, version))), 0o644))
	}
	o := ocicniNode{Node: n, Ocicni: n.NewOcicni(), unwind: unwind}
	check(t, errors.Join(o.Status(), o.Add("live", "live")))
	o.live = n.Settled()
	return o
}

// left returns what is on the node beside the live pod's, and the number of pending records.
func (o ocicniNode) left() (left e2e.Left, pending int) {
	left = o.Settled()
	left.Addresses -= o.live.Addresses
	left.NetNS -= o.live.NetNS
	left.Veths -= o.live.Veths
	left.Rules -= o.live.Rules
	if o.unwind {
		pending = len(o.Journal()) - 1
	}
	return left, pending
}

// TestE2EOcicniLeak: sandboxes of a pod that cannot start leave nothing with unwind; what is pending goes by each of the ways
// in which CRI-O comes back. CRI-O sends one DEL, and drops libcni's record after it.
func TestE2EOcicniLeak(t *testing.T) {
	table := e2e.NewTable(t, fmt.Sprintf("ocicni: %d sandboxes of a pod fail ADD and DEL on a /28 with a live pod; addresses/netns/veths/rules", tries),
		"CHAIN", "CNI", "THEN", "MEANWHILE", "PENDING", "FIRST WITHOUT ADDRESS", "AFTER THE REPAIR", "PENDING")
	for _, c := range []struct {
		unwind  bool
		version string
		how     string
		then    func(o ocicniNode) error
	}{
		{false, "", "STATUS, GC, the next ADD", func(o ocicniNode) error {
			return errors.Join(o.Status(), o.GC("live"), o.nextADD())
		}},
		{true, "", "STATUS", func(o ocicniNode) error { return o.Status() }},
		{true, "", "GC", func(o ocicniNode) error { return o.GC("live") }},
		{true, "", "the next ADD", ocicniNode.nextADD},
		{true, "1.0.0", "the next ADD", ocicniNode.nextADD},
		{true, "1.0.0", "a sweep", func(o ocicniNode) error { o.Unwindctl("sweep"); return nil }},
	} {
		chain := map[bool]string{false: "plain", true: "unwind"}[c.unwind]
		t.Run(strings.TrimSpace(chain+" "+c.version+" "+c.how), func(t *testing.T) {
			t.Parallel()
			o := newOcicniNode(t, c.unwind, c.version)
			o.Plan(map[string]string{"ADD": "fail", "DEL": "fail"})
			noAddress := 0
			for i := range tries {
				err := o.Add("bad", fmt.Sprintf("bad%d", i))
				if err == nil {
					t.Fatalf("sandbox %d started", i)
				}
				if noAddress == 0 && strings.Contains(err.Error(), "no IP addresses available") {
					noAddress = i + 1
				}
			}
			during, pending := o.left()
			o.Plan(nil)
			after, left := e2e.Left{}, 0
			e2e.Eventually(t, 2*time.Minute, "nothing is pending", func() bool { // the pauses after failed tries
				check(t, c.then(o))
				after, left = o.left()
				return !c.unwind || left == 0
			})
			table.Row(chain, c.version, c.how, during, pending, noAddress, after, left)
			if !c.unwind {
				if during.Addresses == 0 || noAddress == 0 || after.Addresses == 0 {
					t.Errorf("the plain chain leaks %s, later %s, so this shows nothing", during, after)
				}
				return
			}
			if during != (e2e.Left{}) || noAddress != 0 || pending != tries {
				t.Errorf("meanwhile unwind leaves %s, %d DELs pending; sandbox %d got no address", during, pending, noAddress)
			}
			if after != (e2e.Left{}) {
				t.Errorf("later unwind leaves %s", after)
			}
		})
	}
}

// nextADD makes one more sandbox of the pod that could not start, and removes it.
func (o ocicniNode) nextADD() error {
	err := o.Add("bad", "next")
	if err == nil {
		err = o.Del("bad", "next")
		o.RemoveNetNS("next")
	}
	if !o.unwind {
		return nil // the pool is full
	}
	return err
}

// TestE2EOcicniDEL: a pod's first DEL fails, and CRI-O drops libcni's record; its second DEL frees all that the pod had.
func TestE2EOcicniDEL(t *testing.T) {
	table := e2e.NewTable(t, "ocicni: a pod's first DEL fails; addresses/netns/veths/rules", "CHAIN", "AFTER DEL 1", "AFTER DEL 2")
	for _, unwind := range []bool{false, true} {
		o := newOcicniNode(t, unwind, "")
		check(t, o.Add("pod", "one"))
		o.Plan(map[string]string{"DEL": "fail"})
		if err := o.Del("pod", "one"); err == nil {
			t.Error("the first DEL passes")
		}
		first, _ := o.left()
		o.Plan(nil)
		check(t, o.Del("pod", "one"))
		o.RemoveNetNS("one")
		second, pending := o.left()
		table.Row(map[bool]string{false: "plain", true: "unwind"}[unwind], first, second)
		switch {
		case !unwind && second.Rules == 0:
			t.Errorf("the plain chain leaves %s, so this shows nothing", second)
		case unwind && (first.Addresses != 0 || second != (e2e.Left{}) || pending != 0):
			t.Errorf("unwind leaves %s after the first DEL, %s after the second, %d pending", first, second, pending)
		}
	}
}

// TestE2EOcicniGC: CRI-O's GC has null for a network that none of its pods uses; a live pod that is not in libcni's cache keeps
// what it has.
func TestE2EOcicniGC(t *testing.T) {
	o := newOcicniNode(t, true, "")
	results := o.File("/var/lib/cni/results")
	check(t, os.Rename(results, results+".away"))
	check(t, o.GC())
	if left, pending := o.left(); left != (e2e.Left{}) || pending != 0 {
		t.Errorf("GC changes what there is by %s, and the journal by %d", left, pending)
	}
	check(t, errors.Join(os.RemoveAll(results), os.Rename(results+".away", results)))
	check(t, errors.Join(o.GC("live"), o.Del("live", "live")))
	o.RemoveNetNS("live")
	if left := o.Settled(); left != (e2e.Left{}) || len(o.Journal()) != 0 {
		t.Errorf("left: %s, %+v", left, o.Journal())
	}
}
