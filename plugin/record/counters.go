package record

import (
	"context"
	"errors"
	"syscall"

	"cni-unwind/journal"
)

// The counters in the journal, with their labels. Counters and history are for people and
// monitoring; unwind's decisions do not depend on them.
const (
	CountRollbacks  = "rollbacks"           // plugin: the one that failed; result: complete, pending
	CountSwept      = "swept"               // reason, see alive.Reason
	CountDuplicates = "duplicate_addresses" //
	CountDegraded   = "degraded"            // verb; reason, see trouble
	// end of the last complete sweep of all networks, Unix time
	LastSweep = "last_sweep"
)

// trouble returns one word for the cause of a journal failure.
func trouble(err error) string {
	for _, t := range []struct {
		word string
		errs []error
	}{
		{"busy", []error{journal.ErrBusy, context.DeadlineExceeded}},
		{"full", []error{syscall.ENOSPC, syscall.EDQUOT}},
		{"read-only", []error{syscall.EROFS}},
		{"permission", []error{syscall.EACCES, syscall.EPERM}},
		{"newer", []error{journal.ErrNewer}},
	} {
		for _, is := range t.errs {
			if errors.Is(err, is) {
				return t.word
			}
		}
	}
	return "other"
}
