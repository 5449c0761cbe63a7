package inspect

import (
	"context"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
)

// completeTime bounds the time of a shell completion.
const completeTime = time.Second

// Complete returns what a shell may complete, with duplicates: the arguments that name an attachment
// and the networks in the journal, and with history also those in the history. It leaves out what it
// cannot read in completeTime.
func Complete(ctx context.Context, stateDir string, history bool) (args, networks []string) {
	ctx, cancel := context.WithTimeout(ctx, completeTime)
	defer cancel()
	s, _ := ReadSnapshot(ctx, &journal.Store{Dir: stateDir}, nil)
	attachments := s.Attachments
	if history {
		attachments = append(attachments, attachmentsOf(s.Events)...)
	}
	for _, a := range attachments {
		networks = append(networks, a.Network)
		if a.ContainerID != "" {
			args = append(args, a.Key().String())
		}
		if pod := podName(a.Pod); pod != "-" {
			args = append(args, pod)
		}
		args = append(args, term.Addresses(a.Addresses)...)
	}
	return args, networks
}
