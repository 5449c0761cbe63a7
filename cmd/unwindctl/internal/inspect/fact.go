package inspect

import (
	"cni-unwind/plugin/decide"
	"cni-unwind/plugin/facts"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/tristate"
)

// Fact is one piece of evidence in readable form: a question, and "yes", "no" or "unknown".
type Fact struct {
	Question  string `json:"question"`
	Answer    string `json:"answer"`
	NotLooked bool   `json:"notLooked,omitempty"` // unknown because it was not examined
}

// factsOf returns the evidence for a verdict. It marks facts that were not examined: other evidence
// was sufficient, or the fact means nothing, for example after a reboot.
func factsOf(f *sweep.Finding) []Fact {
	ev := f.Evidence
	fact := func(question string, of decide.Fact) Fact {
		answer, looked := facts.Known(of)
		return Fact{question, answer.String(), answer == tristate.Unknown && !looked}
	}
	return []Fact{
		fact("its lock is held", ev.Locked),
		fact("this process is in the namespaces of its ADD", ev.SameNamespaces),
		fact("it was added in this boot", ev.SameBoot),
		fact("it was added on another machine", ev.OtherHost),
		fact("its network namespace is at its path or mounted elsewhere", ev.NetNS),
		fact("a process is in its network namespace", ev.HasProcess),
		fact("the host end of its interface exists", ev.HostLink),
		fact("the runtime lists it", ev.Listed),
		fact("it is older than the grace period", ev.PastGracePeriod),
		fact("it was added again without a journal entry", ev.AddedUnseen),
	}
}
