package plugin

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
)

// atOnce runs a verb for all pods at once and returns the errors.
func atOnce(pods []*pod, verb func(*pod) error) (errs []error, took time.Duration) {
	var mu sync.Mutex
	var all sync.WaitGroup
	began := time.Now()
	for _, p := range pods {
		all.Go(func() {
			if err := verb(p); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("%s: %w", p.ContainerID, err))
			}
		})
	}
	all.Wait()
	return errs, time.Since(began)
}

// TestSlowDelIsNotKilled: a slow DEL may use the time that the others do not need, until one has
// hung.
func TestSlowDelIsNotKilled(t *testing.T) {
	stories(t, `
	# each DEL takes more than a fourth of 3 s
	hasty; chain p0, "delayMS": 1000 | p1, "delayMS": 1000 | p2, "delayMS": 1000 | p3, "delayMS": 1000
	add a; plan p3 DEL late; del a; left
	add a; plan p3 DEL hang; fails del a; entry a deleting 1
	plan; del a`)
}

// TestHangingChainsHoldNobodyUp: beside 16 pods whose portmap hangs, in ADD and then in DEL,
// another pod's verbs take at most half a second more than alone. It tries three times, since other
// tests run on the machine.
func TestHangingChainsHoldNobodyUp(t *testing.T) {
	for _, verb := range []string{"ADD", "DEL"} {
		t.Run(verb, func(t *testing.T) {
			n := newNode(t)
			n.conf["delegateTimeout"] = "60s"
			list := n.unwind(n.faulty("portmap", ""))
			other := n.pod("other")
			alone := other.addAndDel(list)
			var hanging []*pod
			for i := range 16 {
				hanging = append(hanging, n.pod(fmt.Sprint("hanging", i)))
			}
			if verb == "DEL" {
				if errs, _ := atOnce(hanging, func(p *pod) error { _, err := p.add(list); return err }); len(errs) > 0 {
					t.Fatal(errs)
				}
			}
			n.plan(map[string]map[string]string{"pod:hanging": {verb: "hang"}})
			ctx, cancel := context.WithCancel(t.Context())
			var running sync.WaitGroup
			for _, p := range hanging {
				running.Go(func() {
					if verb == "ADD" {
						_, _ = p.cni.AddNetworkList(ctx, list, &p.RuntimeConf)
					} else {
						_ = p.cni.DelNetworkList(ctx, list, &p.RuntimeConf)
					}
				})
			}
			best := time.Hour
			for range 3 { // the first one runs while they start
				best = min(best, other.addAndDel(list))
			}
			t.Logf("alone %s, beside %d that hang %s", alone, len(hanging), best)
			if best > alone+time.Second/2 {
				t.Errorf("it took %s, and %s alone", best, alone)
			}
			cancel()
			running.Wait()
			n.plan(nil)
			if errs, _ := atOnce(hanging, func(p *pod) error { return p.del(list) }); len(errs) > 0 {
				t.Error(errs)
			}
			n.nothingLeft()
		})
	}
}

func (p *pod) addAndDel(list *libcni.NetworkConfigList) time.Duration {
	p.Helper()
	began := time.Now()
	p.mustAdd(list)
	p.mustDel(list)
	return time.Since(began)
}
