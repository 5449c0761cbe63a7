package main

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// sweepRounds is the number of rounds into which benchSweep divides the pods. Each round times DELs
// without unwind, then a sweep.
const sweepRounds = 5

// benchSweep times the release of dead pods, whose network namespaces are gone. The pods' networks
// use bridge, tuning and portmap. Without unwind, each pod gets a DEL. With unwind, one
// `unwindctl sweep` releases all pods of a round.
func benchSweep(ctx context.Context, work string, pods int) error {
	work = filepath.Join(work, "sweep")
	deleted, err := newNetwork(work, plain, 10, "3", false)
	if err != nil {
		return err
	}
	swept, err := newNetwork(work, unwound, 11, "3", false)
	if err != nil {
		return err
	}
	var p, w time.Duration
	for round := range sweepRounds {
		dead, err := deleted.deadPods(ctx, pods/sweepRounds, round)
		if err == nil {
			_, err = swept.deadPods(ctx, pods/sweepRounds, round)
		}
		if err == nil {
			err = takenApart(ctx)
		}
		if err != nil {
			return err
		}
		start := time.Now()
		for _, pod := range dead {
			if err := pod.del(ctx); err != nil {
				return err
			}
		}
		p += time.Since(start)
		start = time.Now()
		out, err := exec.CommandContext(ctx, "bin/unwindctl", "sweep", "--force", "--state-dir",
			swept.stateDir()).CombinedOutput()
		if w += time.Since(start); err != nil {
			return fmt.Errorf("unwindctl sweep: %w: %s", err, out)
		}
		for _, n := range []*network{deleted, swept} {
			if err := n.leaves(0); err != nil {
				return err
			}
		}
	}
	fmt.Printf("\n%d dead pods in %d rounds of bridge + tuning + portmap: DELs one by one %.1f s, "+
		"unwindctl sweep %.1f s, %.2f × as fast\n", pods/sweepRounds*sweepRounds, sweepRounds, p.Seconds(),
		w.Seconds(), p.Seconds()/w.Seconds())
	return nil
}

// deadPods adds pods one by one, and removes their namespaces without a DEL.
func (n *network) deadPods(ctx context.Context, pods, round int) ([]*pod, error) {
	all, err := newPods(n, pods, round)
	for _, p := range all {
		if err == nil {
			err = p.add(ctx)
		}
		if err == nil {
			err = p.gone()
		}
	}
	return all, err
}

// takenApart waits until the kernel has removed the veths of the deleted namespaces.
func takenApart(ctx context.Context) error {
	for ctx.Err() == nil {
		out, err := exec.CommandContext(ctx, "ip", "-o", "link", "show", "type", "veth").Output()
		if err != nil || len(strings.TrimSpace(string(out))) == 0 {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	return ctx.Err()
}
