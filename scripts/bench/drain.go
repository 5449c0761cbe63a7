package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"
)

// runtimeTimeout is the default timeout of containerd and CRI-O for one ADD or DEL.
const runtimeTimeout = time.Minute

// benchDrain starts all pods at the same time, with the chain bridge + firewall + portmap + tuning,
// and then deletes all of them at the same time. It alternates between a network without unwind and
// one with unwind. It prints how many ADDs and DELs failed or exceeded the runtime's timeout, and
// the time until the last one ended. It repeats the failed DELs until none fails. To measure a busy
// machine, run `nice -n 19 make bench ARGS="-drain 120"` next to two busy loops.
func benchDrain(ctx context.Context, work string, pods, rounds int) error {
	var networks []*network
	for i, kind := range []string{plain, unwound} {
		n, err := newNetwork(filepath.Join(work, fmt.Sprintf("drain-%d", pods)), kind, i, "4", false)
		if err != nil {
			return err
		}
		if err := n.warmUp(ctx); err != nil {
			return err
		}
		networks = append(networks, n)
	}
	fmt.Printf("\n%d simultaneous pods of bridge + firewall + portmap + tuning, load %s\n",
		pods, load())
	walls := map[string]time.Duration{}
	for round := range rounds {
		for _, n := range inTurn(networks, round) {
			all, err := newPods(n, pods, round)
			if err != nil {
				return err
			}
			add, del, again, err := drain(ctx, all)
			if err != nil {
				return err
			}
			walls["ADD "+n.kind] += add.wall
			walls["DEL "+n.kind] += del.wall
			fmt.Printf("%-7s ADD: %3d failed, %5.1f s; DEL: %3d failed, %5.1f s, %d more rounds of DELs "+
				"until all succeeded\n",
				n.kind, len(add.failed), add.wall.Seconds(), len(del.failed), del.wall.Seconds(), again)
			for _, err := range append(add.errs, del.errs...) {
				fmt.Printf("        e.g. %.300v\n", err)
			}
			if err := n.leaves(0); err != nil {
				return err
			}
			if err := goneAll(all); err != nil {
				return err
			}
		}
	}
	fmt.Printf("unwind / plain, of the time: ADD %.2f, DEL %.2f\n",
		walls["ADD "+unwound].Seconds()/walls["ADD "+plain].Seconds(),
		walls["DEL "+unwound].Seconds()/walls["DEL "+plain].Seconds())
	return nil
}

// warmUp adds and deletes one pod, which creates the shared iptables chains. Plugins fail if
// several of them create these chains at the same time.
func (n *network) warmUp(ctx context.Context) error {
	p, err := n.newPod(3999)
	if err != nil {
		return err
	}
	return errors.Join(p.add(ctx), p.del(ctx), p.gone())
}

// drain adds all pods at the same time, and then deletes all of them. It repeats the failed DELs
// until none fails. again is the number of repetitions.
func drain(ctx context.Context, pods []*pod) (add, del drained, again int, err error) {
	add = together(ctx, pods, (*pod).add)
	del = together(ctx, pods, (*pod).del)
	for left := del.failed; len(left) > 0; again++ {
		if again == 100 {
			return add, del, again, fmt.Errorf("%d DELs keep failing", len(left))
		}
		left = together(ctx, left, (*pod).del).failed
	}
	return add, del, again, nil
}

// drained is the outcome of a verb for all pods.
type drained struct {
	failed []*pod
	errs   []error // the first error, if any
	wall   time.Duration
}

func together(ctx context.Context, pods []*pod, do func(*pod, context.Context) error) (d drained) {
	var mu sync.Mutex
	t, _ := atOnce(pods, func(p *pod) error {
		ctx, cancel := context.WithTimeout(ctx, runtimeTimeout)
		defer cancel()
		if err := do(p, ctx); err != nil {
			mu.Lock()
			defer mu.Unlock()
			if d.failed = append(d.failed, p); d.errs == nil {
				d.errs = []error{err}
			}
		}
		return nil
	})
	d.wall = t.wall
	return d
}
