package undo

import (
	"fmt"

	"cni-unwind/journal"
)

// FailingPlugins returns the plugins with a pending DEL that has failed, or is unproven, if the
// attachment has no other pending DELs.
func FailingPlugins(e *journal.Entry) (plugins []string) {
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			if s.LastError == "" && s.Unproven == "" {
				return nil
			}
			plugins = append(plugins, s.Type)
		}
	}
	return plugins
}

// OnceMore says for which of the two facts a DEL that passed runs once more; "" for none.
func OnceMore(killed, provesNothing bool) string {
	switch {
	case killed && provesNothing:
		return "once more: was killed, proves nothing"
	case killed:
		return "once more: was killed"
	case provesNothing:
		return "once more: proves nothing"
	}
	return ""
}

// PendingSteps names the delegates with a pending DEL, each with the reason.
func PendingSteps(e *journal.Entry) []string {
	var names []string
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			switch {
			case s.LastError != "":
				names = append(names, fmt.Sprintf("%s (code %d)", s.Type, s.LastCode))
			case s.Unproven != "":
				names = append(names, s.Type+" (unproven)")
			case s.Parked:
				names = append(names, s.Type+" (its address has another owner)")
			case s.RepeatAt != 0, s.ConfirmAt != 0:
				names = append(names, fmt.Sprintf("%s (%s)", s.Type, OnceMore(s.RepeatAt != 0, s.ConfirmAt != 0)))
			default:
				names = append(names, s.Type)
			}
		}
	}
	return names
}
