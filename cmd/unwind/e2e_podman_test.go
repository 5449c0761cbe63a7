//go:build e2e

package main

import (
	"fmt"
	"strings"
	"testing"

	"cni-unwind/testdata/e2e"
)

// TestE2EPodman: containers of podman with its CNI backend come up, are restarted with the ID that they have, and go; those
// that cannot start leave nothing, while the plain chain leaks.
func TestE2EPodman(t *testing.T) {
	table := e2e.NewTable(t, fmt.Sprintf("podman: a container is started, restarted and removed; then %d cannot start on a /28; addresses/netns/veths/rules", e2e.Tries),
		"CHAIN", "UP", "RESTARTED", "REMOVED", "NOT STARTED LEAVE", "AFTER", "JOURNAL")
	plain, unwind := podman(t, false), podman(t, true)
	for chain, o := range map[string]podmanOutcome{"plain": plain, "unwind": unwind} {
		table.Row(chain, o.up, o.restarted, o.removed, o.During, o.After, len(o.Entries))
	}
	if plain.During.Addresses == 0 {
		t.Error("the plain chain leaks nothing, so this shows nothing")
	}
	one := plain.up
	if one.Addresses != 1 || one.Veths != 1 || one.Rules == 0 {
		t.Errorf("a container has %s", one)
	}
	if unwind.up != one || unwind.restarted != one || unwind.removed != (e2e.Left{}) {
		t.Errorf("with unwind a container has %s, after its restart %s, and leaves %s; plain has %s", unwind.up, unwind.restarted, unwind.removed, one)
	}
	if !unwind.During.HasNothing() {
		t.Errorf("containers that cannot start leave %s", unwind.During)
	}
	if unwind.After != (e2e.Left{}) || len(unwind.Entries) > 0 {
		t.Errorf("later unwind leaves %s, and %+v", unwind.After, unwind.Entries)
	}
}

type podmanOutcome struct {
	e2e.Outcome
	up, restarted, removed e2e.Left
}

func podman(t *testing.T, unwind bool) (o podmanOutcome) {
	n := e2e.NewNode(t)
	n.Configure(e2e.Network{Subnet: e2e.Small, Plugins: []string{e2e.Firewall, n.Faulty()}, Unwind: unwind})
	p := n.NewPodman()
	run := []string{"run", "-d", "--network", e2e.NetworkName, "--cgroup-parent", n.Cgroup()}
	id := p.Run(append(run, "--name", "c", e2e.PauseImage)...)
	o.up = n.Settled()
	p.Run("restart", "-t", "1", "c")
	o.restarted = n.Settled()
	for address, owner := range n.Reserved() {
		if owner != id {
			t.Errorf("after the restart %s is reserved for %s, not for %s", address, owner, id)
		}
		if _, _, err := n.Try("ping", "-c1", "-W2", address); err != nil {
			t.Errorf("the container does not answer at %s", address)
		}
	}
	p.Run("rm", "-f", "-t", "1", "c")
	o.removed = n.Settled()

	n.Plan(map[string]string{"ADD": "fail", "DEL": "fail"})
	for i := range e2e.Tries {
		_, stderr, err := p.Try(append(run, "--rm", e2e.PauseImage)...)
		if err == nil {
			t.Fatalf("container %d started", i)
		}
		if i == 0 {
			t.Log(stderr)
		}
	}
	p.Try("rm", "-f", "-a")
	o.During = n.Settled()
	n.Plan(nil)
	if _, stderr, err := p.Try("rm", "-f", "-a"); err != nil {
		t.Errorf("later: %s", strings.TrimSpace(stderr))
	}
	if unwind {
		n.Unwindctl("sweep")
		o.Entries = n.Journal()
	}
	o.After = n.Settled()
	return o
}
