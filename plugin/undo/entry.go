package undo

import (
	"fmt"
	"strings"

	"cni-unwind/journal"
)

// FailingPlugins returns the plugins with a pending DEL that has failed, or is unproven, if the
// attachment has no other pending DELs.
func FailingPlugins(e *journal.Entry) (plugins []string) {
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			if s.State != journal.StepFailed && s.State != journal.StepUnproven {
				return nil
			}
			plugins = append(plugins, s.Type)
		}
	}
	return plugins
}

// Words describes the state of a step's DEL in a few words, or "" if none was tried.
func Words(s *journal.Step) string {
	switch s.State {
	case journal.StepFailed:
		return fmt.Sprintf("code %d", s.LastCode)
	case journal.StepUntried:
		if s.RepeatAt != 0 {
			return "was killed"
		}
	case journal.StepParked:
		return "its address has another owner"
	case journal.StepRepeat:
		var why []string
		if s.RepeatAt != 0 {
			why = append(why, "was killed")
		}
		if s.ConfirmAt != 0 {
			why = append(why, "unverified")
		}
		return "repeat: " + strings.Join(why, ", ")
	}
	return string(s.State)
}

// PendingSteps names the delegates with a pending DEL, each with its Words.
func PendingSteps(e *journal.Entry) []string {
	var names []string
	for _, g := range e.Generations {
		for _, s := range g.Steps {
			name := s.Type
			if words := Words(&s); words != "" {
				name += " (" + words + ")"
			}
			names = append(names, name)
		}
	}
	return names
}
