package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
)

// benchStatus times STATUS and GC, with an empty journal and with many live attachments. For
// comparison, it also times VERSION, which only starts the process.
func benchStatus(ctx context.Context, work string, many int) error {
	work = filepath.Join(work, "status")
	var networks []*network
	for i, live := range []int{0, many} {
		n, err := newNetwork(work, unwound, 20+i, "1", false)
		if err != nil {
			return err
		}
		if live > 0 {
			if err := n.fill(ctx, live); err != nil {
				return err
			}
		}
		networks = append(networks, n)
		work += "-full"
	}
	const warmUp, rounds = 5, 40
	times := map[string][]time.Duration{}
	for round := range warmUp + rounds {
		for i, n := range networks {
			for _, command := range []string{"VERSION", "STATUS", "GC"} {
				took, err := n.ask(ctx, command)
				if err != nil {
					return err
				}
				if round >= warmUp {
					name := fmt.Sprint(command, i)
					times[name] = append(times[name], took)
				}
			}
		}
	}
	ms := func(name string) float64 { return 1000 * quantile(times[name], 0.5).Seconds() }
	fmt.Printf("\nmedians: process (VERSION) %.1f ms; STATUS with 0 records %.1f ms, with %d %.1f "+
		"ms; GC with 0 %.1f ms, with %d %.1f ms\n",
		ms("VERSION0"), ms("STATUS0"), many, ms("STATUS1"), ms("GC0"), many, ms("GC1"))
	return nil
}

func (n *network) ask(ctx context.Context, command string) (time.Duration, error) {
	stdin, err := n.request()
	if err != nil {
		return 0, err
	}
	args := &invoke.Args{Command: command, Path: strings.Join(n.cni.Path, ":")}
	start := time.Now()
	err = invoke.ExecPluginWithoutResult(ctx, filepath.Join(n.cni.Path[0], "unwind"), stdin, args, nil)
	return time.Since(start), err
}
