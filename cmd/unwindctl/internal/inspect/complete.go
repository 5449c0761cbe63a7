package inspect

import (
	"context"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
)

// completeTime bounds the time of a shell completion.
const completeTime = time.Second

// Completions are what a shell may complete, with duplicates.
type Completions struct {
	Attachments, Pods, Addresses, Networks []string
}

// Complete returns the names in the journal, and with history also those in the history. It leaves
// out what it cannot read in completeTime.
func Complete(ctx context.Context, stateDir string, history bool) (c Completions) {
	ctx, cancel := context.WithTimeout(ctx, completeTime)
	defer cancel()
	s, _ := ReadSnapshot(ctx, &journal.Store{Dir: stateDir}, nil)
	attachments := s.Attachments
	if history {
		attachments = append(attachments, attachmentsOf(s.Events)...)
	}
	for _, a := range attachments {
		c.Networks = append(c.Networks, a.Network)
		if a.ContainerID != "" {
			c.Attachments = append(c.Attachments, a.Key().String())
		}
		if pod := podName(a.Pod); pod != "-" {
			c.Pods = append(c.Pods, pod)
		}
		c.Addresses = append(c.Addresses, term.Addresses(a.Addresses)...)
	}
	return c
}
