package e2e

import (
	"context"
	"strings"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Config returns the CNI configuration that the runtime uses, as JSON.
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

// AwaitConfig waits until the CNI configuration that the runtime uses contains the text. With
// in=false, it waits until the configuration does not contain the text.
func (c *CRI) AwaitConfig(text string, in bool) {
	c.node.Helper()
	what := "the runtime's network has " + text
	if !in {
		what += " no more"
	}
	Eventually(c.node, startTimeout, what, func() bool { return strings.Contains(c.Config(), text) == in })
}

// TimeStatus requests the runtime's status, with a timeout, and returns how long the call took.
func (c *CRI) TimeStatus(within time.Duration) (took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	began := time.Now()
	_, err = c.runtime.Status(ctx, &cri.StatusRequest{})
	return time.Since(began), err
}
