package e2e

import (
	"context"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Config returns the runtime's view of its network, as JSON.
func (c *CRI) Config() string {
	c.node.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), criTimeout)
	defer cancel()
	answer, err := c.runtime.Status(ctx, &cri.StatusRequest{Verbose: true})
	if err != nil {
		c.node.Fatal(err)
	}
	return answer.GetInfo()["cniconfig"]
}

// AwaitConfig waits until the runtime has read a network configuration that contains a text, or one
// that does not.
func (c *CRI) AwaitConfig(text string, in bool) {
	c.node.Helper()
	what := "the runtime's network has " + text
	if !in {
		what += " no more"
	}
	Eventually(c.node, startTimeout, what, func() bool { return strings.Contains(c.Config(), text) == in })
}

// TimeStatus requests the runtime's status as NetworkReady does, for at most within.
func (c *CRI) TimeStatus(within time.Duration) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	began := time.Now()
	_, err = c.runtime.Status(ctx, &cri.StatusRequest{})
	return time.Since(began), err
}
