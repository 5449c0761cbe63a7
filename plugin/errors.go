package plugin

import (
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// maxMessage limits an error for the runtime, in bytes. Events and logs repeat the error at each
// retry.
const maxMessage = 1000

// cniError returns the error for the runtime. Its code and the beginning of its message come from
// the first failure.
func cniError(code uint, msg, details string) *types.Error {
	msg = netconf.Shorten(strings.ToValidUTF8(msg, "�"), maxMessage)
	details = netconf.Shorten(strings.ToValidUTF8(details, "�"), max(0, maxMessage-len("; ")-len(msg)))
	if code == 0 {
		code = types.ErrInternal
	}
	return types.NewError(code, msg, details)
}

// ownError returns one of unwind's own errors, on one line.
func ownError(code uint, format string, args ...any) *types.Error {
	msg := fmt.Sprintf("unwind: "+format, args...)
	return cniError(code, strings.ReplaceAll(msg, "\n", "; "), "")
}

func badConfig(err error) *types.Error {
	return ownError(types.ErrInvalidNetworkConfig, "%v", err)
}

// addError returns the failed delegate's message, followed by the pending DELs. lost is the error
// that keeps the journal from recording these DELs, or nil.
func addError(f *delegate.Failure, e *journal.Entry, lost error) *types.Error {
	msg, pending := f.Error(), ""
	if len(e.Undo.Steps) > 0 {
		pending = fmt.Sprintf("; unwind: pending DEL: %s", strings.Join(undo.PendingSteps(e), ", "))
		if lost != nil {
			pending += ", which the journal cannot record: " + netconf.Shorten(lost.Error(), 200)
		}
	}
	room := max(maxMessage/2, maxMessage-len(pending))
	return cniError(f.Code, netconf.Shorten(msg, room)+pending, f.Details)
}

// delError names the delegates with a pending DEL, without their messages. go-cni ignores errors
// that contain "not found", and a delegate's message may contain that. The messages are in the log,
// and in the journal if it could be written.
func delError(key journal.Key, failures []*delegate.Failure, durable bool) *types.Error {
	var names []string
	for _, f := range failures {
		names = append(names, fmt.Sprintf("%s (code %d)", f.Plugin, f.Code))
	}
	hint := "; see unwindctl show " + key.String()
	if !durable {
		hint = "; the journal cannot be written (see unwind's log)"
	}
	return ownError(failures[0].Code, "DEL incomplete; it will be retried: %s%s",
		strings.Join(names, ", "), hint)
}
