package e2e

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

// OcicniNode is a node with CRI-O's CNI library and one live pod.
type OcicniNode struct {
	*Node
	*Ocicni
	Unwind bool
	live   Left // the live pod's resources
}

// NewOcicniNode creates a node with or without unwind. If version is "", the node's conflist
// supports CNI 1.0.0 and 1.1.0. Otherwise, the conflist supports only that version.
func NewOcicniNode(t *testing.T, unwind bool, version string) OcicniNode {
	n := NewNode(t)
	n.Configure(Network{Subnet: Small, Plugins: []string{Firewall, n.Faulty()}, Unwind: unwind})
	if version != "" {
		file := n.File(ConfDir, "10-podnet.conflist")
		text, err := os.ReadFile(file)
		check(n, err)
		const both = `"cniVersions": ["1.0.0", "1.1.0"]`
		if !strings.Contains(string(text), both) {
			t.Fatalf("no %s in %s", both, text)
		}
		check(n, os.WriteFile(file, []byte(strings.ReplaceAll(string(text), both, fmt.Sprintf(`"cniVersions": [%q]`, version))), 0o644))
	}
	o := OcicniNode{Node: n, Ocicni: n.NewOcicni(), Unwind: unwind}
	check(n, errors.Join(o.Status(), o.Add("live", "live")))
	o.live = n.Settled()
	return o
}

// Beside counts the node's resources and the journal's records, except those of the live pod.
func (o OcicniNode) Beside() (left Left, pending int) {
	left = o.Settled()
	left.Addresses -= o.live.Addresses
	left.NetNS -= o.live.NetNS
	left.Veths -= o.live.Veths
	left.Rules -= o.live.Rules
	if o.Unwind {
		pending = len(o.Journal()) - 1
	}
	return left, pending
}

// NextADD starts another sandbox of the pod "bad", whose earlier sandboxes failed, and removes the
// new sandbox. Without unwind, NextADD ignores errors.
func (o OcicniNode) NextADD() error {
	err := o.Add("bad", "next")
	if err == nil {
		err = o.Del("bad", "next")
		o.RemoveNetNS("next")
	}
	if !o.Unwind {
		return nil // the ADD fails, because the pool is full
	}
	return err
}
