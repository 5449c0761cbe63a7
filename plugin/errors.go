package plugin

import (
	"fmt"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"cni-unwind/journal"
)

// maxMessage bounds what a runtime gets to read, in bytes: it ends in events and logs, once per retry.
const maxMessage = 1000

// cniError makes the error that the runtime gets. It has the code of the first failure and begins with its words.
func cniError(code uint, msg, details string) *types.Error {
	msg = shorten(strings.ToValidUTF8(msg, "�"), maxMessage)
	details = shorten(strings.ToValidUTF8(details, "�"), max(0, maxMessage-len("; ")-len(msg)))
	if code == 0 {
		code = types.ErrInternal
	}
	return types.NewError(code, msg, details)
}

func badConfig(err error) *types.Error {
	return cniError(types.ErrInvalidNetworkConfig, "unwind: "+strings.ReplaceAll(err.Error(), "\n", "; "), "")
}

// addError says which delegate failed, in its words, and then what is still owed.
func addError(f *failure, e *journal.Entry) *types.Error {
	msg, pending := f.Error(), ""
	if n := e.Pending(); n > 0 {
		pending = fmt.Sprintf("; unwind: DEL pending: %s", strings.Join(pendingSteps(e), ", "))
	}
	room := max(maxMessage/2, maxMessage-len(pending))
	return cniError(f.code, shorten(msg, room)+pending, f.details)
}

// delError says which delegates are owed a DEL, in fixed words: go-cni drops errors that say "not found", and a delegate's
// may say that. The log and the journal have the rest, the journal if it could be written.
func delError(failures []*failure, durable bool) *types.Error {
	var names []string
	for _, f := range failures {
		names = append(names, fmt.Sprintf("%s (code %d)", f.plugin, f.code))
	}
	hint := "; unwindctl list shows what is pending"
	if !durable {
		hint = "; the journal could not be written, see the log"
	}
	return cniError(failures[0].code, "unwind: DEL incomplete, to be tried again: "+strings.Join(names, ", ")+hint, "")
}

// pendingSteps names the delegates that are owed a DEL, each with why.
func pendingSteps(e *journal.Entry) []string {
	var names []string
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			switch {
			case s.LastError != "":
				names = append(names, fmt.Sprintf("%s (code %d)", s.Type, s.LastCode))
			case s.Parked:
				names = append(names, s.Type+" (its address has another owner)")
			case s.RepeatAt != 0:
				names = append(names, s.Type+" (once more, since it was killed)")
			default:
				names = append(names, s.Type)
			}
		}
	}
	return names
}
