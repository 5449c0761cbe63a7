package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// comparison times ADDs and DELs on networks of several kinds that run the same chain. On the
// networks in good, ADDs succeed. On the networks in failing, one more plugin fails each ADD.
type comparison struct {
	options
	chain   string
	good    []*network
	failing []*network
}

func newComparison(ctx context.Context, work, chain string, o options) (*comparison, error) {
	c := &comparison{options: o, chain: chain}
	kinds := []string{plain, unwound, unwoundBig, noop}
	if os.Getenv("MULTUS") != "" {
		kinds = append(kinds, multus)
	}
	for i, kind := range kinds {
		n, err := newNetwork(work, kind, 2*i, chain, false)
		if err != nil {
			return nil, err
		}
		c.good = append(c.good, n)
		switch kind {
		case unwound:
			err = n.fill(ctx, 10)
		case unwoundBig:
			err = n.fill(ctx, o.live)
		}
		if err != nil {
			return nil, err
		}
		if kind == unwoundBig || kind == noop {
			continue
		}
		if n, err = newNetwork(work, kind, 2*i+1, chain, true); err != nil {
			return nil, err
		}
		c.failing = append(c.failing, n)
	}
	return c, nil
}

// run adds and deletes pods in rounds. In each round, the kinds of networks take turns, and each
// gets as many simultaneous pods as parallel says. Each round begins with the next kind.
func (c *comparison) run(ctx context.Context, r *results, parallel int) error {
	rounds := max(1, c.pods/parallel)
	warmUp := (c.warmUp + parallel - 1) / parallel
	for round := range warmUp + rounds {
		to := r
		if round < warmUp {
			to = &results{out: io.Discard}
		}
		for _, n := range inTurn(c.good, round) {
			if err := c.goodPods(ctx, to, n, parallel, round); err != nil {
				return err
			}
		}
		for _, n := range inTurn(c.failing, round) {
			if err := c.failingPods(ctx, to, n, parallel, round); err != nil {
				return err
			}
		}
	}
	r.tails()
	return nil
}

func (c *comparison) goodPods(
	ctx context.Context, r *results, n *network, parallel, round int,
) error {
	pods, err := newPods(n, parallel, round)
	if err != nil {
		return err
	}
	add, err := atOnce(pods, func(p *pod) error { return p.add(ctx) })
	if err != nil {
		return err
	}
	del, err := atOnce(pods, func(p *pod) error { return p.del(ctx) })
	if err != nil {
		return err
	}
	r.write("ADD", c.chain, parallel, n.kind, add)
	r.write("DEL", c.chain, parallel, n.kind, del)
	held := 0
	if n.kind == unwound || n.kind == unwoundBig {
		held = 1 // see fill
	}
	if err := errors.Join(goneAll(pods), n.leaves(held)); err != nil {
		return err
	}
	second, err := atOnce(pods, func(p *pod) error { return p.secondDel(ctx) })
	r.write("secondDEL", c.chain, parallel, n.kind, second)
	return err
}

func (c *comparison) failingPods(
	ctx context.Context, r *results, n *network, parallel, round int,
) error {
	pods, err := newPods(n, parallel, round)
	if err != nil {
		return err
	}
	failed, err := atOnce(pods, func(p *pod) error { return p.failedAdd(ctx) })
	if err != nil {
		return err
	}
	r.write("failedADD", c.chain, parallel, n.kind, failed)
	return errors.Join(goneAll(pods), n.leaves(0))
}

func newPods(n *network, parallel, round int) ([]*pod, error) {
	var pods []*pod
	for i := range parallel {
		p, err := n.newPod((round*parallel + i) % 3999)
		if err != nil {
			return nil, err
		}
		pods = append(pods, p)
	}
	return pods, nil
}

func goneAll(pods []*pod) error {
	var errs []error
	for _, p := range pods {
		errs = append(errs, p.gone())
	}
	return errors.Join(errs...)
}

// timed contains the duration of each operation and of all together, and the CPU time per
// operation. This process's CPU time counts too, because a runtime also starts and reaps plugins.
type timed struct {
	each      []time.Duration
	wall      time.Duration
	processor time.Duration
}

func atOnce(pods []*pod, do func(*pod) error) (timed, error) {
	t := timed{each: make([]time.Duration, len(pods))}
	errs := make([]error, len(pods))
	var all sync.WaitGroup
	began, used := time.Now(), processorTime()
	for i, p := range pods {
		all.Go(func() {
			start := time.Now()
			errs[i] = do(p)
			t.each[i] = time.Since(start)
		})
	}
	all.Wait()
	t.wall = time.Since(began)
	t.processor = (processorTime() - used) / time.Duration(len(pods))
	return t, errors.Join(errs...)
}

// processorTime returns the CPU time of this process and of its descendants that have ended.
func processorTime() (used time.Duration) {
	for _, whose := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if err := unix.Getrusage(whose, &u); err != nil {
			panic(err) // impossible: getrusage(2) fails only for wrong arguments
		}
		used += time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	return used
}

// results writes durations in the format of `go test -bench`
// (https://go.dev/design/14313-benchmark-format).
type results struct {
	out   io.Writer
	err   error
	names []string
	each  map[string][]time.Duration
}

func (r *results) write(verb, chain string, parallel int, kind string, t timed) {
	name := fmt.Sprintf("Benchmark%s/chain=%s/parallel=%d/kind=%s", verb, chain, parallel, kind)
	for _, d := range t.each {
		r.line("%s 1 %d ns/op\n", name, d.Nanoseconds())
	}
	if len(t.each) > 1 {
		r.line("%s 1 %d wall-ns/op\n", name, t.wall.Nanoseconds())
	}
	if t.processor > 0 {
		r.line("%s 1 %d cpu-ns/op\n", name, t.processor.Nanoseconds())
	}
	if r.each == nil {
		r.each = map[string][]time.Duration{}
	}
	if _, known := r.each[name]; !known {
		r.names = append(r.names, name)
	}
	r.each[name] = append(r.each[name], t.each...)
}

// tails writes the 99th percentiles of the durations since its last call.
func (r *results) tails() {
	for _, name := range r.names {
		r.line("%s 1 %d p99-ns/op\n", name, quantile(r.each[name], 0.99).Nanoseconds())
	}
	r.names, r.each = nil, nil
}

func (r *results) line(format string, args ...any) {
	if _, err := fmt.Fprintf(r.out, format, args...); r.err == nil {
		r.err = err
	}
}

// quantile returns the smallest v such that at least the fraction q of all values is at most v.
func quantile[T float64 | time.Duration](all []T, q float64) T {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[max(0, int(math.Ceil(q*float64(len(sorted))))-1)]
}
