package plugin

import (
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
	"cni-unwind/plugin/internal/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/undo"
)

// maxMessage bounds an error for the runtime, in bytes: events and logs repeat it at each retry.
const maxMessage = 1000

// cniError makes the error for the runtime. It has the code of the first failure and begins with
// its words.
func cniError(code uint, msg, details string) *types.Error {
	msg = netconf.Shorten(strings.ToValidUTF8(msg, "�"), maxMessage)
	details = netconf.Shorten(strings.ToValidUTF8(details, "�"), max(0, maxMessage-len("; ")-len(msg)))
	if code == 0 {
		code = types.ErrInternal
	}
	return types.NewError(code, msg, details)
}

func badConfig(err error) *types.Error {
	return cniError(types.ErrInvalidNetworkConfig, "unwind: "+strings.ReplaceAll(err.Error(), "\n", "; "), "")
}

// addError gives the failed delegate's words, and then the pending DELs.
func addError(f *delegate.Failure, e *journal.Entry) *types.Error {
	msg, pending := f.Error(), ""
	if n := e.Pending(); n > 0 {
		pending = fmt.Sprintf("; unwind: pending DEL: %s", strings.Join(undo.PendingSteps(e), ", "))
	}
	room := max(maxMessage/2, maxMessage-len(pending))
	return cniError(f.Code, netconf.Shorten(msg, room)+pending, f.Details)
}

// delError names the delegates with a pending DEL in fixed words: go-cni drops errors that say "not
// found", and a delegate's words may say that. The log has the rest, and the journal too if it
// could be written.
func delError(failures []*delegate.Failure, durable bool) *types.Error {
	var names []string
	for _, f := range failures {
		names = append(names, fmt.Sprintf("%s (code %d)", f.Plugin, f.Code))
	}
	hint := "; unwindctl list shows the pending DELs"
	if !durable {
		hint = "; the journal cannot be written, see the log"
	}
	return cniError(failures[0].Code, "unwind: DEL incomplete, to be retried: "+strings.Join(names, ", ")+hint, "")
}
