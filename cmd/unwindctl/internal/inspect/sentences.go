package inspect

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/known"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/tristate"
	"cni-unwind/plugin/undo"
)

// summary says what an attachment has, why it is kept, and how to release it. all is the journal.
func summary(a *Attachment, f *sweep.Finding, all []Attachment) []string {
	holds, when := "No address on record is held by", "since "+since(a.Created)
	if n := len(a.Addresses); n > 0 {
		is := map[bool]string{true: " is held by", false: " are held by"}[n == 1]
		if len(a.freed) > 0 {
			is = map[bool]string{true: " was given to", false: " were given to"}[n == 1]
			when = since(a.Created)
		}
		holds = strings.Join(term.Addresses(a.Addresses), " and ") + is
	}
	lines := []string{fmt.Sprintf("%s %s, interface %s in network %s, %s.", holds, whose(a),
		a.IfName, a.Network, when)}
	if len(a.freed) > 0 {
		lines = append(lines, fmt.Sprintf("The IPAM plugin has taken %s back, so another pod may have "+
			"it.",
			strings.Join(term.Addresses(a.freed), " and ")))
	}
	reason := term.OneLine(f.Reason.Text)
	if f.Releasable() && a.State == journal.Unwinding && a.Reason != "" {
		reason = term.OneLine(a.Reason)
	}
	switch ev := f.Evidence; {
	case !f.Releasable() && ev.Locked == tristate.Yes:
		return append(lines, "It is kept because an ADD, a DEL or a sweep is working on it. Try again "+
			"in a minute.")
	case f.Fate == alive.Unknown && ev.SameNamespaces != tristate.Yes:
		return append(lines, "It is kept because its state is unknown from here: its ADD ran in other "+
			"namespaces than this program.",
			"Run this on the host, or in a container with hostPID: unwindctl --host show.")
	case f.Fate == alive.Unknown:
		return append(lines, fmt.Sprintf("It is kept because its state is unknown: %s.",
			reason))
	case !f.Releasable():
		return append(lines, fmt.Sprintf("It is kept because it is live: %s.", reason),
			"The runtime's DEL releases it. Otherwise a sweep does, once its network namespace, every "+
				"process in it and the host end of its interface are gone.")
	case f.Fate == alive.Foreign:
		return append(lines, fmt.Sprintf("It is dead here: %s. unwind runs no DEL for it, because "+
			"that could harm the original.", reason),
			fmt.Sprintf("Every sweep releases what host-local keeps for it on this disk. To do it now: "+
				"unwindctl sweep %s", a.Key))
	default:
		lines = append(lines, fmt.Sprintf("It is dead and will be released: %s.", reason))
		return append(lines, pendingSentences(a, ev.SameBoot == tristate.Yes, all)...)
	}
}

func whose(a *Attachment) string {
	if a.Pod == nil || a.Pod.Name == "" {
		return "container " + a.ContainerID
	}
	return fmt.Sprintf("pod %s (container %s)", podName(a.Pod),
		term.Short(a.ContainerID, term.Plain))
}

func since(t time.Time) string {
	if t.IsZero() {
		return "some time"
	}
	return fmt.Sprintf("%s (%s ago)", term.Time(t), term.Ago(t))
}

// pendingSentences describes what each pending DEL waits for, and what to do.
func pendingSentences(a *Attachment, thisBoot bool, all []Attachment) (lines []string) {
	var untried []string
	failed, ready := false, false
	_, err := os.Lstat(a.NetNS)
	by := undo.Asker{Now: journal.BootNanos(), SameBoot: thisBoot, GracePeriod: a.grace,
		Since: a.since, NoNetNS: errors.Is(err, fs.ErrNotExist),
		ContainerLives: func() bool { return containerLives(a, all) },
		Queued:         func(s *journal.Step) bool { return known.Of(s.Type).Queues }}
	for _, s := range a.Steps {
		wait := undo.NextTry(&s.of, by)
		next := "The next sweep retries it."
		if wait.Awaits == undo.Pause {
			next = fmt.Sprintf("It is retried in %s.", term.Roughly(wait.In))
		}
		switch {
		case wait.Awaits == undo.Container:
			lines = append(lines, fmt.Sprintf("The DEL of %s waits, because it could free what another "+
				"attachment of its container has. It runs once that one is gone.", s.Plugin))
		case wait.Awaits == undo.Runtime:
			lines = append(lines, fmt.Sprintf("The DEL of %s waits for the runtime, which may still send "+
				"a DEL with the network namespace. A sweep runs it in %s.", s.Plugin, term.Roughly(wait.In)))
		case s.State == journal.StepFailed:
			failed, ready = true, true
			lines = append(lines, fmt.Sprintf("The DEL of %s has failed %s, the last time with "+
				"code %d: %s. %s",
				s.Plugin, term.Plural(s.Attempts, "time", "times"), s.LastCode,
				strings.TrimSuffix(term.OneLine(s.LastError), "."), next))
		case wait.Awaits == undo.Queue:
			lines = append(lines, fmt.Sprintf("The DEL of %s has passed, but %s: it is unproven. "+
				"It does not run again while that file exists.", s.Plugin, s.Unproven))
		case s.State == journal.StepUnproven:
			ready = true
			lines = append(lines, fmt.Sprintf("The DEL of %s has passed, but %s: it is unproven. %s",
				s.Plugin, s.Unproven, next))
		case s.State == journal.StepParked:
			lines = append(lines, fmt.Sprintf("The DEL of %s waits, because it would remove the rules of "+
				"the address's new owner%s. It runs once that one is gone.",
				s.Plugin, newOwner(a, all)))
		case wait.Awaits == undo.GracePeriod:
			lines = append(lines, fmt.Sprintf("%s: its DEL runs again in %s. No sweep runs it earlier.",
				s.whyOnceMore(), term.Roughly(wait.In)))
		case s.State == journal.StepRepeat:
			ready = true
			lines = append(lines, s.whyOnceMore()+": the next sweep runs its DEL again.")
		default:
			ready = true
			untried = append(untried, s.Plugin)
		}
	}
	if len(untried) > 0 {
		lines = append(lines, fmt.Sprintf("Pending DEL, not tried yet: %s.",
			strings.Join(untried, ", ")))
	}
	if ready {
		lines = append(lines, fmt.Sprintf("To try it now: unwindctl sweep %s", a.Key))
	}
	if failed {
		lines = append(lines, fmt.Sprintf("If it can never pass, for example because the plugin is "+
			"gone for good, give it up: unwindctl forget %s", a.Key))
	}
	return lines
}

func containerLives(a *Attachment, all []Attachment) bool {
	return slices.ContainsFunc(all, func(other Attachment) bool {
		return other.Key != a.Key && other.ContainerID == a.ContainerID &&
			undo.KeepsContainer(other.State)
	})
}

// newOwner returns another attachment that has one of the addresses, as the end of a sentence.
func newOwner(a *Attachment, all []Attachment) string {
	for _, other := range all {
		for _, address := range other.Addresses {
			if other.Key != a.Key && slices.Contains(a.Addresses, address) {
				return fmt.Sprintf(": %s now has %s", whose(&other), address)
			}
		}
	}
	return ""
}

// whyOnceMore returns the reason why a DEL that has passed runs again.
func (s *Step) whyOnceMore() string {
	const (
		killed = "%s was killed while it ran, so something that it started may have continued"
		proves = "the DEL of %s passes even if it frees nothing, and no store could be queried"
	)
	switch {
	case s.Killed && s.ProvesNothing:
		return fmt.Sprintf(killed+", and "+proves, s.Plugin, s.Plugin)
	case s.Killed:
		return fmt.Sprintf(killed, s.Plugin)
	}
	return fmt.Sprintf("T"+proves[1:], s.Plugin)
}

func interfaceOf(ifname string) string {
	if ifname == "" {
		return ""
	}
	return ", interface " + ifname
}
